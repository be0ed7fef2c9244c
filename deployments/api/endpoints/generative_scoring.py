"""Serves POST /generative_scoring: the probabilities of labels, or of continuations, after each item.

A request with labels builds one `engine.requests.ScoreRequest`; a request with `continuations` builds one
`engine.requests.LikelihoodRequest` (see `generative_scoring_continuations`).
"""

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints import generative_scoring_continuations as continuations
from deployments.api.endpoints.scoring_common import (
    ServedRequest,
    check_items,
    check_size,
    column_layout,
    fill_template,
    query_of,
    refuse_chat_fields,
    report_items,
    report_label_mass,
    row_layout,
    score_usage,
    submit_rows,
    text_label_ids,
    tokenize_rows,
)
from deployments.api.generation.chat_request_builder import conversation_ids
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.chat import Message
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.errors import describe, invalid
from scoring.errors import ItemError
from scoring.labels import check_label_ids, label_ids
from scoring.loglikelihood import Continuations
from scoring.normalize import ItemScores, score_items
from scoring.prompts.templates import FilledTemplate
from scoring.row_builder import DEFAULT_FIELD_NAMES, FieldNames, PromptSpec

TEXT_FIELDS = (  # of a request that is no conversation
    "query", "items", "item_first", "seam", "truncate", "truncation_side", "max_item_tokens", "max_query_tokens",
    "instruction", "system",
)  # fmt: skip


async def generative_scoring(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /generative_scoring. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, ScoringRequest, handler.settings.deadlines.scoring_s)
    card = await handler.language_model(body.model, context.route)
    served = ServedRequest(handler, context, card, new_id("generative-scoring-"), body.cache_salt, body.priority)
    if body.messages is not None:
        body = await _with_conversations(served, body, body.messages)
    else:
        _check_text_fields(body)
    template = None if body.messages is not None else _fill_template(handler, body)
    _check_fields(handler, body, template)
    spec = _prompt_spec(handler, body, template)
    if body.continuations is None:
        size, answer = await _score_labels(served, body, spec)
    else:
        size, answer = await _score_continuations(served, body, body.continuations, spec)
    return await handler.sized_json(context, size, lambda: _head(served, body, template) | answer)


async def _score_labels(served: ServedRequest, body: ScoringRequest, spec: PromptSpec) -> tuple[int, dict[str, Any]]:
    """Returns the rough size of the answer in bytes, and the answer."""
    handler, context = served.handler, served.context
    rows = await tokenize_rows(served, query_of(body), body.items, spec)
    if body.label_token_ids is not None:
        labels = check_label_ids(body.label_token_ids, served.card.vocab_size)
    else:
        labels = await text_label_ids(served, rows, body.labels, spec.template)
    _check_items(body, rows.errors, rows.truncated)
    full, all_or_nothing = body.detail != "probabilities", body.on_item_error == "fail"
    reply = await submit_rows(served, rows, labels, full=full, all_or_nothing=all_or_nothing)
    scores = score_items(
        rows, reply.label_logprobs, reply.status, reply.cached, softmax=body.apply_softmax is not False, full=full
    )
    _check_items(body, scores.errors, rows.truncated)
    report_items(handler, context, rows.truncated, scores.errors)
    report_label_mass(handler, context, scores)
    size = scores.probabilities.nbytes
    return size, await handler.off_loop(size, _label_answer, handler, body, labels, scores)


async def _score_continuations(
    served: ServedRequest, body: ScoringRequest, given: Continuations, spec: PromptSpec
) -> tuple[int, dict[str, Any]]:
    """Returns the rough size of the answer in bytes, and the answer."""
    handler = served.handler
    rows = await continuations.tokenize_rows(served, body, given, spec)
    _check_items(body, rows.errors, rows.truncated)
    reply = await continuations.submit_rows(served, body, rows)
    size = continuations.answer_size(rows)
    normalization = body.normalization or "none"
    items = await handler.off_loop(size, continuations.score_items, given, normalization, rows, reply)
    _check_items(body, items.errors, rows.truncated)
    report_items(handler, served.context, rows.truncated, items.errors)
    return size, await handler.off_loop(size, continuations.answer, body, rows, items)


def _check_text_fields(body: ScoringRequest) -> None:
    """Raises ApiError for a request without items, and for fields of a conversation."""
    if not body.items:
        raise invalid("items", "given, or `messages`", "nothing")
    refuse_chat_fields(body)


