"""Declares the request and the answer of POST /classify and /v1/classify."""

from typing import Literal

from pydantic import BaseModel

from deployments.api.schemas.generation import PromptTokensDetails
from deployments.api.schemas.pooling import PoolingInput


class ClassifyRequest(PoolingInput):
    """Holds one or more texts in `input`, or one conversation in `messages`. `null` means absent."""


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
