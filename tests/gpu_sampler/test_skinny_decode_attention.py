"""Attention of single tokens over slots of a pool, from sums of products, one token after another."""

import math
from typing import Any

import numpy as np
import pytest

from tests.support.layer_kernels import skinny_decode_attention

R, H, G, D, SLOTS = 3, 4, 2, 5, 20
LENGTHS = (1, 7, 12)
SCALE = 0.7


def inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    q, keys, values = (rng.normal(0, 1, shape) for shape in ((R, H, D), (SLOTS, 1, G, D), (SLOTS, 1, G, D)))
    indices = np.concatenate([rng.permutation(SLOTS)[:length] for length in LENGTHS]).astype(np.int32)
    indptr = np.cumsum([0, *LENGTHS]).astype(np.int32)
    return q.astype(np.float32), keys.astype(np.float32), values.astype(np.float32), indptr, indices


def slow(given: tuple[Any, ...], row: int, head: int, softcap: float, window: int) -> tuple[list[float], float]:
    """Returns what one head of a row gives, and the natural logarithm of its sum."""
    q, keys, values, indptr, indices = given
    slots = [int(slot) for slot in indices[indptr[row] : indptr[row + 1]]]
    if window:
        slots = slots[max(0, len(slots) - window) :]
    group = head // (H // G)
    scores = [
        SCALE * math.fsum(float(a) * float(b) for a, b in zip(q[row, head], keys[s, 0, group], strict=True))
        for s in slots
    ]
    if softcap:
        scores = [softcap * math.tanh(score / softcap) for score in scores]
    total = math.fsum(map(math.exp, scores))
    out = [
        math.fsum(math.exp(score) * float(values[s, 0, group, d]) for score, s in zip(scores, slots, strict=True))
        / total
        for d in range(D)
    ]
    return out, math.log(total)


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.8])
def test_heads_are_weighted_means_of_the_values_of_their_group(softcap: float, window: int) -> None:
    given = inputs()
    out, lse = skinny_decode_attention(*given, scale=SCALE, softcap=softcap, window=window)
    assert out.shape == (R, H, D) and lse.shape == (R, H) and out.dtype == np.float64
    for row in range(R):
        for head in range(H):
            expected, logarithm = slow(given, row, head, softcap, window)
            assert out[row, head].tolist() == pytest.approx(expected, rel=1e-12)
            assert lse[row, head] == pytest.approx(logarithm / math.log(2), rel=1e-12)


def test_scores_far_from_zero_overflow_nothing() -> None:
    q, keys, values, indptr, indices = inputs()
    out, lse = skinny_decode_attention(q * 1e4, keys, values, indptr, indices, scale=SCALE)
    assert np.isfinite(out).all() and np.isfinite(lse).all() and lse.max() > 1e4
