"""Every bad value is a ParamError that names field, value and range; every bound itself is allowed."""

import math
from typing import Any

import pytest

from gpu_sampler.sampling_params import MAX_EOS_TOKEN_IDS, ParamError, SamplingLimits, SamplingParams

V = 111
LIMITS = SamplingLimits()
HUGE = 10**400  # too large for a float
HUGER = 10**5000  # too large to be printed
NUMBERS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # allowed, refused
    "temperature": ((0, 0.0, -0.0, 1e-5, 1, 2), (-1e-9, 2.0000001)),
    "top_p": ((1e-9, 1 - 2**-24, 1), (0, -0.0, -1e-9, 1.0000001)),
    "min_p": ((0, 1e-9, 1), (-1e-9, 1.0000001)),
    "repetition_penalty": ((1e-300, 1, 10), (0, -1, 10.000001)),
    "frequency_penalty": ((-2, 0, 2), (-2.000001, 2.000001)),
    "presence_penalty": ((-2, 0, 2), (-2.000001, 2.000001)),
}
INTEGERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "top_k": ((-1, 0, 1, V, V + 1, HUGE), (-2, -HUGE)),
    "max_tokens": ((1, 2**31 - 1), (0, -1, 2**31, HUGE)),
    "min_tokens": ((0, 16), (-1, 17, HUGE)),  # max_tokens is 16
    "n": ((1, LIMITS.max_n), (0, LIMITS.max_n + 1, HUGE)),
    "seed": ((-(2**63), 0, 2**63, 2**64 - 1), (-(2**63) - 1, 2**64, HUGE)),
    "logprobs": ((0, LIMITS.max_logprobs), (-1, LIMITS.max_logprobs + 1, HUGE)),
}
LISTS: dict[str, tuple[int, int]] = {  # least and most entries
    "allowed_token_ids": (1, LIMITS.max_allowed_token_ids),
    "stop_token_ids": (0, LIMITS.max_stop_token_ids + MAX_EOS_TOKEN_IDS),
    "logprob_token_ids": (1, LIMITS.max_logprob_token_ids),
}
BAD_IDS: tuple[Any, ...] = (-1, V, 2**31 - 1, 2**31, 2**63, HUGE, True, "1", 1.0, math.nan, None)


def brief(value: object) -> str:
    """A name for a case: Python refuses to print HUGER."""
    return "huge" if isinstance(value, int) and abs(value) >= HUGE else str(value)


def refused(field: str, value: Any, name: str = "") -> ParamError:
    with pytest.raises(ParamError) as caught:
        SamplingParams(**{field: value}).validate(V)
    error = caught.value
    assert error.field == (name or field)
    assert f"`{error.field}` must be {error.allowed}. Given: {error.given}." == str(error)
    return error


@pytest.mark.parametrize("field", [*NUMBERS, *INTEGERS])
def test_every_bound_is_allowed(field: str) -> None:
    for value in (NUMBERS | INTEGERS)[field][0]:
        SamplingParams(**{field: value}).validate(V)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [*NUMBERS, *INTEGERS])
def test_one_beyond_a_bound_is_refused_with_field_value_and_range(field: str) -> None:
    for value in (NUMBERS | INTEGERS)[field][1]:
        error = refused(field, value)
        assert error.given == value or str(error.given).startswith("an integer of ")
        assert any(sign in error.allowed for sign in ("[", "]", ">=", "64-bit"))


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, False, "1", "NaN", None, HUGE, HUGER, [1], 1j], ids=brief
)
def test_what_is_no_finite_number_is_refused(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, True, False, "1", 1.0, -HUGER, [1]], ids=brief)
def test_what_is_no_integer_is_refused(field: str, value: Any) -> None:
    refused(field, value)


def test_default_parameters_are_allowed_for_a_vocabulary_of_one() -> None:
    SamplingParams().validate(1)


def test_min_tokens_may_reach_max_tokens_and_no_further() -> None:
    SamplingParams(max_tokens=3, min_tokens=3).validate(V)
    with pytest.raises(ParamError, match=r"`min_tokens` must be in \[0, 3\]. Given: 4"):
        SamplingParams(max_tokens=3, min_tokens=4).validate(V)


@pytest.mark.risk(
    "S4",
    figure="canary bytes changed: 0 of 8 KiB around each of over 15 buffers of a step and over 20 of a verification",
)
@pytest.mark.parametrize("field", LISTS)
@pytest.mark.parametrize("bad", BAD_IDS, ids=brief)
def test_ids_outside_of_the_vocabulary_are_refused(field: str, bad: Any) -> None:
    error = refused(field, (0, bad, V - 1))
    assert str(V) in error.allowed


