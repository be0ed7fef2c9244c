"""Scores continuations: their ids under either seam, their rows, and their log-probabilities.

Shape legend: N items, R rows (one for each continuation), P prefix tokens, M tokens, W continuation tokens of all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import ItemError, ScoreCode, ScoringError, refusal
from scoring.labels import token_id_problem
from scoring.normalize import MIN_LOGPROB
from scoring.row_builder import (
    Int32s,
    Items,
    PromptLimits,
    PromptSpec,
    Query,
    ScoringRows,
    build_rows,
    check_joined,
    check_tokens,
    offsets,
)
from scoring.tokenizer_protocol import TokenizerProtocol

Normalization = Literal["none", "tokens", "bytes"]
Texts = list[str]
Ids = list[list[int]]
Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuations:
    """Holds what follows each item: one list for all of them, or one list for each. All of one kind, none empty."""

    lists: list[Texts | Ids]
    per_item: bool

    def of(self, item: int) -> Texts | Ids:
        """Returns the continuations of an item."""
        return self.lists[item if self.per_item else 0]

    def name(self, item: int, index: int) -> str:
        """Returns the place of a continuation in the request, for errors."""
        return f"continuations[{item}][{index}]" if self.per_item else f"continuations[{index}]"


class LikelihoodRows(NamedTuple):
    """Holds the rows of all continuations.

    Row r is `prefix + own`. `own` is the first `shared[r]` ids of row r - 1's own and then
    `ids[starts[r]:starts[r + 1]]`; the continuation is the last `target_lengths[r]` tokens.
    """

    prefix: Int32s  # [P]
    ids: Int32s  # [M]
    starts: Int32s  # [R + 1]
    shared: Int32s  # [R]
    target_lengths: Int32s  # [R]
    items: list[int]  # [R] the item of each row, ascending
    lengths: list[int]  # [R] tokens, the prefix included
    tokens: list[list[int]]  # [R] continuation ids
    truncated: list[int]  # [N] tokens cut off each item
    errors: dict[int, ItemError]


class _Row(NamedTuple):
    """Holds one continuation behind its context."""

    item: int
    context: Int32s  # up to the continuation, without what all rows leave out; one object where it is one context
    continuation: list[int]


def build_likelihood_rows(
    tokenizer: TokenizerProtocol,
    query: Query,
    items: Items,
    spec: PromptSpec,
    continuations: Continuations,
    limits: PromptLimits,
) -> LikelihoodRows:
    """Builds the rows of a request with continuations. This is CPU work: call it off the event loop.

    Items are cut so that the longest continuation still fits behind each of them. Behind a template continuations are
    data: tokenised with the row as one text, in which only the template writes control tokens.

    Args:
        tokenizer: Encodes the text.
        query: Text, or token ids.
        items: At least one, of the same kind as the query.
        spec: Says how they are joined.
        continuations: The texts that follow each item.
        limits: The limits of the model and the server.

    Raises:
        ScoringError: The request as a whole is wrong.
    """
    text = isinstance(continuations.lists[0][0], str)
    if spec.seam == "joint" and not text and spec.template is None:
        raise refusal("seam", "be concat for continuations of token ids. Given: joint.")
    encoded = _encode(tokenizer, continuations, limits, plain=spec.template is not None)
    longest = max(len(ids) for group in encoded for ids in group)
    if longest >= limits.max_model_len:
        rule = f"leave room in {limits.max_model_len} tokens. Given: {longest}."
        raise refusal("continuations", rule, ScoreCode.CONTEXT_LENGTH_EXCEEDED)
    contexts = build_rows(tokenizer, query, items, spec, limits._replace(max_model_len=limits.max_model_len - longest))
    errors = dict(contexts.errors)
    if text and (spec.seam == "joint" or spec.template is not None):
        left_out, rows = 0, _joint(tokenizer, spec, continuations, contexts, limits, errors)
    else:
        left_out = max(0, len(contexts.prefix) - 1)  # an empty item's context is the last token of the prefix
        rows = [
            _Row(item, context, ids)
            for item, context in _contexts(contexts, left_out)
            for ids in encoded[item if continuations.per_item else 0]
        ]
    return _pack(rows, left_out, contexts, errors, limits, spec.names.items)


def _encode(
    tokenizer: TokenizerProtocol, continuations: Continuations, limits: PromptLimits, *, plain: bool
) -> list[Ids]:
    """Returns the ids of each continuation, encoded separately."""
    found: list[Ids] = []
    for item, group in enumerate(continuations.lists):
        texts = [text for text in group if isinstance(text, str)]
        ids = (
            tokenizer.encode_batch(texts, add_special_tokens=False, plain=plain)
            if texts
            else [x for x in group if isinstance(x, list)]
        )
        for index, one in enumerate(ids):
            field = continuations.name(item, index)
            wrong = token_id_problem(field, one, limits.vocab_size)
            if wrong:
                raise ScoringError(ScoreCode.INVALID_TOKEN_ID, wrong, field)
            maximum = limits.scoring.max_continuation_tokens
            if not 1 <= len(one) <= maximum:
                raise refusal(field, f"be 1 to {maximum} tokens. Given: {len(one)} tokens.")
        found.append(ids)
    return found


def _contexts(rows: ScoringRows, left_out: int = 0) -> Iterator[tuple[int, Int32s]]:
    """Yields each item and the ids of its context, without the first `left_out`."""
    for row, item in enumerate(rows.items):
        yield item, np.concatenate((rows.prefix[left_out:], rows.ids[rows.starts[row] : rows.starts[row + 1]]))


def _joint(
    tokenizer: TokenizerProtocol,
    spec: PromptSpec,
    continuations: Continuations,
    contexts: ScoringRows,
    limits: PromptLimits,
    errors: dict[int, ItemError],
) -> list[_Row]:
    """Tokenises each context and continuation as one text.

    The continuation's ids are those after the beginning that this has in common with the context by itself.
    """
    chars = sum(len(text) + len(more) for item, text in contexts.texts.items() for more in continuations.of(item))
    check_joined(chars, limits.scoring.max_joined_chars, "continuations")
    found: list[_Row] = []
    for item, context in _contexts(contexts):
        text, group = contexts.texts[item], [more for more in continuations.of(item) if isinstance(more, str)]
        plain = spec.template is not None
        special = spec.add_special_tokens and not plain and bool(text)  # an empty text's context is the begin token
        wholes = tokenizer.encode_batch([text + more for more in group], add_special_tokens=special, plain=plain)
        head = [] if text else context.tolist()
        rows = [_split(item, context, np.array(head + whole, np.int32)) for whole in wholes]
        problem = next((p for row in rows if (p := _problem(row, limits, spec.names.items))), None)
        if problem is None:
            found += rows
        else:
            errors[item] = problem
    return found


def _split(item: int, context: Int32s, whole: Int32s) -> _Row:
    at = _common(context, whole)
    return _Row(item, whole[:at], whole[at:].tolist())


def _problem(row: _Row, limits: PromptLimits, field: str) -> ItemError | None:
    """Returns what is wrong with a row whose item is an entry of `field`."""
    name, given = f"{field}[{row.item}]", len(row.context) + len(row.continuation)
    if given > limits.max_model_len:
        return ItemError(
            ScoreCode.CONTEXT_LENGTH_EXCEEDED,
            f"`{name}` and a continuation must be at most {limits.max_model_len} tokens. Given: {given}.",
        )
    if not len(row.context) or not row.continuation:
        return ItemError(
            ScoreCode.INVALID_VALUE,
            f"`{name}` and each continuation must have a token each when tokenised as one text. "
            "Given: one without. Use the concat seam.",
        )
    wrong = token_id_problem(name, row.continuation, limits.vocab_size, text=True)
    return None if wrong is None else ItemError(ScoreCode.INVALID_TOKEN_ID, wrong)


def _pack(
    rows: list[_Row],
    left_out: int,
    contexts: ScoringRows,
    errors: dict[int, ItemError],
    limits: PromptLimits,
    field: str,
) -> LikelihoodRows:
    """Packs the rows. The prefix leaves each row its last context token, which predicts the continuation."""
    shortest = min((left_out + len(row.context) for row in rows), default=1)
    keep = min(shortest - 1, len(contexts.prefix))
    parts: list[Int32s] = []
    shared: list[int] = []
    skip = keep - left_out
    for at, row in enumerate(rows):
        share = _shared(rows[at - 1], row, skip) if at else 0
        parts.append(np.concatenate((row.context[skip + share :], np.array(row.continuation, np.int32))))
        shared.append(share)
    total = keep + sum(map(len, parts)) - len(parts)  # a row's last token is not computed
    check_tokens(total, limits.max_request_tokens, field)
    return LikelihoodRows(
        prefix=contexts.prefix[:keep],
        ids=np.concatenate(parts) if parts else np.empty(0, np.int32),
        starts=offsets([len(part) for part in parts]),
        shared=np.array(shared, np.int32),
        target_lengths=np.array([len(row.continuation) for row in rows], np.int32),
        items=[row.item for row in rows],
        lengths=[left_out + len(row.context) + len(row.continuation) for row in rows],
        tokens=[row.continuation for row in rows],
        truncated=contexts.truncated,
        errors=errors,
    )


def _shared(before: _Row, row: _Row, skip: int) -> int:
    """Returns how many tokens after the first `skip` a row shares with the one before, whose last is not computed."""
    maximum = len(row.context) - 1 - skip
    if row.context is before.context:
        return maximum
    computed = np.concatenate((before.context[skip:], np.array(before.continuation[:-1], np.int32)))
    return min(_common(computed, row.context[skip:]), maximum)


def _common(a: Int32s, b: Int32s) -> int:
    """Returns the length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class ContinuationScore(NamedTuple):
    """Holds the score of one continuation. Logarithms are natural."""

    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool
    weight: float


