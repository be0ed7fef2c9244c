"""GET /v1/models and /v1/models/{id}."""

from typing import Any, Literal

from pydantic import BaseModel


class ModelFacts(BaseModel):
    """What OpenAI's model object has no room for."""

    vocab_size: int
    revision: str | None
    templates: list[str]
    max_choices: int
    logprobs_mode: str
    sampling_defaults: dict[str, Any]
    limits: dict[str, int]


class ModelObject(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["assay"]
    root: str
    max_model_len: int
    assay: ModelFacts


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelObject]
