"""Serves POST /classify and /v1/classify: what a sequence head says about texts or a conversation.

A request builds one `engine.requests.PoolingRequest`.
"""

import time
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.pooling_common import activation_of, input_spec, pool_items, read_inputs
from deployments.api.endpoints.scoring_common import check_items, report_items, score_usage
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.classify import ClassifyRequest
from deployments.protocol import ModelCard
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.activation import pooled_items
from scoring.normalize import ItemScores


async def classify(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers both routes. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, ClassifyRequest)
    card, head = await handler.pooling_head(body.model, context.route, (HeadKind.SEQUENCE,))
    activation = activation_of(body, head)
    field, items = await read_inputs(handler, context, body)
    request_id, spec = new_id("classify-"), input_spec(body, field)
    found = await pool_items(
        handler, context, card, head, request_id, items, spec, salt=body.cache_salt, priority=body.priority
    )
    scores = pooled_items(found.rows, found.reply.values, found.reply.status, found.reply.cached, activation)
    check_items(scores.errors, field)
    report_items(handler, context, found.rows.truncated)

    def encode() -> Response:
        return handler.json(context, _answer(request_id, card, head, scores))

    return await handler.off_loop(scores.probabilities.nbytes, encode)


def _answer(request_id: str, card: ModelCard, head: HeadInfo, scores: ItemScores) -> dict[str, Any]:
    best = scores.probabilities.argmax(axis=1).tolist()
    return {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": card.name,
        "data": [
            {"index": index, "label": head.labels[label], "probs": probs, "num_classes": head.width}
            for index, (label, probs) in enumerate(zip(best, scores.probabilities.tolist(), strict=True))
        ],
        "usage": score_usage(scores),
    }
