"""POST /v1/score: a number for each item and label, and little else."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.endpoints.scoring_common import check_items, check_size, rows_of, score
from deployments.api.handler import Api, refuse
from deployments.api.request_context import Exchange
from deployments.api.schemas.generative_scoring import REFUSED, ScoreRequest
from deployments.api.score_response import Columns, spread
from deployments.protocol import ModelCard
from scoring.labels import check_label_ids
from scoring.normalize import scores
from scoring.row_builder import Prompts, Rows


async def scoring(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, ScoreRequest)
    refuse(body, REFUSED)
    check_size(api, len(body.items), len(body.label_token_ids), "items")
    card = await api.served(body.model)
    labels = check_label_ids(body.label_token_ids, card.vocab_size)
    if not body.items:
        return api.json(exchange, _answer(card, Columns.none()))
    rows = await rows_of(api, exchange, _prompts(api, body), card)
    check_items(rows.errors, "items")
    columns = await _columns(api, exchange, body, rows, labels)
    check_items(columns.errors, "items")
    api.observer.items(exchange.route, len(rows.truncated), sum(cut > 0 for cut in rows.truncated))
    api.masses(exchange, columns)
    size = columns.probabilities.nbytes
    return await api.off_loop(size, lambda: api.json(exchange, _answer(card, columns)))


def _prompts(api: Api, body: ScoreRequest) -> Prompts:
    return Prompts(
        query=body.query,
        items=body.items,
        item_first=bool(body.item_first),
        seam="joint" if isinstance(body.query, str) else "concat",
        truncate=api.settings.truncation,
    )


async def _columns(api: Api, exchange: Exchange, body: ScoreRequest, rows: Rows, labels: list[int]) -> Columns:
    softmax = bool(body.apply_softmax)
    _, reply = await score(api, exchange, rows, labels, full=not softmax)
    found = scores(reply.label_logprobs, reply.status.astype(bool), softmax=softmax, full=not softmax)
    return spread(rows, found, reply)


def _answer(card: ModelCard, found: Columns) -> dict[str, Any]:
    return {
        "scores": found.probabilities.tolist(),
        "pooled_hidden_states": None,
        "model": card.name,
        "object": "scoring",
        "usage": found.usage(),
        "truncated": (found.truncated_tokens > 0).tolist(),
    }
