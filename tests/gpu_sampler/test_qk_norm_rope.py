"""Heads normed and turned, number by number."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.layer_kernels import qk_norm_rope

T, H, D = 3, 2, 6
EPS = 0.25  # large enough to be seen
Floats = npt.NDArray[np.float32]


def heads_and_angles(seed: int = 0) -> tuple[Floats, Floats, Floats, Floats]:
    """Heads, two tables that are no cosines and sines, whose halves differ, and a norm's weight."""
    rng = np.random.default_rng(seed)
    shapes = (T, H, D), (T, D), (T, D), (D,)
    heads, cos, sin, norm = (rng.normal(0, 1, shape).astype(np.float32) for shape in shapes)
    return heads, cos, sin, norm


def slow(head: Floats, cos: Floats, sin: Floats, norm: Floats | None, eps: float) -> list[float]:
    x = [float(one) for one in head]
    if norm is not None:
        root = math.sqrt(math.fsum(one * one for one in x) / D + eps)
        x = [one / root * float(g) for one, g in zip(x, norm, strict=True)]
    half = D // 2
    low = [math.fsum((x[i] * float(cos[i]), -x[half + i] * float(sin[i]))) for i in range(half)]
    high = [math.fsum((x[half + i] * float(cos[half + i]), x[i] * float(sin[half + i]))) for i in range(half)]
    return low + high


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("eps", [0.0, EPS])
def test_heads_are_normed_and_turned_by_their_tokens_angles(eps: float, normed: bool) -> None:
    heads, cos, sin, weight = heads_and_angles()
    norm = weight if normed else None
    found = qk_norm_rope(heads, cos, sin, norm, eps)
    assert found.shape == (T, H, D) and found.dtype == np.float64
    for t in range(T):
        for h in range(H):
            assert found[t, h] == pytest.approx(slow(heads[t, h], cos[t], sin[t], norm, eps), rel=1e-12, abs=1e-12)


def test_a_quarter_turn_takes_the_first_half_to_the_second_and_that_back_with_its_sign_changed() -> None:
    heads, *_ = heads_and_angles(1)
    found = qk_norm_rope(heads, np.zeros((T, D), np.float32), np.ones((T, D), np.float32))
    assert np.array_equal(found[..., : D // 2], -heads[..., D // 2 :])
    assert np.array_equal(found[..., D // 2 :], heads[..., : D // 2])


def test_an_angle_of_zero_changes_nothing() -> None:
    heads, *_ = heads_and_angles(2)
    found = qk_norm_rope(heads, np.ones((T, D), np.float32), np.zeros((T, D), np.float32))
    assert np.array_equal(found, heads)


def test_a_rotation_keeps_lengths_and_the_norm_makes_them_one() -> None:
    heads, *_ = heads_and_angles(3)
    angles = np.tile(np.random.default_rng(4).uniform(-4, 4, (T, D // 2)), 2)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = qk_norm_rope(heads, cos, sin)  # angles of float64, so that what is left is the reference's own
    np.testing.assert_allclose((turned**2).sum(2), (heads.astype(np.float64) ** 2).sum(2), rtol=1e-12)
    normed = qk_norm_rope(heads, cos, sin, np.ones(D, np.float32))
    np.testing.assert_allclose((normed**2).mean(2), 1.0, rtol=1e-12)


def test_eps_holds_a_head_of_zeros_finite() -> None:
    _, cos, sin, norm = heads_and_angles(5)
    assert not qk_norm_rope(np.zeros((T, H, D), np.float32), cos, sin, norm, EPS).any()
