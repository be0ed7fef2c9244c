"""Defines the operator's choices for the HTTP layer. `deployments.config.app_args` reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from deployments.limits import Limits
from scoring.templates import TemplateSpec

Truncation = Literal["item", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Holds deadlines in seconds from the first byte of a request. A client may shorten them, but not lengthen them."""

    scoring_s: float = 60.0
    generation_s: float = 600.0
    max_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Says how answers are streamed."""

    header_after_s: float = 2.0  # the status line waits this long for the first token
    keep_alive_s: float = 15.0
    max_buffer_bytes: int = 1_048_576  # made and not yet taken by the client
    stall_s: float = 60.0  # a client that takes nothing for so long counts as gone


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
        """Reads the model's own values from `generation_config.json`. The defaults above fill what is missing."""
        file = folder / "generation_config.json"
        if not file.is_file():
            return cls()
        found = json.loads(file.read_text("utf-8"))
        names = [item.name for item in fields(cls)]
        return cls(**{name: found[name] for name in names if isinstance(found.get(name), int | float)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Says how messages become a prompt."""

    template: str | None = None  # text of a template in place of the model's own
    template_flags: tuple[str, ...] = ()  # names of `chat_template_kwargs` that requests may set
    render_s: float = 2.0
    expose_template: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankSettings:
    """Says how documents are ranked."""

    template: str | None = None  # None: the first preset made for it that suits the tokenizer, if any
    return_documents: bool = False  # for requests without the field


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSettings:
    """Says how questions are worded for the model."""

    layout: Literal["auto", "chat", "plain", "builtin"] = "auto"
    min_label_mass: float = 0.0  # with less, the answer to a question is a refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Holds everything that a route reads besides the request, the model card and the tokenizer."""

    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    stream: StreamSettings = field(default_factory=StreamSettings)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    chat: ChatSettings = field(default_factory=ChatSettings)
    truncation: Truncation = "item"
    templates: Mapping[str, TemplateSpec] = field(default_factory=dict)
    rerank: RerankSettings = field(default_factory=RerankSettings)
    decisions: DecisionSettings = field(default_factory=DecisionSettings)
    synthetic: bool = False  # drafts are accepted at set rates: a header says that answers are not samples
    strict: bool = False  # unknown fields are refused instead of named in a header
    versions: dict[str, str] = field(default_factory=dict)  # of the package, Ray, ...; the replica's are in its card
    tokenizer_threads: int = 2
    max_inflight_requests: int = 1024
    max_inflight_body_bytes: int = 268_435_456
