"""DraftGraphs: a whole run of drafts, for all rows of a step, as one CUDA graph.

    two tokens a row -> draw -> [the draft -> draw] x (K - 1)

All that the K steps feed, write and attend to is known before the first of them, but for the drafts, which never leave
the device: a row's context grows by one slot a draft. So the host packs once, plans K steps and replays once, where a
draft at a time costs it more than the device needs for it. What lies between the steps is in the graph too: the draws,
the token table and `DraftState`.

Shape legend: R rows of a graph, padding included, K drafts, A attended tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine import graphs
from engine.config import SpeculationConfig
from engine.drafts.proposer import DraftRows
from engine.drafts.state import DraftState
from engine.flashinfer_attention import GraphBuffers
from engine.graphs import DecodeGraphs, recorded
from engine.jobs import Int32s, Int64s
from engine.requests import RequestTable
from engine.row_sampler import RowSampler
from engine.transfer import gathered

ROWS = (2, 4, 8, 16, 32, 64)
FED_FIRST = 2  # tokens of a row in the first step
STAGING = 1 << 20  # bytes of a plan, which names each block of attention that the device runs at once in 13 bytes
NO_ROWS = np.empty(0, np.int64)
_cuda: Any = torch.cuda  # its pools carry no types


def row_counts(most_rows: int, captured: int) -> tuple[int, ...]:
    """Row counts of the graphs, ascending, the last enough for `most_rows` rows; none whose first step would have more
    than `captured` tokens."""
    fitting = [size for size in ROWS if FED_FIRST * size <= captured]
    return tuple(size for size in fitting if size == ROWS[0] or size < 2 * most_rows)


class _Inputs(NamedTuple):
    """What the host gives a replay, in one copy."""

    flat: torch.Tensor  # i32 [(3 K + 6) R], as `_run` takes it apart
    kv_indices: list[torch.Tensor]  # K of i32 [A]
    kv_indptr: list[torch.Tensor]  # K of i32 [rows + 1] on the host


class DraftGraphs:
    """Graphs for the row counts `sizes`, for rows that feed two tokens first and have neither overlay nor allow mask.

    Rows of fewer than K drafts run to the end, too: what they do behind their last draft, and all that padding rows do,
    is that of slot 0, the dummy, which nobody reads. Each of the K steps of a row count has a wrapper a kind of layer,
    of 1 MiB on the device and 1 MiB pinned. K buffers of 0.5 MiB, which the row counts share, say what the steps attend
    to. All graphs share one memory pool.
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
        self._flat = torch.zeros((3 * self._drafts + 6) * sizes[-1], dtype=torch.int32, device=self._device)
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
                self._prepare(size, DraftRows(NO_ROWS, NO_ROWS, NO_ROWS))
                self._graphs[size] = self._record(size, pool)

    def take(self, rows: DraftRows, starts: Int64s) -> bool:
        """Whether the drafts of rows that feed from `starts` on, all of which draft, are worth a replay: some row has
        all K, and contexts are short, since the first step reads them twice. If so, the sampler's state is there."""
        return (
            0 < len(rows.slots) <= self._sizes[-1]
            and int(rows.most.max()) == self._drafts
            and bool((starts == rows.lengths - FED_FIRST).all())
            and int((2 * rows.lengths - 1).sum()) <= graphs.MOST_AGAIN
            and self._sampler.prepare_drafts(rows.slots)
        )

    def replay(self, rows: DraftRows) -> None:
        """The rows' drafts, into the state and the token table."""
        size = next(size for size in self._sizes if size >= len(rows.slots))
        self._prepare(size, rows)
        self._graphs[size].replay()
        self._state.stored(rows.slots, rows.most, known=self._method == "probabilistic")

    def _prepare(self, size: int, rows: DraftRows) -> None:
        inputs = self._pack(size, rows)
        self._flat[: len(inputs.flat)].copy_(inputs.flat)
        for step, indptr, indices in zip(self._steps[size], inputs.kv_indptr, inputs.kv_indices, strict=True):
            step.plan(indptr, indices)

    def _pack(self, size: int, rows: DraftRows) -> _Inputs:
        """What each row feeds is its tokens from the last but one on: token j of it draws draft j - 1."""
        table, pads = self._table, (0, size - len(rows.slots))
        slots_R, most_R = np.pad(rows.slots, pads), np.pad(rows.most, pads)
        first_R = np.pad(rows.lengths - FED_FIRST, pads)
        behind = np.arange(self._drafts + FED_FIRST)[:, None]  # of a row's first token
        places = np.where(behind <= most_R + 1, first_R + behind, 0)  # [K + 2, R] of what is fed, and of each draft
        fed = behind[:-1] <= most_R  # [K + 1, R]
        owners = np.where(fed, slots_R, 0)
        writes, ids = table.slots[owners, places[:-1]], table.tokens[slots_R, places[:FED_FIRST]]
        flat: Int32s = np.concatenate((owners, places, writes, ids), dtype=np.int32, casting="same_kind").ravel()
        counts = np.where(fed, places[:-1] + 1, 1)  # of what is attended to
        pairs = zip(owners.ravel().tolist(), counts.ravel().tolist(), strict=True)
        contexts = [table.slots[slot, :count] for slot, count in pairs]
        return self._sent(flat, contexts, [counts[:FED_FIRST].ravel(), *counts[FED_FIRST:]])

    def _sent(self, flat: Int32s, contexts: Sequence[Int32s], counts: Sequence[Int64s]) -> _Inputs:
        """On the device, by one copy; `counts`: how many slots the tokens of each step attend to."""
        indptrs = [np.pad(np.cumsum(one, dtype=np.int32), (1, 0)) for one in counts]
        attended = [int(indptr[-1]) for indptr in indptrs]
        host = gathered([flat, *contexts, *indptrs], self._device)
        here, ends = torch.split(host, [len(flat) + sum(attended), sum(map(len, indptrs))])
        there, *indices = torch.split(here.to(self._device, non_blocking=True), [len(flat), *attended])
        return _Inputs(there, indices, list(torch.split(ends, [len(indptr) for indptr in indptrs])))

    def _record(self, size: int, pool: Any) -> Any:
        """What replays `_run`."""
        return recorded(lambda: self._run(size), self._device, pool)

    def _run(self, size: int) -> None:
        """What is captured: every tensor comes from `_flat`, and nothing here waits for the device."""
        drafts = self._drafts
        given = self._flat[: (3 * drafts + 6) * size].view(-1, size)
        owners, places, writes, ids = torch.split(given, [drafts + 1, drafts + FED_FIRST, drafts + 1, FED_FIRST])
        places, fed = places.long(), ids.long()
        for offset, step in enumerate(self._steps[size]):
            new = slice(0, FED_FIRST) if offset == 0 else slice(offset + 1, offset + 2)
            logits = step.logits(fed.reshape(-1), places[new].reshape(-1), writes[new].reshape(-1))
            slots = owners[offset + 1].clone()  # at an address that kernels are compiled for
            fed = self._draw(logits[-size:], slots, places[offset + FED_FIRST], offset)

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, offset: int) -> torch.Tensor:
        """The rows' drafts, i64 [R], which stand at `places` of the token table: what the next step feeds."""
        at = slots.long()
        drawn = self._sampler.launch_draft(logits, slots, offset, self._method, self._rules)
        self._state.store(at, offset, drawn.ids)
        if self._method == "probabilistic":
            self._state.store_q(at, offset, drawn.q_ids, drawn.q_probs)
        ids: torch.Tensor = drawn.ids.clamp(min=0)
        self._table.token_table.index_put_((at, places), ids)
        return ids.long()
