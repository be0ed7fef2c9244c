"""DraftGraphs: a whole run of drafts, for all rows of a step, as CUDA graphs that are launched one behind the other.

    two tokens a row -> draw -> [the draft -> draw] x (K - 1)

All that the K steps feed, write and attend to is known before the first of them, but for the drafts, which never leave
the device: a row's context grows by one slot a draft. So the host packs once, plans K steps and launches them all,
where a draft at a time costs it more than the device needs for it. What lies between the steps is in the graphs too:
the draws, the token table and `DraftState`. A graph is one step: a launch takes the host the longer the more kernels
it has, and the device begins behind the first.

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
STAGING = 1 << 20  # bytes of a plan, which names each block of attention that the device runs at once in 13 bytes
NO_DRAFTS = DraftRows(*(np.empty(0, np.int64) for _ in DraftRows._fields))
_cuda: Any = torch.cuda  # its pools carry no types


def row_counts(max_rows: int, captured: int) -> tuple[int, ...]:
    """Row counts of the graphs, ascending, the last enough for `most_rows` rows; none whose first step would have more
    than `captured` tokens."""
    fitting = [size for size in ROWS if FED_FIRST * size <= captured]
    return tuple(size for size in fitting if size == ROWS[0] or size < 2 * max_rows)


class _PackedInputs(NamedTuple):
    """What a graph of R rows is given beside its contexts, as views of one i32 array: on the host or on the device."""

    owners: Any  # [K + 1, R] request slots of the tokens fed
    places: Any  # [K + 2, R] where these stand in their rows, and the last draft
    writes: Any  # [K + 1, R] their pool slots
    ids: Any  # [2, R] the first two tokens
    rows: Any  # [3 K + 6, R], all of the above, which lie behind each other
    first_ends: Any  # [2 R + 1] of the contexts of the first step
    ends: Any  # [K - 1, R + 1] of those of the others

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
        """Of the array."""
        return (3 * drafts + 6) * size + FED_FIRST * size + 1 + (drafts - 1) * (size + 1)

    def indptrs(self) -> list[Any]:
        """[rows + 1] of each step."""
        return [self.first_ends, *self.ends]


class _Left(NamedTuple):
    """What a step leaves to the next, in the graphs' memory."""

    rows: torch.Tensor  # i64, `_Head.rows`
    slots: list[torch.Tensor]  # i32 [R] of each draft
    fed: torch.Tensor  # i64 [1 or 2, R] or [R]
    drafts: tuple[Draft, ...]


