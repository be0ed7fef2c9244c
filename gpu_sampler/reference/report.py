"""Log-probabilities, ranks, first tokens and chosen ids of sampled rows.

Everything a row reports comes from its `Basis`: the values that are ordered, and one formula from value to
log-probability, so that a token has the same float wherever it appears.
Shape legend: R rows, V vocabulary, N top-N, C chosen ids, M ids of a row.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.reference.keys import first_of_order, row_keys
from gpu_sampler.reference.row_stats import row_stats

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


class Basis(NamedTuple):
    """log p(token) = (value - max) / T - log_mass, -inf for a token that comes after the last kept one."""

    values_RV: Float32s  # without NaN and +inf
    max_R: Float64s  # 0 where nothing is finite
    temperatures_R: Float64s
    log_mass_R: Float64s
    least_R: Float32s  # kept: value > least, or value = least with id <= last
    last_R: Int64s


class Report(NamedTuple):
    logprobs_R: Float32s  # of the sampled token, -inf where there is none
    ranks_R: npt.NDArray[np.int32]  # 0 where there is none
    top_ids_RN: npt.NDArray[np.int32]  # padded with INVALID_TOKEN
    top_logprobs_RN: Float32s  # padded with -inf
    chosen_logprobs_RC: Float32s  # -inf at ids outside the vocabulary


def full_basis(values_RV: Float32s) -> Basis:
    """Log-softmax of the values: raw rows, and greedy rows after the penalties."""
    rows = len(values_RV)
    ones = np.ones(rows)
    stats = row_stats(values_RV, ones)
    with np.errstate(divide="ignore"):
        log_mass = np.log(stats.total_R)
    every = np.full(rows, np.iinfo(np.int64).max)
    return Basis(values_RV, stats.max_R, ones, log_mass, np.full(rows, -np.inf, np.float32), every)


def kept_basis(
    values_RV: Float32s, temperatures_R: npt.NDArray[np.floating], mass_R: Float64s, least_R: Float32s, last_R: Int64s
) -> Basis:
    """The law that drew the row: `mass` of the kept tokens is relative to exp(max / T)."""
    max_R = values_RV.max(axis=1).astype(np.float64)
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass_R)
    max_R = np.where(max_R == -np.inf, 0.0, max_R)
    return Basis(values_RV, max_R, temperatures_R.astype(np.float64), log_mass, least_R, last_R)


def report(
    basis: Basis,
    tokens_R: npt.NDArray[np.integer],
    n_top_R: npt.NDArray[np.integer],
    chosen_RC: npt.NDArray[np.integer],
) -> Report:
    """`n_top` is each row's own N; `chosen` is padded with negative ids."""
    tokens_R1 = tokens_R.astype(np.int64)[:, None]
    logprobs_R = _logprobs(basis, tokens_R1, _gather(basis, tokens_R1))[:, 0]
    top = first_of_order(row_keys(basis.values_RV), min(int(n_top_R.max(initial=0)), basis.values_RV.shape[1]))
    own_RN = np.arange(top.ids_RC.shape[1]) < n_top_R[:, None]
    top_RN = np.where(own_RN, _logprobs(basis, top.ids_RC, top.values_RC), np.float32(-np.inf))
    ids_RN = np.where(top_RN == -np.inf, INVALID_TOKEN, top.ids_RC).astype(np.int32)
    chosen_RC = chosen_RC.astype(np.int64)
    return Report(
        logprobs_R, _ranks(basis, tokens_R1), ids_RN, top_RN, _logprobs(basis, chosen_RC, _gather(basis, chosen_RC))
    )


def _gather(basis: Basis, ids_RM: Int64s) -> Float32s:
    """Values of ids, -inf outside [0, V)."""
    inside = (ids_RM >= 0) & (ids_RM < basis.values_RV.shape[1])
    values = np.take_along_axis(basis.values_RV, np.where(inside, ids_RM, 0), axis=1)
    return np.where(inside, values, np.float32(-np.inf))


def _logprobs(basis: Basis, ids_RM: Int64s, values_RM: Float32s) -> Float32s:
    least_R1, last_R1 = basis.least_R[:, None], basis.last_R[:, None]
    kept = (values_RM > least_R1) | ((values_RM == least_R1) & (ids_RM <= last_R1))
    kept &= values_RM > -np.inf
    above = np.where(kept, values_RM.astype(np.float64), 0.0) - basis.max_R[:, None]
    log_mass_R1 = np.where(np.isfinite(basis.log_mass_R), basis.log_mass_R, 0.0)[:, None]
    logprobs = above / basis.temperatures_R[:, None] - log_mass_R1
    with np.errstate(over="ignore"):
        return np.where(kept, logprobs, -np.inf).astype(np.float32)


def _ranks(basis: Basis, tokens_R1: Int64s) -> npt.NDArray[np.int32]:
    value_R1 = _gather(basis, tokens_R1)
    ahead_R = (basis.values_RV > value_R1).sum(axis=1)
    ahead_R += ((basis.values_RV == value_R1) & (np.arange(basis.values_RV.shape[1]) < tokens_R1)).sum(axis=1)
    return np.where(tokens_R1[:, 0] >= 0, 1 + ahead_R, 0).astype(np.int32)
