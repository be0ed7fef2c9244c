"""Enumerates the distribution of the next token in float64, which every sampler is compared with.

Everything here is written for reading, one token at a time in Python floats, and shares no code with any sampler.
Shape legend: V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import SamplingParams

Float64s = npt.NDArray[np.float64]

MIN_TEMPERATURE = 1e-6
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
    temperature, best = max(params.temperature, MIN_TEMPERATURE), values[kept[0]]
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


def enumerate_distribution(
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
        temperature = max(params.temperature, MIN_TEMPERATURE)
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
    order: list[int]  # ids of the total order in this mode, removed by a filter or not; rank of order[i] is i + 1


def expected_logprobs(
    logits_V: Sequence[float] | npt.NDArray[np.floating],
    params: SamplingParams,
    mode: str,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> ExpectedLogprobs:
    """Returns what a row reports. `raw_logprobs`: of the logits as they came; `processed_logprobs`: of the distribution
    that draws, and for a greedy row of the values after the penalties at T = 1."""
    if mode == "raw_logprobs":
        values = clean_logits(logits_V)
        return ExpectedLogprobs(log_softmax(values), total_order(values))
    values = processed_values(logits_V, params, prompt, outputs)
    if params.temperature == 0:
        return ExpectedLogprobs(log_softmax(values), total_order(values))
    with np.errstate(divide="ignore"):
        return ExpectedLogprobs(np.log(enumerate_distribution(logits_V, params, prompt, outputs)), total_order(values))
