"""What every scoring route does between its body and its answer: rows as ids, label ids, and one ScoreRequest."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deployments.api.handler import TEXT_COST, Api
from deployments.api.request_context import Exchange, new_id
from deployments.errors import ApiError, of_item_error
from deployments.protocol import ModelCard, ScoreReply
from engine.requests import ScoreRequest
from scoring.errors import ItemError
from scoring.labels import check_label_ids, label_ids
from scoring.row_builder import Bounds, Prompts, Rows, build_rows
from scoring.templates import Filled, fill


class Scored(NamedTuple):
    request: ScoreRequest
    reply: ScoreReply


def check_size(api: Api, items: int, labels: int, field: str) -> None:
    """Refuses from lengths alone what would be too many rows or numbers."""
    for what, given, most in (("rows", items, "max_rows"), ("rows times labels", items * labels, "max_answer_cells")):
        if given > api.limits[most]:
            message = f"The request's {what} must be at most {api.limits[most]}. Given: {given}. Send fewer items."
            raise ApiError("request_too_large", message, field)


def filled(api: Api, name: str, given: Mapping[str, str | None]) -> Filled:
    """The template `name` with a request's `query`, `instruction` and `system`."""
    template = api.templates.get(name)
    if template is None:
        known = ", ".join(sorted(api.templates)) or "absent: this server has none"
        raise ApiError("invalid_value", f"`template` must be one of {known}. Given: another name.", "template")
    return fill(template, given)


def bounds_of(api: Api, card: ModelCard) -> Bounds:
    return Bounds(
        vocab_size=card.vocab_size,
        max_model_len=card.max_model_len,
        max_request_tokens=api.limits["max_request_tokens"],
        limits=api.settings.limits.scoring,
    )


async def rows_of(api: Api, exchange: Exchange, spec: Prompts, card: ModelCard) -> Rows:
    """Tokenising happens off the event loop."""
    around = 0 if spec.template is None else spec.template.template.chars
    size = TEXT_COST * (len(exchange.body) + len(spec.items) * around)
    limit_s = api.settings.deadlines.scoring_s
    return await api.tokenize(exchange, limit_s, size, build_rows, api.tokenizer, spec, bounds_of(api, card))


async def text_labels(
    api: Api, card: ModelCard, rows: Rows, texts: Sequence[str] | None, template: Filled | None
) -> list[int]:
    """Label ids of strings in the context of these rows; of the template's own if there are no others."""
    if texts is None and template is not None and template.template.fixed_labels:
        return check_label_ids(template.template.label_ids, card.vocab_size)
    if texts is None:
        texts = () if template is None else template.template.labels
    size = TEXT_COST * len(rows.suffix) * len(texts)
    plain = template is not None
    found = await api.off_loop(size, label_ids, api.tokenizer, texts, rows.suffix, plain=plain)
    return check_label_ids(found, card.vocab_size)


async def score(
    api: Api,
    exchange: Exchange,
    rows: Rows,
    labels: list[int],
    *,
    full: bool,
    all_or_nothing: bool = True,
    kind: str = "score-",
    salt: str | None = None,
    priority: int | None = None,
) -> Scored:
    """Scores at least one row. `full`: log-probabilities over the whole vocabulary, else only among the labels.

    `all_or_nothing`: a failed row fails the request.
    """
    request = ScoreRequest(
        request_id=new_id(kind),
        prefix=rows.prefix,
        ids=rows.ids,
        starts=rows.starts,
        labels=np.array(labels, np.int32),
        full=full,
        cache_salt=exchange.salt(salt),
        tenant=exchange.tenant,
        priority=exchange.priority(priority),
        timeout_s=exchange.timeout_s(api.settings.deadlines.scoring_s),
    )
    async with api.deadline(exchange, api.settings.deadlines.scoring_s):
        reply = await api.backend.score(request, all_or_nothing)
    api.computed(exchange, reply.queue_s, reply.compute_s, reply.head_s)
    return Scored(request, reply)


def check_items(errors: Mapping[int, ItemError], field: str) -> None:
    """Raises the first item's error, if there is one."""
    if errors:
        index = min(errors)
        raise of_item_error(errors[index], f"{field}[{index}]")
