"""Continuations of a scoring request: their ids under either seam, their rows, and what their log-probabilities say.

Shape legend: N items, R rows (one a continuation), P prefix tokens, M tokens, W continuation tokens of all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import ItemError, ScoreCode, ScoringError, check_joined, check_tokens, id_range
from scoring.normalize import LOWEST
from scoring.row_builder import build_rows
from scoring.rows import Bounds, Int32s, Prompts, Rows, offsets
from scoring.tokenizer_protocol import Tokens

Normalization = Literal["none", "tokens", "bytes"]
Texts = list[str]
Ids = list[list[int]]
Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuations:
    """What follows each item: one list for all of them, or a list an item. All of one kind, none empty."""

    lists: list[Texts | Ids]
    per_item: bool

    def of(self, item: int) -> Texts | Ids:
        return self.lists[item if self.per_item else 0]

    def name(self, item: int, index: int) -> str:
        return f"continuations[{item}][{index}]" if self.per_item else f"continuations[{index}]"


class Spans(NamedTuple):
    """Row r is `prefix + own`, own being the first `shared[r]` of row r - 1's own and then
    `ids[starts[r]:starts[r + 1]]`; its continuation is its last `wanted[r]` tokens."""

    prefix: Int32s  # [P]
    ids: Int32s  # [M]
    starts: Int32s  # [R + 1]
    shared: Int32s  # [R]
    wanted: Int32s  # [R]
    items: list[int]  # [R] the item of each row, ascending
    lengths: list[int]  # [R] tokens, the prefix included
    tokens: list[list[int]]  # [R] continuation ids
    truncated: list[int]  # [N] tokens cut off each item
    errors: dict[int, ItemError]


class _Row(NamedTuple):
    item: int
    context: Int32s  # of the whole row, up to the continuation; the same object where it is the same context
    continuation: list[int]


def build_spans(tokens: Tokens, spec: Prompts, continuations: Continuations, bounds: Bounds) -> Spans:
    """Raises ScoringError for what is wrong with the request as a whole. CPU work: call it off the event loop.

    Items are cut so that the longest continuation still fits behind each of them. Behind a template continuations are
    data: tokenised with the row as one text, in which only the template writes control tokens.
    """
    text = isinstance(continuations.lists[0][0], str)
    if spec.seam == "joint" and not text and spec.template is None:
        raise ScoringError(
            ScoreCode.INVALID_VALUE, "`seam` must be concat for continuations of token ids. Given: joint.", "seam"
        )
    alone = _encoded(tokens, continuations, bounds, plain=spec.template is not None)
    longest = max(len(ids) for group in alone for ids in group)
    if longest >= bounds.max_model_len:
        raise ScoringError(
            ScoreCode.CONTEXT_LENGTH_EXCEEDED,
            f"`continuations` must leave room in {bounds.max_model_len} tokens. Given: {longest}.",
            "continuations",
        )
    contexts = build_rows(tokens, spec, replace(bounds, max_model_len=bounds.max_model_len - longest))
    errors = dict(contexts.errors)
    if text and (spec.seam == "joint" or spec.template is not None):
        rows = _joint(tokens, spec, continuations, contexts, bounds, errors)
    else:
        rows = [
            _Row(item, context, ids)
            for item, context in _contexts(contexts)
            for ids in alone[item if continuations.per_item else 0]
        ]
    return _packed(rows, contexts, errors, bounds)


def _encoded(tokens: Tokens, continuations: Continuations, bounds: Bounds, *, plain: bool) -> list[Ids]:
    """Ids of each continuation by itself."""
    found: list[Ids] = []
    for item, group in enumerate(continuations.lists):
        texts = [text for text in group if isinstance(text, str)]
        ids = (
            tokens.encode_batch(texts, add_special_tokens=False, plain=plain)
            if texts
            else [x for x in group if isinstance(x, list)]
        )
        for index, one in enumerate(ids):
            field = continuations.name(item, index)
            wrong = id_range(field, one, bounds.vocab_size)
            if wrong:
                raise ScoringError(ScoreCode.INVALID_TOKEN_ID, wrong, field)
            if not 1 <= len(one) <= bounds.limits.max_continuation_tokens:
                most = bounds.limits.max_continuation_tokens
                raise ScoringError(
                    ScoreCode.INVALID_VALUE, f"`{field}` must be 1 to {most} tokens. Given: {len(one)} tokens.", field
                )
        found.append(ids)
    return found


def _contexts(rows: Rows) -> Iterator[tuple[int, Int32s]]:
    """(item, ids of its whole context)."""
    for row, item in enumerate(rows.items):
        yield item, np.concatenate((rows.prefix, rows.ids[rows.starts[row] : rows.starts[row + 1]]))


def _joint(
    tokens: Tokens,
    spec: Prompts,
    continuations: Continuations,
    contexts: Rows,
    bounds: Bounds,
    errors: dict[int, ItemError],
) -> list[_Row]:
    """A continuation's ids are those of `context + continuation`, tokenised as one text, that come after what the
    context alone has in common with it."""
    chars = sum(len(text) + len(more) for item, text in contexts.texts.items() for more in continuations.of(item))
    check_joined(chars, bounds.limits.max_joined_chars, "continuations")
    found: list[_Row] = []
    for item, context in _contexts(contexts):
        text, group = contexts.texts[item], [more for more in continuations.of(item) if isinstance(more, str)]
        plain = spec.template is not None
        special = spec.add_special_tokens and not plain and bool(text)  # an empty text's context is the begin token
        wholes = tokens.encode_batch([text + more for more in group], add_special_tokens=special, plain=plain)
        head = [] if text else context.tolist()
        rows = [_split(item, context, np.array(head + whole, np.int32)) for whole in wholes]
        problem = next((p for row in rows if (p := _problem(row, bounds))), None)
        if problem is None:
            found += rows
        else:
            errors[item] = problem
    return found


def _split(item: int, context: Int32s, whole: Int32s) -> _Row:
    at = _common(context, whole)
    return _Row(item, whole[:at], whole[at:].tolist())


def _problem(row: _Row, bounds: Bounds) -> ItemError | None:
    given = len(row.context) + len(row.continuation)
    if given > bounds.max_model_len:
        return ItemError(
            ScoreCode.CONTEXT_LENGTH_EXCEEDED,
            f"`items[{row.item}]` and a continuation must be at most {bounds.max_model_len} tokens. Given: {given}.",
        )
    if not len(row.context) or not row.continuation:
        return ItemError(
            ScoreCode.INVALID_VALUE,
            f"`items[{row.item}]` and each continuation must have a token each when tokenised as one text. "
            "Given: one without. Use the concat seam.",
        )
    return None


def _packed(rows: list[_Row], contexts: Rows, errors: dict[int, ItemError], bounds: Bounds) -> Spans:
    """The prefix leaves every row the last token of its context: the continuation's first token is read off it."""
    keep = min((len(row.context) - 1 for row in rows), default=0)
    keep = min(keep, len(contexts.prefix))
    parts: list[Int32s] = []
    shared: list[int] = []
    for at, row in enumerate(rows):
        share = _shared(rows[at - 1], row, keep) if at else 0
        parts.append(np.concatenate((row.context[keep + share :], np.array(row.continuation, np.int32))))
        shared.append(share)
    total = keep + sum(map(len, parts)) - len(parts)  # a row's last token is not computed
    check_tokens(total, bounds.max_request_tokens, "items")
    return Spans(
        prefix=contexts.prefix[:keep],
        ids=np.concatenate(parts) if parts else np.empty(0, np.int32),
        starts=offsets([len(part) for part in parts]),
        shared=np.array(shared, np.int32),
        wanted=np.array([len(row.continuation) for row in rows], np.int32),
        items=[row.item for row in rows],
        lengths=[len(row.context) + len(row.continuation) for row in rows],
        tokens=[row.continuation for row in rows],
        truncated=contexts.truncated,
        errors=errors,
    )


