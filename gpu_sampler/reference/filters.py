"""Reference of `sample`: decides which tokens each row keeps, and which one it draws.

Three exact draws (Gumbel-max: Gumbel 1954; Maddison, Tarlow, Minka 2014):
- no filter: one Gumbel number a group of 128 ids picks the group, one a token picks the token in it (max-stability). A
  token with an entry in the row's overlay leaves its group and competes with the groups by its own number, so that no
  group's sum depends on where the overlay's tokens lie;
- few tokens kept: one Gumbel number a kept token;
- many tokens kept (more than CANDIDATES without a top-k): draws from the unfiltered row until the draw is a kept token.
The route depends on the row alone; the limits are part of RNG_VERSION.

The total order of a row is by value after penalties as float32, descending, then by token id, ascending; -0 equals +0.
It is strict, so "top-k", "rank", "argmax" and "mass before" each have one answer. Bfloat16 logits tie constantly.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag
from gpu_sampler.reference.philox import Purpose, gumbel, words
from gpu_sampler.reference.softmax_stats import GROUP, Float32s, Float64s, SoftmaxStats, grouped, softmax_stats

Int64s = npt.NDArray[np.int64]
CANDIDATES: Final = 256  # first tokens of the total order that a row lists before it draws by rejection
WIDE: Final = 1024  # a top-k above this is flagged
MAX_DRAWS: Final = 4096
_DRAWS_AT_ONCE: Final = 8


def clean(logits_RV: Float32s) -> tuple[Float32s, npt.NDArray[np.bool_]]:
    """Returns logits with NaN and +inf as -inf, and which rows had one."""
    bad_R = np.asarray(~(logits_RV.max(axis=1) < np.inf))  # the largest of a row with NaN is NaN, which compares false
    if not bad_R.any():
        return logits_RV, bad_R
    return np.where(logits_RV < np.inf, logits_RV, np.float32(-np.inf)), bad_R


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


class Row(NamedTuple):
    """Holds a row after bias, bans and penalties, and how to draw from it."""

    z_V: Float32s  # neither NaN nor +inf, at least one finite value
    best: float  # its largest value
    temperature: float  # > 0
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    min_p: float  # 0 = off
    seed: np.uint64
    branch: int
    position: int
    singles: Int64s  # ids with an overlay entry, which stand outside of their groups

    @property
    def others_V(self) -> Float32s:
        """Returns the row without its singles: what the groups hold."""
        if not len(self.singles):
            return self.z_V
        others = self.z_V.copy()
        others[self.singles] = -np.inf
        return others

    @property
    def log_min_p(self) -> float:
        """Returns ln(min_p), -inf where it is off."""
        return float(np.log(self.min_p)) if self.min_p > 0 else -np.inf


class Drawn(NamedTuple):
    """Holds a token that was drawn by rejection."""

    token: int
    flags: RowFlag
    kept: Int64s | None  # the kept tokens in order; None where the draw did not need them


def greedy(z_V: Float32s) -> int:
    """Returns the first token of the total order."""
    return int(z_V.argmax())


def draw_plain(rows: Sequence[Row]) -> list[int]:
    """Draws a token from each whole row, in two levels; the rows have one length."""
    stats = [softmax_stats(row.others_V, row.temperature) for row in rows]
    return _two_level(rows, stats, np.zeros(len(rows), np.int64))


def keep(row: Row) -> tuple[Int64s | None, RowFlag]:
    """Returns the kept tokens of a filtered row, None if they are more than a list of candidates holds, and flags."""
    ids = first(row.z_V, row.top_k or CANDIDATES + 1)
    ids = ids[row.z_V[ids] > -np.inf]
    x = scaled(row, ids)
    total = float(np.exp(x).sum()) if row.top_k else softmax_stats(row.z_V, row.temperature).total(row.temperature)
    kept = kept_prefix(x, total, row.top_p, row.log_min_p)
    flag = RowFlag.WIDE if row.top_k > WIDE else RowFlag(0)
    return (ids[:kept] if row.top_k or kept <= CANDIDATES else None), flag


def kept_prefix(x_n: Float64s, total: float, top_p: float, log_min_p: float) -> int:
    """Returns how many candidates stay, at least one.

    A token stays if and only if the mass strictly before it is below top_p x total and x >= ln(min_p).

    Args:
        x_n: (z - best) / T of candidates in order.
        total: the mass that top-p refers to, in units of exp(0) for the best token.
        top_p: 1 = off.
        log_min_p: -inf = off.
    """
    stays = x_n >= log_min_p
    if top_p < 1:
        weights = np.exp(x_n)
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        stays &= before < top_p * total
    return max(1, len(stays) if stays.all() else int(stays.argmin()))


def nucleus_scan(z_V: Float32s, temperature: float, top_p: float, log_min_p: float) -> Int64s:
    """Returns ids of the kept tokens of a row without top-k, in the total order."""
    order = first(z_V, len(z_V))
    order = order[: max(1, int(np.count_nonzero(z_V > -np.inf)))]
    x = (z_V[order].astype(np.float64) - float(z_V[order[0]])) / temperature
    return order[: kept_prefix(x, float(np.exp(x).sum()), top_p, log_min_p)]


def draw_kept(rows: Sequence[Row], kept: Sequence[Int64s]) -> list[int]:
    """Draws a token a row from its list of kept tokens."""
    return _draw_kept(rows, kept, round_=0)


def _draw_kept(rows: Sequence[Row], kept: Sequence[Int64s], round_: int) -> list[int]:
    width = max(map(len, kept))
    ids = np.zeros((len(rows), width), np.int64)
    values = np.full((len(rows), width), -np.inf)
    for index, (row, own) in enumerate(zip(rows, kept, strict=True)):
        ids[index, : len(own)] = own
        values[index, : len(own)] = scaled(row, own)
    best = (values + _noise(rows, ids, Purpose.SAMPLE_TOKEN, round_)).argmax(axis=1)
    return [int(token) for token in ids[np.arange(len(rows)), best]]


def draw_by_rejection(row: Row) -> Drawn:
    """Draws from the unfiltered row until the draw is a kept token, ties included.

    A draw is kept if and only if the mass strictly before it in the total order is below top_p of the whole and it
    passes min-p. After MAX_DRAWS the kept tokens are listed instead.
    """
    stats = softmax_stats(row.others_V, row.temperature)
    weights_V = np.exp(scaled(row, np.arange(len(row.z_V))))
    total = softmax_stats(row.z_V, row.temperature).total(row.temperature)
    bound = row.top_p * total if row.top_p < 1 else np.inf
    for start in range(0, MAX_DRAWS, _DRAWS_AT_ONCE):
        rounds = np.arange(start, start + _DRAWS_AT_ONCE)
        for token in _two_level([row] * len(rounds), [stats] * len(rounds), rounds):
            if scaled(row, np.array([token]))[0] >= row.log_min_p and _mass_before(row, weights_V, token) < bound:
                return Drawn(token, RowFlag.REJECTION, None)
    kept = nucleus_scan(row.z_V, row.temperature, row.top_p, row.log_min_p)
    token = _draw_kept([row], [kept], round_=MAX_DRAWS)[0]
    return Drawn(token, RowFlag.REJECTION | RowFlag.NUCLEUS_SCAN, kept)


def _two_level(rows: Sequence[Row], stats: Sequence[SoftmaxStats], rounds_R: Int64s) -> list[int]:
    """Draws a token from each whole row; round 0 is the draw of a row without filters.

    `stats` are those of the rows without their singles.
    """
    groups = np.arange(len(stats[0].sums_G))[None]
    weights = np.stack([one.log_weights(row.best, row.temperature) for one, row in zip(stats, rows, strict=True)])
    scores = weights + _noise(rows, groups, Purpose.SAMPLE_GROUP, rounds_R[:, None])
    chosen = scores.argmax(axis=1)
    ids = chosen[:, None] * GROUP + np.arange(GROUP)
    inside = np.stack([_inside(row, int(group)) for row, group in zip(rows, chosen, strict=True)])
    best = (inside + _noise(rows, ids, Purpose.SAMPLE_TOKEN, rounds_R[:, None])).argmax(axis=1)
    tokens = [int(token) for token in ids[np.arange(len(rows)), best]]
    for index, row in enumerate(rows):
        if len(row.singles):
            noise = _noise([row], row.singles[None], Purpose.SAMPLE_TOKEN, rounds_R[index])
            alone = scaled(row, row.singles) + noise[0]
            if alone.max() > scores[index].max():
                tokens[index] = int(row.singles[alone == alone.max()].min())
    return tokens


def _mass_before(row: Row, weights_V: Float64s, token: int) -> float:
    value = row.z_V[token]
    before = row.z_V > value
    before[:token] |= row.z_V[:token] == value
    return float(weights_V[before].sum())


def scaled(row: Row, ids: Int64s) -> Float64s:
    """Returns (z - best) / T of `ids`. The best is taken off first: z / T would round the noise away at small T."""
    found: Float64s = (row.z_V[ids].astype(np.float64) - row.best) / row.temperature
    return found


def _inside(row: Row, group: int) -> Float64s:
    values: Float64s = grouped_part(row.z_V, group)
    inside = row.singles[row.singles // GROUP == group] % GROUP
    values[inside] = -np.inf
    return (values - row.best) / row.temperature


def grouped_part(z_V: Float32s, group: int) -> Float64s:
    """Returns one group, float64 [128], filled up with -inf."""
    part: Float64s = grouped(z_V[group * GROUP : (group + 1) * GROUP])[0]
    return part


def _noise(rows: Sequence[Row], ids: Int64s, purpose: Purpose, round_: int | Int64s = 0) -> Float64s:
    """Returns Gumbel noise of `ids` [R, n], each row by its own seed, position and branch."""
    seeds = np.array([row.seed for row in rows], np.uint64)[:, None]
    positions = np.array([row.position for row in rows], np.int64)[:, None]
    branches = np.array([row.branch for row in rows], np.int64)[:, None]
    return gumbel(words(seeds, ids, positions, purpose, round_, branches)).astype(np.float64)
