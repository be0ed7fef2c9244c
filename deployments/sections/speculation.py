"""The `speculation` section: who drafts tokens for the model, and which drafts are kept (docs/speculation.md)."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from deployments.sections.base import Section
from engine.config import MAX_NGRAM, SpeculationConfig
from gpu_sampler.proposal import MAX_DRAFTS

Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
RuleName = Literal["strict", "standard", "block", "synthetic"]


class SpeculationArgs(Section):
    """Speculative decoding. It changes the time that answers take, and what they hold only where a rule says so."""

    method: Literal["none", "draft_model", "ngram"] = "none"
    """`draft_model`: a small model runs ahead. `ngram`: what followed the last tokens when they stood in the row
    before."""
    draft: str | None = Field(default=None, min_length=1)
    """The draft model: a folder, or a repository id in the local cache, with the target's vocabulary; "builtin" for
    the built-in model."""
    draft_revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """Needed for a repository id."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_DRAFTS)
    """Tokens drafted for each row and step."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """`probabilistic`: drawn from the draft model's own distribution; `greedy`: its most likely token."""
    rejection_sample_method: RuleName = "standard"
    """Of rows whose request has no `seed`. `synthetic` is for benchmarks: its answers follow no law."""
    seeded_rejection_sample_method: RuleName = "strict"
    """Of rows whose request has a `seed`. Under `strict` they get the tokens that they get without speculation."""
    synthetic_acceptance_rates: tuple[Rate, ...] = ()
    """With a rule `synthetic`: one rate a position, given that the drafts before were accepted."""
    ngram_tokens: int = Field(default=2, ge=1, le=MAX_NGRAM)
    """How many last tokens must have stood in the row before."""
    adaptive: bool = False
    """Drafts only while that is measured to be faster."""

    @field_validator("draft_sample_method", mode="before")
    @classmethod
    def _known_by_another_name(cls, given: object) -> object:
        if given == "gumbel":
            raise ValueError(
                "`speculation.draft_sample_method` must be greedy or probabilistic. Given: gumbel, which is called "
                "`probabilistic` here."
            )
        return given

    def config(self) -> SpeculationConfig:
        """ValueError, naming field, value and range, for what does not go together."""
        return SpeculationConfig(**self.model_dump())
