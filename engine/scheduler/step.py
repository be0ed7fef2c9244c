"""Step: what the scheduler planned, and the launcher, the flight and the results work on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.requests import Int32s, Int64s
from engine.scheduler.request_state import Request, RequestTable, Work
from engine.scheduler.score_batcher import ScorePart


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A planned step: what the model is given, and whose rows come back."""

    kind: StepKind
    sequences: Sequence[ScheduledSequence]
    tokens: int
    requests: list[Request] = field(default_factory=list)  # rows to sample, in order of the logits
    slots: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # their request slots
    positions: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # where their new tokens belong
    most_drafts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # verify: that each row has room for
    drafts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # verify: that were made
    drafting: bool = False  # whether rows have drafts that need not have them
    missing_q: int = 0  # verify: rows drafted from a distribution that is not known
    members: list[Request] = field(default_factory=list)  # rows of a prefill step, sampled or not
    completed: list[Request] = field(default_factory=list)  # rows whose prefill this step ends
    parts: list[ScorePart] = field(default_factory=list)
    scratch: list[Int32s] = field(default_factory=list)  # pool slots to free once the step has finished
    charges: list[tuple[Work, int]] = field(default_factory=list)  # new tokens by job
    planned: float = 0.0
    launched: float = 0.0
    waiting: bool = False  # there was more work than steps hold

    @property
    def isolated(self) -> bool:
        """Whether it is a isolated job's, which shares it with nobody."""
        rows = self.members or self.requests
        first = rows[0].parent if rows else self.parts[0].work if self.parts else None
        return first is not None and first.isolated

    def begin(self) -> None:
        """Tells the jobs that nothing was computed for before."""
        for request in self.members or self.requests:
            if request.parent.started is None:
                request.parent.started = self.launched
        for part in self.parts:
            if part.work.started is None:
                part.work.started = self.launched

    def works(self) -> list[Work]:
        """The jobs that the step computes for."""
        rows: list[Request] = self.members or self.requests
        return list({id(w): w for w in [*(r.parent for r in rows), *(p.work for p in self.parts)]}.values())


def decode_sequences(step: Step, table: RequestTable) -> None:
    """Fills in the runs of a decode step: each row's last token, after which it has one more."""
    step.sequences = table.last_tokens(step.slots, step.positions)
    table.length[step.slots] += 1
