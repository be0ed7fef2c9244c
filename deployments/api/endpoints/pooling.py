"""Serves POST /pooling: what any pooling head says: classes, scores of tokens or steps, or vectors.

A request builds one `engine.requests.PoolingRequest`.
"""

from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.pooling_common import (
    PooledRows,
    activation_of,
    check_dimensions,
    check_finite,
    encoded_vector,
    input_spec,
    mark_id,
    pointer_answers,
    pool_items,
    pooled_usage,
    prompt_text,
    read_inputs,
    vectors,
    wants_activation,
)
from deployments.api.endpoints.scoring_common import ServedRequest, list_answer, report_items
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.pooling import PoolingBody
from deployments.errors import describe, invalid
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.activation import activate
from scoring.process_rewards import STEP_WIDTHS, aggregate, by_row, step_scores

KINDS = (HeadKind.SEQUENCE, HeadKind.TOKEN, HeadKind.POOLED, HeadKind.POINTER)
OF_VECTORS = ("dimensions", "encoding_format", "prompt_name")
OF_TOKENS = ("step_tag_id", "steps", "aggregate")


async def pooling(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /pooling. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, PoolingBody, handler.settings.deadlines.scoring_s)
    card, head = await handler.pooling_head(body.model, context.route, KINDS)
    served = ServedRequest(handler, context, card, new_id("pool-"), body.cache_salt, body.priority)
    _check_fields(body, head)
    prompt = ""
    if head.embedding is not None:
        prompt = prompt_text(head.embedding, body.prompt_name, body.input)
        check_dimensions(head, head.embedding, body.dimensions)
    mark = _mark(handler, body, head)
    field, items = await read_inputs(handler, context, body, prompt)
    found = await pool_items(served, head, items, input_spec(body, field), mark=mark)
    check_finite(found, field)
    report_items(handler, context, found.rows.truncated)

    def make() -> dict[str, Any]:
        return list_answer(served, _data(body, head, found, mark), pooled_usage(found))

    return await handler.sized_json(context, found.reply.values.nbytes * 4, make)


def _check_fields(body: PoolingBody, head: HeadInfo) -> None:
    if body.task is not None and body.task != head.task:
        raise invalid("task", f"{head.task} or absent, since the model has a {head.kind} head", body.task)
    others = {
        HeadKind.SEQUENCE: OF_VECTORS + OF_TOKENS,
        HeadKind.TOKEN: OF_VECTORS,
        HeadKind.POOLED: OF_TOKENS,
        HeadKind.POINTER: OF_VECTORS + OF_TOKENS,
    }
    for field in others[head.kind]:
        value = getattr(body, field)
        if value is not None and value is not False:
            raise invalid(field, f"absent, since the model has a {head.kind} head", describe(value))
    if (body.steps or body.aggregate) and head.width not in STEP_WIDTHS:
        raise invalid("steps", f"false: the head has {head.width} numbers, and a step's score needs 1 or 2", "true")
    if body.aggregate and body.steps is False:
        raise invalid("aggregate", "absent beside `steps: false`", body.aggregate)


def _mark(handler: RequestHandler, body: PoolingBody, head: HeadInfo) -> int | None:
    """Returns the id of the token whose places are answered; None: every token is."""
    found = mark_id(handler, head) if body.step_tag_id is None else body.step_tag_id
    if found is None and (body.steps or body.aggregate):
        raise invalid("step_tag_id", "given with `steps`: nothing says which token ends a step", "nothing")
    return found


def _data(body: PoolingBody, head: HeadInfo, found: PooledRows, mark: int | None) -> list[dict[str, Any]]:
    values = found.reply.values
    if head.embedding is not None:
        normalise = wants_activation(body)
        cut = vectors(head.embedding, values, body.dimensions, normalise)
        return [_item(index, encoded_vector(one, body.encoding_format)) for index, one in enumerate(cut)]
    if head.kind is HeadKind.POINTER and mark is not None:
        answers = pointer_answers(found, mark, activation_of(body, head))
        return [_item(index, one.tolist()) for index, one in enumerate(answers)]
    numbers = activate(values, activation_of(body, head))
    if found.positions is None:
        return [_item(index, one) for index, one in enumerate(numbers.tolist())]
    data = []
    for index, one in enumerate(by_row(found.rows, found.positions, numbers)):
        if not (body.steps or body.aggregate):
            data.append(_item(index, one.tolist()))
            continue
        scores = step_scores(one)
        score = {} if body.aggregate is None else {"score": aggregate(scores, body.aggregate)}
        data.append(_item(index, scores) | score)
    return data


def _item(index: int, data: Any) -> dict[str, Any]:
    return {"index": index, "object": "pooling", "data": data}
