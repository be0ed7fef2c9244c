"""Turns label log-probabilities into scores.

Shape legend: N rows or items, L labels.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import NONFINITE, ItemError
from scoring.row_builder import Int32s, ScoringRows

Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
MIN_LOGPROB = -9999.0  # JSON has no infinity


class ItemScores(NamedTuple):
    """Holds the scores of N items in request order. Values of a failed item are zeros; `errors` names them."""

    probabilities: Float64s  # [N, L]
    logprobs: Float64s | None  # [N, L] over the whole vocabulary; None if only the labels were computed
    label_mass: Float64s | None  # [N] probability of all labels together; None as above
    prompt_tokens: Int64s  # [N]
    cached_tokens: Int64s  # [N]
    truncated_tokens: Int64s  # [N]
    errors: dict[int, ItemError]


def score_items(
    rows: ScoringRows,
    label_logprobs: Float32s,
    status: npt.NDArray[np.uint8],
    cached: Int32s,
    *,
    softmax: bool,
    full: bool,
) -> ItemScores:
    """Scores the items of a request by the log-probabilities of its rows.

    Args:
        rows: The rows that were computed, R of them for N items.
        label_logprobs: Log-probability of each label after each row, [R, L].
        status: 0 for each row that was computed without an error, [R].
        cached: Tokens of each row that were found in the prefix cache, [R].
        softmax: Normalise among the labels.
        full: The log-probabilities are over the whole vocabulary, not over the labels only.
    """
    probabilities, logprobs, label_mass, ok = normalize_labels(
        label_logprobs, status.astype(bool), softmax=softmax, full=full
    )
    return ItemScores(
        probabilities=by_item(rows, probabilities, np.float64),
        logprobs=None if logprobs is None else by_item(rows, logprobs, np.float64),
        label_mass=None if label_mass is None else by_item(rows, label_mass, np.float64),
        prompt_tokens=by_item(rows, rows.starts[1:] - rows.starts[:-1] + len(rows.prefix), np.int64),
        cached_tokens=by_item(rows, cached, np.int64),
        truncated_tokens=np.array(rows.truncated, np.int64),
        errors=rows.errors | {rows.items[row]: NONFINITE for row in (~ok).nonzero()[0].tolist()},
    )


def by_item(rows: ScoringRows, values: npt.NDArray[Any], dtype: type) -> npt.NDArray[Any]:
    """Returns the values of R rows as those of N items, [N, *]: zeros for an item without a row."""
    if not rows.errors:  # every item has its row
        return values.astype(dtype, copy=False)
    out: npt.NDArray[Any] = np.zeros((len(rows.truncated), *values.shape[1:]), dtype)
    out[np.array(rows.items, np.intp)] = values
    return out


def sigmoid(values: Float64s) -> Float64s:
    """Returns `1 / (1 + exp(-x))` of each number."""
    weights = np.exp(-np.abs(values))
    return np.where(values >= 0, 1.0, weights) / (1.0 + weights)


def normalize_labels(
    label_logprobs: Float32s, failed: Bools, *, softmax: bool, full: bool
) -> tuple[Float64s, Float64s | None, Float64s | None, Bools]:
    """Computes probabilities of labels from their log-probabilities, in float64.

    With L_k the log-probability of label k, a probability is `exp(L_k) / sum_j exp(L_j)`, with the maximum subtracted,
    or `exp(L_k)`. With `full` L_k is over the whole vocabulary, and `sum_k exp(L_k)` is the mass of the labels.
    Otherwise only the differences of the L_k have a meaning, which is all that a softmax needs.

    Args:
        label_logprobs: L_k of each row, [N, L].
        failed: Rows that must not be used, [N].
        softmax: Normalise among the labels.
        full: L_k is over the whole vocabulary.

    Returns:
        Probabilities [N, L], log-probabilities [N, L] and mass of the labels [N] (both None without `full`), and
        whether each row is usable [N]. A row whose labels all have no weight is not. All values are finite; unusable
        rows hold zeros.
    """
    values = label_logprobs.astype(np.float64)
    best = np.maximum.reduce(values, axis=1, initial=-np.inf)  # NaN where one of the row's is
    ok = ~failed & np.isfinite(best)
    unusable = None if ok.all() else ~ok
    if unusable is not None:
        values[unusable], best[unusable] = 0.0, 0.0
    weights = np.exp(values - best[:, None])
    total = np.add.reduce(weights, axis=1)
    probabilities = weights / total[:, None] if softmax else np.exp(values)
    if unusable is not None:
        probabilities[unusable] = 0.0
    if not full:
        return probabilities, None, None, ok
    mass = np.minimum(np.exp(best) * total, 1.0)
    if unusable is not None:
        mass[unusable] = 0.0
    return probabilities, np.maximum(values, MIN_LOGPROB), mass, ok
