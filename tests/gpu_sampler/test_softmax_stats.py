"""Group maxima and sums, and the log-sum-exp made of them, against sums of Python floats."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.reference.logprobs import raw_view
from gpu_sampler.reference.softmax_stats import GROUP, Float32s, grouped, softmax_stats

SIZES = [1, 3, 17, 127, 128, 129, 300, 1003]


def row(size: int, spread: float = 3.0) -> npt.NDArray[np.float32]:
    z_V = np.random.default_rng(size).normal(0, spread, size).astype(np.float32)
    z_V[size // 2 : size // 2 + size // 5] = -np.inf
    return z_V


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 0.3, 1.0, 2.0, 100.0])
def test_group_statistics_are_those_of_python_sums(size: int, temperature: float) -> None:
    z_V = row(size)
    stats = softmax_stats(z_V, temperature)
    assert len(stats.maxima_G) == len(stats.sums_G) == -(-size // GROUP)
    assert stats.best == z_V.max()
    for j in range(len(stats.maxima_G)):
        values = [float(x) for x in z_V[j * GROUP : (j + 1) * GROUP] if x > -np.inf]
        assert stats.maxima_G[j] == max(values, default=-math.inf)
        exact = math.fsum(math.exp((x - max(values)) / temperature) for x in values)
        assert stats.sums_G[j] == pytest.approx(exact, rel=1e-13)
    total = math.fsum(math.exp((float(x) - stats.best) / temperature) for x in z_V)
    assert stats.total(temperature) == pytest.approx(total, rel=1e-12)


def test_group_without_a_finite_value_weighs_nothing() -> None:
    z_V = np.full(300, -np.inf, np.float32)
    z_V[[5, 299]] = (1.0, -3e38)
    stats = softmax_stats(z_V, 0.5)
    assert stats.maxima_G.tolist() == [1, -np.inf, float(np.float32(-3e38))]
    assert stats.sums_G.tolist() == [1, 0, 1]
    assert stats.log_weights(stats.best, 0.5)[1] == -np.inf and stats.total(0.5) == 1


def test_groups_are_contiguous_and_filled_up_with_minus_inf() -> None:
    groups = grouped(np.arange(129, dtype=np.float32))
    assert groups.shape == (2, 128) and groups[0].tolist() == list(range(128))
    assert groups[1, 0] == 128 and (groups[1, 1:] == -np.inf).all()


def log_sum_exp(z_V: Float32s) -> float:
    """Returns what raw log-probabilities are taken from."""
    view = raw_view(z_V)
    return view.shift + view.log_sum


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [-3e4, 0.0, 88.0, 3e4])
def test_log_sum_exp_is_exact_wherever_the_row_lies(size: int, shift: float) -> None:
    z_V = row(size) + np.float32(shift)
    best = float(z_V.max())
    exact = best + math.log(math.fsum(math.exp(float(x) - best) for x in z_V))
    assert log_sum_exp(z_V) == pytest.approx(exact, rel=1e-14, abs=1e-14)


def test_log_sum_exp_of_a_row_without_a_finite_value_is_minus_inf() -> None:
    assert log_sum_exp(np.full(3, -np.inf, np.float32)) == -np.inf
    assert log_sum_exp(np.array([-np.inf, 4, -np.inf], np.float32)) == 4
