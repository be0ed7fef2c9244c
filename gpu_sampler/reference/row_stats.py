"""What one read of a row tells: maxima and sums by group of 128 ids, and where a known token stands.

Shape legend: R rows, V vocabulary, G groups (g an id's place in its group).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GROUP = 128
"""Ids of a group. Part of RNG_VERSION: the first Gumbel number of a plain row picks a group."""

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


class RowStats(NamedTuple):
    """Sums are relative: sum_RG to the group's maximum, total_R to the row's, both at the row's temperature."""

    grouped_RGg: Float32s  # the row, padded with -inf to whole groups
    max_RG: Float32s
    sum_RG: Float64s  # sum of exp((z - max of the group) / T), 0 where the group has nothing finite
    max_R: Float64s  # 0 where the row has nothing finite
    total_R: Float64s  # sum of exp((z - max) / T)
    empty_R: npt.NDArray[np.bool_]


class Target(NamedTuple):
    logprobs_R: Float32s  # -inf for a token outside the vocabulary or of value -inf
    ranks_R: npt.NDArray[np.int32]  # 1-based place in the total order, 0 for a token outside the vocabulary


def group_row(values_RV: Float32s) -> Float32s:
    """[R, G, 128], padded with -inf. Groups are contiguous: the lemma of first tokens needs that under ties."""
    rows, size = values_RV.shape
    padded = np.full((rows, -(-size // GROUP) * GROUP), -np.inf, np.float32)
    padded[:, :size] = values_RV
    return padded.reshape(rows, -1, GROUP)


def row_stats(values_RV: Float32s, temperatures_R: npt.NDArray[np.floating]) -> RowStats:
    """Statistics of rows without NaN and +inf; temperatures are positive. Every sum is float64 and of its row alone."""
    grouped = group_row(values_RV)
    max_RG = grouped.max(axis=2)
    low = max_RG == -np.inf
    above = np.subtract(grouped, np.where(low, np.float32(0), max_RG)[..., None], dtype=np.float64)
    t_R1 = temperatures_R.astype(np.float64)[:, None]
    sum_RG = np.exp(above / t_R1[..., None]).sum(axis=2)
    max_R = max_RG.max(axis=1).astype(np.float64)
    empty_R = max_R == -np.inf
    max_R = np.where(empty_R, 0.0, max_R)
    shift_RG = np.exp((max_RG.astype(np.float64) - max_R[:, None]) / t_R1)
    total_R = np.cumsum(sum_RG * shift_RG, axis=1)[:, -1]
    return RowStats(grouped, max_RG, sum_RG, max_R, total_R, empty_R)


def logsumexp(values_RV: Float32s) -> Float64s:
    """float64 [R] at T = 1; -inf where nothing is finite."""
    stats = row_stats(values_RV, np.ones(len(values_RV)))
    with np.errstate(divide="ignore"):
        return stats.max_R + np.log(stats.total_R)


def row_target(values_RV: Float32s, lse_R: Float64s, targets_R: npt.NDArray[np.integer]) -> Target:
    """Log-probability and rank of one known token a row: rank = 1 + number of tokens before it in the total order."""
    size = values_RV.shape[1]
    inside_R = (targets_R >= 0) & (targets_R < size)
    ids_R1 = np.where(inside_R, targets_R, 0).astype(np.int64)[:, None]
    value_R1 = np.take_along_axis(values_RV, ids_R1, axis=1)
    ahead_R = (values_RV > value_R1).sum(axis=1)
    ahead_R += ((values_RV == value_R1) & (np.arange(size) < ids_R1)).sum(axis=1)
    logprobs = logprobs_of(value_R1, lse_R)[:, 0]
    return Target(
        np.where(inside_R, logprobs, np.float32(-np.inf)), np.where(inside_R, 1 + ahead_R, 0).astype(np.int32)
    )


def logprobs_of(values_RN: Float32s, lse_R: Float64s) -> Float32s:
    """fp32 z - logsumexp, the one formula for every log-probability of a row, so that a token's number is the same
    float wherever it is reported. -inf stays -inf, in a row with nothing finite too."""
    low = values_RN == -np.inf
    finite_lse = np.where(np.isfinite(lse_R), lse_R, 0.0)[:, None]
    logprobs = np.where(low, 0.0, values_RN.astype(np.float64)) - finite_lse
    return np.where(low, -np.inf, logprobs).astype(np.float32)
