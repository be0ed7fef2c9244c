"""Holds the steps that the scoring routes share: limits, rows, label ids, one request, the answer's layouts."""

import base64
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.api.handler import MAX_NAMED_FIELDS, TEXT_COST, RequestHandler
from deployments.api.request_context import RequestContext
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.schemas.known_fields import REFUSED, is_neutral
from deployments.errors import ApiError, describe, from_item_error, invalid
from deployments.protocol import ModelCard
from engine.model.heads.info import HeadInfo
from engine.requests import PoolingRequest, PoolingResult, ScoreRequest, ScoreResult
from scoring.errors import ItemError
from scoring.labels import check_label_ids, joint_label_ids, label_ids
from scoring.normalize import ItemScores
from scoring.prompts.templates import FilledTemplate, fill
from scoring.row_builder import Items, PromptLimits, PromptSpec, Query, ScoringRows, build_score_rows, check_joined

FAILED_ITEMS = "x-assay-failed-items"
CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class ServedRequest(NamedTuple):
    """Holds what every step of one scoring request needs."""

    handler: RequestHandler
    context: RequestContext  # of the HTTP request
    card: ModelCard  # of the model that is served
    id: str
    salt: str | None  # the request's `cache_salt`
    priority: int | None  # the request's `priority`


def check_size(handler: RequestHandler, items: int, labels: int, field: str) -> None:
    """Refuses too many rows or numbers, from lengths alone. Raises ApiError naming `field`."""
    for what, given, name in (("rows", items, "max_rows"), ("rows times labels", items * labels, "max_answer_cells")):
        maximum = handler.limits[name]
        if given > maximum:
            message = f"The request's {what} must be at most {maximum}. Given: {given}. Send fewer items."
            raise ApiError("request_too_large", message, field)


def refuse_chat_fields(body: object) -> None:
    """Raises ApiError for a field of conversations that a request without `messages` gives."""
    for name in CHAT_FIELDS:
        value = getattr(body, name)
        if value is not None and not is_neutral(value, REFUSED[name]):
            raise invalid(name, "absent without `messages`", describe(value))


def fill_template(handler: RequestHandler, name: str, given: Mapping[str, str | None]) -> FilledTemplate:
    """Fills the template `name` with a request's `query`, `instruction` and `system`.

    Raises:
        ApiError: There is no template of this name.
        ScoringError: A value is missing, or the template does not use it.
    """
    template = handler.templates.get(name)
    if template is None:
        known = ", ".join(sorted(handler.templates)) or "absent: this server has none"
        raise ApiError("invalid_value", f"`template` must be one of {known}. Given: another name.", "template")
    return fill(template, given)


def prompt_limits(handler: RequestHandler, card: ModelCard) -> PromptLimits:
    """Returns what the model and the server allow one scoring request."""
    return PromptLimits(
        vocab_size=card.vocab_size,
        max_model_len=card.max_model_len,
        max_request_tokens=handler.limits["max_request_tokens"],
        max_rows=handler.limits["max_rows"],
        max_cells=handler.limits["max_answer_cells"],
        scoring=handler.settings.limits.scoring,
    )


def query_of(body: ScoringRequest) -> Query:
    """Returns the query: empty text if a template needs none."""
    return "" if body.query is None else body.query


async def tokenize_rows(served: ServedRequest, query: Query, items: Items, spec: PromptSpec) -> ScoringRows:
    """Builds the rows of a request, off the event loop. Raises ScoringError for the request as a whole."""
    handler, context = served.handler, served.context
    template_chars = 0 if spec.template is None else spec.template.template.chars
    size = TEXT_COST * (context.body_bytes + len(items) * template_chars)
    limit_s = handler.settings.deadlines.scoring_s
    limits = prompt_limits(handler, served.card)
    return await handler.tokenize(
        context, limit_s, size, build_score_rows, handler.tokenizer, query, items, spec, limits
    )