class DraftGraphs:
    """Graphs for the row counts `sizes`, for rows that feed two tokens first and have neither overlay nor allow mask.

    Rows of fewer than K drafts run to the end, too: what they do behind their last draft, and all that padding rows do,
    is that of slot 0, the dummy, which nobody reads. Each of the K steps of a row count has a wrapper a kind of layer,
    of 1 MiB on the device and 1 MiB pinned. What the host gives a replay, contexts among it, lies in K + 1 arrays of
    0.5 MiB that the row counts share, and is written in pinned memory of that size. All graphs share one memory pool.
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
        """Captures. The sampler was warmed up for as many rows and drafts: it takes no more memory from here on."""
        self._table, self._sampler, self._state = table, sampler, state
        self._drafts = config.num_speculative_tokens
        self._method, self._rules = config.draft_sample_method, config.rules
        self._sizes, self._device = sizes, decode_graphs.device
        self._behind = np.arange(self._drafts + FED_FIRST)[:, None]  # of a row's first token
        width = decode.MAX_VERIFY_ATTENDED + (FED_FIRST + 1 + self._drafts) * sizes[-1]
        self._front = _PackedInputs.length(sizes[-1], self._drafts)
        width = max(width, self._front)
        self._given = torch.zeros((self._drafts + 1, width), dtype=torch.int32, device=self._device)
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(self._given.numel(), dtype=torch.int32, pin_memory=pinned)
        self._sent: Any = _cuda.Event()  # behind which the host may write there again
        self._heads = {size: _PackedInputs.of(self._host.numpy(), size, self._drafts) for size in sizes}
        self._indptrs = {size: _PackedInputs.of(self._host, size, self._drafts).indptrs() for size in sizes}
        self._there = {size: _PackedInputs.of(self._given[0], size, self._drafts) for size in sizes}
        last_page = torch.ones(FED_FIRST * sizes[-1], dtype=torch.int32, device=self._device)
        self._steps = {
            size: [
                decode_graphs.step(len(indptr) - 1, GraphBuffers(indptr, indices, last_page, STAGING))
                for indptr, indices in zip(there.indptrs(), self._given[1:], strict=True)
            ]
            for size, there in self._there.items()
        }
        self._least = torch.zeros(1, dtype=torch.int64, device=self._device)  # of a token's id, where none was drawn
        pool: Any = _cuda.graph_pool_handle()
        self._graphs: dict[int, list[Any]] = {}
        with torch.no_grad():
            for size in reversed(sizes):
                self._send(size, NO_DRAFTS)
                for step, indptr, indices in zip(self._steps[size], self._indptrs[size], self._given[1:], strict=True):
                    step.plan(indptr, indices[: int(indptr[-1])])
                self._prepare(size, NO_DRAFTS)  # as before every replay: what cannot be done is found out here
                self._graphs[size] = self._record(size, pool)

    def take(self, rows: DraftRows, starts: Int64s) -> bool:
        """Whether the drafts of rows that feed from `starts` on, all of which draft, are worth a replay: some row has
        all K, and contexts are short, since the first step reads them twice. If so, the sampler's state is there."""
        return (
            0 < len(rows.slots) <= self._sizes[-1]
            and int(rows.most.max()) == self._drafts
            and bool((starts == rows.lengths - FED_FIRST).all())
            and int((2 * rows.lengths - 1).sum()) <= decode.MAX_VERIFY_ATTENDED
            and self._sampler.prepare_drafts(rows.slots)
        )

    def replay(self, rows: DraftRows) -> None:
        """The rows' drafts, into the state and the token table."""
        size = next(size for size in self._sizes if size >= len(rows.slots))
        self._prepare(size, rows)
        for graph in self._graphs[size]:
            graph.replay()
        self._state.stored(rows.slots, rows.most, known=self._method == "probabilistic")

    def _prepare(self, size: int, rows: DraftRows) -> None:
        self._send(size, rows)
        for step, indptr in zip(self._steps[size], self._indptrs[size], strict=True):
            step.replan(indptr)
        self._sent.record()

    def _send(self, size: int, rows: DraftRows) -> None:
        """One copy, and one launch that takes it to where the graphs read it."""
        self._sent.synchronize()
        given = self._pack(size, rows)
        self._given[:, : given.shape[1]].copy_(given.to(self._device, non_blocking=True))
        self._sent.record()

    def _pack(self, size: int, rows: DraftRows) -> torch.Tensor:
        """i32 [K + 1, *] on the host: the head, and the contexts of each step. What each row feeds is its tokens from
        the last but one on: token j of it draws draft j - 1. Written in place: at a few rows, making arrays would take
        longer than what they are for."""
        table, head, n, behind = self._table, self._heads[size], len(rows.slots), self._behind
        places = np.where(behind <= rows.most + 1, rows.lengths - FED_FIRST + behind, 0)
        fed = behind[:-1] <= rows.most
        owners = fed * rows.slots
        counts = np.ones((self._drafts + 1, size), np.int64)  # of what is attended to
        counts[:, :n] = np.where(fed, places[:-1] + 1, 1)
        head.rows[:, n:] = head.first_ends[0] = head.ends[:, 0] = 0  # the heads of other row counts lie here, too
        head.owners[:, :n], head.places[:, :n] = owners, places
        head.writes[:, :n] = table.slots[owners, places[:-1]]
        head.ids[:, :n] = table.tokens[rows.slots, places[:FED_FIRST]]
        np.cumsum(counts[:FED_FIRST], dtype=np.int32, out=head.first_ends[1:])
        np.cumsum(counts[FED_FIRST:], axis=1, dtype=np.int32, out=head.ends[:, 1:])
        return self._with_contexts(head, counts)

    def _with_contexts(self, head: _PackedInputs, counts: Int64s) -> torch.Tensor:
        """`counts` [K + 1, R]: how many slots each token attends to."""
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
        """What replays `_run`. Each graph is replayed as soon as it is recorded: the next one's first runs read what it
        leaves."""
        recordings, left = list[Any](), None
        for offset in range(self._drafts):
            made = list[_Left]()
            recordings.append(recorded(partial(self._note_step, made, size, offset, left), self._device, pool))
            recordings[-1].replay()
            left = made[-1]  # of the run that was recorded: those before it were to warm up
        return recordings

    def _note_step(self, made: list[_Left], *given: Any) -> None:
        made.append(self._step(*given))

    def _run(self, size: int) -> None:
        """What is recorded: every tensor comes from `_given`, and nothing here waits for the device."""
        left = None
        for offset in range(self._drafts):
            left = self._step(size, offset, left)

    def _step(self, size: int, offset: int, left: _Left | None) -> _Left:
        """Draft `offset` of every row, behind what the step before has `left`. What nobody in here reads is stored
        behind the last step, for all of them at once: launches cost more than what they store."""
        there = self._there[size]
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
        """Of whole runs, for rows `owners` [K, R] where their drafts stand at `places`."""
        ids = torch.stack([draft.ids for draft in drafts])
        q = None
        if self._method == "probabilistic":
            q = torch.stack([draft.q_ids for draft in drafts]), torch.stack([draft.q_probs for draft in drafts])
        self._state.store(owners, ids, q)
        self._table.token_table.index_put_((owners, places), ids.clamp(min=0))

    def _fed(self, draft: Draft) -> torch.Tensor:
        """What the next step feeds, i64 [R], by one launch."""
        return torch.maximum(draft.ids, self._least)


def _aligned(slots_KR: torch.Tensor) -> list[torch.Tensor]:
    """Its rows, at addresses that kernels are compiled for: multiples of 16 bytes."""
    steps, rows = slots_KR.shape
    wide = slots_KR.new_empty((steps, -(-rows // ALIGNED) * ALIGNED))[:, :rows]
    return list(wide.copy_(slots_KR))
