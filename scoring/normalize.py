"""From label log-probabilities to scores. Shape legend: N rows, L labels."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
LOWEST = -9999.0  # JSON has no infinity


class Scores(NamedTuple):
    """float64, finite; rows that are not `ok` hold zeros."""

    probabilities: Float64s  # [N, L]
    logprobs: Float64s | None  # [N, L] over the whole vocabulary; None if only the labels were computed
    label_mass: Float64s | None  # [N]
    ok: npt.NDArray[np.bool_]  # [N]


def scores(
    label_logprobs: npt.NDArray[np.float32], failed: npt.NDArray[np.bool_], *, softmax: bool, full: bool
) -> Scores:
    """With L_k the log-probability of label k: `exp(L_k) / sum_j exp(L_j)` with the maximum subtracted, or `exp(L_k)`.

    `full`: L_k is over the whole vocabulary, and sum_k exp(L_k) is the labels' mass. Otherwise only their differences
    mean something, which is all that a softmax needs. A row whose labels all have no weight cannot be normalised.
    """
    values = label_logprobs.astype(np.float64)
    best = values.max(axis=1, initial=-np.inf)
    ok = ~failed & np.isfinite(best) & ~np.isnan(values).any(axis=1)
    values = np.where(ok[:, None], values, 0.0)
    best = np.where(ok, best, 0.0)
    weights = np.exp(values - best[:, None])
    total = weights.sum(axis=1)
    probabilities = weights / total[:, None] if softmax else np.exp(values)
    probabilities = np.where(ok[:, None], probabilities, 0.0)
    if not full:
        return Scores(probabilities, None, None, ok)
    mass = np.where(ok, np.minimum(np.exp(best) * total, 1.0), 0.0)
    return Scores(probabilities, np.maximum(values, LOWEST), mass, ok)