async def text_label_ids(
    served: ServedRequest, rows: ScoringRows, texts: Sequence[str] | None, template: FilledTemplate | None
) -> list[int]:
    """Returns the ids of labels given as text, at the end of these rows.

    Args:
        served: The request.
        rows: The rows that the labels follow.
        texts: The request's labels; None for the template's own.
        template: The request's template, if it has one.

    Raises:
        ScoringError: A label is not one token, two labels are the same token, or they are too many for these rows' end.
    """
    own = None if template is None else template.template
    if texts is None and own is not None and own.fixed_labels:
        return check_label_ids(own.label_ids, served.card.vocab_size)
    if texts is None:
        texts = () if own is None else own.labels
    handler = served.handler
    joined = {} if rows.suffix or own is not None else {index: rows.texts[index] for index in rows.items if rows.texts}
    if joined:  # the rows have no end in common
        behind = sum(map(len, joined.values()))
        call = partial(joint_label_ids, handler.tokenizer, texts, joined, "items")
    else:
        behind = len(rows.suffix)
        call = partial(label_ids, handler.tokenizer, texts, rows.suffix, plain=own is not None)
    chars = (1 + len(texts)) * behind + sum(map(len, texts))
    maximum, limit_s = handler.settings.limits.scoring.max_joined_chars, handler.settings.deadlines.scoring_s
    check_joined(chars, maximum, "labels", "Send fewer labels, or their ids.")
    found = await handler.tokenize(served.context, limit_s, TEXT_COST * chars, call)
    return check_label_ids(found, served.card.vocab_size)


async def submit_rows(
    served: ServedRequest,
    rows: ScoringRows,
    labels: list[int],
    *,
    full: bool,
    raw_logits: bool = False,
    all_or_nothing: bool = True,
) -> ScoreResult:
    """Computes the labels' log-probabilities after each row on a replica.

    Args:
        served: The request.
        rows: At least one row.
        labels: Label ids, [L].
        full: Log-probabilities over the whole vocabulary, else only among the labels.
        raw_logits: The labels' logits in place of log-probabilities; excludes `full`.
        all_or_nothing: A failed row fails the request.

    Raises:
        ApiError: The deadline passed, or no replica takes the request.
    """
    handler, context = served.handler, served.context
    limit_s = handler.settings.deadlines.scoring_s
    request = ScoreRequest(
        request_id=served.id,
        prefix=rows.prefix,
        ids=rows.ids,
        starts=rows.starts,
        labels=np.array(labels, np.int32),
        full=full,
        raw_logits=raw_logits,
        cache_salt=context.salt(served.salt),
        tenant=context.tenant,
        priority=context.priority(served.priority),
        timeout_s=context.timeout_s(limit_s),
    )
    with handler.deadline(context, limit_s):
        reply = await handler.backend.score(request, all_or_nothing)
    handler.report_compute(context, reply.queue_s, reply.compute_s, reply.head_s)
    return reply


async def submit_pooling(
    served: ServedRequest, rows: ScoringRows, head: HeadInfo, positions: npt.NDArray[np.int32] | None = None
) -> PoolingResult:
    """Computes the pooling head's numbers of each row on a replica. A failed row fails the request.

    Args:
        served: The request.
        rows: At least one row, which shares nothing with others where the head reads whole rows.
        head: The model's head.
        positions: The places in `rows.ids` that have answers; None: each row has one.

    Raises:
        ApiError: The deadline passed, or no replica takes the request.
    """
    handler, context = served.handler, served.context
    limit_s = handler.settings.deadlines.scoring_s
    request = PoolingRequest(
        request_id=served.id,
        prefix=rows.prefix,
        ids=rows.ids,
        starts=rows.starts,
        task=head.task,
        positions=np.zeros(0, np.int32) if positions is None else positions,
        segments=rows.segments,
        cache_salt=context.salt(served.salt),
        tenant=context.tenant,
        priority=context.priority(served.priority),
        timeout_s=context.timeout_s(limit_s),
    )
    with handler.deadline(context, limit_s):
        reply = await handler.backend.pooling(request, all_or_nothing=True)
    handler.report_compute(context, reply.queue_s, reply.compute_s, reply.head_s)
    return reply


def check_items(errors: Mapping[int, ItemError], field: str) -> None:
    """Raises the first item's error as an ApiError, if there is one."""
    if errors:
        index = min(errors)
        raise from_item_error(errors[index], f"{field}[{index}]")


