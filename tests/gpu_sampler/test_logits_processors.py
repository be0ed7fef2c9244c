"""Steps 1 and 2 of a row (bias, allowed ids, bans, penalties) against the plain enumeration, and its edges."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.reference.logits_processors import apply_logits_processors, banned_now
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.state.host_state import SamplingState
from tests.support.distribution import processed_values

V = 111
INF = np.inf
LARGEST = float(np.finfo(np.float32).max)


def row(size: int = V) -> npt.NDArray[np.float32]:
    z_V = (np.random.default_rng(size).normal(0, 4, size) * 8).round().astype(np.float32) / np.float32(8)
    z_V[::13] = -INF
    z_V[1::17] = 0
    z_V[2::19] = -0.0
    return z_V


def patched(z_V: npt.NDArray[np.float32], params: SamplingParams, *tokens: list[int]) -> npt.NDArray[np.float32]:
    """`tokens`: the prompt, and what was generated."""
    prompt, output = (*tokens, [], [])[:2]
    state = SamplingState(num_slots=2, vocab_size=len(z_V), overlay_entries=256)
    state.admit(1, params, prompt, seed=0, output_ids=output)
    return apply_logits_processors(z_V, state, 1)


PARAMS: dict[str, dict[str, Any]] = {  # numbers that float32, in which the state keeps them, holds exactly
    "bias": {"logit_bias": ((0, 100), (5, -100), (13, 100), (110, 0.125), (7, -0.0))},
    "allowed": {"allowed_token_ids": (0, 1, 13, 110, 110)},
    "allowed and bias outside of it": {"allowed_token_ids": (3,), "logit_bias": ((4, 100),)},
    "bad word of one token": {"bad_words_ids": ((5,), (110,))},
    "bad words that end now": {"bad_words_ids": ((4, 9), (7, 4, 10), (6, 4, 11), (4, 4))},
    "ban and bias on one token": {"bad_words_ids": ((5,),), "logit_bias": ((5, 100),)},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (0, 5, 110)},
    "min_tokens reached": {"min_tokens": 3, "stop_token_ids": (0, 5, 110)},
    "repetition": {"repetition_penalty": 1.6875},
    "repetition below 1": {"repetition_penalty": 0.3125},
    "frequency": {"frequency_penalty": -1.375},
    "presence": {"presence_penalty": 2},
    "everything": {
        "logit_bias": ((4, 1.5), (7, -3), (0, 2)),
        "allowed_token_ids": (*range(0, V, 3), 4, 7),
        "bad_words_ids": ((4, 9), (12,)),
        "min_tokens": 9,
        "stop_token_ids": (15,),
        "repetition_penalty": 1.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.25,
    },
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("output", [[], [7, 7, 4], [110, 0, 4]])
def test_row_after_steps_1_and_2_is_that_of_the_enumeration(name: str, output: list[int]) -> None:
    params = SamplingParams(max_tokens=16, **PARAMS[name])
    z_V, prompt = row(), [3, 3, 26, 110, 1, 2]
    found = patched(z_V, params, prompt, output)
    expected = np.array(processed_values(z_V, params, prompt, output), np.float32)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(z_V, row())  # what was given is left alone


def test_penalties_leave_unseen_ids_alone() -> None:
    params = SamplingParams(repetition_penalty=9, frequency_penalty=2, presence_penalty=2)
    z_V = row()
    changed = patched(z_V, params, [1, 3], [3, 4]) != z_V
    assert set(np.flatnonzero(changed).tolist()) <= {1, 3, 4}
    assert not (patched(z_V, params) != z_V).any()


def test_zero_of_either_sign_is_multiplied_and_stays_zero() -> None:
    z_V = np.array([0.0, -0.0, 1.0], np.float32)
    assert patched(z_V, SamplingParams(repetition_penalty=3), [0, 1, 2]).tolist() == [0, 0, float(np.float32(1 / 3))]


def test_prompt_counts_for_repetition_only() -> None:
    z_V = np.full(5, 2.0, np.float32)
    params = SamplingParams(repetition_penalty=2, frequency_penalty=0.25, presence_penalty=0.5)
    assert patched(z_V, params, [0, 1], [1, 1, 2]).tolist() == [1, 0, 0.25, 2, 2]


def test_stop_ids_are_banned_until_min_tokens_and_no_longer() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(4,))
    z_V = np.zeros(7, np.float32)
    assert [patched(z_V, params, [], [0] * n)[4] for n in range(4)] == [-INF, -INF, 0, 0]


def test_longest_bad_word_is_matched_whole() -> None:
    word = tuple(range(16))
    z_V, params = np.zeros(V, np.float32), SamplingParams(bad_words_ids=(word,), max_tokens=40)
    assert patched(z_V, params, [], [9, *word[:-1]])[15] == -INF
    assert patched(z_V, params, [], [9, *word[1:-1]])[15] == 0
    assert patched(z_V, params, list(word[:-1]))[15] == 0  # a bad word is a thing of what is generated
    assert patched(z_V, SamplingParams(bad_words_ids=((5,) * 16,)), [], [5] * 14)[5] == 0


def test_nothing_is_banned_twice_or_by_an_empty_history() -> None:
    state = SamplingState(num_slots=2, vocab_size=V, overlay_entries=99)
    state.admit(1, SamplingParams(bad_words_ids=((1, 2), (3, 4, 5))), [1, 3, 4], seed=0)
    assert banned_now(state, 1).tolist() == []


@pytest.mark.parametrize("repetition", [1e-300, 1e-40, 1e-30, 10])
@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_no_penalty_or_bias_makes_nan_or_plus_inf(repetition: float, bias: float) -> None:
    z_V = np.array([LARGEST, -LARGEST, 0.0, -0.0, -INF, 1e-45, 1.0, -1.0], np.float32)
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=-2,
        presence_penalty=-2,
        logit_bias=tuple((token, bias) for token in range(8)),
    )
    found = patched(z_V, params, list(range(8)), list(range(8)))
    assert (found < INF).all()
    assert found[4] == -INF and found[0] == (LARGEST if repetition < 1 else np.float32(LARGEST / 10))


def test_row_without_features_is_handed_on_as_it_is() -> None:
    z_V = row()
    assert patched(z_V, SamplingParams(top_k=3, min_tokens=0, stop_token_ids=(4,))) is z_V
    state = SamplingState(num_slots=2, vocab_size=V)
    assert apply_logits_processors(z_V, state, 0) is z_V


def test_vocabulary_of_one_token() -> None:
    z_V = np.array([1.5], np.float32)
    assert patched(z_V, SamplingParams(logit_bias=((0, -100),)), [0], [0]).tolist() == [-98.5]
    assert patched(z_V, SamplingParams(bad_words_ids=((0,),))).tolist() == [-INF]
    assert patched(z_V, SamplingParams(allowed_token_ids=(0,), presence_penalty=1), [], [0]).tolist() == [0.5]
