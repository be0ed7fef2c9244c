"""Serves POST /v1/score: a number for each item and label, and little else.

A request builds one `engine.requests.ScoreRequest`; one without items builds none.
"""

from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.scoring_common import (
    check_items,
    check_size,
    report_items,
    report_label_mass,
    score_usage,
    submit_rows,
    tokenize_rows,
    usage,
)
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.generative_scoring import ScoreBody
from deployments.protocol import ModelCard
from scoring.labels import check_label_ids
from scoring.normalize import score_items
from scoring.row_builder import PromptSpec


async def scoring(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/score. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, ScoreBody)
    check_size(handler, len(body.items), len(body.label_token_ids), "items")
    card = await handler.language_model(body.model, context.route)
    labels = check_label_ids(body.label_token_ids, card.vocab_size)
    if not body.items:
        return handler.json(context, _answer(card, [], usage(0, 0), []))
    rows = await tokenize_rows(handler, context, body.query, body.items, _prompt_spec(handler, body), card)
    check_items(rows.errors, "items")
    softmax = bool(body.apply_softmax)
    id, salt, priority = new_id("score-"), body.cache_salt, body.priority
    reply = await submit_rows(handler, context, id, rows, labels, full=not softmax, salt=salt, priority=priority)
    scores = score_items(rows, reply.label_logprobs, reply.status, reply.cached, softmax=softmax, full=not softmax)
    check_items(scores.errors, "items")
    report_items(handler, context, rows.truncated)
    report_label_mass(handler, context, scores)

    def make() -> dict[str, Any]:
        truncated = (scores.truncated_tokens > 0).tolist()
        return _answer(card, scores.probabilities.tolist(), score_usage(scores), truncated)

    return await handler.sized_json(context, scores.probabilities.nbytes, make)


def _prompt_spec(handler: RequestHandler, body: ScoreBody) -> PromptSpec:
    return PromptSpec(
        item_first=bool(body.item_first),
        seam="joint" if isinstance(body.query, str) else "concat",
        truncate=handler.settings.truncation,
    )


def _answer(card: ModelCard, scores: list[list[float]], usage: dict[str, Any], truncated: list[bool]) -> dict[str, Any]:
    return {
        "scores": scores,
        "pooled_hidden_states": None,
        "model": card.name,
        "object": "scoring",
        "usage": usage,
        "truncated": truncated,
    }
