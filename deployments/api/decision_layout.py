"""Which layout a server asks its decisions in, and how many options that leaves a question."""

import logging

from deployments.limits import Limits
from deployments.settings import ApiSettings
from engine.tokenizer.tokenizer import Tokenizer
from scoring.chat_template import ChatTemplate
from scoring.decision_prompts import BUILTIN, PLAIN, chat_layout
from scoring.decisions import MAX_CODES, DecisionPrompts

log = logging.getLogger("ray.serve")


def decision_prompts(tokenizer: Tokenizer, settings: ApiSettings, template: ChatTemplate | None) -> DecisionPrompts:
    """Raises ValueError where the layout that the operator chose cannot be had. `auto` takes the chat template if there
    is one that serves, else plain text."""
    most = min(MAX_CODES, settings.limits.scoring.max_labels)
    match settings.decisions.layout:
        case "plain":
            return DecisionPrompts(tokenizer, PLAIN, most)
        case "builtin":
            return DecisionPrompts(tokenizer, BUILTIN, most)
        case "chat":
            if template is None:
                raise ValueError("`decisions.layout` must be auto or plain: the tokenizer has no chat template.")
            return DecisionPrompts(tokenizer, chat_layout(template), most)
    if template is not None:
        try:
            return DecisionPrompts(tokenizer, chat_layout(template), most)
        except ValueError as error:
            log.warning("Decisions are asked in plain text: %s", error)
    return DecisionPrompts(tokenizer, PLAIN, most)


def option_limits(prompts: DecisionPrompts, limits: Limits) -> dict[str, int]:
    """A question has no more options than there are codes."""
    codes = len(prompts.codes)
    return {name: min(codes, getattr(limits.scoring, name)) for name in ("max_choices", "max_levels")}
