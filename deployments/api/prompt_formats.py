"""Chooses at start-up the server's chat template and the layout in which its decisions are worded.

Both come from the operator or the model, never from a request.
"""

import logging

from deployments.config.settings import ApiSettings
from deployments.limits import Limits
from engine.tokenizer.tokenizer import Tokenizer
from scoring.decisions import MAX_CODES, DecisionPrompts
from scoring.prompts.chat_template import ChatTemplate
from scoring.prompts.decision_prompts import BUILTIN, PLAIN, chat_layout

log = logging.getLogger("assay.http")
serve_log = logging.getLogger("ray.serve")


def chat_source(tokenizer: Tokenizer, settings: ApiSettings) -> str | None:
    """Returns the text of the chat template: the operator's, or else the model's own."""
    return tokenizer.info().chat_template if settings.chat.template is None else settings.chat.template


def compile_chat(tokenizer: Tokenizer, settings: ApiSettings) -> ChatTemplate | None:
    """Compiles the chat template.

    Returns:
        The template; None if there is none, or if the model's own cannot be used (the log says why).

    Raises:
        ValueError: The operator's template cannot be used.
    """
    source, info = chat_source(tokenizer, settings), tokenizer.info()
    if not source:
        return None
    try:
        return ChatTemplate(
            source,
            controls=tokenizer.special_texts,
            markers=tokenizer.marker_texts,
            names={"bos_token": info.bos_token, "eos_token": info.eos_token, "pad_token": info.pad_token},
            max_chars=settings.limits.wire.max_string_chars,
            max_seconds=settings.chat.render_timeout_s,
        )
    except ValueError as error:
        if settings.chat.template is not None:
            raise ValueError(f"`chat.template_file` cannot be used. {error}") from error
        log.warning("The model's own chat template cannot be used, so there is no chat. %s", error)
        return None


def decision_prompts(tokenizer: Tokenizer, settings: ApiSettings, template: ChatTemplate | None) -> DecisionPrompts:
    """Makes the prompts of decisions in the layout that the operator chose.

    `auto` takes the chat template if it suits, else plain text.

    Raises:
        ValueError: The chosen layout does not suit the tokenizer, or needs a chat template that is missing.
    """
    max_codes = min(MAX_CODES, settings.limits.scoring.max_labels)
    match settings.decisions.layout:
        case "plain":
            return DecisionPrompts(tokenizer, PLAIN, max_codes)
        case "builtin":
            return DecisionPrompts(tokenizer, BUILTIN, max_codes)
        case "chat":
            if template is None:
                raise ValueError("`decisions.layout` must be auto or plain: the tokenizer has no chat template.")
            return DecisionPrompts(tokenizer, chat_layout(template), max_codes)
    if template is not None:
        try:
            return DecisionPrompts(tokenizer, chat_layout(template), max_codes)
        except ValueError as error:
            serve_log.warning("Decisions are asked in plain text: %s", error)
    return DecisionPrompts(tokenizer, PLAIN, max_codes)


def option_limits(prompts: DecisionPrompts, limits: Limits) -> dict[str, int]:
    """Returns the limits on options and levels: a question has no more of them than there are codes."""
    codes = len(prompts.codes)
    return {name: min(codes, getattr(limits.scoring, name)) for name in ("max_choices", "max_levels")}
