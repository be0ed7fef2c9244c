"""Serves POST /pooling: what any pooling head says: classes, scores of tokens or steps, or vectors.

A request builds one `engine.requests.PoolingRequest`.
"""

import time
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.pooling_common import (
    PooledRows,
    activation_of,
    check_dimensions,
    encoded_vector,
    input_spec,
    pool_items,
    prompt_text,
    read_inputs,
    row_usage,
    vectors,
    wants_activation,
)
from deployments.api.endpoints.scoring_common import check_items, report_items, usage
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.pooling import PoolingBody
from deployments.errors import ApiError, invalid
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.activation import activate
from scoring.errors import NONFINITE
from scoring.process_rewards import STEP_WIDTHS, aggregate, by_row, step_scores

KINDS = (HeadKind.SEQUENCE, HeadKind.TOKEN, HeadKind.POOLED)
OF_VECTORS = ("dimensions", "encoding_format", "prompt_name")
OF_TOKENS = ("step_tag_id", "steps", "aggregate")


async def pooling(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /pooling. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, PoolingBody)
    card, head = await handler.pooling_head(body.model, context.route, KINDS)
    _check_fields(body, head)
    prompt = ""
    if head.embedding is not None:
        prompt = prompt_text(head.embedding, body.prompt_name)
        check_dimensions(head, head.embedding, body.dimensions)
    step_tag = _step_tag(handler, body, head)
    field, items = await read_inputs(handler, context, body, prompt)
    request_id, spec = new_id("pool-"), input_spec(body, field)
    found = await pool_items(
        handler,
        context,
        card,
        head,
        request_id,
        items,
        spec,
        step_tag=step_tag,
        salt=body.cache_salt,
        priority=body.priority,
    )
    failed = {found.rows.items[row]: NONFINITE for row in found.reply.status.nonzero()[0].tolist()}
    check_items(failed, field)
    report_items(handler, context, found.rows.truncated)

    def encode() -> Response:
        tokens, cached = row_usage(found.rows, found.reply.cached.tolist())
        answer = {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": card.name,
            "data": _data(body, head, found),
            "usage": usage(tokens, cached),
        }
        return handler.json(context, answer)

    return await handler.off_loop(found.reply.values.nbytes * 4, encode)


def _check_fields(body: PoolingBody, head: HeadInfo) -> None:
    if body.task is not None and body.task != head.task:
        raise invalid("task", f"{head.task} or absent, since the model has a {head.kind} head", body.task)
    others = {HeadKind.SEQUENCE: OF_VECTORS + OF_TOKENS, HeadKind.TOKEN: OF_VECTORS, HeadKind.POOLED: OF_TOKENS}
    for field in others[head.kind]:
        if getattr(body, field) not in (None, False):
            raise invalid(field, f"absent, since the model has a {head.kind} head", "given")
    if (body.steps or body.aggregate) and head.width not in STEP_WIDTHS:
        raise invalid("steps", f"false: the head has {head.width} numbers, and a step's score needs 1 or 2", "true")
    if body.aggregate and body.steps is False:
        raise invalid("aggregate", "absent beside `steps: false`", body.aggregate)


def _step_tag(handler: RequestHandler, body: PoolingBody, head: HeadInfo) -> int | None:
    """Returns the id of the token that ends a step; None: every token is answered."""
    if body.step_tag_id is not None or head.kind is not HeadKind.TOKEN:
        return body.step_tag_id
    if head.step_tag is not None:
        ids = handler.tokenizer.encode_batch([head.step_tag], add_special_tokens=False)[0]
        if len(ids) == 1:
            return ids[0]
        message = f"The model's steps end with {head.step_tag}, which is no token of its tokenizer."
        raise ApiError("invalid_value", f"`step_tag_id` must be given. {message}", "step_tag_id")
    if body.steps or body.aggregate:
        raise invalid("step_tag_id", "given with `steps`: nothing says which token ends a step", "nothing")
    return None


def _data(body: PoolingBody, head: HeadInfo, found: PooledRows) -> list[dict[str, Any]]:
    values = found.reply.values
    if head.embedding is not None:
        normalise = wants_activation(body)
        cut = vectors(head.embedding, values, body.dimensions, normalise)
        return [_item(index, encoded_vector(one, body.encoding_format)) for index, one in enumerate(cut)]
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
