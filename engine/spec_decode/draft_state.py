"""Keeps the drafts of each running row, by request slot.

Rows that are reordered, skipped or resumed between steps keep their drafts, and nothing is copied for them.

Shape legend: S request slots, B rows of a step, K drafts, N ids of a sparse proposal.
"""

from typing import Any

import numpy as np
import torch

from engine.requests import Int64s
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import PROPOSAL_IDS, Proposal, ProposalKind

SparseDistribution = tuple[
    torch.Tensor, torch.Tensor
]  # ids i32 [*, N] of distributions, and their probabilities f32 [*, N]


class DraftState:
    """Holds drafts as tensors on the model's device; the host knows their numbers."""

    def __init__(self, slots: int, max_drafts: int, device: torch.device) -> None:
        self.lengths = np.zeros(slots, np.int64)  # [S] drafts
        self.known = np.zeros((slots, max_drafts), np.bool_)  # [S, K] whether the draft's distribution is known
        self.ids = torch.full((slots, max_drafts), INVALID_TOKEN, dtype=torch.int32, device=device)
        self.kinds = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.q_ids = torch.full((slots, max_drafts, PROPOSAL_IDS), INVALID_TOKEN, dtype=torch.int32, device=device)
        self.q_probs = torch.zeros((slots, max_drafts, PROPOSAL_IDS), dtype=torch.float32, device=device)
        self._offsets = torch.arange(max_drafts, device=device)[:, None]  # [K, 1]
        self._device = device

    def clear(self, slots_B: Int64s) -> None:
        """Removes the rows' drafts."""
        self.lengths[slots_B] = 0
        self.known[slots_B] = False
        at = self.on_device(slots_B)
        self.ids[at] = INVALID_TOKEN
        self.kinds[at] = int(ProposalKind.NONE)

    def put(self, slots_B: Int64s, offset: int, ids_B: torch.Tensor, q_BN: SparseDistribution | None) -> None:
        """Adds one draft to each row.

        Args:
            slots_B: Request slots.
            offset: The draft's offset; every row has those before it.
            ids_B: i32 [B].
            q_BN: The distribution that it was drawn from; None: it is certain.
        """
        q_1BN = None if q_BN is None else (q_BN[0][None], q_BN[1][None])
        self.store(self.on_device(slots_B)[None], ids_B[None], q_1BN, offset)
        self.lengths[slots_B] = offset + 1
        self.known[slots_B, offset] = q_BN is not None  # those before it stay

    def put_row(self, slot: int, ids_n: torch.Tensor) -> None:
        """Sets all drafts of one row; they are certain."""
        self.ids[slot, : len(ids_n)] = ids_n
        self.kinds[slot] = int(ProposalKind.ONE_HOT)
        self.lengths[slot] = len(ids_n)

    def store(
        self, at_KB: torch.Tensor, ids_KB: torch.Tensor, q_KBN: SparseDistribution | None, first: int = 0
    ) -> None:
        """Does the device's part for K drafts a row, in few launches, so that a graph can hold it.

        Args:
            at_KB: Request slots, i64 on the device; 0 after a row's last draft.
            ids_KB: i32 [K, B].
            q_KBN: The distributions that they were drawn from; None: they are certain.
            first: The offset of the first.
        """
        at = at_KB, self._offsets[first : first + len(at_KB)]
        self.ids.index_put_(at, ids_KB)
        if q_KBN is not None:
            self.q_ids.index_put_(at, q_KBN[0])
            self.q_probs.index_put_(at, q_KBN[1])
        self.kinds.index_fill_(0, at_KB[0], int(ProposalKind.ONE_HOT if q_KBN is None else ProposalKind.SPARSE))

    def stored(self, slots_B: Int64s, drafts_B: Int64s, *, known: bool) -> None:
        """Does the host's part for rows with `drafts_B` drafts, whose distributions are stored if `known`."""
        self.lengths[slots_B] = drafts_B
        self.known[slots_B] = known & (np.arange(self.known.shape[1]) < drafts_B[:, None])

    def without_q(self, slots_B: Int64s) -> int:
        """Returns how many rows have a draft whose distribution is not known."""
        drafted = np.arange(self.known.shape[1]) < self.lengths[slots_B, None]
        return int(np.count_nonzero((drafted & ~self.known[slots_B]).any(axis=1)))

    def of(self, slots_B: Int64s) -> Proposal:
        """Returns the rows' drafts in this order; K is the largest number of a row."""
        count = int(self.lengths[slots_B].max(initial=0))
        at = self.on_device(slots_B)
        kinds = self.kinds[at]
        ids, q_ids, q_probs = (part[at, :count] for part in (self.ids, self.q_ids, self.q_probs))
        if self._device.type == "cpu":
            return Proposal(ids.numpy(), kinds.numpy(), q_ids.numpy(), q_probs.numpy())
        return Proposal(ids, kinds, q_ids, q_probs)

    def on_device(self, slots_B: Int64s) -> torch.Tensor:
        """Returns request slots as an index on the device."""
        at = torch.from_numpy(np.asarray(slots_B, np.int64))
        return at if self._device.type == "cpu" else at.pin_memory().to(self._device, non_blocking=True)


def as_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """Returns what a sampler gave, a numpy array on the CPU, as a tensor on the state's device."""
    return torch.as_tensor(values).to(device)
