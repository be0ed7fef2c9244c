"""Declares the bodies of POST /pooling, and the fields that all routes of pooling heads share."""

from typing import Annotated, Literal

from pydantic import BaseModel

from deployments.api.schemas.chat import Messages, TemplateValues
from deployments.api.schemas.fields import AtLeastOne, Body, Name, Priority, Salt, one_of, prompts
from deployments.api.schemas.generation import PromptTokensDetails

TruncateTokens = Annotated[int, one_of(lambda x: x == -1 or 1 <= x < 2**31, "-1 or >= 1")]
EncodingFormat = Literal["float", "base64"]


class PoolingInput(Body):
    """Holds one or more texts in `input`, or one conversation in `messages`. `null` means absent."""

    model: Name | None = None
    input: Annotated[list[str] | list[list[int]] | None, prompts("max_items", null=True)] = None
    messages: Messages | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class PoolingBody(PoolingInput):
    """Holds inputs and what the head is used for. `null` means absent."""

    task: Literal["classify", "token_classify", "embed"] | None = None
    dimensions: AtLeastOne | None = None
    encoding_format: EncodingFormat | None = None
    prompt_name: Name | None = None
    step_tag_id: Annotated[int, one_of(lambda x: 0 <= x < 2**31, ">= 0")] | None = None
    steps: bool | None = None
    aggregate: Literal["min", "last", "product"] | None = None


class PooledItem(BaseModel):
    """Holds what the head says of one input: numbers (`classify`, `embed`, `steps`), or a list of them for each token
    (`token_classify`), or base64 of little-endian float32. `score` is present with `aggregate` alone."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str
    score: float | None = None


class PoolingUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: Literal[0]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    computed_tokens: int


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledItem]
    usage: PoolingUsage
