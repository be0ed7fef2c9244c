"""Declares the request and the answer of POST /v1/completions, and the fields that chat requests share with it."""

from typing import Annotated, Literal

from pydantic import BaseModel

from deployments.api.schemas.fields import (
    Body,
    Count,
    Int,
    Name,
    Number,
    Priority,
    Salt,
    biases,
    ids,
    one_of,
    prompts,
    strings,
)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Body):
    """Holds the fields of both generation routes. `null` means absent; SamplingParams checks the ranges."""

    model: Name | None = None
    n: Int | None = None
    temperature: Number | None = None
    top_k: Int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, biases()] = None
    allowed_token_ids: Annotated[list[int] | None, ids("max_allowed_token_ids", 1)] = None
    bad_words: Annotated[list[str] | None, strings("max_bad_words", "max_stop_chars")] = None
    stop: Annotated[list[str] | None, strings("max_stop", "max_stop_chars", one=True)] = None
    stop_token_ids: Annotated[list[int] | None, ids("max_stop_token_ids")] = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[Int, one_of(lambda x: -(2**63) <= x < 2**63, "of 64 bits")] | None = None
    logprob_token_ids: Annotated[list[int] | None, ids("max_logprob_token_ids", 1)] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Int, one_of(lambda x: x == -1 or 1 <= x < 2**31, "-1 or >= 1")] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Int | None = None
    resume_token_ids: Annotated[list[int] | None, ids("max_request_tokens", 1)] = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    # Honoured where they ask for what happens anyway.
    best_of: Int | None = None
    do_sample: bool | None = None

    @property
    def length_field(self) -> str:
        """The name of the field that says how long the answer may be."""
        return "max_tokens"


class PromptLogprob(BaseModel):
    """Scores one token at one place of the prompt: the token there, or one of the most probable."""

    logprob: float
    rank: int
    decoded_token: str


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Speculation(BaseModel):
    """Counts the tokens that were drafted for the answer, and those that it kept."""

    drafted: int
    accepted: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    truncated_tokens: int | None = None
    speculation: Speculation | None = None


class CompletionRequest(GenerationRequest):
    """Holds the body of a completion request. `null` means absent except in `prompt`."""

    prompt: Annotated[list[str] | list[list[int]], prompts()]
    max_tokens: Count | None = None
    logprobs: Int | None = None
    echo: bool | None = None


class CompletionLogprobs(BaseModel):
    """Holds one entry for each token. With `echo` the prompt's come first, the first of them null."""

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
    """Holds the whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
