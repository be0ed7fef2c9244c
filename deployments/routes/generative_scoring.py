"""POST /generative_scoring: probabilities of labels after each item, one ScoreTask a request."""

import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from deployments.exchange import Exchange
from deployments.messages import ModelCard, ScoreReply, ScoreTask
from deployments.routes.context import TEXT_COST, Api, refuse
from deployments.score_columns import Columns, spread
from deployments.wire.errors import ApiError, invalid
from deployments.wire.generative_scoring import REFUSED, ScoringRequest
from deployments.wire.ids import new_id
from scoring.errors import ItemError, ScoringError
from scoring.labels import check_label_ids, label_ids
from scoring.normalise import scores
from scoring.prompts import Bounds, Prompts, Rows, build_rows


async def generative_scoring(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, ScoringRequest)
    _check_fields(api, body)
    card = await api.served(body.model)
    try:
        rows, labels = await _prepare(api, exchange, body, card)
    except ScoringError as error:
        raise ApiError(error.code.value, error.message, error.field) from None
    _check_items(body, rows.errors, len(rows.truncated))
    task = _task(api, exchange, body, rows, labels)
    async with api.deadline(exchange, api.settings.deadlines.scoring_s):
        reply = await api.backend.score(task)
    exchange.timings(reply.queue_s, reply.compute_s)
    api.observer.stage("queue", reply.queue_s)
    api.observer.stage("compute", reply.compute_s)
    columns = _columns(body, rows, reply)
    _check_items(body, columns.errors, len(rows.truncated))
    api.observer.items(exchange.route, len(rows.truncated), sum(cut > 0 for cut in rows.truncated))
    size = columns.probabilities.nbytes
    answer = await api.off_loop(size, _answer, api, body, card, task, columns)
    return await api.off_loop(size, api.json, exchange, answer)


def _check_fields(api: Api, body: ScoringRequest) -> None:
    refuse(body, REFUSED)
    if (body.label_token_ids is None) == (body.labels is None):
        given = "neither" if body.labels is None else "both"
        raise invalid("label_token_ids", "given, or `labels`, but not both", given)
    if body.detail == "probabilities" and body.apply_softmax is False:
        raise invalid("detail", "full without `apply_softmax`", "probabilities")
    count = len(body.items)
    cells = count * len(body.label_token_ids or body.labels or ())
    for what, given_count, most in (("items", count, "max_rows"), ("items times labels", cells, "max_answer_cells")):
        if given_count > api.limits[most]:
            message = f"The request's {what} must be at most {api.limits[most]}. Given: {given_count}."
            raise ApiError("request_too_large", message, "items")


async def _prepare(api: Api, exchange: Exchange, body: ScoringRequest, card: ModelCard) -> tuple[Rows, list[int]]:
    """Rows as ids, and label ids. Tokenising happens off the event loop."""
    started = exchange.elapsed_s()
    spec = Prompts(
        query=body.query,
        items=body.items,
        item_first=bool(body.item_first),
        add_special_tokens=body.add_special_tokens is not False,
        seam=body.seam or "concat",
        truncate=body.truncate or api.settings.truncation,
        truncation_side=body.truncation_side or "right",
        max_item_tokens=body.max_item_tokens,
        max_query_tokens=body.max_query_tokens,
    )
    bounds = Bounds(
        vocab_size=card.vocab_size,
        max_model_len=card.max_model_len,
        max_request_tokens=api.limits["max_request_tokens"],
        limits=api.settings.limits.scoring,
    )
    rows = await api.off_loop(TEXT_COST * len(exchange.body), build_rows, api.tokenizer, spec, bounds)
    if body.label_token_ids is not None:
        labels = check_label_ids(body.label_token_ids, card.vocab_size)
    else:
        size = TEXT_COST * len(rows.suffix) * len(body.labels or ())
        labels = await api.off_loop(size, label_ids, api.tokenizer, body.labels or [], rows.suffix)
        check_label_ids(labels, card.vocab_size)
    api.observer.stage("tokenize", exchange.elapsed_s() - started)
    return rows, labels


def _task(api: Api, exchange: Exchange, body: ScoringRequest, rows: Rows, labels: list[int]) -> ScoreTask:
    return ScoreTask(
        task_id=new_id("score-"),
        prefix=rows.prefix,
        ids=rows.ids,
        starts=rows.starts,
        labels=np.array(labels, np.int32),
        full=body.detail != "probabilities",
        salt=body.cache_salt or "",
        priority=body.priority or 0,
        remaining_s=exchange.remaining_s(api.settings.deadlines.scoring_s),
        whole=body.on_item_error == "fail",
    )


def _check_items(body: ScoringRequest, errors: dict[int, ItemError], count: int) -> None:
    """Raises the first item's error if the request wants that, or if no item is left."""
    if errors and (body.on_item_error == "fail" or len(errors) == count):
        index = min(errors)
        raise ApiError(errors[index].code.value, errors[index].message, f"items[{index}]")


def _columns(body: ScoringRequest, rows: Rows, reply: ScoreReply) -> Columns:
    softmax = body.apply_softmax is not False
    found = scores(
        reply.label_logprobs, reply.status.astype(bool), softmax=softmax, full=body.detail != "probabilities"
    )
    return spread(rows, found, reply)


def _answer(api: Api, body: ScoringRequest, card: ModelCard, task: ScoreTask, columns: Columns) -> dict[str, Any]:
    prompt, cached = int(columns.prompt_tokens.sum()), int(columns.cached_tokens.sum())
    data: dict[str, Any]
    match body.layout:
        case "columns":
            data = {"columns": columns.columns()}
        case "packed":
            data = {"columns": columns.packed()}
        case _:
            data = {"data": columns.rows()}
    labels: list[int] = task.labels.tolist()
    texts = api.tokenizer.token_texts(labels)
    return {
        "id": task.task_id,
        "object": "list",
        "created": int(time.time()),
        "model": card.name,
        **data,
        "labels": [{"token_id": token, "token": text} for token, text in zip(labels, texts, strict=True)],
        "template": None,
        "prompt_format_version": None,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 0,
            "total_tokens": prompt,
            "prompt_tokens_details": {"cached_tokens": cached},
            "computed_tokens": prompt - cached,
        },
    }
