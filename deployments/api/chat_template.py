"""The server's chat template: the operator's file or the model's own, never a request's."""

import logging

from deployments.settings import ApiSettings
from engine.tokenizer.tokenizer import Tokenizer
from scoring.chat_template import ChatTemplate

log = logging.getLogger("assay.http")


def chat_source(tokenizer: Tokenizer, settings: ApiSettings) -> str | None:
    """The text of the template that is used."""
    return tokenizer.info().chat_template if settings.chat.template is None else settings.chat.template


def compile_chat(tokenizer: Tokenizer, settings: ApiSettings) -> ChatTemplate | None:
    """None if there is no template, or only one of the model's own that is not usable: the log says why. Raises
    ValueError if the operator's is not usable."""
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