def continuation_scores(
    logprobs: Sequence[npt.NDArray[np.float32]],
    greedy: Sequence[npt.NDArray[np.bool_]],
    tokens: Sequence[list[int]],
    lengths: Sequence[int],
) -> list[ContinuationScore] | None:
    """Scores one item's continuations.

    Args:
        logprobs: Log-probability of each token, by continuation.
        greedy: Whether each token was the most probable one, by continuation.
        tokens: Ids of each continuation.
        lengths: The divisor of each summed log-probability. `weight` is the softmax of the quotients.

    Returns:
        The scores; None if no continuation has any probability.
    """
    sums = np.array([values.astype(np.float64).sum() for values in logprobs])
    scaled = sums / np.array(lengths, np.float64)
    best = scaled.max()
    if not np.isfinite(best):
        return None
    weights = np.exp(scaled - best)
    weights /= weights.sum()
    finite = [np.maximum(values.astype(np.float64), MIN_LOGPROB) for values in logprobs]
    return [
        ContinuationScore(
            logprob=float(values.sum()),
            token_ids=ids,
            token_logprobs=values.tolist(),
            is_greedy=bool(best_everywhere.all()),
            weight=float(weight),
        )
        for ids, values, best_everywhere, weight in zip(tokens, finite, greedy, weights, strict=True)
    ]


def normalization_lengths(normalization: Normalization, group: Texts | Ids, tokens: Sequence[list[int]]) -> list[int]:
    """Returns what each continuation's log-probability is divided by: 1, its tokens, or its bytes.

    Raises:
        ScoringError: Bytes are requested for continuations of token ids.
    """
    if normalization == "none":
        return [1] * len(tokens)
    if normalization == "tokens":
        return [len(ids) for ids in tokens]
    texts = [text for text in group if isinstance(text, str)]
    if len(texts) < len(tokens):
        raise refusal("normalization", "be none or tokens for continuations of token ids. Given: bytes.")
    return [len(text.encode("utf-8")) for text in texts]
