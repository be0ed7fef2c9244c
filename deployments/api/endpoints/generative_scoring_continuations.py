"""Scores continuations for /generative_scoring: how likely each of several texts is after an item.

A request builds one `engine.requests.LikelihoodRequest`.
"""

from typing import Any, NamedTuple

import numpy as np

from deployments.api.endpoints.scoring_common import ServedRequest, check_size, prompt_limits, query_of, usage
from deployments.api.handler import TEXT_COST, RequestHandler
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.errors import ApiError, invalid
from deployments.protocol import LikelihoodReply
from engine.requests import LikelihoodRequest
from scoring.errors import NONFINITE, ItemError
from scoring.loglikelihood import (
    Continuations,
    ContinuationScore,
    LikelihoodRows,
    Normalization,
    build_likelihood_rows,
    continuation_scores,
    normalization_lengths,
)
from scoring.row_builder import PromptSpec

ANSWER_COST = 64  # rough bytes of a token in an answer


class ItemLikelihoods(NamedTuple):
    """Holds the scores of N items in request order; a failed item has none."""

    scores: dict[int, list[ContinuationScore]]
    errors: dict[int, ItemError]
    prompt_tokens: list[int]  # [N]
    cached_tokens: list[int]  # [N]


def check_fields(handler: RequestHandler, body: ScoringRequest, continuations: Continuations) -> None:
    """Raises ApiError for fields that need labels, and for too many rows, from lengths alone."""
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
    check_size(handler, sum(len(continuations.of(item)) for item in range(len(body.items))), 1, "continuations")


async def tokenize_rows(
    served: ServedRequest, body: ScoringRequest, continuations: Continuations, spec: PromptSpec
) -> LikelihoodRows:
    """Builds the rows of a request, at least one, off the event loop.

    Raises:
        ApiError: The continuations have too many tokens together.
        ScoringError: The request as a whole is wrong.
    """
    handler, context = served.handler, served.context
    size = TEXT_COST * context.body_bytes * (1 if spec.template is None else len(body.items))
    first = continuations.of(0)
    normalization_lengths(body.normalization or "none", first, [[]] * len(first))  # refuses what has no bytes
    limit_s, limits = handler.settings.deadlines.scoring_s, prompt_limits(handler, served.card)
    rows = await handler.tokenize(
        context,
        limit_s,
        size,
        build_likelihood_rows,
        handler.tokenizer,
        query_of(body),
        body.items,
        spec,
        continuations,
        limits,
    )
    cells, maximum = int(rows.target_lengths.sum(dtype=np.int64)), handler.limits["max_answer_cells"]
    if cells > maximum:
        message = f"The request's continuations must be at most {maximum} tokens together. Given: {cells}."
        raise ApiError("request_too_large", message, "continuations")
    return rows


async def submit_rows(served: ServedRequest, body: ScoringRequest, rows: LikelihoodRows) -> LikelihoodReply:
    """Computes the log-probability of each continuation's tokens on a replica.

    Raises:
        ApiError: The deadline passed, or no replica takes the request.
    """
    handler, context = served.handler, served.context
    limit_s = handler.settings.deadlines.scoring_s
    request = LikelihoodRequest(
        request_id=served.id,
        prefix=rows.prefix,
        ids=rows.ids,
        starts=rows.starts,
        shared=rows.shared,
        wanted=rows.target_lengths,
        cache_salt=context.salt(served.salt),
        tenant=context.tenant,
        priority=context.priority(served.priority),
        timeout_s=context.timeout_s(limit_s),
    )
    with handler.deadline(context, limit_s):
        reply = await handler.backend.likelihood(request, all_or_nothing=body.on_item_error == "fail")
    handler.report_compute(context, reply.queue_s, reply.compute_s, reply.head_s)
    return reply


def score_items(
    continuations: Continuations, normalization: Normalization, rows: LikelihoodRows, reply: LikelihoodReply
) -> ItemLikelihoods:
    """Scores the continuations of each item by the replica's reply."""
    count = len(rows.truncated)
    ends = np.cumsum([0, *rows.target_lengths.tolist()]).tolist()
    rows_of: dict[int, list[int]] = {}
    for row, item in enumerate(rows.items):
        rows_of.setdefault(item, []).append(row)
    scores: dict[int, list[ContinuationScore]] = {}
    errors = dict(rows.errors)
    prompt, cached = [0] * count, [0] * count
    for item, own in rows_of.items():
        parts = [slice(ends[row], ends[row + 1]) for row in own]
        tokens = [rows.tokens[row] for row in own]
        prompt[item] = sum(rows.lengths[row] for row in own)
        cached[item] = sum(int(reply.cached[row]) for row in own)
        lengths = normalization_lengths(normalization, continuations.of(item), tokens)
        found = None
        if not reply.status[own].any():
            logprobs, greedy = [reply.logprobs[at] for at in parts], [reply.greedy[at] for at in parts]
            found = continuation_scores(logprobs, greedy, tokens, lengths)
        if found is None:
            errors[item] = NONFINITE
        else:
            scores[item] = found
    return ItemLikelihoods(scores, errors, prompt, cached)


def answer(body: ScoringRequest, rows: LikelihoodRows, items: ItemLikelihoods) -> dict[str, Any]:
    """Writes the part of the answer that depends on continuations."""
    columns = body.layout == "columns"
    return {
        **({"columns": _column_layout(rows, items)} if columns else {"data": _row_layout(rows, items)}),
        "labels": [],
        "usage": usage(sum(items.prompt_tokens), sum(items.cached_tokens)),
    }


def answer_size(rows: LikelihoodRows) -> int:
    """Returns the rough size of the answer in bytes."""
    return ANSWER_COST * int(rows.target_lengths.sum(dtype=np.int64))


def _row_layout(rows: LikelihoodRows, items: ItemLikelihoods) -> list[dict[str, Any]]:
    entries = []
    for index, cut in enumerate(rows.truncated):
        found, error = items.scores.get(index), items.errors.get(index)
        entries.append(
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
    return entries


def _column_layout(rows: LikelihoodRows, items: ItemLikelihoods) -> dict[str, Any]:
    groups = [items.scores.get(index) for index in range(len(rows.truncated))]
    return {
        "score": [None if group is None else group[0].weight for group in groups],
        "continuations": [None if group is None else [one._asdict() for one in group] for group in groups],
        "prompt_tokens": items.prompt_tokens,
        "cached_tokens": items.cached_tokens,
        "truncated_tokens": rows.truncated,
        "error": {str(index): error._asdict() for index, error in sorted(items.errors.items())},
    }
