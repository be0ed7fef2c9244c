"""Checks the noise itself, word by word, and makes noise that fails the checks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Noise = Callable[[npt.NDArray[np.uint32]], npt.NDArray[Any]]
"""Words to standard Gumbel noise, which must fall as the word grows."""


def coarse_uniforms(words: npt.NDArray[np.uint32]) -> npt.NDArray[Any]:
    """The planted fault: 24 bits of the word, as many generators of floats use."""
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(-np.log1p(-(words >> 8).astype(np.float32) / np.float32(2**24))))


def closed_uniforms(words: npt.NDArray[np.uint32]) -> npt.NDArray[Any]:
    """The planted fault: the word 0xFFFFFFFF gives 1."""
    uniforms = (words.astype(np.float64) / (2**32 - 1)).astype(np.float32)
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(-np.log1p(-uniforms)))


def rate_of_tail(noise: Noise, nats: float) -> float:
    """How often a token `nats` below the top one beats it, over all words for the lower token and 4,096 evenly spread
    words for the upper one. Noise falls as the word grows, so the words that win are counted by bisection."""
    upper = (np.arange(4096, dtype=np.uint64) * 2**20 + 2**19).astype(np.uint32)
    needed = noise(upper) + np.float32(nats)
    low, high = np.zeros(4096, np.int64), np.full(4096, 2**32, np.int64)  # words below `low` win, from `high` on lose
    while (low < high).any():
        middle = (low + high) // 2
        wins = noise(np.minimum(middle, 2**32 - 1).astype(np.uint32)) > needed
        wins &= middle < 2**32
        low, high = np.where(wins, middle + 1, low), np.where(wins, high, np.maximum(middle, low))
    return float(low.mean()) / 2**32


def extreme_words_are_harmless(noise: Noise) -> bool:
    """No word wins outright: the noise is finite, in [-2.82, 22.88], and least at the largest word."""
    words = np.concatenate([np.arange(4096), 2**31 + np.arange(-64, 64), 2**32 - 4096 + np.arange(4096)])
    found = noise(words.astype(np.uint32))
    inside = np.isfinite(found) & (found >= np.float32(-2.8205)) & (found <= np.float32(22.875))
    return bool(inside.all() and (np.diff(found) <= 0).all() and found[-1] < -2.8)
