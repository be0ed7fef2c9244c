"""Defines the total order of a row: value after penalties as float32, descending; token id ascending. -0 equals +0.

It is strict, so "top-k", "rank", "argmax" and "mass before" each have one answer. Bfloat16 logits tie constantly.
"""

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


def clean(logits_RV: Float32s) -> tuple[Float32s, npt.NDArray[np.bool_]]:
    """Returns logits with NaN and +inf as -inf, and which rows had one."""
    bad_RV = ~(logits_RV < np.inf)  # NaN compares false too
    bad_R = np.asarray(bad_RV.any(axis=1))
    if not bad_R.any():
        return logits_RV, bad_R
    return np.where(bad_RV, np.float32(-np.inf), logits_RV), bad_R


def first(z_V: Float32s, n: int) -> Int64s:
    """Returns ids of the first n elements, in order; all of them if n is not below V."""
    if n >= len(z_V):
        return np.argsort(-z_V, kind="stable")
    if n <= 0:
        return np.empty(0, np.int64)
    bound = np.partition(z_V, len(z_V) - n)[len(z_V) - n]  # the n-th largest value
    above = np.flatnonzero(z_V > bound)
    level = np.flatnonzero(z_V == bound)[: n - len(above)]
    ids = np.concatenate([above, level])
    return ids[np.lexsort((ids, -z_V[ids]))]


def rank(z_V: Float32s, token: int) -> int:
    """Returns the 1-based place of `token`."""
    value = z_V[token]
    return 1 + int(np.count_nonzero(z_V > value)) + int(np.count_nonzero(z_V[:token] == value))
