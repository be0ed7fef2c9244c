"""Scores pairs of texts by the model's head, whichever it is: what /rerank and /score have in common.

A language model answers by the labels of the rerank prompt, a sequence head of one number by that number after the
prompt's text, an encoder after the pair as its tokenizer writes it, and a pooled head by the cosine of two vectors.

Shape legend: N pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from deployments.api.endpoints.pooling_common import text_spec, with_prompt
from deployments.api.endpoints.scoring_common import (
    ServedRequest,
    check_items,
    check_size,
    submit_pooling,
    submit_rows,
    text_label_ids,
    tokenize_rows,
)
from deployments.api.handler import RequestHandler
from deployments.api.rerank_prompt import CONFIGURATION, RerankPrompt, remedy
from deployments.errors import ApiError, from_item_error
from deployments.protocol import ModelCard
from engine.model.heads.info import HeadInfo, HeadKind
from engine.requests import PoolingTask, RowStatus
from scoring.activation import pooled_items
from scoring.embeddings import cosines
from scoring.errors import ItemError, ScoreCode
from scoring.normalize import Float64s, ItemScores, by_item, score_items
from scoring.prompts.templates import Template
from scoring.rerank import log_odds, relevance
from scoring.row_builder import PromptSpec, ScoringRows, check_tokens, joined, unshared

READ = {HeadKind.TOKEN: "single tokens", HeadKind.POINTER: "marked tokens"}
COUNTS = (1, 2)  # labels that a language model's score may have: the logit of yes, or its distance to that of no


class PairScores(NamedTuple):
    """Holds the scores of N pairs. The numbers of a text in `errors` are no scores."""

    raw: Float64s  # [N] log-odds, the head's number, or a cosine
    activated: Float64s  # [N] after the activation of the prompt; a cosine stays as it is
    truncated: list[int]  # [N] tokens cut off
    prompt_tokens: int
    cached_tokens: int
    errors: Mapping[int, ItemError] = MappingProxyType({})  # of texts that the model cannot read


def pair_template(handler: RequestHandler, card: ModelCard) -> Template | None:
    """Returns the template that joins two texts for the model's head; None where the head needs none.

    Raises:
        ApiError: The head gives no single number for two texts, or has no prompt (404).
    """
    head, found = card.head, handler.rerank.template
    if head is not None and (head.encoder or head.kind is not HeadKind.SEQUENCE):
        _check_head(handler, head)
        return None
    if head is not None:
        _check_width(handler, head)
    elif found is not None and len(found.labels) not in COUNTS:
        if handler.rerank.source == CONFIGURATION:
            message = "This server ranks no documents: its `rerank.template` has no labels for a language-model head."
            raise ApiError("not_found", message)
        found = None
    if found is None:
        labelled = head is None
        raise ApiError("not_found", remedy(handler.templates, handler.rerank, handler.tokenizer, labelled=labelled))
    return found


def _check_head(handler: RequestHandler, head: HeadInfo) -> None:
    if head.task is PoolingTask.TOKEN_CLASSIFY:
        raise ApiError("not_found", f"This server ranks no documents: its head reads {READ[head.kind]}. Use /pooling.")
    if handler.rerank.source == CONFIGURATION:
        raise ApiError(
            "not_found",
            "This server ranks no documents: its model reads texts as its tokenizer writes them, and a template would "
            "change them. Remove `rerank.template` from `args` of its configuration.",
        )
    if head.kind is HeadKind.SEQUENCE:
        _check_width(handler, head)
        if handler.rerank.activation is None:
            raise ApiError(
                "not_found",
                f"This server ranks no documents: {handler.rerank.problem}, and `rerank.activation` does not say what "
                "applies to the head's number.",
            )


def _check_width(handler: RequestHandler, head: HeadInfo) -> None:
    if head.width != 1:
        message = f"This server ranks no documents: its head has {head.width} numbers, and ranking needs one."
        raise ApiError("not_found", message)
    if handler.rerank.activation == "softmax":
        message = "This server ranks no documents: `rerank.activation: softmax` needs two numbers, its head has one."
        raise ApiError("not_found", message)


def pair_source(card: ModelCard, prompt: RerankPrompt) -> str | None:
    """Says where the form of pairs comes from; None where the rerank routes answer 404."""
    head = card.head
    if head is not None and head.task is PoolingTask.TOKEN_CLASSIFY:
        return None
    if head is not None and (head.encoder or head.kind is HeadKind.POOLED):
        ranks = head.kind is HeadKind.POOLED or (head.width == 1 and prompt.activation in ("none", "sigmoid"))
        return "tokenizer" if ranks and prompt.source != CONFIGURATION else None
    if prompt.template is None:
        return None
    if head is None:
        return prompt.source if len(prompt.template.labels) in COUNTS else None
    return prompt.source if head.width == 1 and prompt.activation != "softmax" else None


async def score_pairs(
    served: ServedRequest,
    queries: Sequence[str],
    texts: list[str],
    spec_of: Callable[[str], PromptSpec],
    *,
    all_or_nothing: bool = True,
) -> PairScores:
    """Scores each text beside its query.

    Args:
        served: The request.
        queries: One query for all texts, or one for each.
        texts: The texts, [N].
        spec_of: Returns how a query is joined with texts.
        all_or_nothing: A text that the model cannot read fails the request; else only if it can read none.

    Raises:
        ApiError: A text is wrong, too long, or gave a number that is not finite.
        ScoringError: The request as a whole is wrong.
    """
    handler, head = served.handler, served.card.head
    if head is not None and head.kind is HeadKind.POOLED:
        return await _cosines(served, queries, texts, spec_of(queries[0]), all_or_nothing)
    specs = [spec_of(query)._replace(pairs=head is not None and head.encoder) for query in queries]
    field = specs[0].names.items
    if len(queries) == 1:
        rows = await tokenize_rows(served, queries[0], texts, specs[0])
    else:
        each = zip(queries, texts, specs, strict=True)
        parts = [await tokenize_rows(served, query, [text], spec) for query, text, spec in each]
        rows = joined(parts, field)
        check_tokens(len(rows.ids), handler.limits["max_request_tokens"], field)
    unread = _unread_texts(rows, field, all_or_nothing)
    scores, raw = await _scored(served, rows, specs[0])
    check_items({index: error for index, error in scores.errors.items() if index not in unread}, field)
    return PairScores(
        raw,
        raw if handler.rerank.activation == "none" else relevance(raw),
        rows.truncated,
        int(scores.prompt_tokens.sum()),
        int(scores.cached_tokens.sum()),
        unread,
    )


def _unread_texts(rows: ScoringRows, field: str, all_or_nothing: bool) -> dict[int, ItemError]:
    """Returns the errors of the texts that the model cannot read, if others can be scored.

    Raises:
        ApiError: Every text failed, or one is too long to be scored whole, or one failed with `all_or_nothing`.
    """
    if all_or_nothing or not rows.items:
        check_items(rows.errors, field)
    too_long = ScoreCode.CONTEXT_LENGTH_EXCEEDED
    check_items({index: error for index, error in rows.errors.items() if error.code is too_long}, field)
    return rows.errors


async def _scored(served: ServedRequest, rows: ScoringRows, spec: PromptSpec) -> tuple[ItemScores, Float64s]:
    """Returns the scores of items, and the log-odds or the model's own number of each, [N]."""
    head = served.card.head
    if head is not None:
        rows = unshared(rows) if head.whole_rows else rows
        pooled = await submit_pooling(served, rows, head)
        scores = pooled_items(rows, pooled.values, pooled.status, pooled.cached, "none")
        return scores, scores.probabilities[:, 0]
    labels = await text_label_ids(served, rows, None, spec.template)
    single = len(labels) == 1
    reply = await submit_rows(served, rows, labels, full=False, raw_logits=single)
    if single:
        scores = pooled_items(rows, reply.label_logprobs, reply.status, reply.cached, "none")
        return scores, scores.probabilities[:, 0]
    scores = score_items(rows, reply.label_logprobs, reply.status, reply.cached, softmax=True, full=False)
    return scores, by_item(rows, log_odds(reply.label_logprobs), np.float64)


