"""Draws are independent across positions, rows, adjacent seeds and branches, and the tails have their weight.

The joint tests compare pairs with the product of their laws, so they test the marginal laws again.
"""

import itertools

import numpy as np
import pytest

from gpu_sampler.reference.philox import gumbel
from tests.support.cases import FILTERED_PAIR, PAIR, group_and_place
from tests.support.draws import LAW_ALPHA, DrawRow, LawCase, against_joint_law, reference_draws, rows_of
from tests.support.tails import closed_uniforms, coarse_uniforms, extreme_words_are_harmless, rate_of_tail

ROUTES = pytest.mark.parametrize("case", [PAIR, FILTERED_PAIR], ids=["two-level", "candidates"])


def pairs_agree(case: LawCase, first: list[DrawRow], second: list[DrawRow]) -> float:
    tokens = reference_draws([*first, *second], 1)[:, 0]
    return against_joint_law(case, case, np.stack([tokens[: len(first)], tokens[len(first) :]], axis=1)).p_value


@pytest.mark.risk("D2")
@ROUTES
def test_positions_are_independent(case: LawCase) -> None:
    tokens_RS = reference_draws(rows_of(case, 2000, 1), 4)
    for one, other in itertools.combinations(range(4), 2):
        assert against_joint_law(case, case, tokens_RS[:, [one, other]]).p_value > LAW_ALPHA


@pytest.mark.full(keep=1)
@ROUTES
@pytest.mark.parametrize("step", [1, 2, 1 << 16, 1 << 32, 1 << 63])
def test_adjacent_seeds_are_independent(case: LawCase, step: int) -> None:
    rows = rows_of(case, 2000, 2)
    others = [row._replace(seed=(row.seed + step) % 2**64) for row in rows]
    assert pairs_agree(case, rows, others) > LAW_ALPHA


@ROUTES
def test_small_consecutive_seeds_give_independent_rows(case: LawCase) -> None:
    tokens = reference_draws([DrawRow(case, seed) for seed in range(4001)], 1)[:, 0]
    assert against_joint_law(case, case, np.stack([tokens[:-1:2], tokens[1::2]], axis=1)).p_value > LAW_ALPHA


@pytest.mark.full(keep=1)
@ROUTES
def test_branches_of_one_request_are_independent(case: LawCase) -> None:
    rows = rows_of(case, 2000, 3)
    for branch in (1, 2, 127):
        others = [row._replace(branch=branch) for row in rows]
        assert pairs_agree(case, rows, others) > LAW_ALPHA


def test_a_branch_is_not_a_later_position() -> None:
    rows = rows_of(PAIR, 2000, 4)
    later = reference_draws(rows, 2)[:, 1]
    branch = reference_draws([row._replace(branch=1) for row in rows], 1)[:, 0]
    assert against_joint_law(PAIR, PAIR, np.stack([later, branch], axis=1)).p_value > LAW_ALPHA


def test_group_and_token_in_it_are_independent() -> None:
    assert group_and_place(reference_draws) > LAW_ALPHA


@pytest.mark.parametrize("nats", [0.0, 5.0, 12.0, 18.0, 19.0, 20.0])
def test_token_far_below_the_top_is_drawn_at_its_rate(nats: float) -> None:
    assert rate_of_tail(gumbel, nats) * (1 + np.exp(nats)) == pytest.approx(1, abs=0.02)


def test_uniforms_of_24_bits_fail_the_same_check_in_the_tail() -> None:
    assert abs(rate_of_tail(coarse_uniforms, 18.0) * (1 + np.exp(18.0)) - 1) > 0.02


def test_no_word_wins_outright() -> None:
    assert extreme_words_are_harmless(gumbel)


def test_uniform_that_reaches_one_or_zero_is_rejected() -> None:
    assert not extreme_words_are_harmless(closed_uniforms)
    assert not extreme_words_are_harmless(coarse_uniforms)
