"""Defines what proposes draft tokens for speculative decoding."""

from typing import NamedTuple, Protocol

from engine.batch.input_batch import StepSequences
from engine.requests import Int64s
from gpu_sampler.spec_decode import Proposal
from gpu_sampler.startup_progress import StartupProgress


class DraftRows(NamedTuple):
    """Names running rows that are to draft, one entry a row. The host knows all their tokens."""

    slots: Int64s  # request slots
    lengths: Int64s  # tokens
    max_drafts: Int64s


class Proposer(Protocol):
    """Proposes drafts. The step thread calls it at the start of a verify step, so that a resumed row drafts where the
    lost one would.

    Invariants: a row's drafts depend on its own tokens, parameters and noise alone; when `propose` returns, they follow
    the row's tokens in the request table's `token_table`.
    """

    def propose(self, rows: DraftRows) -> Proposal:
        """Returns the rows' drafts, up to `max_drafts` each."""
        ...

    def lengths(self, slots: Int64s) -> Int64s:
        """Returns how many drafts `propose` made for these rows, i64 [B]."""
        ...

    def missing(self, slots: Int64s) -> int:
        """Returns how many of these rows have drafts whose distribution is not known."""
        ...

    def prefill(self, sequences: StepSequences) -> None:
        """Reads prompt tokens, in the step in which the target reads them."""
        ...

    def warm_up(self, progress: StartupProgress) -> None:
        """Compiles and captures what start-up should pay for."""
        ...

    def capture_next(self) -> bool:
        """Captures one CUDA graph that `warm_up` has left for later; see `CausalLM`."""
        ...
