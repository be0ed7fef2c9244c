"""Draws the token of each row. The route depends on the row's own parameters and values, never on its batch.

greedy      the first token of the total order
plain       no filter: two-level Gumbel, one number a group, then one a token of the group that won
candidates  the kept tokens are listed, one Gumbel number each: rows with top-k, and rows whose nucleus or min-p set
            lies within the first LISTED tokens
rejection   wider sets: draws of the unfiltered law, round by round, until one is a member
Exact by max-stability of Gumbel noise; everything is keyed by token or group id, so lists may be in any order.
Shape legend: R rows, V vocabulary, G groups, C listed tokens.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag
from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.reference.keys import First, first_of_order, row_keys
from gpu_sampler.reference.nucleus_scan import Cut, Nucleus, cut_first, least_above, nucleus_scan
from gpu_sampler.reference.philox import Noise, Purpose
from gpu_sampler.reference.row_stats import GROUP, RowStats, row_stats

LISTED = 256
"""A kept set of at most so many tokens is listed. Part of RNG_VERSION, as it decides the route."""
MAX_DRAWS = 4096
"""Rounds of a rejection. The row is then drawn from its scanned nucleus with the noise of the round after them."""
_BUCKETS = (64, 256, 1024)
_DRAWS_AT_ONCE = 16

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


class SelectRows(NamedTuple):
    """Parameters of R rows, as in `gpu_sampler.state.Rows`."""

    seeds_R: npt.NDArray[np.uint64]
    positions_R: npt.NDArray[np.int32]
    branches_R: npt.NDArray[np.int32]
    temperatures_R: Float32s  # > 0
    top_k_R: npt.NDArray[np.int32]
    top_p_R: Float32s
    min_p_R: Float32s

    def take(self, rows: npt.NDArray[np.integer]) -> "SelectRows":
        return SelectRows(*(field[rows] for field in self))

    def noise(self, rounds_R: Int64s | int = 0) -> Noise:
        return Noise(self.seeds_R, self.positions_R, self.branches_R, rounds_R)


class Selected(NamedTuple):
    """Kept tokens are those of value > `least`, and of value = `least` with id <= `last`."""

    tokens_R: Int64s  # INVALID_TOKEN where nothing is finite
    flags_R: npt.NDArray[np.uint32]
    least_R: Float32s
    last_R: Int64s
    mass_R: Float64s  # of the kept tokens, relative to exp(max / T)


def select_greedy(values_RV: Float32s) -> Int64s:
    """[R] the first token of the total order: numpy's argmax is the first of equals."""
    tokens_R = values_RV.argmax(axis=1)
    best_R = np.take_along_axis(values_RV, tokens_R[:, None], axis=1)[:, 0]
    return np.where(best_R == -np.inf, INVALID_TOKEN, tokens_R)


def select_plain(values_RV: Float32s, rows: SelectRows) -> Selected:
    stats = row_stats(values_RV, rows.temperatures_R)
    every_R = np.arange(len(values_RV))
    tokens_R = np.where(stats.empty_R, INVALID_TOKEN, two_level(stats, rows, every_R, 0))
    return _selected(tokens_R, stats.total_R)


def select_candidates(values_RV: Float32s, rows: SelectRows) -> Selected:
    """Rows with top-k. They are taken together by size of list only to save time: a longer list changes nothing."""
    size = values_RV.shape[1]
    parts = []
    bucket_R = np.searchsorted(np.array(_BUCKETS), np.minimum(rows.top_k_R, size))
    for bucket in np.unique(bucket_R):
        at = np.flatnonzero(bucket_R == bucket)
        count = int(np.minimum(rows.top_k_R[at], size).max())
        first = first_of_order(row_keys(values_RV[at]), count)
        limited = np.where(np.arange(count) < rows.top_k_R[at, None], first.values_RC, np.float32(-np.inf))
        parts.append((at, _from_list(First(first.ids_RC, limited), rows.take(at), None, 0)))
    return _join(parts, len(values_RV))


def select_nucleus(values_RV: Float32s, rows: SelectRows) -> Selected:
    """Rows with top-p or min-p and without top-k."""
    stats = row_stats(values_RV, rows.temperatures_R)
    first = first_of_order(row_keys(values_RV), min(LISTED, values_RV.shape[1]))
    fits_R = _fits(values_RV, first, stats, rows)
    listed, wide = np.flatnonzero(fits_R), np.flatnonzero(~fits_R)
    parts = []
    if len(listed):
        some = First(first.ids_RC[listed], first.values_RC[listed])
        parts.append((listed, _from_list(some, rows.take(listed), stats.total_R[listed], 0)))
    for row in wide:
        at = np.array([row])
        parts.append((at, _by_rejection(values_RV[at], _take(stats, at), rows.take(at))))
    return _join(parts, len(values_RV))


def two_level(stats: RowStats, rows: SelectRows, at_N: Int64s, rounds_N: Int64s | int) -> Int64s:
    """[N] tokens of the unfiltered law, drawn from rows `at`, any of them more than once."""
    t_N1 = rows.temperatures_R[at_N].astype(np.float64)[:, None]
    max_N1 = stats.max_R[at_N, None]
    noise = rows.take(at_N).noise(rounds_N)
    with np.errstate(divide="ignore"):
        scores_NG = np.log(stats.sum_RG[at_N]) + (stats.max_RG[at_N].astype(np.float64) - max_N1) / t_N1
    scores_NG = scores_NG + noise.of_blocks(Purpose.SAMPLE_GROUP, np.zeros_like(at_N), scores_NG.shape[1])
    group_N = scores_NG.argmax(axis=1)
    first_N = group_N * GROUP
    scores_Ng = (stats.grouped_RGg[at_N, group_N].astype(np.float64) - max_N1) / t_N1
    scores_Ng = scores_Ng + noise.of_blocks(Purpose.SAMPLE_TOKEN, first_N, GROUP)
    return first_N + scores_Ng.argmax(axis=1)


