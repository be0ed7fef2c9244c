"""Ranks documents by how they suit a query; `rerank_dialects` has the routes.

A request builds one `engine.requests.ScoreRequest`, whose labels are the rerank template's yes and no, or its single
label, whose logit is the score. It builds one `engine.requests.PoolingRequest` where the model has a sequence head of
one number.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.responses import Response

from deployments.api.endpoints.scoring_common import (
    check_items,
    check_size,
    report_items,
    submit_pooling,
    submit_rows,
    text_label_ids,
    tokenize_rows,
)
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.rerank_prompt import CONFIGURATION, RerankPrompt, remedy
from deployments.api.schemas.rerank import RerankRequest
from deployments.errors import ApiError, describe, invalid
from deployments.protocol import ModelCard
from scoring.activation import pooled_items
from scoring.normalize import Float64s, ItemScores, score_items
from scoring.rerank import Ranked, document_text, log_odds, ranked, relevance
from scoring.row_builder import FieldNames, PromptSpec, ScoringRows
from scoring.templates import Template, fill

TEXTS_ROUTE = "/rerank"
ENTRY_BYTES = 64  # of an answer, without its document
COUNTS = (1, 2)  # labels that a language model's score may have: the logit of yes, or its distance to that of no


class Documents(NamedTuple):
    """Holds the texts to rank, the field that held them, and whether the answer repeats them."""

    texts: list[str]
    field: str
    echoed: bool


class Ranking(NamedTuple):
    """Holds everything that the answer is made of."""

    request_id: str
    order: list[Ranked]
    truncated: list[int]  # tokens cut off each document
    prompt_tokens: int
    cached_tokens: int


Render = Callable[[RerankRequest, ModelCard, Documents, Ranking, str], Any]


async def rank(handler: RequestHandler, context: RequestContext, body: RerankRequest, render: Render) -> Response:
    """Ranks the documents of a request, and answers in the form that `render` gives the ranking.

    Raises:
        ApiError, ScoringError: The request is refused.
    """
    card = await handler.served(body.model)
    template = _template(handler, card)
    documents = await handler.off_loop(context.body_bytes, _documents, handler, body, context.route)
    check_size(
        handler, len(documents.texts), len(template.labels) if card.head is None else card.head.width, documents.field
    )
    spec = _prompt_spec(handler, body, template, documents)
    rows = await tokenize_rows(handler, context, body.query, documents.texts, spec, card)
    check_items(rows.errors, documents.field)
    request_id = new_id("rerank-")
    salt, priority = body.cache_salt, body.priority
    if card.head is None:
        labels = await text_label_ids(handler, card, rows, None, spec.template)
        single = len(labels) == 1
        reply = await submit_rows(
            handler, context, request_id, rows, labels, full=False, raw_logits=single, salt=salt, priority=priority
        )
        if single:
            scores = pooled_items(rows, reply.label_logprobs, reply.status, reply.cached, "none")
            odds = scores.probabilities[:, 0]
        else:
            scores = score_items(rows, reply.label_logprobs, reply.status, reply.cached, softmax=True, full=False)
            odds = log_odds(reply.label_logprobs)
    else:
        pooled = await submit_pooling(handler, context, request_id, rows, salt=salt, priority=priority)
        scores = pooled_items(rows, pooled.values, pooled.status, pooled.cached, "none")
        odds = scores.probabilities[:, 0]
    check_items(scores.errors, documents.field)
    ranking = _rank(handler, body, documents, rows, scores, odds, request_id)
    report_items(handler, context, rows.truncated)
    size = context.body_bytes + ENTRY_BYTES * len(ranking.order)
    found = await handler.off_loop(size, render, body, card, documents, ranking, context.route)
    return await handler.off_loop(size, handler.json, context, found)


def can_rank(card: ModelCard, prompt: RerankPrompt) -> bool:
    """Returns whether the model's head gives a number for this prompt: one of its own, or that of its labels."""
    if prompt.template is None:
        return False
    if card.head is None:
        return len(prompt.template.labels) in COUNTS
    return card.head.width == 1 and prompt.activation != "softmax"


def _template(handler: RequestHandler, card: ModelCard) -> Template:
    """Returns the template that suits the model's head. Raises ApiError, 404, where there is none."""
    found = handler.rerank.template
    if card.head is not None:
        if card.head.width != 1:
            message = f"This server ranks no documents: its head has {card.head.width} numbers, and ranking needs one."
            raise ApiError("not_found", message)
        if handler.rerank.activation == "softmax":
            message = (
                "This server ranks no documents: `rerank.activation: softmax` needs two numbers, its head has one."
            )
            raise ApiError("not_found", message)
    elif found is not None and len(found.labels) not in COUNTS:
        if handler.rerank.source == CONFIGURATION:
            message = "This server ranks no documents: its `rerank.template` has no labels for a language-model head."
            raise ApiError("not_found", message)
        found = None
    if found is None:
        raise ApiError(
            "not_found", remedy(handler.templates, handler.rerank, handler.tokenizer, labelled=card.head is None)
        )
    return found


