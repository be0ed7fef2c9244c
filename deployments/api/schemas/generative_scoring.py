"""Declares the request and the answer of POST /generative_scoring."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from deployments.api.schemas.chat import Conversations, TemplateValues
from deployments.api.schemas.fields import (
    AtLeastOne,
    Body,
    Name,
    Priority,
    Salt,
    continuation_lists,
    ids,
    strings,
    text,
    text_or_ids,
    texts_or_ids,
)
from deployments.api.schemas.generation import PromptTokensDetails
from deployments.errors import Code
from scoring.loglikelihood import Continuations


class ScoringRequest(Body):
    """Holds a scoring request: `query` and `items`, or conversations in `messages`. `null` means absent except in
    `items`; only a template without a query needs none."""

    item_fields: ClassVar[frozenset[str]] = frozenset(("items",))

    model: Name | None = None
    query: Annotated[str | list[int] | None, text_or_ids(null=True)] = None
    items: Annotated[list[str] | list[list[int]], texts_or_ids("max_items")] = Field(default_factory=list)
    messages: Conversations = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None
    label_token_ids: Annotated[list[int] | None, ids("max_labels", 1)] = None
    labels: Annotated[list[str] | None, strings("max_labels", "max_name_chars", 1)] = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    seam: Literal["concat", "joint"] | None = None
    truncate: Literal["item", "error"] | None = None
    truncation_side: Literal["right", "left"] | None = None
    max_item_tokens: AtLeastOne | None = None
    max_query_tokens: AtLeastOne | None = None
    on_item_error: Literal["report", "fail"] | None = None
    detail: Literal["full", "probabilities"] | None = None
    layout: Literal["rows", "columns", "packed"] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    template: Name | None = None
    continuations: Annotated[Continuations | None, continuation_lists()] = None
    normalization: Literal["none", "tokens", "bytes"] | None = None
    instruction: Annotated[str | None, text("max_instruction_chars")] = None
    system: Annotated[str | None, text("max_instruction_chars")] = None


class ItemFailure(BaseModel):
    code: Code
    message: str


class ScoreRow(BaseModel):
    index: int
    object: Literal["score"]
    score: float | None
    probabilities: list[float] | None
    logprobs: list[float] | None
    label_mass: float | None
    prompt_tokens: int
    cached_tokens: int
    truncated: bool
    truncated_tokens: int
    error: ItemFailure | None


class Continuation(BaseModel):
    """Scores one continuation. Logarithms are natural; `weight` is the share among the item's continuations."""

    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool
    weight: float


class ContinuationRow(BaseModel):
    index: int
    object: Literal["score"]
    score: float | None
    continuations: list[Continuation] | None
    prompt_tokens: int
    cached_tokens: int
    truncated: bool
    truncated_tokens: int
    error: ItemFailure | None


class ContinuationColumns(BaseModel):
    score: list[float | None]
    continuations: list[list[Continuation] | None]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    truncated_tokens: list[int]
    error: dict[str, ItemFailure]
    """By item index: only those that failed."""


class ScoreColumns(BaseModel):
    """Holds lists with layout `columns`; with `packed` base64 of little-endian float32 or int32, NaN if failed."""

    score: list[float | None] | str
    probabilities: list[list[float] | None] | str
    logprobs: list[list[float] | None] | str | None
    label_mass: list[float | None] | str | None
    prompt_tokens: list[int] | str
    cached_tokens: list[int] | str
    truncated_tokens: list[int] | str
    error: dict[str, ItemFailure]
    """By item index: only those that failed."""


class Label(BaseModel):
    token_id: int
    token: str


class ScoringUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: Literal[0]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    computed_tokens: int


class ScoringResponse(BaseModel):
    """Holds `data` with layout `rows`, else `columns`. `labels` is empty for a request with continuations."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreRow] | list[ContinuationRow] | None = None
    columns: ScoreColumns | ContinuationColumns | None = None
    labels: list[Label]
    template: str | None
    prompt_format_version: str | None
    usage: ScoringUsage
