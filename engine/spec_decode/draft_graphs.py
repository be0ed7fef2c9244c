"""Captures all draft steps of a verify step as CUDA graphs, one graph for each of its K drafts.

    two tokens a row -> draw -> [the draft -> draw] x (K - 1)

All inputs of the K steps are known before the first of them, but for the drafts, which stay on the device: a row's
context grows by one slot a draft. So the host packs one array, plans K steps and launches K graphs; a draft at a time
would cost it more than the device needs. The graphs hold what lies between the steps too: the draws, the token table
and `DraftState`. There is a graph for each step because a launch takes the host longer the more kernels it has, and
the device begins after the first. Switch: `engine.graphs`.

Shape legend: R rows of a graph, padding included, K drafts, A attended tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.plans import GraphBuffers
from engine.config import SpeculationConfig
from engine.model.cuda_graphs import decode
from engine.model.cuda_graphs.decode import DecodeGraphs, recorded
from engine.requests import Int64s
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_state import DraftState
from engine.spec_decode.proposer import DraftRows
from gpu_sampler.sampler import Sampler
from gpu_sampler.spec_decode import Draft

ROWS = (2, 4, 8, 16, 32, 64)
FED_FIRST = 2  # tokens of a row in the first step
ALIGNED = 4  # i32 numbers
STAGING = 1 << 20  # bytes of a plan, which names each concurrent block of attention in 13 bytes
NO_DRAFTS = DraftRows(*(np.empty(0, np.int64) for _ in DraftRows._fields))
_cuda: Any = torch.cuda  # its pools carry no types


def row_counts(max_rows: int, captured: int) -> tuple[int, ...]:
    """Returns the row counts of the graphs, ascending, the last enough for `max_rows` rows. The first step of each has
    up to `captured` tokens."""
    fitting = [size for size in ROWS if FED_FIRST * size <= captured]
    return tuple(size for size in fitting if size == ROWS[0] or size < 2 * max_rows)


class _PackedInputs(NamedTuple):
    """Holds the inputs of a graph of R rows, without contexts, as views of one i32 array on the host or the device."""

    owners: Any  # [K + 1, R] request slots of the input tokens
    places: Any  # [K + 2, R] their positions, and the last draft's
    writes: Any  # [K + 1, R] their storage slots
    ids: Any  # [2, R] the first two tokens
    rows: Any  # [3 K + 6, R], all of the above, which lie one after another
    first_ends: Any  # [2 R + 1], indptr of the first step
    ends: Any  # [K - 1, R + 1], indptrs of the others

    @classmethod
    def of(cls, words: Any, size: int, drafts: int) -> "_PackedInputs":
        fed, placed = drafts + 1, 2 * drafts + 3
        rows = words[: (placed + fed + FED_FIRST) * size].reshape(-1, size)
        ends = words[rows.shape[0] * size : cls.length(size, drafts)]
        first = FED_FIRST * size + 1
        parts = rows[:fed], rows[fed:placed], rows[placed:-FED_FIRST], rows[-FED_FIRST:]
        return cls(*parts, rows, ends[:first], ends[first:].reshape(drafts - 1, size + 1))

    @staticmethod
    def length(size: int, drafts: int) -> int:
        """Returns the length of the array."""
        return (3 * drafts + 6) * size + FED_FIRST * size + 1 + (drafts - 1) * (size + 1)

    def indptrs(self) -> list[Any]:
        """Returns each step's indptr, [rows + 1]."""
        return [self.first_ends, *self.ends]


class _Left(NamedTuple):
    """Holds what a step leaves to the next, in the graphs' memory."""

    rows: torch.Tensor  # i64, `_PackedInputs.rows`
    slots: list[torch.Tensor]  # i32 [R] of each draft
    fed: torch.Tensor  # i64 [1 or 2, R] or [R], the next input tokens
    drafts: tuple[Draft, ...]


