"""The token behind a rejected draft: its distribution by route, its noise, and what of it has no weight."""

import numpy as np
import pytest

from gpu_sampler.reference import rejection_sample as module
from gpu_sampler.reference.filters import Int64s, Row
from gpu_sampler.reference.philox import Purpose
from gpu_sampler.reference.rejection_sample import draw_residual, residual
from gpu_sampler.reference.softmax_stats import Float64s
from tests.support.draws import DISTRIBUTION_ALPHA
from tests.support.statistics import chi_square

NONE = np.empty(0, np.int64)
DRAWS = 2000


def rows(count: int, position: int = 3) -> list[Row]:
    seeds = np.random.default_rng(4).integers(0, 2**64, count, np.uint64, endpoint=False)
    z_V = np.zeros(1, np.float32)  # which is not looked at
    return [Row(z_V, 0.0, 1.0, 0, 1.0, 0.0, seed, 0, position, NONE) for seed in seeds]


def draws(weights_V: Float64s, singles: Int64s, listed: bool, count: int = DRAWS) -> list[int]:
    return [draw_residual(weights_V, row, singles, listed=listed) for row in rows(count)]


def weights() -> Float64s:
    """Three groups of 128; few tokens have weight."""
    rng = np.random.default_rng(2)
    found = np.zeros(300)
    found[rng.choice(300, 12, replace=False)] = rng.gamma(1.0, size=12)
    found[[5, 130]] = 3.0
    return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("singles", [(), (5, 130, 7)], ids=["groups", "singles"])
def test_residual_is_drawn_by_its_weights(listed: bool, singles: tuple[int, ...]) -> None:
    weights_V = weights()
    counts = np.bincount(draws(weights_V, np.array(singles, np.int64), listed), minlength=len(weights_V))
    assert chi_square(counts, weights_V / weights_V.sum()).p_value > DISTRIBUTION_ALPHA


def test_singles_left_in_their_groups_too_fail_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._grouped
    monkeypatch.setattr(module, "_grouped", lambda weights_V, singles: right(weights_V, NONE))
    weights_V = weights()
    counts = np.bincount(draws(weights_V, np.array([5, 130, 7]), False), minlength=len(weights_V))
    assert chi_square(counts, weights_V / weights_V.sum()).p_value < DISTRIBUTION_ALPHA


def test_noise_of_one_level_used_in_the_other_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._residual_noise
    monkeypatch.setattr(module, "_residual_noise", lambda row, ids, purpose: right(row, ids % 128, Purpose.RESID_GROUP))
    weights_V = np.zeros(384)
    weights_V[[0, 1, 2, 128, 129, 130, 256, 257, 258]] = [1, 2, 3, 3, 2, 1, 2, 2, 2]
    counts = np.bincount(draws(weights_V, NONE, False), minlength=384)
    assert chi_square(counts, weights_V / weights_V.sum()).p_value < DISTRIBUTION_ALPHA


@pytest.mark.parametrize("listed", [True, False])
def test_token_without_weight_is_never_drawn(listed: bool) -> None:
    weights_V = np.zeros(129)
    weights_V[128] = 1e-17
    assert set(draws(weights_V, NONE, listed, 50)) == {128}
    assert set(draws(weights_V, np.array([0, 128]), listed, 50)) == {128}


def test_what_q_covers_is_gone_and_weight_scales_p_alone() -> None:
    p_V, q_V = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.3, 0.6, 0.0])
    np.testing.assert_allclose(residual(p_V, q_V), [0.4, 0, 0, 0])
    np.testing.assert_allclose(residual(p_V, q_V, 0.5), [0.15, 0, 0, 0])
    assert residual(p_V, p_V).sum() == 0
