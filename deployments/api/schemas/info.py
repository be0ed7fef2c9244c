"""Declares the bodies of the model, tokenizer and probe routes."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from deployments.api.schemas.chat import Messages, TemplateValues
from deployments.api.schemas.fields import Body, Name, ids, text


class HeadFacts(BaseModel):
    """Describes the head that answers. `labels` are the names of its numbers, in order; null for a language model, and
    empty for vectors and pointers."""

    kind: Literal["lm", "sequence", "token", "pooled", "pointer"]
    labels: list[str] | None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None


class ModelFacts(BaseModel):
    """Holds the facts that OpenAI's model object has no field for."""

    vocab_size: int
    revision: str | None
    weights_digest: str
    head: HeadFacts
    templates: list[str]
    prompt_source: str | None
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


class Alive(BaseModel):
    status: Literal["ok"]


class Readiness(BaseModel):
    model_config = ConfigDict(extra="allow")

    status: Literal["ready", "starting", "failed", "unready", "draining"]
    reason: str | None = None
    """The class of the error that the start has failed with, where `status` is failed."""
    replicas_ready: int
    replicas_total: int
    canary_age_s: float | None
    auth: Literal["keys", "disabled"]


class Versions(BaseModel):
    versions: dict[str, str]
    model: str | None
    revision: str | None
    templates: dict[str, str]
    """By name. A version changes with every change of wording."""


class TokenizeRequest(Body):
    """Holds either `prompt`, or `messages` and their options."""

    model: Name | None = None
    prompt: Annotated[str | None, text()] = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: Annotated[list[int], ids("max_request_tokens")]


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfoResponse(BaseModel):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None = None
