"""Serves POST /classify and /v1/classify: what a sequence head or a pointer says about texts or a conversation.

A request builds one `engine.requests.PoolingRequest`.
"""

from functools import partial
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.pooling_common import (
    PooledRows,
    activation_of,
    check_finite,
    input_spec,
    mark_id,
    pointer_answers,
    pool_items,
    pooled_usage,
    read_inputs,
)
from deployments.api.endpoints.scoring_common import ServedRequest, list_answer, report_items
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.classify import ClassifyRequest
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.activation import Activation, activate


async def classify(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers both routes. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, ClassifyRequest, handler.settings.deadlines.scoring_s)
    card, head = await handler.pooling_head(body.model, context.route, (HeadKind.SEQUENCE, HeadKind.POINTER))
    served = ServedRequest(handler, context, card, new_id("classify-"), body.cache_salt, body.priority)
    activation = activation_of(body, head)
    field, items = await read_inputs(handler, context, body)
    mark = mark_id(handler, head)
    found = await pool_items(served, head, items, input_spec(body, field), mark=mark)
    check_finite(found, field)
    report_items(handler, context, found.rows.truncated)
    make = partial(_answer, served, head, found, activation, mark)
    return await handler.sized_json(context, found.reply.values.nbytes * 2, make)


def _answer(
    served: ServedRequest, head: HeadInfo, found: PooledRows, activation: Activation, mark: int | None
) -> dict[str, Any]:
    if head.kind is HeadKind.POINTER and mark is not None:
        answers = pointer_answers(found, mark, activation)
    else:
        answers = [*activate(found.reply.values, activation)]
    data = []
    for index, numbers in enumerate(answers):
        best = int(numbers.argmax())
        label = head.labels[best] if head.labels else str(best)  # a pointer's classes are the marked tokens, by place
        data.append({"index": index, "label": label, "probs": numbers.tolist(), "num_classes": len(numbers)})
    return list_answer(served, data, pooled_usage(found))
