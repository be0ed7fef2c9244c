"""Computes the statistics that tests of a sampler use, in numpy alone.

Shape legend: B bins, N draws, V vocabulary.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


class ChiSquare(NamedTuple):
    statistic: float
    dof: int
    p_value: float  # 0 if a token of probability zero was drawn, 1 if there was nothing to test


def chi_square(counts_B: npt.ArrayLike, probs_B: npt.ArrayLike, min_expected: float = 10.0) -> ChiSquare:
    """Pearson's test of `counts_B` against `probs_B`. Bins are taken from the rarest up and merged until each expects
    `min_expected`; a count where the probability is zero rejects outright."""
    counts, probs = np.asarray(counts_B, np.float64).ravel(), np.asarray(probs_B, np.float64).ravel()
    if counts.shape != probs.shape:
        raise ValueError(f"counts {counts.shape} and probabilities {probs.shape} differ in shape")
    if counts[probs <= 0].sum() > 0:
        return ChiSquare(math.inf, 1, 0.0)
    merged: list[tuple[float, float]] = []
    seen = expected = 0.0
    for i in np.argsort(probs, kind="stable"):
        seen, expected = seen + counts[i], expected + probs[i] * counts.sum()
        if expected >= min_expected:
            merged.append((seen, expected))
            seen = expected = 0.0
    if merged:  # what is left over of the largest bins (nothing, or too little for a bin of its own)
        merged[-1] = (merged[-1][0] + seen, merged[-1][1] + expected)
    dof = len(merged) - 1
    if dof < 1:
        return ChiSquare(0.0, 0, 1.0)
    statistic = math.fsum((o - e) ** 2 / e for o, e in merged)
    return ChiSquare(statistic, dof, chi_square_tail(statistic, dof))


def chi_square_tail(statistic: float, dof: int) -> float:
    """P(X >= statistic) for chi-square with `dof` degrees: the regularised upper incomplete gamma function Q(dof / 2,
    statistic / 2), by its series below the mean and by Lentz's continued fraction above it (DLMF 8.7.1 and 8.9.2)."""
    a, x = dof / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - scale * total)
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 10_000):
        numerator = -i * (i - a)
        b += 2
        d = 1 / (numerator * d + b or tiny)
        c = b + numerator / c or tiny
        fraction *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return scale * fraction


def total_variation(counts_B: npt.ArrayLike, probs_B: npt.ArrayLike) -> float:
    """Half the sum of |frequency - probability|."""
    counts, probs = np.asarray(counts_B, np.float64).ravel(), np.asarray(probs_B, np.float64).ravel()
    return float(0.5 * np.abs(counts / counts.sum() - probs).sum())


def total_variation_bound(probs_B: npt.ArrayLike, draws: int, alpha: float = 1e-4) -> float:
    """Bounds the total variation of `draws` exact draws, but for a probability below `alpha`: its mean is at most
    0.5 sqrt(K / n) for K possible tokens, and one draw moves it by at most 1 / n (McDiarmid's inequality)."""
    support = int(np.count_nonzero(np.asarray(probs_B)))
    return 0.5 * math.sqrt(support / draws) + math.sqrt(math.log(1 / alpha) / (2 * draws))


def probability_transform(tokens_N: Int64s, probs_NV: Float64s, jitter_N: Float64s) -> Float64s:
    """[N] numbers that are uniform on [0, 1) if token i was drawn from distribution i: the probability of all likelier
    tokens (the lower id first among equals) plus `jitter` times its own. Below 0 marks a token of probability zero."""
    places_N = np.empty(len(tokens_N))
    for i, token in enumerate(tokens_N):
        probs_V, own = probs_NV[i], probs_NV[i, token]
        ahead = (probs_V > own) | ((probs_V == own) & (np.arange(len(probs_V)) < token))
        places_N[i] = probs_V[ahead].sum() + jitter_N[i] * own if own > 0 else -1.0
    return places_N


def mean_surprise(counts_V: npt.ArrayLike, probs_V: npt.ArrayLike) -> float:
    """The two-sided p-value of the mean log-probability of the draws, normal by the central limit theorem."""
    counts, probs = np.asarray(counts_V, np.float64), np.asarray(probs_V, np.float64)
    counts, probs = counts[probs > 0], probs[probs > 0]
    logs, draws = np.log(probs), counts.sum()
    mean = float((probs * logs).sum())
    variance = float((probs * (logs - mean) ** 2).sum())
    if variance < 1e-12:
        return 1.0
    z = (float((counts * logs).sum()) / draws - mean) / math.sqrt(variance / draws)
    return math.erfc(abs(z) / math.sqrt(2))
