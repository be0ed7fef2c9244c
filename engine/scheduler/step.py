"""Step: one planned step, as the scheduler hands it to the model runner and the output processor."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.requests import Int32s, Int64s
from engine.scheduler.request_state import RequestState, RequestTable, SequenceState
from engine.scheduler.score_batcher import ScorePart


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """Holds what the model computes in one step, and whose rows come back. R rows are sampled."""

    kind: StepKind
    sequences: Sequence[ScheduledSequence]
    tokens: int  # new tokens
    sampled: list[SequenceState] = field(default_factory=list)  # [R] the rows to sample, in order of the logits
    slots: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] their request slots
    positions: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] where their new tokens belong
    max_drafts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] verify: drafts that have room
    drafts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] verify: drafts that were made
    drafting: bool = False  # whether rows are drafted for that need not be
    missing_q: int = 0  # verify: rows drafted from a distribution that is not known
    prefilled: list[SequenceState] = field(default_factory=list)  # rows of a prefill step, sampled or not
    completed: list[SequenceState] = field(default_factory=list)  # rows whose prefill this step ends
    parts: list[ScorePart] = field(default_factory=list)
    scratch: list[Int32s] = field(default_factory=list)  # pool slots to free once the step has finished
    charges: list[tuple[RequestState, int]] = field(default_factory=list)  # new tokens by request
    planned: float = 0.0  # the engine's time, seconds
    launched: float = 0.0
    waiting: bool = False  # there was more work than steps hold

    @property
    def isolated(self) -> bool:
        """Tells whether the step belongs to an isolated request, which shares it with no other."""
        rows = self.prefilled or self.sampled
        first = rows[0].parent if rows else self.parts[0].state if self.parts else None
        return first is not None and first.isolated

    def begin(self) -> None:
        """Sets the start of the requests for which nothing was computed before."""
        for state in self.requests():
            if state.started is None:
                state.started = self.launched

    def requests(self) -> list[RequestState]:
        """Returns the requests that the step computes for, each once."""
        rows = self.prefilled or self.sampled
        return list({id(s): s for s in [*(r.parent for r in rows), *(p.state for p in self.parts)]}.values())


def decode_sequences(step: Step, table: RequestTable) -> None:
    """Fills in the sequences of a decode step: the last token of each row, after which the row has one more."""
    step.sequences = table.last_tokens(step.slots, step.positions)
    table.length[step.slots] += 1
