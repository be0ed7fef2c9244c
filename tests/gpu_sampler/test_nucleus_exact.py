"""The exact nucleus of a row of any width, against a walk along the order."""

import math

import numpy as np
import pytest

from gpu_sampler.reference.filters import kept_prefix, nucleus_scan
from tests.support.cases import coarse_logits

BELOW_1 = 1 - 2**-24


def slow_kept(z: list[float], temperature: float, top_p: float, log_min_p: float) -> list[int]:
    finite = [token for token, value in enumerate(z) if value > -math.inf]
    order = sorted(finite, key=lambda token: (-z[token], token)) or [0]
    x = [(z[token] - z[order[0]]) / temperature for token in order]
    total = math.fsum(map(math.exp, x))
    count = 1
    while count < len(order):
        before = math.fsum(map(math.exp, x[:count]))
        if not (x[count] >= log_min_p and (top_p == 1 or before < top_p * total)):
            break
        count += 1
    return order[:count]


@pytest.mark.parametrize("size", [1, 3, 128, 300, 515])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, BELOW_1, 1.0])
@pytest.mark.parametrize("log_min_p", [-math.inf, math.log(0.05), 0.0])
def test_nucleus_is_that_of_a_walk_along_the_order(size: int, top_p: float, log_min_p: float) -> None:
    for temperature in (1e-5, 0.5, 2.0):
        z_V = coarse_logits(size, 3, 0.4)
        if size > 3:
            z_V[::7] = -np.inf
        found = nucleus_scan(z_V, temperature, top_p, log_min_p)
        assert found.tolist() == slow_kept(z_V.tolist(), temperature, top_p, log_min_p)


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 320), (0.75, 480), (0.750001, 481), (1e-9, 1), (1.0, 640)])
def test_constant_row_is_cut_by_counting(top_p: float, count: int) -> None:
    assert nucleus_scan(np.full(640, -1.25, np.float32), 1.0, top_p, -math.inf).tolist() == list(range(count))


def test_one_finite_token_is_the_nucleus() -> None:
    z_V = np.full(131, -np.inf, np.float32)
    z_V[130] = -3e38
    assert nucleus_scan(z_V, 1.0, BELOW_1, -math.inf).tolist() == [130]


def test_first_token_always_stays() -> None:
    assert kept_prefix(np.array([0.0, -1.0]), 2.0, 1e-9, -math.inf) == 1
    assert kept_prefix(np.array([0.0]), 1e9, 1e-9, 0.0) == 1


def test_everything_stays_without_filters() -> None:
    assert kept_prefix(np.array([0.0, -1.0, -800.0]), 1.37, 1.0, -math.inf) == 3
