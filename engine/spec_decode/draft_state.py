"""DraftState: what was drafted for each running row, by request slot.

By slot and not by row of a step: rows that are reordered, skipped or resumed between steps keep their own drafts, and
nothing is copied for them. Shape legend: S request slots, B rows of a step, K drafts, N ids of a sparse proposal.
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
    """Tensors on the model's device, but for the lengths, which the host knows."""

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        self.lengths = np.zeros(slots, np.int64)  # [S] drafts
        self.known = np.zeros((slots, most), np.bool_)  # [S, K] whether it was told what the draft was drawn from
        self.ids = torch.full((slots, most), INVALID_TOKEN, dtype=torch.int32, device=device)
        self.kinds = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.q_ids = torch.full((slots, most, PROPOSAL_IDS), INVALID_TOKEN, dtype=torch.int32, device=device)
        self.q_probs = torch.zeros((slots, most, PROPOSAL_IDS), dtype=torch.float32, device=device)
        self._offsets = torch.arange(most, device=device)[:, None]  # [K, 1]
        self._device = device

    def clear(self, slots_B: Int64s) -> None:
        """The rows have no drafts."""
        self.lengths[slots_B] = 0
        self.known[slots_B] = False
        at = self.on_device(slots_B)
        self.ids[at] = INVALID_TOKEN
        self.kinds[at] = int(ProposalKind.NONE)

    def put(self, slots_B: Int64s, offset: int, ids_B: torch.Tensor, q_BN: SparseDistribution | None) -> None:
        """The rows' draft at `offset`, the latest; every row has those before it. `q_BN`: what it was drawn from, None
        for a certain one."""
        q_1BN = None if q_BN is None else (q_BN[0][None], q_BN[1][None])
        self.store(self.on_device(slots_B)[None], ids_B[None], q_1BN, offset)
        self.lengths[slots_B] = offset + 1
        self.known[slots_B, offset] = q_BN is not None  # nothing is said of those before it

    def put_row(self, slot: int, ids_n: torch.Tensor) -> None:
        """All drafts of one row, certain ones."""
        self.ids[slot, : len(ids_n)] = ids_n
        self.kinds[slot] = int(ProposalKind.ONE_HOT)
        self.lengths[slot] = len(ids_n)

    def store(
        self, at_KB: torch.Tensor, ids_KB: torch.Tensor, q_KBN: SparseDistribution | None, first: int = 0
    ) -> None:
        """The device's part, for K drafts a row from the `first` on, and what they were drawn from. `at_KB`, i64, lies
        on the device: slot 0 behind a row's last draft. A graph may hold it, in few launches."""
        at = at_KB, self._offsets[first : first + len(at_KB)]
        self.ids.index_put_(at, ids_KB)
        if q_KBN is not None:
            self.q_ids.index_put_(at, q_KBN[0])
            self.q_probs.index_put_(at, q_KBN[1])
        self.kinds.index_fill_(0, at_KB[0], int(ProposalKind.ONE_HOT if q_KBN is None else ProposalKind.SPARSE))

    def stored(self, slots_B: Int64s, drafts_B: Int64s, *, known: bool) -> None:
        """The host's part, for rows of which so many drafts are stored, and what they were drawn from if `known`."""
        self.lengths[slots_B] = drafts_B
        self.known[slots_B] = known & (np.arange(self.known.shape[1]) < drafts_B[:, None])

    def without_q(self, slots_B: Int64s) -> int:
        """Rows with a draft whose distribution nobody told."""
        drafted = np.arange(self.known.shape[1]) < self.lengths[slots_B, None]
        return int(np.count_nonzero((drafted & ~self.known[slots_B]).any(axis=1)))

    def of(self, slots_B: Int64s) -> Proposal:
        """The rows' drafts in this order, K the most of them."""
        most = int(self.lengths[slots_B].max(initial=0))
        at = self.on_device(slots_B)
        kinds = self.kinds[at]
        ids, q_ids, q_probs = (part[at, :most] for part in (self.ids, self.q_ids, self.q_probs))
        if self._device.type == "cpu":
            return Proposal(ids.numpy(), kinds.numpy(), q_ids.numpy(), q_probs.numpy())
        return Proposal(ids, kinds, q_ids, q_probs)

    def on_device(self, slots_B: Int64s) -> torch.Tensor:
        """Request slots as an index."""
        at = torch.from_numpy(np.asarray(slots_B, np.int64))
        return at if self._device.type == "cpu" else at.pin_memory().to(self._device, non_blocking=True)


def as_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """What a sampler gave, a numpy array on the CPU, as a tensor where the state is."""
    return torch.as_tensor(values).to(device)
