"""What a generation request wants to be told of its prompts: their text, their log-probabilities, or nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.api.generation.stop_strings import BranchText
from deployments.errors import invalid
from engine.tokenizer.tokenizer import Tokenizer
from gpu_sampler.sampling_params import SamplingLimits, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """`echo`, `prompt_logprobs`, and `max_tokens` 0."""

    echo: bool = False
    logprobs: int | None = None
    only: bool = False  # nothing is generated

    def check(self, limits: SamplingLimits, min_tokens: int | None) -> None:
        """Raises ApiError naming the field."""
        if self.logprobs is not None and not 0 <= self.logprobs <= limits.max_logprobs:
            raise invalid("prompt_logprobs", f"in [0, {limits.max_logprobs}]", str(self.logprobs))
        if self.only and not self.echo and self.logprobs is None:
            raise invalid("max_tokens", ">= 1 without `echo` or `prompt_logprobs`", "0")
        if self.only and min_tokens:
            raise invalid("min_tokens", "0 with `max_tokens` 0", str(min_tokens))

    def top(self, params: SamplingParams) -> int | None:
        """How many of the first tokens of the order a replica tells beside each prompt token; None: nothing."""
        asked = [0] if self.only else []
        if self.logprobs is not None:
            asked.append(self.logprobs)
        if self.echo and params.logprobs is not None:
            asked.append(params.logprobs)
        return max(asked, default=None)

    def new_tokens(self, params: SamplingParams) -> int:
        """The most that a branch generates."""
        return 0 if self.only else params.max_tokens

    def cells_each(self, params: SamplingParams, named: int) -> int:
        """Log-probabilities of one prompt token in one choice, `named` being the length of `logprob_token_ids`."""
        top = self.top(params)
        if top is None:
            return 0
        lists = (self.logprobs is not None) + (self.echo and params.logprobs is not None)
        return max(lists, 1) * (1 + top + named)


class EchoedPrompt(NamedTuple):
    """A prompt as its answer repeats it: what its ids say, which is what the model sees."""

    text: str
    offsets: list[int]  # [P] characters before each token


def echoed(tokenizer: Tokenizer, prompts: Sequence[list[int]], *, skip_special_tokens: bool) -> list[EchoedPrompt]:
    """Decodes token by token: call it off the event loop."""
    found = []
    for ids in prompts:
        text = BranchText(tokenizer.decoder(skip_special_tokens=skip_special_tokens), offsets=True)
        piece = text.push(ids)
        found.append(EchoedPrompt(piece.text + text.finish().text, piece.offsets))
    return found
