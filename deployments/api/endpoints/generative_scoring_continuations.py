"""/generative_scoring with `continuations`: how likely each of several texts is after an item."""

from typing import Any, NamedTuple

import numpy as np

from deployments.api.endpoints.scoring_common import bounds_of, check_size
from deployments.api.handler import TEXT_COST, Api
from deployments.api.request_context import Exchange, new_id
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.score_response import usage
from deployments.errors import ApiError, invalid
from deployments.protocol import LikelihoodReply, ModelCard
from engine.requests import LikelihoodRequest
from scoring.errors import NONFINITE, ItemError
from scoring.loglikelihood import Continuations, Likelihood, Normalization, Spans, build_spans, likelihoods, sizes
from scoring.row_builder import Prompts

ANSWER_COST = 64  # bytes that a token takes in an answer, roughly


class Items(NamedTuple):
    """Answers in request order; a failed item has none."""

    found: dict[int, list[Likelihood]]
    errors: dict[int, ItemError]
    prompt_tokens: list[int]
    cached_tokens: list[int]


def check_fields(api: Api, body: ScoringRequest, continuations: Continuations) -> None:
    """Raises for fields that go with labels only, and from lengths alone for what would be too much."""
    if body.label_token_ids is not None or body.labels is not None:
        raise invalid("continuations", "absent with `label_token_ids` or `labels`", "both")
    if body.apply_softmax is not None:
        raise invalid("apply_softmax", "absent with `continuations`", "a boolean")
    if body.detail == "probabilities":
        raise invalid("detail", "full with `continuations`", "probabilities")
    if body.layout == "packed":
        raise invalid("layout", "rows or columns with `continuations`", "packed")
    if continuations.per_item and len(continuations.lists) != len(body.items):
        given = f"{len(continuations.lists)} lists for {len(body.items)} items"
        raise invalid("continuations", "one list, or one for each item", given)
    check_size(api, sum(len(continuations.of(item)) for item in range(len(body.items))), 1, "continuations")


async def spans_of(
    api: Api, exchange: Exchange, body: ScoringRequest, continuations: Continuations, spec: Prompts, card: ModelCard
) -> Spans:
    """Rows as ids, at least one of them. Tokenising happens off the event loop."""
    size = TEXT_COST * len(exchange.body) * (1 if spec.template is None else len(body.items))
    sizes(body.normalization or "none", continuations.of(0), [[]] * len(continuations.of(0)))
    limit_s, bounds = api.settings.deadlines.scoring_s, bounds_of(api, card)
    spans = await api.tokenize(exchange, limit_s, size, build_spans, api.tokenizer, spec, continuations, bounds)
    cells, most = int(spans.wanted.sum(dtype=np.int64)), api.limits["max_answer_cells"]
    if cells > most:
        message = f"The request's continuations must be at most {most} tokens together. Given: {cells}."
        raise ApiError("request_too_large", message, "continuations")
    return spans


async def ask(api: Api, exchange: Exchange, body: ScoringRequest, spans: Spans) -> tuple[str, LikelihoodReply]:
    """The answer's id, and what a replica found."""
    request = LikelihoodRequest(
        request_id=new_id("score-"),
        prefix=spans.prefix,
        ids=spans.ids,
        starts=spans.starts,
        shared=spans.shared,
        wanted=spans.wanted,
        cache_salt=exchange.salt(body.cache_salt),
        tenant=exchange.tenant,
        priority=exchange.priority(body.priority),
        timeout_s=exchange.timeout_s(api.settings.deadlines.scoring_s),
    )
    async with api.deadline(exchange, api.settings.deadlines.scoring_s):
        reply = await api.backend.likelihood(request, all_or_nothing=body.on_item_error == "fail")
    api.computed(exchange, reply.queue_s, reply.compute_s, reply.head_s)
    return request.request_id, reply


def items_of(continuations: Continuations, normalization: Normalization, spans: Spans, reply: LikelihoodReply) -> Items:
    """What the reply says of each item."""
    count = len(spans.truncated)
    ends = np.cumsum([0, *spans.wanted.tolist()]).tolist()
    rows: dict[int, list[int]] = {}
    for row, item in enumerate(spans.items):
        rows.setdefault(item, []).append(row)
    found: dict[int, list[Likelihood]] = {}
    errors = dict(spans.errors)
    prompt, cached = [0] * count, [0] * count
    for item, own in rows.items():
        parts = [slice(ends[row], ends[row + 1]) for row in own]
        tokens = [spans.tokens[row] for row in own]
        prompt[item] = sum(spans.lengths[row] for row in own)
        cached[item] = sum(int(reply.cached[row]) for row in own)
        by = sizes(normalization, continuations.of(item), tokens)
        told = None
        if not reply.status[own].any():
            told = likelihoods([reply.logprobs[at] for at in parts], [reply.greedy[at] for at in parts], tokens, by)
        if told is None:
            errors[item] = NONFINITE
        else:
            found[item] = told
    return Items(found, errors, prompt, cached)


def answer(body: ScoringRequest, spans: Spans, items: Items) -> dict[str, Any]:
    """What an answer with continuations says of its items."""
    columns = body.layout == "columns"
    return {
        **({"columns": _columns(spans, items)} if columns else {"data": _rows(spans, items)}),
        "labels": [],
        "usage": usage(sum(items.prompt_tokens), sum(items.cached_tokens)),
    }


def size_of(spans: Spans) -> int:
    """Bytes that the answer may have, roughly."""
    return ANSWER_COST * int(spans.wanted.sum(dtype=np.int64))


def _rows(spans: Spans, items: Items) -> list[dict[str, Any]]:
    rows = []
    for index, cut in enumerate(spans.truncated):
        found, error = items.found.get(index), items.errors.get(index)
        rows.append(
            {
                "index": index,
                "object": "score",
                "score": None if found is None else found[0].weight,
                "continuations": None if found is None else [one._asdict() for one in found],
                "prompt_tokens": items.prompt_tokens[index],
                "cached_tokens": items.cached_tokens[index],
                "truncated": cut > 0,
                "truncated_tokens": cut,
                "error": None if error is None else error._asdict(),
            }
        )
    return rows


def _columns(spans: Spans, items: Items) -> dict[str, Any]:
    groups = [items.found.get(index) for index in range(len(spans.truncated))]
    return {
        "score": [None if group is None else group[0].weight for group in groups],
        "continuations": [None if group is None else [one._asdict() for one in group] for group in groups],
        "prompt_tokens": items.prompt_tokens,
        "cached_tokens": items.cached_tokens,
        "truncated_tokens": spans.truncated,
        "error": {str(index): error._asdict() for index, error in sorted(items.errors.items())},
    }
