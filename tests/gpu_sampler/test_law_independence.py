"""Draws are independent across positions, rows, adjacent seeds and branches, and the tails have their weight.

The joint tests compare pairs with the product of their laws, so they test the marginal laws again.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.device_noise import gumbels
from gpu_sampler.reference.philox import gumbel
from gpu_sampler.testing.cases import FILTERED_PAIR, PAIR, group_and_place
from gpu_sampler.testing.draws import (
    LAW_ALPHA,
    DrawRow,
    Draws,
    LawCase,
    against_joint_law,
    reference_draws,
    rows_of,
    torch_draws,
)

Noise = Callable[[npt.NDArray[np.uint32]], npt.NDArray[Any]]
SAMPLERS = pytest.mark.parametrize("draws", [reference_draws, torch_draws], ids=["reference", "torch"])
ROUTES = pytest.mark.parametrize("case", [PAIR, FILTERED_PAIR], ids=["two-level", "candidates"])


def pairs_agree(case: LawCase, first: list[DrawRow], second: list[DrawRow], draws: Draws) -> float:
    tokens = draws([*first, *second], 1)[:, 0]
    return against_joint_law(case, case, np.stack([tokens[: len(first)], tokens[len(first) :]], axis=1)).p_value


@SAMPLERS
@ROUTES
def test_positions_are_independent(case: LawCase, draws: Draws) -> None:
    tokens_RS = draws(rows_of(case, 2000, 1), 4)
    for one, other in itertools.combinations(range(4), 2):
        assert against_joint_law(case, case, tokens_RS[:, [one, other]]).p_value > LAW_ALPHA


@SAMPLERS
@ROUTES
@pytest.mark.parametrize("step", [1, 2, 1 << 16, 1 << 32, 1 << 63])
def test_adjacent_seeds_are_independent(case: LawCase, draws: Draws, step: int) -> None:
    rows = rows_of(case, 2000, 2)
    others = [row._replace(seed=(row.seed + step) % 2**64) for row in rows]
    assert pairs_agree(case, rows, others, draws) > LAW_ALPHA


@SAMPLERS
@ROUTES
def test_small_consecutive_seeds_give_independent_rows(case: LawCase, draws: Draws) -> None:
    tokens = draws([DrawRow(case, seed) for seed in range(4001)], 1)[:, 0]
    assert against_joint_law(case, case, np.stack([tokens[:-1:2], tokens[1::2]], axis=1)).p_value > LAW_ALPHA


@SAMPLERS
@ROUTES
def test_branches_of_one_request_are_independent(case: LawCase, draws: Draws) -> None:
    rows = rows_of(case, 2000, 3)
    for branch in (1, 2, 127):
        others = [row._replace(branch=branch) for row in rows]
        assert pairs_agree(case, rows, others, draws) > LAW_ALPHA


@SAMPLERS
def test_a_branch_is_not_a_later_position(draws: Draws) -> None:
    rows = rows_of(PAIR, 2000, 4)
    later = draws(rows, 2)[:, 1]
    branch = draws([row._replace(branch=1) for row in rows], 1)[:, 0]
    assert against_joint_law(PAIR, PAIR, np.stack([later, branch], axis=1)).p_value > LAW_ALPHA


@SAMPLERS
def test_group_and_token_in_it_are_independent(draws: Draws) -> None:
    assert group_and_place(draws) > LAW_ALPHA


def torch_gumbels(words: npt.NDArray[np.uint32]) -> npt.NDArray[Any]:
    return np.asarray(gumbels(torch.from_numpy(words.astype(np.int64))))


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


NOISES = [gumbel, torch_gumbels]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("nats", [0.0, 5.0, 12.0, 18.0, 19.0, 20.0])
def test_token_far_below_the_top_is_drawn_at_its_rate(noise: Noise, nats: float) -> None:
    assert rate_of_tail(noise, nats) * (1 + np.exp(nats)) == pytest.approx(1, abs=0.02)


def test_uniforms_of_24_bits_fail_the_same_check_in_the_tail() -> None:
    assert abs(rate_of_tail(coarse_uniforms, 18.0) * (1 + np.exp(18.0)) - 1) > 0.02


def extreme_words_are_harmless(noise: Noise) -> bool:
    """No word wins outright: the noise is finite, in [-2.82, 22.88], and least at the largest word."""
    words = np.concatenate([np.arange(4096), 2**31 + np.arange(-64, 64), 2**32 - 4096 + np.arange(4096)])
    found = noise(words.astype(np.uint32))
    inside = np.isfinite(found) & (found >= np.float32(-2.8205)) & (found <= np.float32(22.875))
    return bool(inside.all() and (np.diff(found) <= 0).all() and found[-1] < -2.8)


@pytest.mark.parametrize("noise", NOISES)
def test_no_word_wins_outright(noise: Noise) -> None:
    assert extreme_words_are_harmless(noise)


def test_uniform_that_reaches_one_or_zero_is_rejected() -> None:
    assert not extreme_words_are_harmless(closed_uniforms)
    assert not extreme_words_are_harmless(coarse_uniforms)
