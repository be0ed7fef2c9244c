"""POST /rerank, /v1/rerank and /v2/rerank: documents in the order in which they suit a query."""

from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.endpoints.scoring_common import check_items, check_size, rows_of, score, text_labels
from deployments.api.handler import Api, refuse
from deployments.api.request_context import Exchange
from deployments.api.schemas.rerank import REFUSED, RerankRequest
from deployments.api.score_response import spread
from deployments.errors import ApiError, describe, invalid
from deployments.protocol import ModelCard, ScoreReply
from scoring.normalize import scores
from scoring.rerank import Ranked, document_text, log_odds, ranked, relevance
from scoring.row_builder import Names, Prompts, Rows
from scoring.templates import Template, fill

TEXTS_ROUTE = "/rerank"
ENTRY_BYTES = 64  # of an answer, without its document


class Listed(NamedTuple):
    """What is ranked, the field that it came in, and whether the answer repeats it."""

    texts: list[str]
    field: str
    echoed: bool


class Found(NamedTuple):
    """All that an answer is made of."""

    request_id: str
    order: list[Ranked]
    truncated: list[int]  # by document
    prompt_tokens: int
    cached_tokens: int


async def rerank(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, RerankRequest)
    template = _template(api)
    listed = await api.off_loop(len(exchange.body), _listed, api, body, exchange.route)
    refuse(body, REFUSED)
    check_size(api, len(listed.texts), len(template.labels), listed.field)
    card = await api.served(body.model)
    spec = _prompts(api, body, template, listed)
    rows = await rows_of(api, exchange, spec, card)
    check_items(rows.errors, listed.field)
    labels = await text_labels(api, card, rows, None, spec.template)
    scored, reply = await score(api, exchange, rows, labels, full=False, kind="rerank-", priority=body.priority)
    found = _found(body, listed, rows, reply, scored.request_id)
    api.observer.items(exchange.route, len(rows.truncated), sum(cut > 0 for cut in rows.truncated))
    size = len(exchange.body) + ENTRY_BYTES * len(found.order)
    answer = await api.off_loop(size, _answer, body, card, listed, found, exchange.route)
    return await api.off_loop(size, api.json, exchange, answer)


def _template(api: Api) -> Template:
    if api.rerank is None:
        raise ApiError("not_found", "This server ranks no documents: its configuration names no `rerank.template`.")
    return api.rerank


def _listed(api: Api, body: RerankRequest, route: str) -> Listed:
    """The dialect by its fields: `texts` on one path, `documents` on all."""
    if (body.documents is None) == (body.texts is None):
        given = "neither" if body.documents is None else "both"
        raise invalid("documents", "given, or `texts`, but not both", given)
    wanted = _either(body, "return_documents", "return_text")
    echoed = api.settings.rerank.return_documents if wanted is None else wanted
    if body.texts is not None:
        if route != TEXTS_ROUTE:
            raise invalid("texts", f"absent here: send `documents`, or `texts` to {TEXTS_ROUTE}", describe(body.texts))
        return Listed(body.texts, "texts", echoed)
    return Listed(_document_texts(body), "documents", echoed)


def _document_texts(body: RerankRequest) -> list[str]:
    fields = body.rank_fields
    if fields is not None and len(set(fields)) < len(fields):
        raise invalid("rank_fields", "distinct", "a name twice")
    return [document_text(one, fields, f"documents[{i}]") for i, one in enumerate(body.documents or [])]


def _prompts(api: Api, body: RerankRequest, template: Template, listed: Listed) -> Prompts:
    values = {"query": body.query, "instruction": _either(body, "instruction", "instruct"), "system": None}
    most = body.truncate_prompt_tokens
    capped = bool(body.max_tokens_per_doc) or most is not None  # who gives a length wants it cut to
    policy = "item" if capped or body.truncate else api.settings.truncation
    return Prompts(
        query=body.query,
        items=listed.texts,
        truncate="error" if body.truncate is False else policy,
        truncation_side=_either(body, "truncation_side", "truncation_direction") or "right",
        max_item_tokens=body.max_tokens_per_doc or None,
        max_query_tokens=body.max_tokens_per_query or None,
        max_row_tokens=None if most == -1 else most,
        template=fill(template, values),
        names=Names(listed.field, "max_tokens_per_doc", "max_tokens_per_query"),
    )


def _either(body: RerankRequest, name: str, other: str) -> Any:
    """The value of a field with two names."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None and first != second:
        raise invalid(other, f"absent beside another `{name}`", "both")
    return second if first is None else first


def _found(body: RerankRequest, listed: Listed, rows: Rows, reply: ScoreReply, request_id: str) -> Found:
    """Raises the first document's error: an answer that leaves one out silently would be worse."""
    failed = reply.status.astype(bool)
    columns = spread(rows, scores(reply.label_logprobs, failed, softmax=True, full=False), reply)
    check_items(columns.errors, listed.field)
    odds = log_odds(reply.label_logprobs)
    most = None if listed.field == "texts" else body.top_n
    order = ranked(odds if body.raw_scores else relevance(odds), most)
    return Found(request_id, order, rows.truncated, int(columns.prompt_tokens.sum()), int(columns.cached_tokens.sum()))


def _answer(body: RerankRequest, card: ModelCard, listed: Listed, found: Found, route: str) -> Any:
    if listed.field == "texts":
        return _texts_answer(listed, found)
    results = [
        {"index": index, "relevance_score": value}
        | ({"document": {"text": listed.texts[index]}} if listed.echoed else {})
        | _cut(found, index)
        for index, value in found.order
    ]
    meta: dict[str, Any] = {
        "api_version": {"version": "2" if route == "/v2/rerank" else "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": found.prompt_tokens, "output_tokens": 0},
        "cached_tokens": found.cached_tokens,
    }
    if body.max_chunks_per_doc not in (None, 1):
        meta["warnings"] = ["`max_chunks_per_doc` is ignored: a document is one chunk, cut where it is too long."]
    return {
        "id": found.request_id,
        "object": "rerank",
        "model": card.name,
        "results": results,
        "usage": {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens},
        "meta": meta,
    }


def _texts_answer(listed: Listed, found: Found) -> list[dict[str, Any]]:
    return [
        {"index": index, "score": value} | ({"text": listed.texts[index]} if listed.echoed else {}) | _cut(found, index)
        for index, value in found.order
    ]


def _cut(found: Found, index: int) -> dict[str, bool]:
    return {"truncated": True} if found.truncated[index] else {}
