"""The formulas, against fsum in double precision."""

import math

import numpy as np
import pytest

from scoring.errors import NONFINITE, ItemError, ScoreCode
from scoring.normalize import MIN_LOGPROB, normalize_labels, score_items
from scoring.row_builder import ScoringRows

LOGPROBS = np.log(np.array([[0.7, 0.2], [1e-30, 3e-30], [0.5, 0.5]], np.float64)).astype(np.float32)
NONE_FAILED = np.zeros(3, bool)


def check(softmax_given: bool, softmax: bool) -> None:
    probabilities, logprobs, mass, _ = normalize_labels(LOGPROBS, NONE_FAILED, softmax=softmax_given, full=True)
    assert logprobs is not None and mass is not None
    for row, values in enumerate(LOGPROBS.astype(np.float64)):
        weights = [math.exp(value) for value in values]
        total = math.fsum(weights)
        expected = [weight / total if softmax else weight for weight in weights]
        np.testing.assert_allclose(probabilities[row], expected, rtol=1e-12)
        assert mass[row] == pytest.approx(min(1.0, total), rel=1e-12)
        assert logprobs[row].tolist() == values.tolist()


@pytest.mark.parametrize("softmax", [True, False])
def test_probabilities_and_mass_follow_the_formulas(softmax: bool) -> None:
    check(softmax, softmax)


def test_a_wrong_normalization_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check(softmax_given=False, softmax=True)


def test_without_full_only_probabilities_are_given() -> None:
    found, logprobs, mass, _ = normalize_labels(LOGPROBS - 5, NONE_FAILED, softmax=True, full=False)
    full = normalize_labels(LOGPROBS, NONE_FAILED, softmax=True, full=True)[0]
    assert logprobs is None and mass is None
    np.testing.assert_allclose(found, full, rtol=1e-6)


def test_no_weight_no_score_and_never_a_nan() -> None:
    values = np.array([[-np.inf, -1], [-np.inf, -np.inf], [np.nan, -1], [np.inf, -1], [-1, -2]], np.float32)
    failed = np.array([False] * 4 + [True])
    probabilities, logprobs, mass, ok = normalize_labels(values, failed, softmax=True, full=True)
    assert ok.tolist() == [True, False, False, False, False]
    assert probabilities[0].tolist() == [0.0, 1.0]
    assert logprobs is not None and logprobs[0].tolist() == [MIN_LOGPROB, -1.0]
    assert mass is not None
    assert all(np.isfinite(part).all() for part in (probabilities, logprobs, mass))


def test_scores_stand_at_the_places_of_their_items() -> None:
    """Item 1 has no row, and the row of item 2 was not computed."""
    early = ItemError(ScoreCode.INVALID_VALUE, "no tokens")
    ints = np.array([0, 1, 3], np.int32)
    rows = ScoringRows(ints[:1], np.zeros(3, np.int32), ints, [0, 2], [0, 0, 4], {1: early}, "", {})
    status = np.array([0, 1], np.uint8)
    found = score_items(rows, LOGPROBS[:2], status, np.array([1, 0], np.int32), softmax=True, full=False)
    assert found.probabilities[0] == pytest.approx([7 / 9, 2 / 9])
    assert not found.probabilities[1:].any() and found.logprobs is None and found.label_mass is None
    assert found.errors == {1: early, 2: NONFINITE}
    assert [part.tolist() for part in (found.prompt_tokens, found.cached_tokens, found.truncated_tokens)] == [
        [2, 0, 3],
        [1, 0, 0],
        [0, 0, 4],
    ]
