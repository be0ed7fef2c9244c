"""Serves POST /score and /v1/score: a number for each item and label, for each pair of texts, or for a conversation.

A request with items builds one `engine.requests.ScoreRequest`, and none without an item. A request with texts on two
sides builds what `deployments.api.endpoints.pair_scores` builds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from starlette.responses import Response

from deployments.api.endpoints.conversation_scores import score_conversations
from deployments.api.endpoints.pair_scores import PairScores, pair_template, score_pairs
from deployments.api.endpoints.pooling_common import wants_activation
from deployments.api.endpoints.scoring_common import (
    CHAT_FIELDS,
    ServedRequest,
    check_items,
    check_size,
    list_answer,
    refuse_chat_fields,
    report_items,
    report_label_mass,
    score_usage,
    submit_rows,
    tokenize_rows,
    usage,
)
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.chat import Message
from deployments.api.schemas.pooling import PoolingInput
from deployments.api.schemas.score import ScoreBody
from deployments.errors import describe, invalid
from deployments.protocol import ModelCard
from scoring.labels import check_label_ids
from scoring.normalize import score_items
from scoring.prompts.templates import Template, fill
from scoring.row_builder import FieldNames, Items, PromptSpec, Query

SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
OF_ITEMS = ("query", "items", "label_token_ids", "apply_softmax", "item_first")
OF_PAIRS = (
    "instruction",
    "use_activation",
    "activation",
    "truncate_prompt_tokens",
    "truncation_side",
    "max_tokens_per_doc",
    "max_tokens_per_query",
)
CUTS = ("truncate_prompt_tokens", "truncation_side")
OF_TEXTS = ("instruction", "max_tokens_per_doc", "max_tokens_per_query")  # and of no conversation


class Sides(NamedTuple):
    """Holds the texts on two sides, and the names of their fields."""

    queries: list[str]  # one, or as many as texts
    texts: list[str]
    first: str
    second: str


async def scoring(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers both routes. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, ScoreBody, handler.settings.deadlines.scoring_s)
    if body.messages is not None:
        return await _messages(handler, context, body, body.messages)
    refuse_chat_fields(body)
    sides = _sides(body)
    if sides is not None:
        return await _pairs(handler, context, body, sides)
    return await _items(handler, context, body)


def _sides(body: ScoreBody) -> Sides | None:
    """Returns the texts on two sides; None for a request with items. Raises ApiError for a mixture of dialects."""
    given = [pair for pair in SIDES if any(getattr(body, name) is not None for name in pair)]
    if not given:
        for name in OF_PAIRS:
            if getattr(body, name) is not None:
                absent = "absent beside `items`: it belongs to `text_1` and `text_2`"
                raise invalid(name, absent, describe(getattr(body, name)))
        return None
    first, second = given[0]
    others = [*OF_ITEMS, *(name for pair in given[1:] for name in pair)]
    for name in others:
        if getattr(body, name) is not None:
            raise invalid(name, f"absent beside `{first}` and `{second}`", describe(getattr(body, name)))
    queries, texts = getattr(body, first), getattr(body, second)
    for name, value in ((first, queries), (second, texts)):
        if value is None:
            raise invalid(name, "given", "nothing")
    if len(queries) not in (1, len(texts)):
        raise invalid(first, f"one text, or as many as `{second}`, {len(texts)}", str(len(queries)))
    return Sides(queries, texts, first, second)


# Two sides.


async def _pairs(handler: RequestHandler, context: RequestContext, body: ScoreBody, sides: Sides) -> Response:
    card = await handler.served(body.model)
    served = ServedRequest(handler, context, card, new_id("score-"), body.cache_salt, body.priority)
    template = pair_template(handler, card)
    check_size(handler, len(sides.texts), 1 if template is None else max(1, len(template.labels)), sides.second)
    activated = wants_activation(body) is not False

    def spec_of(query: str) -> PromptSpec:
        return _pair_spec(handler, body, template, query, sides)

    found = await score_pairs(served, sides.queries, sides.texts, spec_of)
    return await _answer_scores(served, found, activated=activated)


async def _answer_scores(served: ServedRequest, found: PairScores, *, activated: bool) -> Response:
    handler, context = served.handler, served.context
    report_items(handler, context, found.truncated)

    def make() -> dict[str, Any]:
        numbers = (found.activated if activated else found.raw).tolist()
        data = [
            {"index": index, "object": "score", "score": score} | ({"truncated": True} if cut else {})
            for index, (score, cut) in enumerate(zip(numbers, found.truncated, strict=True))
        ]
        return list_answer(served, data, usage(found.prompt_tokens, found.cached_tokens))

    return await handler.sized_json(context, context.body_bytes, make)


def _pair_spec(
    handler: RequestHandler, body: ScoreBody, template: Template | None, query: str, sides: Sides
) -> PromptSpec:
    if template is None and body.instruction is not None:
        raise invalid("instruction", "absent: the model's head reads the two texts alone", describe(body.instruction))
    maximum = body.truncate_prompt_tokens
    capped = bool(body.max_tokens_per_doc) or maximum is not None
    values = {"query": query, "instruction": body.instruction, "system": None}
    return PromptSpec(
        truncate="item" if capped else handler.settings.truncation,
        truncation_side=body.truncation_side or "right",
        max_item_tokens=body.max_tokens_per_doc or None,
        max_query_tokens=body.max_tokens_per_query or None,
        max_row_tokens=None if maximum == -1 else maximum,
        template=None if template is None else fill(template, values),
        names=FieldNames(sides.second, "max_tokens_per_doc", "max_tokens_per_query", sides.first),
    )


# Conversations.


async def _messages(
    handler: RequestHandler, context: RequestContext, body: ScoreBody, given: Sequence[Any]
) -> Response:
    for name in (*OF_ITEMS, *(name for pair in SIDES for name in pair), *OF_TEXTS):
        if getattr(body, name) is not None:
            raise invalid(name, "absent beside `messages`", describe(getattr(body, name)))
    activated = wants_activation(body) is not False
    card = await handler.served(body.model)
    served = ServedRequest(handler, context, card, new_id("score-"), body.cache_salt, body.priority)
    conversations = [given] if isinstance(given[0], Message) else given
    options = {name: getattr(body, name) for name in (*CHAT_FIELDS, *CUTS)}
    found = await score_conversations(served, conversations, PoolingInput.model_construct(**options))
    return await _answer_scores(served, found, activated=activated)


# Items and labels.


async def _items(handler: RequestHandler, context: RequestContext, body: ScoreBody) -> Response:
    for name in ("query", "items", "label_token_ids"):
        if getattr(body, name) is None:
            raise invalid(name, "given, or `text_1` and `text_2`", "nothing")
    query, items, given = cast(Query, body.query), cast(Items, body.items), body.label_token_ids or []
    check_size(handler, len(items), len(given), "items")
    card = await handler.language_model(body.model, context.route)
    labels = check_label_ids(given, card.vocab_size)
    if not items:
        return handler.json(context, _answer(card, [], usage(0, 0), []))
    served = ServedRequest(handler, context, card, new_id("score-"), body.cache_salt, body.priority)
    rows = await tokenize_rows(served, query, items, _prompt_spec(handler, body))
    check_items(rows.errors, "items")
    softmax = bool(body.apply_softmax)
    reply = await submit_rows(served, rows, labels, full=not softmax)
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
