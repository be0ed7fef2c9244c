"""The kernels draw from the enumerated distribution, by the checks that the reference passes in
tests/gpu_sampler/test_distribution.py.

Interpreted, a few hundred draws show that the path is walked; the distribution itself is shown on a GPU.
"""

import numpy as np
import pytest

from tests.support.cases import CASES, factorial_p_values, factorial_rows, group_and_place
from tests.support.draws import DISTRIBUTION_ALPHA, DRAWS, check, kernel_draws, rows_of

FEW = 128


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["top-k, top-p and min-p", "everything"])
def test_kernels_draw_from_the_distribution(name: str, device: str) -> None:
    found = check(CASES[name], kernel_draws, count=DRAWS if device == "cuda" else FEW)
    assert found.p_value > DISTRIBUTION_ALPHA and found.distance < 1


def test_few_draws_reject_what_is_far_off(device: str) -> None:
    """A top-k of 5 where 9 were asked for: so much the interpreted draws resolve."""
    asked = CASES["top-k, top-p and min-p"]
    cut = kernel_draws(rows_of(asked.with_params(top_k=5), FEW))[:, 0]
    assert check(asked, lambda rows, steps: cut[:, None], count=FEW).p_value < DISTRIBUTION_ALPHA


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_draw_from_the_distribution(name: str) -> None:
    found = check(CASES[name], kernel_draws)
    assert found.p_value > DISTRIBUTION_ALPHA and found.distance < 1


@pytest.mark.gpu
def test_every_combination_of_parameters_draws_from_its_distribution() -> None:
    tokens_R = kernel_draws(factorial_rows()[0])[:, 0]
    found = factorial_p_values(tokens_R)
    assert min(found.values()) > DISTRIBUTION_ALPHA, {name: p for name, p in found.items() if p <= DISTRIBUTION_ALPHA}


@pytest.mark.gpu
def test_greedy_rows_take_the_first_token_of_the_total_order() -> None:
    rows = [row._replace(case=row.case.with_params(temperature=0.0)) for row in factorial_rows()[0][::7]]
    assert kernel_draws(rows)[:, 0].tolist() == [int(row.case.distribution().argmax()) for row in rows]


@pytest.mark.gpu
def test_group_and_token_in_it_are_independent() -> None:
    assert group_and_place(kernel_draws) > DISTRIBUTION_ALPHA


@pytest.mark.gpu
def test_steps_of_one_call_each_are_those_of_the_batch() -> None:
    """Draws of many rows together are what each row draws alone."""
    rows = rows_of(CASES["wide nucleus"], 300)
    together = kernel_draws(rows, 3)
    alone = np.concatenate([kernel_draws([row], 3) for row in rows[::37]])
    assert (together[::37] == alone).all()