@pytest.mark.parametrize("bad", BAD_IDS, ids=brief)
def test_ids_of_bias_and_bad_words_outside_of_the_vocabulary_are_refused(bad: Any) -> None:
    refused("logit_bias", ((0, 1.0), (bad, 1.0)))
    refused("bad_words_ids", ((0,), (V - 1, bad)), "bad_words")


@pytest.mark.parametrize("field", LISTS)
def test_lists_may_reach_their_limits_and_no_further(field: str) -> None:
    least, most = LISTS[field]
    wide = most + 1
    for length in (least, most):
        SamplingParams(**{field: tuple(range(length))}).validate(wide)  # type: ignore[arg-type]
    for length in {least - 1, most + 1} - {-1}:
        with pytest.raises(ParamError, match=f"`{field}` must be a list of {least} to {most} entries. Given: {length}"):
            SamplingParams(**{field: tuple(range(length))}).validate(wide)  # type: ignore[arg-type]


def test_the_first_and_last_id_and_duplicates_are_allowed() -> None:
    for field in LISTS:
        SamplingParams(**{field: (0, V - 1, 0)}).validate(V)  # type: ignore[arg-type]
    SamplingParams(logit_bias=((0, 1), (V - 1, -1.0)), bad_words_ids=((0, V - 1), (0,), (0,))).validate(V)


@pytest.mark.parametrize("value", [-100, 100, -0.0, 1e-300])
def test_bias_within_its_bounds_is_allowed(value: float) -> None:
    SamplingParams(logit_bias=((3, value),)).validate(V)


@pytest.mark.parametrize("value", [-100.001, 100.001, math.nan, math.inf, True, "1", None, HUGE], ids=brief)
def test_bias_that_is_no_number_in_range_is_refused(value: Any) -> None:
    assert "[-100, 100]" in refused("logit_bias", ((3, value),)).allowed


def test_bias_names_an_id_once_and_has_a_largest_length() -> None:
    refused("logit_bias", ((3, 1.0), (3, 2.0)))
    many = tuple((token, 1.0) for token in range(LIMITS.max_logit_bias + 1))
    SamplingParams(logit_bias=many[:-1]).validate(len(many))
    with pytest.raises(ParamError, match=f"Given: {len(many)} entries"):
        SamplingParams(logit_bias=many).validate(len(many))


def test_bad_words_have_a_largest_number_length_and_total() -> None:
    word = tuple(range(16))
    SamplingParams(bad_words_ids=(word,) * 64).validate(V)  # 1,024 tokens
    SamplingParams(bad_words_ids=((1,),) * 256).validate(V)  # with and without a leading space
    assert refused("bad_words_ids", (*[word] * 64, (1,)), "bad_words").given == "1025 tokens"
    assert refused("bad_words_ids", ((1,),) * 257, "bad_words").given == "257 entries"
    assert refused("bad_words_ids", ((*word, 16),), "bad_words").given == "a word of 17 tokens"
    assert refused("bad_words_ids", ((),), "bad_words").given == "a word of 0 tokens"


@pytest.mark.parametrize("value", [7, 7.5, "17", {1: 2}, True])
def test_what_is_no_list_is_refused(value: Any) -> None:
    for field in (*LISTS, "logit_bias"):
        refused(field, value)
    refused("bad_words_ids", value, "bad_words")
    refused("bad_words_ids", (value,), "bad_words")
    refused("logit_bias", (value,))


def test_limits_of_the_server_hold() -> None:
    limits = SamplingLimits(
        max_n=3, max_logprobs=300, max_logprob_token_ids=999, max_stop_token_ids=1, max_allowed_token_ids=2
    )
    SamplingParams(n=3, logprobs=256, stop_token_ids=(1,), allowed_token_ids=(1, 2)).validate(V, limits)
    bad: dict[str, Any] = {
        "n": 4,
        "logprobs": 257,  # never above what the sampler can do
        "logprob_token_ids": (1,) * 129,
        "stop_token_ids": (1,) * (2 + MAX_EOS_TOKEN_IDS),
        "allowed_token_ids": (1, 2, 3),
    }
    for field, value in bad.items():
        with pytest.raises(ParamError) as caught:
            SamplingParams(**{field: value}).validate(V, limits)
        assert caught.value.field == field