async def _cosines(
    served: ServedRequest, queries: Sequence[str], texts: list[str], spec: PromptSpec, all_or_nothing: bool
) -> PairScores:
    """Compares vectors. The prompts that the model names `query` and `document` are written where it has them."""
    handler, head = served.handler, served.card.head
    if head is None:
        raise RuntimeError("Vectors are the answers of a pooled head.")
    prompts = {} if head.embedding is None else dict(head.embedding.prompts)
    default = "" if head.embedding is None else prompts.get(head.embedding.default_prompt or "", "")
    names = spec.names

    async def rows_of(
        side: list[str], prompt: str, field: str, cut_field: str, maximum: int | None, *, cut: bool
    ) -> ScoringRows:
        maxima = [one for one in (maximum, spec.max_row_tokens) if one is not None]
        single = text_spec(
            field,
            cut=cut,
            cut_field=cut_field,
            maximum=min(maxima, default=None),
            side=spec.truncation_side,
        )
        return await tokenize_rows(served, "", with_prompt(side, prompt), single)

    first, own = prompts.get("query", default), prompts.get("document", default)
    cut, asks = spec.truncate == "item", spec.max_query_tokens is not None  # a query's own bound cuts it in any case
    check_size(handler, len(queries) + len(texts), head.width, names.items)
    asked = await rows_of([*queries], first, names.query, names.query_tokens, spec.max_query_tokens, cut=cut or asks)
    if asked.errors and len(queries) == 1:
        raise from_item_error(asked.errors[0].under(f"{names.query}[0]", names.query), names.query)
    check_items(asked.errors, names.query)
    found = await rows_of(texts, own, names.items, names.item_tokens, spec.max_item_tokens, cut=cut)
    unread = _unread_texts(found, names.items, all_or_nothing)
    both = joined([asked, found], names.items)
    check_tokens(len(both.ids), handler.limits["max_request_tokens"], names.items)
    reply = await submit_pooling(served, both, head)
    count = len(queries)
    failed = np.flatnonzero(reply.status != RowStatus.OK)
    if len(failed):
        place = both.items[int(failed[0])] - count
        field = names.query if place < 0 else f"{names.items}[{place}]"
        raise ApiError("nonfinite_logits", "The model's output was not finite.", field)
    vectors = reply.values[count:]
    asked_of = reply.values[:1] if count == 1 else reply.values[:count][found.items]
    cosine = by_item(found, cosines(asked_of, vectors), np.float64)
    return PairScores(cosine, cosine, found.truncated, len(both.ids), int(reply.cached.sum()), unread)
