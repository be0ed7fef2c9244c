"""DraftGraphs: a whole run of drafts, for all rows of a step, as one CUDA graph.

    two tokens a row -> draw -> [the draft -> draw] x (K - 1)

All that the K steps feed, write and attend to is known before the first of them, but for the drafts, which never leave
the device: a row's context grows by one slot a draft. So the host packs once, plans K steps and replays once, where a
draft at a time costs it more than the device needs for it. What lies between the steps is in the graph too: the draws,
the token table and `DraftState`.

Shape legend: R rows of a graph, padding included, K drafts, A attended tokens.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from engine import graphs
from engine.config import SpeculationConfig
from engine.drafts.proposer import DraftRows
from engine.drafts.state import DraftState
from engine.flashinfer_attention import GraphBuffers
from engine.graphs import DecodeGraphs, recorded
from engine.jobs import Int32s
from engine.requests import Int64s, RequestTable
from engine.row_sampler import RowSampler
from engine.transfer import gathered

ROWS = (2, 4, 8, 16, 32, 64)
FED_FIRST = 2  # tokens of a row in the first step
STAGING = 1 << 20  # bytes of a plan: ten times what the largest of these takes
_cuda: Any = torch.cuda  # its pools carry no types


def row_counts(table: RequestTable, most_rows: int, drafts: int) -> tuple[int, ...]:
    """Row counts of the graphs, ascending, the last no larger than the table needs. None where a first step would have
    more than `most_rows` tokens, or padding rows, of two tokens and the drafts, would not fit into the table."""
    rows, width = table.tokens.shape
    if width < FED_FIRST + drafts:
        return ()
    fitting = [size for size in ROWS if FED_FIRST * size <= most_rows]
    return tuple(size for size in fitting if size == ROWS[0] or size < 2 * (rows - 1))


class _Inputs(NamedTuple):
    """What the host gives a replay, one copy. L is a row's length."""

    flat: (
        torch.Tensor
    )  # i32 [(2 K + 6) R]: slots, positions L - 2 .. L + K - 1, pool slots of L - 2 .. L + K - 2, 2 ids
    kv_indices: list[torch.Tensor]  # K of i32 [A]
    kv_indptr: list[torch.Tensor]  # K of i32 [rows + 1] on the host


