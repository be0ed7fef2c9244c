"""Defines the settings of the HTTP layer. `AppArgs.api_settings` makes it from a configuration file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from deployments.config.sections import ChatArgs, DeadlineArgs, DecisionArgs, RerankArgs, StreamArgs
from deployments.limits import Limits
from gpu_sampler.sampling_params import ParamError, SamplingParams
from scoring.prompts.templates import TemplateSpec

Truncation = Literal["item", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Holds the values of absent sampling fields."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(cls, folder: Path) -> "SamplingDefaults":
        """Reads the model's own values from `generation_config.json`. The defaults above fill what is missing.

        Raises:
            ValueError: the file holds no JSON object.
        """
        file = folder / "generation_config.json"
        if not file.is_file():
            return cls()
        try:
            found = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"The model's generation_config.json must be JSON. {error}.") from None
        if not isinstance(found, dict):
            raise ValueError(f"The model's generation_config.json must be a JSON object. Given: {found!r:.40}.")
        names = [item.name for item in fields(cls)]
        return cls(**{name: found[name] for name in names if found.get(name) is not None})

    def checked(self) -> "SamplingDefaults":
        """Returns itself. Raises ValueError for a value that no request may have, which a model's file can hold."""
        try:
            SamplingParams(**asdict(self)).validate(vocab_size=1)
        except ParamError as error:
            raise ValueError(
                f"`{error.field}` of the model's generation_config.json must be {error.allowed}. Given: {error.given}. "
                f"Set `sampling.{error.field}`."
            ) from error
        return self


class ChatSettings(ChatArgs):
    """Says how messages become a prompt. `template` is the text of `template_file`; None: the model's own template."""

    template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Holds everything that a route reads besides the request, the model card and the tokenizer."""

    limits: Limits = field(default_factory=Limits)
    deadlines: DeadlineArgs = field(default_factory=DeadlineArgs)
    stream: StreamArgs = field(default_factory=StreamArgs)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    chat: ChatSettings = field(default_factory=ChatSettings)
    truncation: Truncation = "item"
    templates: Mapping[str, TemplateSpec] = field(default_factory=dict)
    rerank: RerankArgs = field(default_factory=RerankArgs)
    rerank_preset: str | None = None  # of the built-in model, where `rerank.template` names none
    model_folder: Path | None = None  # whose files may describe a reranker
    decisions: DecisionArgs = field(default_factory=DecisionArgs)
    synthetic: bool = False  # drafts are accepted at set rates: a header says that answers are not samples
    openai_errors: bool = False  # status 400 in place of 422
    strict: bool = False  # unknown fields are refused instead of named in a header
    versions: dict[str, str] = field(default_factory=dict)  # of the package, Ray, ...; the replica's are in its card
    tokenizer_threads: int = 2
    cors_origins: tuple[str, ...] = ()  # of web pages that may read answers
    max_inflight_requests: int = 1024
    max_inflight_body_bytes: int = 268_435_456
