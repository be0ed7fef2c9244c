"""Linear layers of few rows, and gated ones, from sums of products."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.layer_kernels import skinny_gemm

M, N, K = 3, 5, 17


def rows_and_weight(seed: int = 0) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    x, weight, bias = rng.normal(0, 1, (M, K)), rng.normal(0, 1, (2 * N, K)), rng.normal(0, 1, 2 * N)
    return x.astype(np.float32), weight.astype(np.float32), bias.astype(np.float32)


def slow(x: npt.NDArray[np.float32], w: npt.NDArray[np.float32], b: float) -> float:
    return math.fsum(float(one) * float(other) for one, other in zip(x, w, strict=True)) + b


@pytest.mark.parametrize("biased", [False, True])
def test_products_are_dot_products_and_the_bias(biased: bool) -> None:
    x, weight, bias = rows_and_weight()
    found = skinny_gemm(x, weight, bias if biased else None)
    assert found.shape == (M, 2 * N) and found.dtype == np.float64
    for i in range(M):
        for j in range(2 * N):
            exact = slow(x[i], weight[j], float(bias[j]) if biased else 0.0)
            assert found[i, j] == pytest.approx(exact, rel=1e-12, abs=1e-12)


def test_the_first_half_gates_the_second() -> None:
    x, weight, bias = rows_and_weight(1)
    found = skinny_gemm(x, weight, bias, gated=True)
    assert found.shape == (M, N)
    for i in range(M):
        for j in range(N):
            gate, up = (slow(x[i], weight[at], float(bias[at])) for at in (j, N + j))
            assert found[i, j] == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=1e-12, abs=1e-12)


def test_a_gate_far_from_zero_overflows_nothing() -> None:
    weight = np.array([[-1e4], [3.0]], np.float32)
    assert skinny_gemm(np.ones((1, 1), np.float32), weight, gated=True).tolist() == [[0.0]]
