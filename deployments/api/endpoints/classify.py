"""Serves POST /classify and /v1/classify: what a sequence head says about texts or a conversation.

A request builds one `engine.requests.PoolingRequest`.
"""

import time
from functools import partial
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.scoring_common import (
    check_items,
    check_size,
    report_items,
    score_usage,
    submit_pooling,
    tokenize_rows,
)
from deployments.api.generation.chat_request_builder import chat_ids
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.classify import ClassifyRequest
from deployments.errors import invalid
from deployments.protocol import ModelCard
from engine.model.heads.info import HeadInfo
from scoring.activation import Activation, default_activation, pooled_items
from scoring.normalize import ItemScores
from scoring.row_builder import FieldNames, Items, PromptSpec, Query

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def classify(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers both routes. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, ClassifyRequest)
    card, head = await handler.pooling_head(body.model, context.route)
    activation = _activation(body, head)
    field, items = await _items(handler, context, body)
    check_size(handler, len(items), head.width, field)
    query: Query = "" if isinstance(items[0], str) else []
    rows = await tokenize_rows(handler, context, query, items, _prompt_spec(body, field), card)
    check_items(rows.errors, field)
    request_id = new_id("classify-")
    salt, priority = body.cache_salt, body.priority
    reply = await submit_pooling(handler, context, request_id, rows, salt=salt, priority=priority)
    scores = pooled_items(rows, reply.values, reply.status, reply.cached, activation)
    check_items(scores.errors, field)
    report_items(handler, context, rows.truncated)
    make = partial(_answer, request_id, card, head, scores)
    return await handler.sized_json(context, scores.probabilities.nbytes, make)


def _activation(body: ClassifyRequest, head: HeadInfo) -> Activation:
    """Returns the head's own activation, or none where the request wants raw numbers (either name of the field)."""
    first, second = body.use_activation, body.activation
    if first is not None and second is not None and first != second:
        raise invalid("activation", "absent beside another `use_activation`", "both")
    wanted = second if first is None else first
    return "none" if wanted is False else default_activation(head.width, head.problem_type)


async def _items(handler: RequestHandler, context: RequestContext, body: ClassifyRequest) -> tuple[str, Items]:
    """Returns the name of the field that holds the inputs, and the inputs."""
    if (body.input is None) == (body.messages is None):
        raise invalid("input", "given, or `messages`, but not both", "neither" if body.input is None else "both")
    if body.input is not None:
        for field in CHAT_FIELDS:
            if getattr(body, field) is not None:
                raise invalid(field, "absent without `messages`", "given")
        return "input", body.input
    prompting = bool(body.add_generation_prompt)  # a head judges what was said: no turn is opened unless it is wanted
    body = body.model_copy(update={"add_generation_prompt": prompting})
    return "messages", [await chat_ids(handler, context, body, body.messages or [])]


def _prompt_spec(body: ClassifyRequest, field: str) -> PromptSpec:
    """Says how an input becomes a row: by itself, as the tokenizer writes a single text.

    A head reads the last token, so that nothing is cut unless the request says so.
    """
    maximum = body.truncate_prompt_tokens
    return PromptSpec(
        item_first=True,  # the tokens at the ends of a text are the item's
        add_special_tokens=body.add_special_tokens is not False,
        truncate="error" if maximum is None else "item",
        truncation_side=body.truncation_side or "right",
        max_item_tokens=None if maximum == -1 else maximum,
        names=FieldNames(field, "truncate_prompt_tokens"),
    )


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
