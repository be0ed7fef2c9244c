"""Declares the request and the answer of POST /classify and /v1/classify."""

from typing import Annotated, Literal

from pydantic import BaseModel

from deployments.api.schemas.chat import Messages, TemplateValues
from deployments.api.schemas.fields import Body, Name, Priority, Salt, one_of, prompts
from deployments.api.schemas.generation import PromptTokensDetails


class ClassifyRequest(Body):
    """Holds one or more texts in `input`, or one conversation in `messages`. `null` means absent."""

    model: Name | None = None
    input: Annotated[list[str] | list[list[int]] | None, prompts("max_items", null=True)] = None
    messages: Messages | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: Annotated[int, one_of(lambda x: x == -1 or 1 <= x < 2**31, "-1 or >= 1")] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class Classification(BaseModel):
    """Classifies one input. `label` is the name of the largest of `probs`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: Literal[0]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    computed_tokens: int


class ClassifyResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: ClassifyUsage
