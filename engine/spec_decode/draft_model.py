"""Proposes drafts by a small model of the same vocabulary, whose keys and values use the same storage slots.

Its first step feeds a row's last two tokens whatever the verify step before accepted: where that accepted all drafts,
the draft model has not read the last of them, otherwise it has, and two tokens are one shape for both. Slots of the
prefix cache are never written again, so that no row changes what its neighbours draft from.
"""

import logging
import time

import numpy as np
import torch

from engine.batch.input_batch import StepKind, StepSequences
from engine.config import SpeculationConfig
from engine.model.interface import CausalLM
from engine.model.loader import draft_progress
from engine.requests import Int64s
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_graphs import DraftGraphs, row_counts
from engine.spec_decode.draft_state import DraftState, as_tensor
from engine.spec_decode.proposer import DraftRows
from gpu_sampler.sampler import Sampler
from gpu_sampler.spec_decode import Proposal
from gpu_sampler.startup_progress import StartupProgress

log = logging.getLogger(__name__)
ONE_ROW = np.zeros(1, np.int32)
NO_ROWS = np.empty(0, np.int32)


class DraftModel:
    """Implements `Proposer`. It keeps `RequestTable.seen` up to date."""

    def __init__(
        self,
        model: CausalLM,
        table: RequestTable,
        sampler: Sampler,
        config: SpeculationConfig,
        token_budget: int,
    ) -> None:
        if table.seen is None:
            raise ValueError("a draft model needs a request table that keeps what it has seen")
        self._model = model
        self._table = table
        self._seen = table.seen
        self._sampler = sampler
        self._config = config
        self._token_budget = token_budget
        self._method = config.draft_sample_method
        self._rules = config.rules
        self._graphs: DraftGraphs | None = None
        self._state = DraftState(len(table.sequences), config.num_speculative_tokens, model.device)

    def propose(self, rows: DraftRows) -> Proposal:
        drafted = rows.max_drafts > 0
        drafting = DraftRows(*(part[drafted] for part in rows))
        self._catch_up(drafting.slots, drafting.lengths)
        starts = self._starts(drafting.slots, drafting.lengths)
        if self._graphs is not None and self._graphs.worth_replay(drafting, starts):
            if (rows.max_drafts < self._config.num_speculative_tokens).any():
                self._state.clear(rows.slots)  # the graph writes those of K drafts alone
            self._graphs.replay(drafting)
        else:
            self._one_by_one(rows)
        self._seen[rows.slots[drafted]] = (rows.lengths + rows.max_drafts - 1)[drafted]  # the last draft is not fed
        return self._state.of(rows.slots)

    def _one_by_one(self, rows: DraftRows) -> None:
        self._state.clear(rows.slots)
        for offset in range(int(rows.max_drafts.max(initial=0))):
            alive = rows.max_drafts > offset
            slots, lengths = rows.slots[alive], rows.lengths[alive]
            logits = self._first(slots, lengths) if offset == 0 else self._next(slots, lengths + offset)
            self._draw(logits, slots, lengths, offset)

    def _catch_up(self, slots: Int64s, lengths: Int64s) -> None:
        """Feeds rows that went on without drafts all but their last two tokens, if these are many together."""
        starts, ends = self._starts(slots, lengths), lengths - 2
        if int((ends - starts).sum()) <= self._token_budget:
            return  # the first step of the drafts feeds them too
        work, left = [], self._token_budget
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            while start < end:
                stop = min(end, start + left)
                work.append(self._table.run(slot, start, stop, self._table.tokens[slot, start:stop], NO_ROWS))
                start, left = stop, left - (stop - start)
                if not left:
                    self._model.fill(StepKind.PREFILL, work, self._table.token_table)
                    work, left = [], self._token_budget
        if work:
            self._model.fill(StepKind.PREFILL, work, self._table.token_table)
        self._seen[slots] = np.maximum(starts, ends)

    def _starts(self, slots: Int64s, lengths: Int64s) -> Int64s:
        """Returns the position of each row's first input token."""
        requests = [self._table.sequences[slot] for slot in slots.tolist()]
        shared = np.array([0 if request is None else request.shared for request in requests], np.int64)
        return np.maximum(np.minimum(self._seen[slots], lengths - 2), shared)

    def _first(self, slots: Int64s, lengths: Int64s) -> torch.Tensor:
        """Returns the logits after the rows' last tokens."""
        sequences = []
        starts = self._starts(slots, lengths)
        for slot, start, length in zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            row = np.array([length - start - 1], np.int32)
            sequences.append(self._table.run(slot, start, length, self._table.tokens[slot, start:length], row))
        return self._model.forward(StepKind.VERIFY, sequences, self._table.token_table)

    def _next(self, slots: Int64s, lengths: Int64s) -> torch.Tensor:
        """Returns the logits after the drafts that are the rows' tokens `length` - 1."""
        pairs = zip(slots.tolist(), lengths.tolist(), strict=True)
        sequences = [self._table.run(slot, length - 1, length, None, ONE_ROW) for slot, length in pairs]
        return self._model.forward(StepKind.DECODE, sequences, self._table.token_table)

    def _draw(self, logits: torch.Tensor, slots: Int64s, lengths: Int64s, offset: int) -> None:
        drawn = self._sampler.draft(logits, slots, offset, self._method, self._rules)
        ids, q_ids, q_probs = (as_tensor(part, self._model.device) for part in drawn)
        self._state.put(slots, offset, ids, (q_ids, q_probs) if self._method == "probabilistic" else None)
        at = self._state.on_device(slots), self._state.on_device(lengths + offset)
        self._table.token_table.index_put_(at, ids.to(torch.int32).clamp(min=0))

    def lengths(self, slots: Int64s) -> Int64s:
        return self._state.lengths[slots]

    def missing(self, slots: Int64s) -> int:
        return 0 if self._method == "greedy" else self._state.without_q(slots)

    def prefill(self, sequences: StepSequences) -> None:
        unread = [sequence._replace(rows=NO_ROWS) for sequence in sequences]
        self._model.fill(StepKind.PREFILL, unread, self._table.token_table)
        for sequence in sequences:
            if sequence.slot:
                self._seen[sequence.slot] = len(sequence.context) + len(sequence.write)

    def capture_next(self) -> bool:
        return self._model.capture_next()

    def warm_up(self, progress: StartupProgress) -> None:
        """Warms up the model and captures the draft graphs. The sampler must be warmed up before."""
        self._model.warm_up(draft_progress(progress))
        decode_graphs, start = self._model.decode_graphs(), time.perf_counter()
        if decode_graphs is None or not self._sampler.prepare_drafts(NO_ROWS):
            return
        sizes = row_counts(len(self._table.sequences) - 1, decode_graphs.max_rows)
        if not sizes:
            return
        try:
            self._graphs = DraftGraphs(decode_graphs, self._table, self._sampler, self._state, self._config, sizes)
        except RuntimeError as error:  # drafts are then slower, and no different
            log.warning("Drafts are launched one at a time: a run of them could not be captured. %s", error)
            return
        progress("draft runs", time.perf_counter() - start)
