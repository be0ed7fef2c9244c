"""The total order: value descending, id ascending, -0 as +0; against a sort of Python tuples."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.reference.filters import clean, first, greedy, rank

Float32s = npt.NDArray[np.float32]


def slow_order(z_V: Float32s) -> list[int]:
    return sorted(range(len(z_V)), key=lambda token: (-float(z_V[token]), token))


def rows() -> dict[str, Float32s]:
    rng = np.random.default_rng(3)
    zeros = np.where(rng.random(300) < 0.5, np.float32(-0.0), np.float32(0.0))
    found = {
        "one token": np.zeros(1, np.float32),
        "all equal": np.full(129, 7.5),
        "zeros of both signs": zeros,
        "zeros and below": np.concatenate([[-1.0], zeros, [-2.0, 0.0, -0.0]]),
        "bf16 ties": np.round(rng.normal(0, 2, 777) * 4) / 4,
        "no ties": rng.normal(0, 3, 300),
        "one finite": np.where(np.arange(131) == 130, -3e38, -np.inf),
        "blocks of -inf": np.where(np.arange(515) // 64 % 2 == 0, -np.inf, rng.integers(0, 3, 515)),
        "nothing finite": np.full(17, -np.inf),
        "extremes": np.array([3.4e38, -3.4e38, 1e-45, -1e-45, 0, -0.0, 3.4e38, -np.inf]),
    }
    return {name: row.astype(np.float32) for name, row in found.items()}


@pytest.mark.parametrize("name", rows())
def test_first_elements_and_ranks_are_those_of_a_sort(name: str) -> None:
    z_V = rows()[name]
    order = slow_order(z_V)
    for n in {0, 1, 2, 17, len(z_V) // 2, len(z_V) - 1, len(z_V), len(z_V) + 1}:
        assert first(z_V, n).tolist() == order[:n]
    for place in {0, len(z_V) // 3, len(z_V) - 1}:
        assert rank(z_V, order[place]) == place + 1
    assert greedy(z_V) == order[0]


@pytest.mark.parametrize("name", rows())
def test_an_order_that_breaks_ties_by_the_higher_id_fails_the_same_check(name: str) -> None:
    z_V = rows()[name]
    wrong = sorted(range(len(z_V)), key=lambda token: (-float(z_V[token]), -token))
    tied = len(np.unique(z_V)) < len(z_V)
    assert (wrong == first(z_V, len(z_V)).tolist()) is not tied


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
def test_nan_and_inf_count_as_minus_inf_and_flag_their_row_only(bad: float) -> None:
    logits_RV = np.arange(33, dtype=np.float32).reshape(3, 11)
    logits_RV[1, [0, 7]] = bad
    logits_RV[2, 4] = -np.inf
    before = logits_RV.copy()
    cleaned, bad_R = clean(logits_RV)
    assert bad_R.tolist() == [False, True, False]
    assert np.flatnonzero(cleaned[1] == -np.inf).tolist() == [0, 7]
    assert np.flatnonzero(cleaned[2] == -np.inf).tolist() == [4]
    np.testing.assert_array_equal(logits_RV, before)  # what was given is left alone
    assert (cleaned[0] == before[0]).all()


def groups_of_lemma(z_V: Float32s, n: int, group: int) -> list[int]:
    """Groups whose maximum is above the n-th largest maximum, then the first tied ones by id, n in all."""
    maxima = [z_V[at : at + group].max() for at in range(0, len(z_V), group)]
    tau = sorted(maxima, reverse=True)[min(n, len(maxima)) - 1]
    above = [j for j, m in enumerate(maxima) if m > tau]
    return above + [j for j, m in enumerate(maxima) if m == tau][: n - len(above)]


@pytest.mark.parametrize("name", ["iid", "heavy", "clustered", "low ids heavy", "constant", "bf16", "holes"])
@pytest.mark.parametrize("n", [1, 2, 17, 50, 200])
def test_group_lemma_at_most_n_groups_hold_the_first_n_elements(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    size = 128 * 60 + 17
    row = {
        "iid": rng.normal(0, 2, size),
        "heavy": rng.standard_cauchy(size),
        "clustered": rng.normal(0, 1, size) + 9 * (np.arange(size) // 512 % 7 == 3),
        "low ids heavy": rng.normal(0, 1, size) - np.arange(size) / 500,
        "constant": np.zeros(size),
        "bf16": np.round(rng.normal(0, 1, size) * 2) / 2,
        "holes": np.where(rng.random(size) < 0.97, -np.inf, np.round(rng.normal(0, 1, size))),
    }[name].astype(np.float32)
    groups = groups_of_lemma(row, n, 128)
    assert len(groups) <= n
    assert {int(token) // 128 for token in first(row, n)} <= set(groups)


def test_one_group_fewer_fails_the_same_check() -> None:
    row = np.zeros(128 * 17, np.float32)
    row[::128] = 1
    assert {int(token) // 128 for token in first(row, 17)} == set(groups_of_lemma(row, 17, 128))
    assert not {int(token) // 128 for token in first(row, 17)} <= set(groups_of_lemma(row, 16, 128))