class DraftGraphs:
    """Graphs for the row counts `sizes`. They draft for rows that all have K drafts to come and feed two tokens first,
    none with an overlay or an allow mask.

    A padding row is slot 0, the dummy, with two tokens: what is written of it nobody reads. Each of the K steps of a row
    count has a wrapper a kind of layer, of 1 MiB on the device and 1 MiB pinned. K buffers of 0.5 MiB, which the row
    counts share, say what the steps attend to. All graphs share one memory pool.
    """

    def __init__(
        self,
        captures: DecodeGraphs,
        table: RequestTable,
        sampler: RowSampler,
        state: DraftState,
        config: SpeculationConfig,
        sizes: tuple[int, ...],
    ) -> None:
        """Captures. The sampler was warmed up for as many rows and drafts: it takes no more memory from here on."""
        self._table, self._sampler, self._state = table, sampler, state
        self._drafts = config.num_speculative_tokens
        self._method, self._rules = config.draft_sample_method, config.rules
        self._sizes, self._device = sizes, captures.device
        self._flat = torch.zeros((2 * self._drafts + 6) * sizes[-1], dtype=torch.int32, device=self._device)
        attended = graphs.MOST_AGAIN + (FED_FIRST + 1 + self._drafts) * sizes[-1]
        first, *later = (
            GraphBuffers.of(rows * sizes[-1], attended, self._device, STAGING)
            for rows in (FED_FIRST, *[1] * (self._drafts - 1))
        )
        self._steps = {
            size: [captures.step(FED_FIRST * size, first), *(captures.step(size, buffers) for buffers in later)]
            for size in sizes
        }
        pool: Any = _cuda.graph_pool_handle()
        self._graphs: dict[int, Any] = {}
        with torch.no_grad():
            for size in reversed(sizes):
                self._prepare(size, np.empty(0, np.int64), np.empty(0, np.int64))
                self._graphs[size] = self._record(size, pool)

    def take(self, rows: DraftRows, starts: Int64s) -> bool:
        """Whether the drafts of a step, whose rows feed from `starts` on, are one replay. If so, the sampler's state
        is on the device. Contexts are read twice by the first step, so that long ones are not worth it."""
        return (
            0 < len(rows.slots) <= self._sizes[-1]
            and bool((rows.most == self._drafts).all())
            and bool((starts == rows.lengths - FED_FIRST).all())
            and int((2 * rows.lengths - 1).sum()) <= graphs.MOST_AGAIN
            and self._sampler.prepare_drafts(rows.slots)
        )

    def replay(self, rows: DraftRows) -> None:
        """All drafts of the rows, into the state and the token table."""
        size = next(size for size in self._sizes if size >= len(rows.slots))
        self._prepare(size, rows.slots, rows.lengths)
        self._graphs[size].replay()
        self._state.stored(rows.slots, self._drafts, known=self._method == "probabilistic")

    def _prepare(self, size: int, slots: Int64s, lengths: Int64s) -> None:
        inputs = self._pack(size, slots, lengths)
        self._flat[: len(inputs.flat)].copy_(inputs.flat)
        for step, indptr, indices in zip(self._steps[size], inputs.kv_indptr, inputs.kv_indices, strict=True):
            step.plan(indptr, indices)

    def _pack(self, size: int, slots: Int64s, lengths: Int64s) -> _Inputs:
        """One host array and one copy for all K steps."""
        table, pads = self._table, size - len(slots)
        slots_R, lengths_R = np.pad(slots, (0, pads)), np.pad(lengths, (0, pads), constant_values=FED_FIRST)
        places = lengths_R - FED_FIRST + np.arange(self._drafts + FED_FIRST)[:, None]  # [K + 2, R]
        ids, writes = table.tokens[slots_R, places[:FED_FIRST]], table.slots[slots_R, places[:-1]]
        flat: Int32s = np.concatenate((slots_R[None], places, writes, ids), dtype=np.int32, casting="same_kind").ravel()
        counts = places[:-1] + 1  # [K + 1, R] what the tokens of a row attend to, themselves included
        contexts = [table.slots[slot, :n] for row in counts.tolist() for slot, n in zip(slots_R, row, strict=True)]
        by_step = [counts[:FED_FIRST].ravel(), *counts[FED_FIRST:]]
        indptrs = [np.pad(np.cumsum(one, dtype=np.int32), (1, 0)) for one in by_step]
        host = gathered([flat, *contexts, *indptrs], self._device)
        attended = [int(indptr[-1]) for indptr in indptrs]
        moved = host[: len(flat) + sum(attended)].to(self._device, non_blocking=True)
        ends = host[len(flat) + sum(attended) :]
        given, *indices = torch.split(moved, [len(flat), *attended])
        return _Inputs(given, indices, list(torch.split(ends, [len(indptr) for indptr in indptrs])))

    def _record(self, size: int, pool: Any) -> Any:
        """What replays `_run`."""
        return recorded(lambda: self._run(size), self._device, pool)

    def _run(self, size: int) -> None:
        """What is captured: every tensor comes from `_flat`, and nothing here waits for the device."""
        drafts = self._drafts
        rows = self._flat[: (2 * drafts + 6) * size].view(-1, size)
        slots, places, writes, ids = torch.split(rows, [1, drafts + FED_FIRST, drafts + FED_FIRST - 1, FED_FIRST])
        at, wide = slots[0].long(), places.long()
        fed = ids.long()
        for offset, step in enumerate(self._steps[size]):
            new = slice(0, FED_FIRST) if offset == 0 else slice(offset + 1, offset + 2)
            logits = step.logits(fed.reshape(-1), wide[new].reshape(-1), writes[new].reshape(-1))
            fed = self._draw(logits[-size:], slots[0], at, wide[offset + FED_FIRST], offset)

    def _draw(
        self, logits: torch.Tensor, slots: torch.Tensor, at: torch.Tensor, places: torch.Tensor, offset: int
    ) -> torch.Tensor:
        """The rows' drafts, i64 [R], which stand at `places` of the token table: what the next step feeds."""
        drawn = self._sampler.launch_draft(logits, slots, offset, self._method, self._rules)
        self._state.store(at, offset, drawn.ids)
        if self._method == "probabilistic":
            self._state.store_q(at, offset, drawn.q_ids, drawn.q_probs)
        ids: torch.Tensor = drawn.ids.clamp(min=0)
        self._table.token_table.index_put_((at, places), ids)
        return ids.long()
