"""The enumerated distribution against cases worked by hand, and the statistics against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from gpu_sampler.sampling_params import SamplingParams
from tests.support.distribution import enumerate_distribution, expected_logprobs, kept_tokens, processed_values
from tests.support.statistics import (
    chi_square,
    chi_square_tail,
    probability_transform,
    total_variation,
    total_variation_bound,
)

LOG = [math.log(x) for x in (8, 4, 2, 1, 1)]  # probabilities 1/2, 1/4, 1/8, 1/16, 1/16


def test_plain_distribution_is_the_softmax() -> None:
    np.testing.assert_allclose(
        enumerate_distribution(LOG, SamplingParams()), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16], rtol=1e-6
    )


def test_half_the_temperature_squares_the_odds() -> None:
    distribution = enumerate_distribution(LOG, SamplingParams(temperature=0.5))
    np.testing.assert_allclose(distribution, np.array([64, 16, 4, 1, 1]) / 86, rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=4), [0, 1, 2, 3]),  # of the tied last two the lower id
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.49), [0]),  # the mass before token 1 is one half
        (SamplingParams(top_p=0.51), [0, 1]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(top_k=2, top_p=0.6), [0]),  # renormalised to 2/3 and 1/3
        (SamplingParams(min_p=0.2), [0, 1, 2]),  # 1/8 >= 0.2 x 1/2
        (SamplingParams(min_p=1.0), [0]),
        (SamplingParams(min_p=0.2, temperature=0.5), [0, 1]),  # of the probabilities after the temperature
        (SamplingParams(temperature=0.0, top_k=3), [0]),
    ],
)
def test_filters_keep_what_a_hand_count_keeps(params: SamplingParams, kept: list[int]) -> None:
    assert kept_tokens(LOG[:4] + LOG[3:4], params) == kept


def test_equal_mass_at_p_is_outside() -> None:
    assert kept_tokens([1.5] * 4, SamplingParams(top_p=0.5)) == [0, 1]


def test_overlay_steps_follow_one_another() -> None:
    params = SamplingParams(
        logit_bias=((0, 1.0), (3, -2.0)),
        allowed_token_ids=(0, 1, 2, 3),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    values = processed_values([1.0, 4.0, -1.0, 1.0, 9.0], params, prompt=[0, 2], outputs=[1, 1, 3])
    # 0: (1 + 1) / 2, prompt only; 1: 4 / 2 - 2 x 0.5 - 0.25; 2: -1 x 2; 3: (1 - 2) x 2 - 0.5 - 0.25; 4 not allowed
    assert values == [1.0, 0.75, -2.0, -2.75, -math.inf]


def test_bad_words_and_early_stops_are_removed_only_when_due() -> None:
    params = SamplingParams(bad_words_ids=((3,), (1, 2), (2, 1, 0)), min_tokens=2, stop_token_ids=(4,))
    assert np.flatnonzero(enumerate_distribution([0.0] * 5, params, outputs=[1])).tolist() == [
        0,
        1,
    ]  # 2, 3 and 4 are out
    assert np.flatnonzero(enumerate_distribution([0.0] * 5, params, outputs=[2, 1])).tolist() == [1, 4]
    assert np.flatnonzero(enumerate_distribution([0.0] * 5, params, outputs=[1, 2])).tolist() == [0, 1, 2, 4]


def test_values_that_are_no_numbers_never_win() -> None:
    distribution = enumerate_distribution([math.nan, math.inf, 0.0, -math.inf], SamplingParams())
    assert distribution.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert enumerate_distribution([math.nan, math.inf], SamplingParams()).tolist() == [0.0, 0.0]


def test_log_probabilities_of_the_two_modes() -> None:
    params = SamplingParams(top_k=2, temperature=0.5, logit_bias=((4, -1.0),))
    raw = expected_logprobs(LOG, params, "raw_logprobs")
    np.testing.assert_allclose(np.exp(raw.logprobs), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16], rtol=1e-6)
    assert raw.order == [0, 1, 2, 3, 4]
    processed = expected_logprobs(LOG, params, "processed_logprobs")
    np.testing.assert_allclose(np.exp(processed.logprobs), [0.8, 0.2, 0, 0, 0], rtol=1e-6)
    assert processed.order == [0, 1, 2, 3, 4]
    greedy = expected_logprobs(LOG, SamplingParams(temperature=0.0, top_k=1), "processed_logprobs")
    np.testing.assert_allclose(np.exp(greedy.logprobs), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16], rtol=1e-6)


@pytest.mark.parametrize("dof", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.99, 1.01, 2.0, 9.0])
def test_chi_square_tail_is_scipys(dof: int, ratio: float) -> None:
    expected = float(stats.chi2.sf(ratio * dof, dof))
    assert chi_square_tail(ratio * dof, dof) == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_chi_square_merges_rare_bins_and_keeps_every_count() -> None:
    counts, probs = np.array([1, 3, 7, 39, 50]), np.array([0.01, 0.04, 0.05, 0.4, 0.5])
    merged = chi_square(counts, probs, min_expected=10)
    expected = stats.chisquare([11, 39, 50], [10, 40, 50])
    assert merged.dof == 2
    assert merged.statistic == pytest.approx(expected.statistic)
    assert merged.p_value == pytest.approx(expected.pvalue)


def test_one_count_where_the_distribution_has_nothing_rejects() -> None:
    assert chi_square([50, 49, 1], [0.5, 0.5, 0.0]).p_value == 0.0


def test_exact_draws_pass_and_wrong_ones_leave_the_total_variation_bound() -> None:
    rng = np.random.default_rng(5)
    probs = rng.dirichlet(np.ones(29))
    counts = rng.multinomial(20_000, probs)
    assert total_variation(counts, probs) < total_variation_bound(probs, 20_000)
    wrong = rng.multinomial(20_000, probs[::-1])
    assert total_variation(wrong, probs) > total_variation_bound(probs, 20_000)


def test_probability_transform_of_exact_draws_is_uniform() -> None:
    rng = np.random.default_rng(6)
    distributions = rng.dirichlet(np.ones(7), size=20_000)
    distributions[::3, 2] = 0.0
    distributions /= distributions.sum(1, keepdims=True)
    tokens = (rng.random((len(distributions), 1)) > distributions.cumsum(1)).sum(1)
    places = probability_transform(tokens, distributions, rng.random(len(distributions)))
    counts = np.histogram(places, 32, (0, 1))[0]
    assert counts.sum() == len(distributions)
    assert chi_square(counts, np.full(32, 1 / 32)).p_value > 1e-4
    assert chi_square(np.histogram(places**1.1, 32, (0, 1))[0], np.full(32, 1 / 32)).p_value < 1e-6
