"""POST /generative_scoring: probabilities of labels after each item, in one ScoreRequest; or of continuations."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.endpoints import generative_scoring_continuations
from deployments.api.endpoints.scoring_common import check_items, check_size, filled, rows_of, score, text_labels
from deployments.api.handler import Api
from deployments.api.request_context import Exchange
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.score_response import Columns, spread
from deployments.errors import invalid
from deployments.protocol import ModelCard, ScoreReply
from engine.requests import ScoreRequest
from scoring.errors import ItemError
from scoring.labels import check_label_ids
from scoring.loglikelihood import Continuations
from scoring.normalize import scores
from scoring.row_builder import Prompts, Rows
from scoring.templates import Filled


async def generative_scoring(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, ScoringRequest)
    template = _template(api, body)
    _check_fields(api, body, template)
    card = await api.served(body.model)
    if body.continuations is not None:
        return await _continuations(api, exchange, body, body.continuations, card, template)
    rows = await rows_of(api, exchange, _prompts(api, body, template), card)
    if body.label_token_ids is not None:
        labels = check_label_ids(body.label_token_ids, card.vocab_size)
    else:
        labels = await text_labels(api, card, rows, body.labels, template)
    _check_items(body, rows.errors, len(rows.truncated))
    full = body.detail != "probabilities"
    salt, priority = body.cache_salt, body.priority
    whole = body.on_item_error == "fail"
    scored, reply = await score(
        api, exchange, rows, labels, full=full, all_or_nothing=whole, salt=salt, priority=priority
    )
    columns = _columns(body, rows, reply)
    _check_items(body, columns.errors, len(rows.truncated))
    api.observer.items(exchange.route, len(rows.truncated), sum(cut > 0 for cut in rows.truncated))
    api.masses(exchange, columns)
    size = columns.probabilities.nbytes
    answer = await api.off_loop(size, _answer, api, body, scored, columns)
    return await api.off_loop(size, api.json, exchange, _head(scored.request_id, card, template) | answer)


async def _continuations(
    api: Api, exchange: Exchange, body: ScoringRequest, given: Continuations, card: ModelCard, template: Filled | None
) -> Response:
    spans = await generative_scoring_continuations.spans_of(
        api, exchange, body, given, _prompts(api, body, template), card
    )
    _check_items(body, spans.errors, len(spans.truncated))
    id, reply = await generative_scoring_continuations.ask(api, exchange, body, spans)
    size = generative_scoring_continuations.size_of(spans)
    items = await api.off_loop(
        size, generative_scoring_continuations.items_of, given, body.normalization or "none", spans, reply
    )
    _check_items(body, items.errors, len(spans.truncated))
    api.observer.items(exchange.route, len(spans.truncated), sum(cut > 0 for cut in spans.truncated))
    answer = await api.off_loop(size, generative_scoring_continuations.answer, body, spans, items)
    return await api.off_loop(size, api.json, exchange, _head(id, card, template) | answer)


def _template(api: Api, body: ScoringRequest) -> Filled | None:
    """The template with its values; raises for fields that go with one only, or not with one."""
    if body.template is None:
        for field in ("instruction", "system"):
            if getattr(body, field) is not None:
                raise invalid(field, "absent without `template`", "a value")
        return None
    if isinstance(body.query, list):
        raise invalid("query", "text with `template`", "token ids")
    if isinstance(body.items[0], list):
        raise invalid("items", "text with `template`", "token ids")
    if body.item_first:
        raise invalid("item_first", "false with `template`, which has its own order", "true")
    if body.add_special_tokens:
        raise invalid("add_special_tokens", "false with `template`, which writes its own", "true")
    if body.seam == "concat":
        raise invalid("seam", "joint with `template`", "concat")
    given = {"query": body.query, "instruction": body.instruction, "system": body.system}
    return filled(api, body.template, given)


def _check_fields(api: Api, body: ScoringRequest, template: Filled | None) -> None:
    if body.query is None and template is None:
        raise invalid("query", "given", "nothing")
    if body.continuations is not None:
        generative_scoring_continuations.check_fields(api, body, body.continuations)
        return
    if body.normalization not in (None, "none"):
        raise invalid("normalization", "absent without `continuations`", body.normalization)
    own = template.template.labels if template else ()
    if body.label_token_ids is not None and body.labels is not None:
        raise invalid("label_token_ids", "given, or `labels`, but not both", "both")
    labels = body.label_token_ids or body.labels or own
    if not labels:
        raise invalid("label_token_ids", "given, or `labels` or `continuations`, but only one of them", "none")
    if body.detail == "probabilities" and body.apply_softmax is False:
        raise invalid("detail", "full without `apply_softmax`", "probabilities")
    check_size(api, len(body.items), len(labels), "items")


def _prompts(api: Api, body: ScoringRequest, template: Filled | None) -> Prompts:
    return Prompts(
        query="" if body.query is None else body.query,
        items=body.items,
        item_first=bool(body.item_first),
        add_special_tokens=body.add_special_tokens is not False,
        seam=body.seam or "concat",
        truncate=body.truncate or api.settings.truncation,
        truncation_side=body.truncation_side or "right",
        max_item_tokens=body.max_item_tokens,
        max_query_tokens=body.max_query_tokens,
        template=template,
    )


def _check_items(body: ScoringRequest, errors: dict[int, ItemError], count: int) -> None:
    """Raises the first item's error if the request wants that, or if no item is left."""
    if body.on_item_error == "fail" or len(errors) == count:
        check_items(errors, "items")


def _columns(body: ScoringRequest, rows: Rows, reply: ScoreReply) -> Columns:
    softmax = body.apply_softmax is not False
    found = scores(
        reply.label_logprobs, reply.status.astype(bool), softmax=softmax, full=body.detail != "probabilities"
    )
    return spread(rows, found, reply)


def _head(id: str, card: ModelCard, template: Filled | None) -> dict[str, Any]:
    return {
        "id": id,
        "object": "list",
        "created": int(time.time()),
        "model": card.name,
        "template": template.template.name if template else None,
        "prompt_format_version": template.template.version if template else None,
    }


def _answer(api: Api, body: ScoringRequest, scored: ScoreRequest, columns: Columns) -> dict[str, Any]:
    data: dict[str, Any]
    match body.layout:
        case "columns":
            data = {"columns": columns.columns()}
        case "packed":
            data = {"columns": columns.packed()}
        case _:
            data = {"data": columns.rows()}
    labels: list[int] = scored.labels.tolist()
    texts = api.tokenizer.token_texts(labels)
    return {
        **data,
        "labels": [{"token_id": token, "token": text} for token, text in zip(labels, texts, strict=True)],
        "usage": columns.usage(),
    }
