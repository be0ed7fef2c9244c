"""Declares the requests and answers of POST /score and /v1/score: SGLang's items, and vLLM's pairs of texts."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, RootModel

from deployments.api.schemas.chat import Conversations, TemplateValues
from deployments.api.schemas.fields import (
    Body,
    Count,
    Name,
    Priority,
    Salt,
    ids,
    strings,
    text,
    text_or_ids,
    texts_or_ids,
)
from deployments.api.schemas.generative_scoring import ScoringUsage
from deployments.api.schemas.pooling import TruncateTokens

Texts = Annotated[list[str] | None, strings("max_items", "max_string_chars", 1, 0, one=True)]


class ScoreBody(Body):
    """Holds a score request of either dialect. `null` means absent.

    SGLang's has `query`, `items` and `label_token_ids`; a bare string of `items` is one item. vLLM's has a text or
    texts on two sides, in `text_1` and `text_2`, `data_1` and `data_2`, or `queries` and `documents`.
    `messages` holds one conversation or a list of them, for a reward model.
    """

    model_config = ConfigDict(title="ScoreRequest")  # its name in the OpenAPI document

    model: Name | None = None
    query: Annotated[str | list[int] | None, text_or_ids(null=True)] = None
    items: Annotated[list[str] | list[list[int]] | None, texts_or_ids("max_items", 0, one=True, null=True)] = None
    label_token_ids: Annotated[list[int] | None, ids("max_labels", 1)] = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    text_1: Texts = None
    text_2: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    messages: Conversations = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None
    instruction: Annotated[str | None, text("max_instruction_chars")] = None
    use_activation: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_doc: Count | None = None
    max_tokens_per_query: Count | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class LabelScores(BaseModel):
    """Answers a request with `items`."""

    scores: list[list[float]]
    """By item, by label."""
    pooled_hidden_states: None
    model: str
    object: Literal["scoring"]
    usage: ScoringUsage
    truncated: list[bool]
    """By item."""


class PairScore(BaseModel):
    """Scores one pair or conversation. `truncated` is present only if part of it was cut off."""

    index: int
    object: Literal["score"]
    score: float
    truncated: Literal[True] | None = None


class PairScoreList(BaseModel):
    """Answers a request with texts on two sides, or with conversations."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: ScoringUsage


class ScoreResponse(RootModel[LabelScores | PairScoreList]):
    """Answers `items` with their labels' scores, two sides of texts and conversations with a score each."""
