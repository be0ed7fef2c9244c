"""What tests hold a sampler against: the law of the design (section 2) by plain enumeration, and the statistics.

Everything here is written for reading, one token at a time in Python floats, and shares no code with any sampler.
Shape legend: V vocabulary, B bins of a chi-square test.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.params import SamplingParams

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

LEAST_TEMPERATURE = 1e-6
REMOVED = -math.inf


def clean_logits(logits_V: Sequence[float] | npt.NDArray[np.floating]) -> list[float]:
    """The logits as floats; NaN and +inf count as -inf."""
    values = [float(x) for x in logits_V]
    return [REMOVED if math.isnan(x) or x == math.inf else x for x in values]


def banned_tokens(params: SamplingParams, outputs: Sequence[int]) -> set[int]:
    """Ids that may not be drawn now: ends of bad words whose beginnings were just produced, and early stop ids."""
    banned: set[int] = set()
    for word in params.bad_words_ids:
        *begin, end = word
        if list(outputs[len(outputs) - len(begin) :]) == begin:
            banned.add(end)
    if len(outputs) < params.min_tokens:
        banned.update(params.stop_token_ids)
    return banned


def processed_values(
    logits_V: Sequence[float] | npt.NDArray[np.floating],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> list[float]:
    """[V] values after steps 1 and 2 (bias, allow set, bans, penalties), as fp32; removed tokens are -inf."""
    values = clean_logits(logits_V)
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in banned_tokens(params, outputs):
        values[token] = REMOVED
    if params.allowed_token_ids is not None:
        values = [x if token in params.allowed_token_ids else REMOVED for token, x in enumerate(values)]
    for token, x in enumerate(values):
        seen, count = token in prompt or token in outputs, list(outputs).count(token)
        if seen:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * count
        x -= params.presence_penalty if count > 0 else 0.0
        values[token] = float(np.float32(x))
    return values


def total_order(values: Sequence[float]) -> list[int]:
    """Ids of the finite values, largest first, the lower id first among equals."""
    finite = [token for token, x in enumerate(values) if x > REMOVED]
    return sorted(finite, key=lambda token: (-values[token], token))


def kept_tokens(values: Sequence[float], params: SamplingParams) -> list[int]:
    """The ids that may be drawn, in the total order: top-k, then top-p on the renormalised rest, then min-p."""
    kept = total_order(values)
    if not kept or params.temperature == 0:
        return kept[:1]
    temperature, best = max(params.temperature, LEAST_TEMPERATURE), values[kept[0]]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp((values[token] - best) / temperature) for token in kept]
        total = math.fsum(weights)
        kept = [kept[i] for i in range(len(kept)) if i == 0 or math.fsum(weights[:i]) / total < params.top_p]
    if params.min_p > 0:
        least = best + temperature * math.log(params.min_p)
        kept = [token for token in kept if values[token] >= least]
    return kept


def enumerate_law(
    logits_V: Sequence[float] | npt.NDArray[np.floating],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> Float64s:
    """[V] the probability of each token as the next one. All zero where no logit is finite."""
    values = processed_values(logits_V, params, prompt, outputs)
    kept = kept_tokens(values, params)
    probs_V = np.zeros(len(values))
    if kept:
        temperature = max(params.temperature, LEAST_TEMPERATURE)
        weights = [math.exp((values[token] - values[kept[0]]) / temperature) for token in kept]
        probs_V[kept] = np.array(weights) / math.fsum(weights)
    return probs_V


def log_softmax(values: Sequence[float]) -> Float64s:
    """[V] of the finite values; -inf elsewhere."""
    best = max(values)
    if best == REMOVED:
        return np.full(len(values), REMOVED)
    lse = best + math.log(math.fsum(math.exp(x - best) for x in values))
    return np.array([x - lse for x in values])


class ExpectedLogprobs(NamedTuple):
    logprobs: Float64s  # [V], -inf where removed
    order: list[int]  # ids of the total order in this mode; rank of order[i] is i + 1


def expected_logprobs(
    logits_V: Sequence[float] | npt.NDArray[np.floating],
    params: SamplingParams,
    mode: str,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> ExpectedLogprobs:
    """What a row reports. `raw_logprobs`: of the logits as they came; `processed_logprobs`: of the law that draws, and
    for a greedy row of the values after the penalties at T = 1."""
    if mode == "raw_logprobs":
        values = clean_logits(logits_V)
        return ExpectedLogprobs(log_softmax(values), total_order(values))
    values = processed_values(logits_V, params, prompt, outputs)
    if params.temperature == 0:
        return ExpectedLogprobs(log_softmax(values), total_order(values))
    with np.errstate(divide="ignore"):
        return ExpectedLogprobs(np.log(enumerate_law(logits_V, params, prompt, outputs)), kept_tokens(values, params))


class ChiSquare(NamedTuple):
    statistic: float
    dof: int
    p_value: float  # 0 if a token of probability zero was drawn, 1 if there was nothing to test


def chi_square(counts_B: npt.ArrayLike, probs_B: npt.ArrayLike, least_expected: float = 10.0) -> ChiSquare:
    """Pearson's test of `counts_B` against `probs_B`. Bins are taken from the rarest up and merged until each expects
    `least_expected`; a count where the probability is zero rejects outright."""
    counts, probs = np.asarray(counts_B, np.float64).ravel(), np.asarray(probs_B, np.float64).ravel()
    if counts.shape != probs.shape:
        raise ValueError(f"counts {counts.shape} and probabilities {probs.shape} differ in shape")
    if counts[probs <= 0].sum() > 0:
        return ChiSquare(math.inf, 1, 0.0)
    merged: list[tuple[float, float]] = []
    seen = expected = 0.0
    for i in np.argsort(probs, kind="stable"):
        seen, expected = seen + counts[i], expected + probs[i] * counts.sum()
        if expected >= least_expected:
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
    """What the total variation of `draws` exact draws exceeds with probability below `alpha`: its mean is at most
    0.5 sqrt(K / n) for K possible tokens, and one draw moves it by at most 1 / n (McDiarmid's inequality)."""
    support = int(np.count_nonzero(np.asarray(probs_B)))
    return 0.5 * math.sqrt(support / draws) + math.sqrt(math.log(1 / alpha) / (2 * draws))


def probability_transform(tokens_N: Int64s, laws_NV: Float64s, jitter_N: Float64s) -> Float64s:
    """[N] numbers that are uniform on [0, 1) if token i was drawn from law i: the probability of all likelier tokens
    (the lower id first among equals) plus `jitter` times its own. Below 0 marks a token of probability zero."""
    places_N = np.empty(len(tokens_N))
    for i, token in enumerate(tokens_N):
        law_V, own = laws_NV[i], laws_NV[i, token]
        ahead = (law_V > own) | ((law_V == own) & (np.arange(len(law_V)) < token))
        places_N[i] = law_V[ahead].sum() + jitter_N[i] * own if own > 0 else -1.0
    return places_N
