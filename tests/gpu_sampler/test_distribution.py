"""The reference draws from the enumerated distribution: chi-square over the full factorial of the parameters, over
single cases with many draws, on ties, on several groups of 128 and where the nucleus is too wide to list.

The checks are functions of the tokens alone; test_distribution_faults.py plants faults before the same checks, and
kernels/test_distribution.py holds the kernels against them.
"""

from functools import cache

import numpy as np
import pytest

from gpu_sampler.output import RowFlag
from tests.support.cases import CASES, factorial_p_values, factorial_rows
from tests.support.distribution import expected_logprobs
from tests.support.draws import DISTRIBUTION_ALPHA, Reported, check, reference_draws, reference_reports, rows_of
from tests.support.slow import slow_token


@cache
def factorial_reports() -> Reported:
    """Returns what the reference says to all combinations, with processed log-probabilities of every token."""
    return reference_reports(factorial_rows()[0], "processed_logprobs")


@pytest.mark.full
@pytest.mark.risk("D2", figure="exactness")
def test_every_combination_of_parameters_draws_from_its_distribution() -> None:
    tokens_R = factorial_reports().tokens.astype(np.int64)
    found = factorial_p_values(tokens_R)
    assert min(found.values()) > DISTRIBUTION_ALPHA, {name: p for name, p in found.items() if p <= DISTRIBUTION_ALPHA}


def test_every_combination_reports_the_distribution_itself_as_processed_logprobs() -> None:
    rows, probs_RV = factorial_rows()
    chosen_RV = factorial_reports().chosen_logprobs.astype(np.float64)
    assert chosen_RV.shape == probs_RV.shape
    np.testing.assert_array_equal(chosen_RV == -np.inf, probs_RV == 0)
    with np.errstate(divide="ignore"):
        errors_RV = np.abs(np.where(probs_RV > 0, chosen_RV, 0) - np.where(probs_RV > 0, np.log(probs_RV), 0))
    assert errors_RV.max() <= 2e-5, rows[int(errors_RV.max(1).argmax())]
    np.testing.assert_allclose(np.exp(chosen_RV).sum(1), 1.0, atol=2e-5)


def test_every_combination_ranks_by_the_total_order() -> None:
    rows, _ = factorial_rows()
    output = factorial_reports()
    for i, (case, _, _) in enumerate(rows):
        order = expected_logprobs(case.logits_V, case.params, "processed_logprobs", case.prompt, case.outputs).order
        token = int(output.tokens[i])
        assert order[int(output.ranks[i]) - 1] == token
        first = (order + [-1] * 3)[:3]
        assert output.top_ids[i, :3].tolist() == first
        chosen = output.chosen_logprobs[i]
        assert output.logprobs[i] == chosen[token]  # the same float wherever a token's number appears
        assert output.top_logprobs[i, :3].tolist() == [chosen[t] if t >= 0 else -np.inf for t in first]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_logprobs_are_those_of_the_logits_as_they_came(temperature: float) -> None:
    rows = factorial_rows()[0][::31]
    rows = [row._replace(case=row.case.with_params(temperature=temperature)) for row in rows]
    output = reference_reports(rows)
    for i, (case, _, _) in enumerate(rows):
        expected = expected_logprobs(case.logits_V, case.params, "raw_logprobs")
        np.testing.assert_allclose(output.chosen_logprobs[i], expected.logprobs, atol=2e-5)
        assert expected.order[int(output.ranks[i]) - 1] == output.tokens[i]
        assert output.top_ids[i, :3].tolist() == expected.order[:3]
        np.testing.assert_allclose(np.exp(output.chosen_logprobs[i].astype(np.float64)).sum(), 1, atol=2e-5)


def test_greedy_rows_take_the_first_token_of_the_total_order() -> None:
    rows = [row._replace(case=row.case.with_params(temperature=0.0)) for row in factorial_rows()[0][::7]]
    tokens_R = reference_draws(rows)[:, 0]
    assert tokens_R.tolist() == [int(row.case.distribution().argmax()) for row in rows]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_reference_draws_from_the_distribution(name: str) -> None:
    p_value, distance = check(CASES[name], reference_draws)
    assert p_value > DISTRIBUTION_ALPHA
    assert distance < 1


@pytest.mark.parametrize("name", [name for name in CASES if "wide" in name])
def test_wide_nuclei_are_drawn_by_rejection_and_narrow_ones_are_not(name: str) -> None:
    wide, narrow = rows_of(CASES[name], 3), rows_of(CASES[name].with_params(temperature=0.01, min_p=0.0), 3)
    output = reference_reports(wide)
    assert (output.flags & RowFlag.REJECTION != 0).all()
    if "ties" not in name:  # a constant row stays wide at every temperature
        output = reference_reports(narrow)
        assert (output.flags & RowFlag.REJECTION == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_reference_draws_the_tokens_of_the_slow_computation(name: str) -> None:
    rows = rows_of(CASES[name], 12, 9)
    assert reference_draws(rows)[:, 0].tolist() == [slow_token(row) for row in rows]