def report_items(
    handler: RequestHandler, context: RequestContext, truncated: Sequence[int], failed: Collection[int] = ()
) -> None:
    """Reports to the observer how many items were scored, and how many of them were cut.

    Args:
        handler: Holds the observer.
        context: The HTTP request, whose answer gets a header that names the first items that failed.
        truncated: Tokens cut off each item, [N].
        failed: The items that failed while others were scored.
    """
    handler.observer.items(context.route, len(truncated), sum(cut > 0 for cut in truncated))
    if failed:
        context.headers[FAILED_ITEMS] = ", ".join(map(str, sorted(failed)[:MAX_NAMED_FIELDS]))


def report_label_mass(handler: RequestHandler, context: RequestContext, scores: ItemScores) -> None:
    """Reports to the observer the labels' mass in each item that was scored, where it was computed."""
    if scores.label_mass is not None:
        scored = np.ones(len(scores.label_mass), np.bool_)
        scored[list(scores.errors)] = False
        handler.observer.label_mass(context.route, scores.label_mass[scored])


def usage(prompt: int, cached: int) -> dict[str, Any]:
    """Returns the usage block: the tokens of all rows, and how many of them were computed."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 0,
        "total_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "computed_tokens": prompt - cached,
    }


def score_usage(scores: ItemScores) -> dict[str, Any]:
    """Returns the usage block of scored items."""
    return usage(int(np.add.reduce(scores.prompt_tokens)), int(np.add.reduce(scores.cached_tokens)))


def list_answer(served: ServedRequest, data: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer that lists `data`, in the form of OpenAI's API."""
    return {
        "id": served.id,
        "object": "list",
        "created": int(time.time()),
        "model": served.card.name,
        "data": data,
        "usage": usage,
    }


def row_layout(scores: ItemScores) -> list[dict[str, Any]]:
    """Writes the layout `rows`: one object for each item."""
    missing: list[Any] = [None] * len(scores.prompt_tokens)
    columns = zip(
        scores.probabilities.tolist(),
        missing if scores.logprobs is None else scores.logprobs.tolist(),
        missing if scores.label_mass is None else scores.label_mass.tolist(),
        scores.prompt_tokens.tolist(),
        scores.cached_tokens.tolist(),
        scores.truncated_tokens.tolist(),
        strict=True,
    )
    found = []
    for index, (probabilities, logprobs, mass, prompt, cached, cut) in enumerate(columns):
        error = scores.errors.get(index)
        row = {
            "index": index,
            "object": "score",
            "score": None if error else probabilities[0],
            "probabilities": None if error else probabilities,
            "logprobs": None if error else logprobs,
            "label_mass": None if error else mass,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "truncated": cut > 0,
            "truncated_tokens": cut,
            "error": None if error is None else error._asdict(),
        }
        found.append(row)
    return found


def column_layout(scores: ItemScores, *, packed: bool) -> dict[str, Any]:
    """Writes the layouts `columns`, lists with null for failed items, and `packed`, base64 with NaN for them."""

    def floats(values: npt.NDArray[np.float64]) -> list[Any] | str:
        if packed:
            values = values.copy()
            values[list(scores.errors)] = np.nan
            return _base64(values, "<f4")
        found: list[Any] = values.tolist()
        for index in scores.errors:
            found[index] = None
        return found

    def ints(values: npt.NDArray[np.int64]) -> list[int] | str:
        return _base64(values, "<i4") if packed else values.tolist()

    return {
        "score": floats(scores.probabilities[:, 0]),
        "probabilities": floats(scores.probabilities),
        "logprobs": None if scores.logprobs is None else floats(scores.logprobs),
        "label_mass": None if scores.label_mass is None else floats(scores.label_mass),
        "prompt_tokens": ints(scores.prompt_tokens),
        "cached_tokens": ints(scores.cached_tokens),
        "truncated_tokens": ints(scores.truncated_tokens),
        "error": {str(index): error._asdict() for index, error in sorted(scores.errors.items())},
    }


def _base64(values: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