async def _with_conversations(served: ServedRequest, body: ScoringRequest, given: Sequence[Any]) -> ScoringRequest:
    """Returns the request with the token ids of each conversation as an item. `template` may name the model's guard.

    Raises:
        ApiError: A field that does not suit a conversation, or a template that is not the model's guard.
        ScoringError: The chat template refuses the messages, or they have too many tokens together.
    """
    for field in TEXT_FIELDS:
        if getattr(body, field):
            raise invalid(field, "absent beside `messages`", describe(getattr(body, field)))
    handler, guard = served.handler, served.handler.guard
    if body.template is not None and (guard is None or body.template != guard.name):
        known = f"{guard.name} or absent" if guard else "absent: this model is no guard that is known"
        raise invalid("template", f"{known}, beside `messages`", "another name")
    answer, own = (guard.answer, guard.labels) if guard is not None and body.template is not None else ("", None)
    conversations = [given] if isinstance(given[0], Message) else given
    length = served.card.max_model_len
    items = await conversation_ids(handler, served.context, body, conversations, "messages", length, answer)
    found: dict[str, Any] = {"query": [], "items": items}
    if own is not None and body.labels is None and body.label_token_ids is None and body.continuations is None:
        ids = await handler.off_loop(0, label_ids, handler.tokenizer, own, answer)
        found["label_token_ids"] = ids
    return body.model_copy(update=found | {"truncate": "error"})  # a conversation without its end is another one


def _fill_template(handler: RequestHandler, body: ScoringRequest) -> FilledTemplate | None:
    """Returns the template with its values. Raises ApiError for fields that need a template, or exclude one."""
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
    return fill_template(handler, body.template, given)


def _check_fields(handler: RequestHandler, body: ScoringRequest, template: FilledTemplate | None) -> None:
    """Raises ApiError for fields that exclude each other, and for too many rows."""
    if body.query is None and template is None:
        raise invalid("query", "given", "nothing")
    if body.continuations is not None:
        continuations.check_fields(handler, body, body.continuations)
        return
    if body.normalization not in (None, "none"):
        raise invalid("normalization", "absent without `continuations`", body.normalization)
    if body.label_token_ids is not None and body.labels is not None:
        raise invalid("label_token_ids", "given, or `labels`, but not both", "both")
    labels = body.label_token_ids or body.labels or (template.template.labels if template else ())
    if not labels:
        raise invalid("label_token_ids", "given, or `labels` or `continuations`, but only one of them", "none")
    if body.detail == "probabilities" and body.apply_softmax is False:
        raise invalid("detail", "full without `apply_softmax`", "probabilities")
    check_size(handler, len(body.items), len(labels), "items")


def _prompt_spec(handler: RequestHandler, body: ScoringRequest, template: FilledTemplate | None) -> PromptSpec:
    return PromptSpec(
        item_first=bool(body.item_first),
        add_special_tokens=body.add_special_tokens is not False,
        seam=body.seam or "concat",
        truncate=body.truncate or handler.settings.truncation,
        truncation_side=body.truncation_side or "right",
        max_item_tokens=body.max_item_tokens,
        max_query_tokens=body.max_query_tokens,
        template=template,
        names=DEFAULT_FIELD_NAMES if body.messages is None else FieldNames("messages"),
    )


def _check_items(body: ScoringRequest, errors: dict[int, ItemError], items: Sequence[int]) -> None:
    """Raises the first item's error if the request wants that, or if every item failed."""
    if body.on_item_error == "fail" or len(errors) == len(items):
        check_items(errors, "items" if body.messages is None else "messages")


def _head(served: ServedRequest, body: ScoringRequest, template: FilledTemplate | None) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "list",
        "created": int(time.time()),
        "model": served.card.name,
        "template": template.template.name if template else body.template,  # of a guard, where messages are scored
        "prompt_format_version": template.template.version if template else None,
    }


def _label_answer(
    handler: RequestHandler, body: ScoringRequest, labels: list[int], scores: ItemScores
) -> dict[str, Any]:
    data: dict[str, Any] = (
        {"columns": column_layout(scores, packed=body.layout == "packed")}
        if body.layout in ("columns", "packed")
        else {"data": row_layout(scores)}
    )
    texts = handler.tokenizer.token_texts(labels)
    return {
        **data,
        "labels": [{"token_id": token, "token": text} for token, text in zip(labels, texts, strict=True)],
        "usage": score_usage(scores),
    }