class DraftGraphs:
    """Captures and replays drafts for the row counts `sizes`, of rows without an overlay and without an allow mask.

    Rows with fewer than K drafts run to the end too: what they do after their last draft, and all that padding rows do,
    goes to slot 0, which is never read. Each of the K steps of a row count has a decoder for layers of equal
    parameters, of 1 MiB on the device and 1 MiB pinned. The host's input of a replay lies in K + 1 arrays of 0.5 MiB,
    which the row counts share, and in pinned memory of that size. All graphs share one memory pool.
    """

    def __init__(
        self,
        decode_graphs: DecodeGraphs,
        table: RequestTable,
        sampler: Sampler,
        state: DraftState,
        config: SpeculationConfig,
        sizes: tuple[int, ...],
    ) -> None:
        """Captures. The sampler must be warmed up for as many rows and drafts: it may allocate nothing after this.

        Args:
            decode_graphs: The draft model's graphs.
            table: The table of the target's requests.
            sampler: Draws the drafts.
            state: Receives them.
            config: The configuration of speculative decoding.
            sizes: Row counts, ascending; see `row_counts`.

        Raises:
            RuntimeError: A step cannot be captured.
        """
        self._table, self._sampler, self._state = table, sampler, state
        self._drafts = config.num_speculative_tokens
        self._method, self._rules = config.draft_sample_method, config.rules
        self._sizes, self._device = sizes, decode_graphs.device
        self._offsets = np.arange(self._drafts + FED_FIRST)[:, None]  # of a row's first token
        width = decode.MAX_VERIFY_ATTENDED + (FED_FIRST + 1 + self._drafts) * sizes[-1]
        self._front = _PackedInputs.length(sizes[-1], self._drafts)
        width = max(width, self._front)
        self._given = torch.zeros((self._drafts + 1, width), dtype=torch.int32, device=self._device)
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(self._given.numel(), dtype=torch.int32, pin_memory=pinned)
        self._sent: Any = _cuda.Event()  # after it the host may write there again
        self._host_inputs = {size: _PackedInputs.of(self._host.numpy(), size, self._drafts) for size in sizes}
        self._indptrs = {size: _PackedInputs.of(self._host, size, self._drafts).indptrs() for size in sizes}
        self._device_inputs = {size: _PackedInputs.of(self._given[0], size, self._drafts) for size in sizes}
        last_page = torch.ones(FED_FIRST * sizes[-1], dtype=torch.int32, device=self._device)
        self._steps = {
            size: [
                decode_graphs.step(len(indptr) - 1, GraphBuffers(indptr, indices, last_page, STAGING))
                for indptr, indices in zip(there.indptrs(), self._given[1:], strict=True)
            ]
            for size, there in self._device_inputs.items()
        }
        self._min_id = torch.zeros(1, dtype=torch.int64, device=self._device)  # a token's id where none was drawn
        pool: Any = _cuda.graph_pool_handle()
        self._graphs: dict[int, list[Any]] = {}
        with torch.no_grad():
            for size in reversed(sizes):
                self._send(size, NO_DRAFTS)
                for step, indptr, indices in zip(self._steps[size], self._indptrs[size], self._given[1:], strict=True):
                    step.plan(indptr, indices[: int(indptr[-1])])
                self._prepare(size, NO_DRAFTS)  # as before a replay: a step that cannot be planned raises here
                self._graphs[size] = self._record(size, pool)

    def worth_replay(self, rows: DraftRows, starts: Int64s) -> bool:
        """Returns whether a replay pays for these rows; if so, the sampler's state is on the device.

        It pays if some row has all K drafts and contexts are short, since the first step reads them twice.

        Args:
            rows: Rows that draft.
            starts: i64 [rows], the first input token of each.
        """
        return (
            0 < len(rows.slots) <= self._sizes[-1]
            and int(rows.max_drafts.max()) == self._drafts
            and bool((starts == rows.lengths - FED_FIRST).all())
            and int((2 * rows.lengths - 1).sum()) <= decode.MAX_VERIFY_ATTENDED
            and self._sampler.prepare_drafts(rows.slots)
        )

    def replay(self, rows: DraftRows) -> None:
        """Writes the rows' drafts to the state and the token table."""
        size = next(size for size in self._sizes if size >= len(rows.slots))
        self._prepare(size, rows)
        for graph in self._graphs[size]:
            graph.replay()
        self._state.stored(rows.slots, rows.max_drafts, known=self._method == "probabilistic")

    def _prepare(self, size: int, rows: DraftRows) -> None:
        self._send(size, rows)
        for step, indptr in zip(self._steps[size], self._indptrs[size], strict=True):
            step.replan(indptr)
        self._sent.record()

    def _send(self, size: int, rows: DraftRows) -> None:
        """Sends the inputs by one copy, and one launch that moves them to where the graphs read them."""
        self._sent.synchronize()
        given = self._pack(size, rows)
        self._given[:, : given.shape[1]].copy_(given.to(self._device, non_blocking=True))
        self._sent.record()

    def _pack(self, size: int, rows: DraftRows) -> torch.Tensor:
        """Packs i32 [K + 1, *] on the host: the inputs, and the contexts of each step.

        A row's inputs are its tokens from the last but one on; input j draws draft j - 1. They are written in place:
        for a few rows, making new arrays would take longer than filling them.
        """
        table, head, n, offsets = self._table, self._host_inputs[size], len(rows.slots), self._offsets
        places = np.where(offsets <= rows.max_drafts + 1, rows.lengths - FED_FIRST + offsets, 0)
        fed = offsets[:-1] <= rows.max_drafts
        owners = fed * rows.slots
        counts = np.ones((self._drafts + 1, size), np.int64)  # attended slots
        counts[:, :n] = np.where(fed, places[:-1] + 1, 1)
        head.rows[:, n:] = head.first_ends[0] = head.ends[:, 0] = 0  # other row counts use this memory too
        head.owners[:, :n], head.places[:, :n] = owners, places
        head.writes[:, :n] = table.slots[owners, places[:-1]]
        head.ids[:, :n] = table.tokens[rows.slots, places[:FED_FIRST]]
        np.cumsum(counts[:FED_FIRST], dtype=np.int32, out=head.first_ends[1:])
        np.cumsum(counts[FED_FIRST:], axis=1, dtype=np.int32, out=head.ends[:, 1:])
        return self._with_contexts(head, counts)

    def _with_contexts(self, head: _PackedInputs, counts: Int64s) -> torch.Tensor:
        """Adds the contexts. `counts` [K + 1, R] are the slots that each token attends to."""
        slots, size = self._table.slots, counts.shape[1]
        pairs = zip(head.owners.ravel().tolist(), counts.ravel().tolist(), strict=True)
        contexts = [slots[slot, :count] for slot, count in pairs]
        attended = [int(head.first_ends[-1]), *head.ends[:, -1].tolist()]
        width = max(self._front, *attended)
        given = self._host[: (self._drafts + 1) * width].view(-1, width)
        start, array = 0, given.numpy()
        for step, count in enumerate(attended):
            end = (step + FED_FIRST) * size
            np.concatenate(contexts[start:end], out=array[step + 1, :count])
            start = end
        return given

    def _record(self, size: int, pool: Any) -> list[Any]:
        """Returns graphs that replay `_step`, one a draft. Each is replayed when it is recorded: the next reads its
        output."""
        recordings, left = list[Any](), None
        for offset in range(self._drafts):
            made = list[_Left]()
            recordings.append(recorded(partial(self._note_step, made, size, offset, left), self._device, pool))
            recordings[-1].replay()
            left = made[-1]  # of the recorded run; those before it were warm-up
        return recordings

    def _note_step(self, made: list[_Left], *given: Any) -> None:
        made.append(self._step(*given))

    def _step(self, size: int, offset: int, left: _Left | None) -> _Left:
        """Draws draft `offset` of every row, from what the step before has `left`. The last step stores the results of
        all steps together, which takes fewer launches."""
        there = self._device_inputs[size]
        if left is None:
            rows = there.rows.long()
            left = _Left(rows, _aligned(there.owners[1:]), rows[-FED_FIRST:], ())
        places = left.rows[self._drafts + 1 : 2 * self._drafts + 3]
        new = slice(0, FED_FIRST) if offset == 0 else slice(offset + 1, offset + 2)
        step = self._steps[size][offset]
        logits = step.logits(left.fed.reshape(-1), places[new].reshape(-1), there.writes[new].reshape(-1))
        given = logits[-size:], left.slots[offset], offset, self._method, self._rules
        drafts = (*left.drafts, self._sampler.launch_draft(*given))
        if offset == self._drafts - 1:
            self._store(left.rows[1 : self._drafts + 1], places[FED_FIRST:], drafts)
            return left._replace(drafts=drafts)
        return left._replace(fed=self._fed(drafts[-1]), drafts=drafts)

    def _store(self, owners: torch.Tensor, places: torch.Tensor, drafts: Sequence[Draft]) -> None:
        """Stores all drafts of the rows `owners` [K, R] at positions `places`."""
        ids = torch.stack([draft.ids for draft in drafts])
        q = None
        if self._method == "probabilistic":
            q = torch.stack([draft.q_ids for draft in drafts]), torch.stack([draft.q_probs for draft in drafts])
        self._state.store(owners, ids, q)
        self._table.token_table.index_put_((owners, places), ids.clamp(min=0))

    def _fed(self, draft: Draft) -> torch.Tensor:
        """Returns the next step's input tokens, i64 [R], by one launch."""
        return torch.maximum(draft.ids, self._min_id)


def _aligned(slots_KR: torch.Tensor) -> list[torch.Tensor]:
    """Returns the rows at addresses that kernels are compiled for: multiples of 16 bytes."""
    steps, rows = slots_KR.shape
    wide = slots_KR.new_empty((steps, -(-rows // ALIGNED) * ALIGNED))[:, :rows]
    return list(wide.copy_(slots_KR))
