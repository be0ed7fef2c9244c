"""The formulas, against fsum in double precision."""

import math

import numpy as np
import pytest

from scoring.normalize import LOWEST, Scores, scores

LOGPROBS = np.log(np.array([[0.7, 0.2], [1e-30, 3e-30], [0.5, 0.5]], np.float64)).astype(np.float32)
NONE_FAILED = np.zeros(3, bool)


def check(found: Scores, softmax: bool) -> None:
    assert found.logprobs is not None and found.label_mass is not None
    for row, values in enumerate(LOGPROBS.astype(np.float64)):
        weights = [math.exp(value) for value in values]
        total = math.fsum(weights)
        expected = [weight / total if softmax else weight for weight in weights]
        np.testing.assert_allclose(found.probabilities[row], expected, rtol=1e-12)
        assert found.label_mass[row] == pytest.approx(min(1.0, total), rel=1e-12)
        assert found.logprobs[row].tolist() == values.tolist()


@pytest.mark.parametrize("softmax", [True, False])
def test_probabilities_and_mass_follow_the_formulas(softmax: bool) -> None:
    check(scores(LOGPROBS, NONE_FAILED, softmax=softmax, full=True), softmax)


def test_a_wrong_normalisation_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check(scores(LOGPROBS, NONE_FAILED, softmax=False, full=True), softmax=True)


def test_without_full_only_probabilities_are_given() -> None:
    found = scores(LOGPROBS - 5, NONE_FAILED, softmax=True, full=False)
    full = scores(LOGPROBS, NONE_FAILED, softmax=True, full=True)
    assert found.logprobs is None and found.label_mass is None
    np.testing.assert_allclose(found.probabilities, full.probabilities, rtol=1e-6)


def test_no_weight_no_score_and_never_a_nan() -> None:
    values = np.array([[-np.inf, -1], [-np.inf, -np.inf], [np.nan, -1], [np.inf, -1], [-1, -2]], np.float32)
    found = scores(values, np.array([False] * 4 + [True]), softmax=True, full=True)
    assert found.ok.tolist() == [True, False, False, False, False]
    assert found.probabilities[0].tolist() == [0.0, 1.0]
    assert found.logprobs is not None and found.logprobs[0].tolist() == [LOWEST, -1.0]
    assert found.label_mass is not None
    assert all(np.isfinite(part).all() for part in (found.probabilities, found.logprobs, found.label_mass))
