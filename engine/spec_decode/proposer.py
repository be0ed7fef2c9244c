"""Proposer: whoever drafts."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.batch.input_batch import ScheduledSequence
from engine.model.interface import StartupProgress
from engine.requests import Int64s
from gpu_sampler.spec_decode import Proposal


class DraftRows(NamedTuple):
    """Running rows, one entry a row, each at a run boundary: the host knows all its tokens."""

    slots: Int64s  # request slots
    lengths: Int64s  # tokens
    most: Int64s  # drafts that the row may have


class Proposer(Protocol):
    """Called by the step thread at the start of a verify step, so that a resumed row drafts where the lost one would.

    Invariants: the drafts of a row depend on its own tokens, parameters and noise alone; they stand in the request
    table's `token_table` behind the row's tokens when `propose` returns.
    """

    def propose(self, rows: DraftRows) -> Proposal:
        """The rows' drafts, of a row at most `most`; how many, `lengths` tells."""
        ...

    def lengths(self, slots: Int64s) -> Int64s:
        """i64 [B]: the drafts that `propose` made of these rows."""
        ...

    def missing(self, slots: Int64s) -> int:
        """Of these rows, those whose drafts were drawn from a distribution that is not known."""
        ...

    def prefill(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Sees prompt tokens, in the step in which the target does."""
        ...

    def warm_up(self, progress: StartupProgress) -> None: ...