def _fits(values_RV: Float32s, first: First, stats: RowStats, rows: SelectRows) -> npt.NDArray[np.bool_]:
    """Whether the kept set lies within the listed tokens: they are the whole row, or reach p of the mass, or no more
    tokens than are listed reach the min-p threshold."""
    t_R1 = rows.temperatures_R.astype(np.float64)[:, None]
    listed_R = np.cumsum(np.exp((first.values_RC.astype(np.float64) - stats.max_R[:, None]) / t_R1), axis=1)[:, -1]
    p_R = rows.top_p_R.astype(np.float64)
    fits_R = (first.values_RC[:, -1] == -np.inf) | (len(values_RV[0]) <= LISTED)
    fits_R |= (p_R < 1) & (listed_R >= p_R * stats.total_R)
    open_R = np.flatnonzero(~fits_R & (rows.min_p_R > 0))
    if len(open_R):
        above = values_RV[open_R].astype(np.float64) - stats.max_R[open_R, None]
        least = least_above(rows.temperatures_R[open_R], rows.min_p_R[open_R])
        fits_R[open_R] = (above >= least[:, None]).sum(axis=1) <= LISTED
    return fits_R


def _from_list(first: First, rows: SelectRows, total_R: Float64s | None, draw: int) -> Selected:
    """Cuts the list and takes the best of the kept tokens."""
    max_R = np.where(first.values_RC[:, 0] == -np.inf, 0.0, first.values_RC[:, 0].astype(np.float64))
    cut = cut_first(first, max_R, rows.temperatures_R, rows.top_p_R, rows.min_p_R, total_R)
    return _best_kept(first, cut, max_R, rows, draw)


def _best_kept(first: First, cut: Cut, max_R: Float64s, rows: SelectRows, draw: int) -> Selected:
    count_R = cut.kept_RC.sum(axis=1)
    width = max(int(count_R.max()), 1)  # noise is needed for kept tokens only
    ids, values, kept = first.ids_RC[:, :width], first.values_RC[:, :width], cut.kept_RC[:, :width]
    above = (values.astype(np.float64) - max_R[:, None]) / rows.temperatures_R.astype(np.float64)[:, None]
    scores = np.where(kept, above + rows.noise(draw).of_ids(Purpose.SAMPLE_TOKEN, ids), -np.inf)
    best_R1 = scores.argmax(axis=1)[:, None]
    tokens_R = np.take_along_axis(ids, best_R1, axis=1)[:, 0]
    last_R1 = np.maximum(count_R - 1, 0)[:, None]
    return Selected(
        np.where(count_R > 0, tokens_R, INVALID_TOKEN),
        np.zeros(len(tokens_R), np.uint32),
        np.take_along_axis(values, last_R1, axis=1)[:, 0],
        np.take_along_axis(ids, last_R1, axis=1)[:, 0],
        cut.mass_R,
    )


def _by_rejection(values_1V: Float32s, stats: RowStats, rows: SelectRows) -> Selected:
    """One row. Rounds are tried some at a time; the first member wins, so their number changes nothing."""
    nucleus = nucleus_scan(values_1V, stats.max_R, rows.temperatures_R, rows.top_p_R, rows.min_p_R)
    members = np.zeros(values_1V.shape[1], np.bool_)
    members[nucleus.first.ids_RC[0, nucleus.cut.kept_RC[0]]] = True
    for start in range(0, MAX_DRAWS, _DRAWS_AT_ONCE):
        rounds = np.arange(start, min(start + _DRAWS_AT_ONCE, MAX_DRAWS))
        drawn = two_level(stats, rows, np.zeros(len(rounds), np.int64), rounds)
        found = np.flatnonzero(members[drawn])
        if len(found):
            return _wide(nucleus, drawn[found[:1]], RowFlag.REJECTION)
    fallen = _best_kept(nucleus.first, nucleus.cut, stats.max_R, rows, MAX_DRAWS)
    return _wide(nucleus, fallen.tokens_R, RowFlag.REJECTION | RowFlag.NUCLEUS_SCAN)


def _wide(nucleus: Nucleus, tokens_1: Int64s, flags: RowFlag) -> Selected:
    last = max(int(nucleus.cut.kept_RC[0].sum()) - 1, 0)
    return Selected(
        tokens_1,
        np.array([int(flags)], np.uint32),
        nucleus.first.values_RC[:, last],
        nucleus.first.ids_RC[:, last],
        nucleus.cut.mass_R,
    )


def _selected(tokens_R: Int64s, mass_R: Float64s) -> Selected:
    """Rows that keep every token."""
    rows = len(tokens_R)
    least, last = np.full(rows, -np.inf, np.float32), np.full(rows, np.iinfo(np.int64).max)
    return Selected(tokens_R, np.zeros(rows, np.uint32), least, last, mass_R)


def _take(stats: RowStats, at: Int64s) -> RowStats:
    return RowStats(*(field[at] for field in stats))


def _join(parts: list[tuple[Int64s, Selected]], rows: int) -> Selected:
    """Rows of several parts in their own order."""
    joined = _selected(np.full(rows, INVALID_TOKEN, np.int64), np.zeros(rows))
    for at, part in parts:
        for whole, piece in zip(joined, part, strict=True):
            whole[at] = piece
    return joined