def _documents(handler: RequestHandler, body: RerankRequest, route: str) -> Documents:
    """Reads either dialect: `texts` on one path, `documents` on all. Raises ApiError for both or neither."""
    if (body.documents is None) == (body.texts is None):
        given = "neither" if body.documents is None else "both"
        raise invalid("documents", "given, or `texts`, but not both", given)
    echo = _either(body, "return_documents", "return_text")
    echoed = handler.settings.rerank.return_documents if echo is None else echo
    if body.texts is not None:
        if route != TEXTS_ROUTE:
            raise invalid("texts", f"absent here: send `documents`, or `texts` to {TEXTS_ROUTE}", describe(body.texts))
        return Documents(body.texts, "texts", echoed)
    return Documents(_document_texts(body), "documents", echoed)


def _document_texts(body: RerankRequest) -> list[str]:
    fields = body.rank_fields
    if fields is not None and len(set(fields)) < len(fields):
        raise invalid("rank_fields", "distinct", "a name twice")
    return [document_text(one, fields, f"documents[{i}]") for i, one in enumerate(body.documents or [])]


def _prompt_spec(handler: RequestHandler, body: RerankRequest, template: Template, documents: Documents) -> PromptSpec:
    values = {"query": body.query, "instruction": _either(body, "instruction", "instruct"), "system": None}
    maximum = body.truncate_prompt_tokens
    capped = bool(body.max_tokens_per_doc) or maximum is not None  # a request with a length wants texts cut to it
    policy = "item" if capped or body.truncate else handler.settings.truncation
    return PromptSpec(
        truncate="error" if body.truncate is False else policy,
        truncation_side=_either(body, "truncation_side", "truncation_direction") or "right",
        max_item_tokens=body.max_tokens_per_doc or None,
        max_query_tokens=body.max_tokens_per_query or None,
        max_row_tokens=None if maximum == -1 else maximum,
        template=fill(template, values),
        names=FieldNames(documents.field, "max_tokens_per_doc", "max_tokens_per_query"),
    )


def _either(body: RerankRequest, name: str, other: str) -> Any:
    """Returns the value of a field with two names. Raises ApiError if both have values, and these differ."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None and first != second:
        raise invalid(other, f"absent beside another `{name}`", "both")
    return second if first is None else first


def _rank(
    handler: RequestHandler,
    body: RerankRequest,
    documents: Documents,
    rows: ScoringRows,
    scores: ItemScores,
    odds: Float64s,
    request_id: str,
) -> Ranking:
    """Orders the documents by their log-odds, or the model's own numbers, [N].

    None has failed: an answer without it would be wrong silently.
    """
    top_n = None if documents.field == "texts" else body.top_n
    raw = body.raw_scores or handler.rerank.activation == "none"
    order = ranked(odds if raw else relevance(odds), top_n)
    return Ranking(request_id, order, rows.truncated, int(scores.prompt_tokens.sum()), int(scores.cached_tokens.sum()))


def answer(body: RerankRequest, card: ModelCard, documents: Documents, ranking: Ranking, route: str) -> Any:
    """Returns the answer in Cohere's form, or for `texts` in that of text-embeddings-inference."""
    if documents.field == "texts":
        return _texts_answer(documents, ranking)
    results = [
        {"index": index, "relevance_score": value}
        | ({"document": {"text": documents.texts[index]}} if documents.echoed else {})
        | _cut(ranking, index)
        for index, value in ranking.order
    ]
    meta: dict[str, Any] = {
        "api_version": {"version": "2" if route == "/v2/rerank" else "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": ranking.prompt_tokens, "output_tokens": 0},
        "cached_tokens": ranking.cached_tokens,
    }
    if body.max_chunks_per_doc not in (None, 1):
        meta["warnings"] = ["`max_chunks_per_doc` is ignored: a document is one chunk, cut where it is too long."]
    return {
        "id": ranking.request_id,
        "object": "rerank",
        "model": card.name,
        "results": results,
        "usage": {"prompt_tokens": ranking.prompt_tokens, "total_tokens": ranking.prompt_tokens},
        "meta": meta,
    }


def _texts_answer(documents: Documents, ranking: Ranking) -> list[dict[str, Any]]:
    return [
        {"index": index, "score": value}
        | ({"text": documents.texts[index]} if documents.echoed else {})
        | _cut(ranking, index)
        for index, value in ranking.order
    ]


def _cut(ranking: Ranking, index: int) -> dict[str, bool]:
    return {"truncated": True} if ranking.truncated[index] else {}