def _shared(before: _Row, row: _Row, keep: int) -> int:
    """How many tokens after the first `keep` a row may have of the one before, whose last token is not computed."""
    most = len(row.context) - 1 - keep
    if row.context is before.context:
        return most
    computed = np.concatenate((before.context[keep:], np.array(before.continuation[:-1], np.int32)))
    return min(_common(computed, row.context[keep:]), most)


def _common(a: Int32s, b: Int32s) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Likelihood(NamedTuple):
    """One continuation."""

    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool
    weight: float


def likelihoods(
    logprobs: Sequence[npt.NDArray[np.float32]],
    greedy: Sequence[npt.NDArray[np.bool_]],
    tokens: Sequence[list[int]],
    sizes: Sequence[int],
) -> list[Likelihood] | None:
    """One item's continuations. `weight` = softmax of the summed log-probability, divided by `sizes` (all 1, the tokens
    or the bytes of each). None where none of them has any probability.
    """
    sums = np.array([values.astype(np.float64).sum() for values in logprobs])
    scaled = sums / np.array(sizes, np.float64)
    best = scaled.max()
    if not np.isfinite(best):
        return None
    weights = np.exp(scaled - best)
    weights /= weights.sum()
    return [
        Likelihood(
            logprob=max(float(total), LOWEST),
            token_ids=ids,
            token_logprobs=np.maximum(values.astype(np.float64), LOWEST).tolist(),
            is_greedy=bool(best_everywhere.all()),
            weight=float(weight),
        )
        for total, ids, values, best_everywhere, weight in zip(sums, tokens, logprobs, greedy, weights, strict=True)
    ]


def sizes(normalization: Normalization, group: Texts | Ids, tokens: Sequence[list[int]]) -> list[int]:
    """What each continuation's log-probability is divided by. ScoringError for the bytes of token ids."""
    if normalization == "none":
        return [1] * len(tokens)
    if normalization == "tokens":
        return [len(ids) for ids in tokens]
    texts = [text for text in group if isinstance(text, str)]
    if len(texts) < len(tokens):
        raise ScoringError(
            ScoreCode.INVALID_VALUE,
            "`normalization` must be none or tokens for continuations of token ids. Given: bytes.",
            "normalization",
        )
    return [len(text.encode("utf-8")) for text in texts]
