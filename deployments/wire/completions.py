"""POST /v1/completions: the request as parsed, and the shape of its answers."""

from typing import Annotated, Literal

from pydantic import BaseModel

from deployments.wire.fields import Int, one_of, prompts
from deployments.wire.generation import GenerationRequest, PromptLogprob, Usage


class CompletionRequest(GenerationRequest):
    """`null` means absent everywhere but in `prompt`."""

    prompt: Annotated[list[str] | list[list[int]], prompts()]
    max_tokens: Annotated[Int, one_of(lambda x: 0 <= x < 2**31, ">= 0")] | None = None
    logprobs: Int | None = None
    echo: bool | None = None


class CompletionLogprobs(BaseModel):
    """One entry a token. With `echo` the prompt's come first, and nothing is told of its first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    requested_logprobs: list[list[float] | None] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    seed: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionResponse(BaseModel):
    """The whole answer, and with `stream` each event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
