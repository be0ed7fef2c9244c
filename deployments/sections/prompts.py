"""What text a model is asked in: templates, ranking, decisions, chats, and rows that are too long."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from deployments.sections.base import Name, Seconds, Section
from deployments.settings import ChatSettings
from scoring.templates import PRESETS, TemplateSpec

FlagName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
MAX_TEMPLATE_CHARS = 1 << 20


class TruncationArgs(Section):
    """What happens to a scoring row that is longer than the model."""

    policy: Literal["item", "error"] = "item"


class TemplateArgs(Section):
    """A prompt template: a preset, or texts of your own; see docs/templates.md."""

    preset: Literal["plain", "builtin", "qwen3_reranker"] | None = None
    prefix: str | None = None
    item: str | None = None
    suffix: str | None = None
    labels: tuple[str, ...] | None = Field(default=None, max_length=256)
    """What the model answers; rerank reads the first as yes. None: the preset's."""
    defaults: dict[Literal["instruction", "system"], str] = Field(default_factory=dict)
    """Values that a request may leave out."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        own = [name for name in ("prefix", "item", "suffix") if getattr(self, name) is not None]
        if self.preset and own:
            raise ValueError(f"`{own[0]}` must be absent beside `preset`. Given: both.")
        if not self.preset and not own:
            raise ValueError("`preset`, or `prefix`, `item` and `suffix`, must be given. Given: neither.")
        return self

    def spec(self) -> TemplateSpec:
        parts = ("prefix", "item", "suffix", "labels")
        given = {name: value for name in parts if (value := getattr(self, name)) is not None}
        base = PRESETS[self.preset] if self.preset else TemplateSpec()
        return replace(base, **given, defaults=dict(base.defaults) | {str(k): v for k, v in self.defaults.items()})


class RerankArgs(Section):
    """The rerank routes."""

    template: Name | None = None
    """A name of `templates` or a preset, with two labels, the first for yes. None: `builtin` for the built-in model,
    `qwen3_reranker` where the tokenizer has its control tokens; otherwise the routes answer 404."""
    return_documents: bool = False
    """Where a request does not say."""


class DecisionArgs(Section):
    """How /v1/decisions puts its questions to the model."""

    layout: Literal["auto", "chat", "plain", "builtin"] = "auto"
    """`auto`: the built-in model's own form, else the tokenizer's chat template, else plain text."""
    min_label_mass: float = Field(default=0.0, ge=0, le=1)
    """A question whose answers together have less probability is answered with a refusal."""


class ChatArgs(Section):
    """How messages become a prompt. The template is the model's own, or a file's: a request never brings one."""

    template_file: str | None = None
    """A Jinja template in place of the model's own."""
    template_flags: tuple[FlagName, ...] = ()
    """Names of `chat_template_kwargs` that requests may set, to true or false."""
    expose_template: bool = True
    """Whether /tokenizer_info shows the template."""
    render_s: Seconds = 2.0
    """A template that takes longer for one request has failed."""

    def settings(self) -> ChatSettings:
        return ChatSettings(
            template=None if self.template_file is None else _template_text(Path(self.template_file)),
            template_flags=self.template_flags,
            render_s=self.render_s,
            expose_template=self.expose_template,
        )


def _template_text(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`chat.template_file` must be a readable text file. {type(error).__name__}.") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"`chat.template_file` must be at most {MAX_TEMPLATE_CHARS} characters. Given: {len(text)}.")
    return text
