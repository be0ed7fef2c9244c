"""Whose turn it is: weighted time by kind, what was idle, and the gap of running rows."""

from collections import Counter

import pytest
import torch

from engine.batch.input_batch import StepKind
from engine.config import EngineConfig
from engine.scheduler import policy as policy_module
from engine.scheduler.policy import StepPolicy

DECODE, PREFILL, SCORE = StepKind.DECODE, StepKind.PREFILL, StepKind.SCORE
NEVER = 10.0  # seconds, longer than any of these steps


def policy_of(decode_gap_s: float) -> StepPolicy:
    return StepPolicy(EngineConfig(decode_gap_s=decode_gap_s), torch.device("cpu"))


def shares(
    policy: StepPolicy, kinds: list[StepKind], seconds: dict[StepKind, float], until: float
) -> dict[StepKind, float]:
    """The part of the time that each kind gets while all of them have work, steps of each taking so long."""
    spent, now = Counter[StepKind](), 0.0
    while now < until:
        kind = policy.order(kinds, now)[0]
        if kind is DECODE:
            policy.decode_planned(now)
        policy.step_ended(kind, 1, seconds[kind])
        spent[kind] += seconds[kind]  # type: ignore[assignment]
        now += seconds[kind]
    return {kind: spent[kind] / now for kind in kinds}


@pytest.mark.parametrize(("generation", "share"), [([PREFILL, DECODE], 0.25), ([DECODE], 1 / 3), ([PREFILL], 0.5)])
def test_scoring_and_generation_share_the_time_by_weight_however_long_their_steps_are(
    generation: list[StepKind], share: float
) -> None:
    found = shares(policy_of(NEVER), [SCORE, *generation], {DECODE: 0.003, PREFILL: 0.017, SCORE: 0.111}, 60.0)
    assert found[SCORE] == pytest.approx(share, abs=0.01)


def test_prefill_fills_the_batch_before_it_decodes_but_rows_wait_for_the_gap_and_one_step_at_most() -> None:
    policy, now, last, waits, prefilled = policy_of(0.04), 0.0, 0.0, list[float](), 0
    while now < 2.0:
        kind = policy.order([DECODE, PREFILL], now)[0]
        seconds = 0.003 if kind is DECODE else 0.011
        if kind is DECODE:
            policy.decode_planned(now)
            waits.append(now - last)
            last = now + seconds
        prefilled += kind is PREFILL
        policy.step_ended(kind, 1, seconds)
        now += seconds
    assert policy.order([DECODE, PREFILL], last + 0.039) == [PREFILL, DECODE]
    assert 0.04 <= min(waits) <= max(waits) <= 0.04 + 0.011
    assert prefilled == pytest.approx(4 * len(waits), abs=4)


def test_what_was_idle_does_not_make_up_for_it() -> None:
    policy = policy_of(NEVER)
    for _ in range(100):
        assert policy.order([SCORE], 0.0) == [SCORE]
        policy.step_ended(SCORE, 1, 1.0)
    found = shares(policy, [SCORE, PREFILL], {SCORE: 0.01, PREFILL: 0.01}, 2.0)
    assert found == pytest.approx({SCORE: 0.5, PREFILL: 0.5}, abs=0.01)


@pytest.mark.risk("R17")
def test_what_was_idle_waits_for_one_step_alone() -> None:
    policy, now = policy_of(NEVER), 0.0
    for _ in range(10):
        for kinds, first in (([PREFILL, DECODE], PREFILL), ([DECODE], DECODE), ([SCORE, PREFILL, DECODE], SCORE)):
            assert policy.order(kinds, now)[0] is first
            policy.step_ended(first, 1, 0.004 if first is SCORE else 0.01)
        now += 0.024
    policy = policy_of(NEVER)
    policy.order([SCORE], 0.0)
    policy.step_ended(SCORE, 1, 0.01)
    assert policy.order([SCORE, PREFILL], 0.0) == [PREFILL, SCORE]


@pytest.mark.risk("R17", planted=True)
def test_a_tie_that_the_running_rows_win_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_name(policy: StepPolicy, kind: StepKind) -> tuple[float, bool, StepKind]:
        return policy._spent[kind is SCORE], kind is not PREFILL, kind

    monkeypatch.setattr(StepPolicy, "_place", by_name)
    with pytest.raises(AssertionError):
        test_what_was_idle_waits_for_one_step_alone()


def test_running_rows_come_first_once_the_gap_has_passed_since_their_last_step_ended() -> None:
    policy = policy_of(0.04)
    assert policy.order([DECODE, SCORE], 1.0) == [DECODE, SCORE]
    policy.decode_planned(1.0)
    policy.step_ended(DECODE, 1, 0.05)  # until 1.05, longer than the gap
    assert policy.order([DECODE, SCORE], 1.05) == [SCORE, DECODE]
    assert policy.order([DECODE, SCORE], 1.08) == [SCORE, DECODE]
    assert policy.order([DECODE, SCORE], 1.091) == [DECODE, SCORE]


def slow_decoding(policy: StepPolicy, step_s: float = 0.08) -> None:
    """Three prefill steps of 50 ms and 0.9 ms a token, and decode steps."""
    for tokens in (100, 200, 300):
        policy.step_ended(PREFILL, tokens, 0.05 + 0.0009 * tokens)
    for _ in range(3):
        policy.decode_ended(False, 8, 8, step_s)


@pytest.mark.parametrize("planted", [False, True])
def test_where_decoding_is_slow_prompts_are_computed_several_at_a_time(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 64 tokens. Planted: rows wait for the configured gap alone, and prompts come one at a time."""
    if planted:
        monkeypatch.setattr(policy_module, "GAP_STEPS", 0)
    policy = policy_of(0.04)
    slow_decoding(policy)
    policy.order([DECODE, PREFILL], 0.92)
    policy.decode_planned(0.92)
    policy.step_ended(DECODE, 8, 0.08)
    assert (policy.order([DECODE, PREFILL], 1.0 + 0.2)[0] is PREFILL) is not planted
    assert policy.order([DECODE, PREFILL], 1.0 + 4 * 0.08 + 0.001)[0] is DECODE
    assert (policy.max_tokens(PREFILL, decoding=True) >= 4 * 64) is not planted


def test_where_decoding_is_fast_rows_wait_for_the_configured_gap() -> None:
    policy = policy_of(0.04)
    slow_decoding(policy, step_s=0.002)
    policy.order([DECODE, PREFILL], 0.998)
    policy.decode_planned(0.998)
    policy.step_ended(DECODE, 8, 0.002)
    assert policy.order([DECODE, PREFILL], 1.0 + 0.039)[0] is PREFILL
    assert policy.order([DECODE, PREFILL], 1.0 + 0.041)[0] is DECODE


def test_prompts_that_yield_come_first_once_the_gap_has_passed_since_a_prefill_step_ended() -> None:
    policy = policy_of(0.04)
    policy.decode_planned(1.0)
    policy.prefill_planned(1.0)
    policy.step_ended(PREFILL, 1, 0.01)  # until 1.01
    assert policy.order([DECODE, PREFILL], 1.03) == [PREFILL, DECODE]
    assert policy.order([DECODE, PREFILL], 1.03, prompts_yield=True) == [DECODE, PREFILL]
    assert policy.order([PREFILL], 1.03, prompts_yield=True) == [PREFILL]
    policy.decode_planned(1.03)
    assert policy.order([DECODE, PREFILL], 1.06, prompts_yield=True) == [PREFILL, DECODE]


def test_a_verify_step_is_a_turn_of_the_running_rows() -> None:
    policy = policy_of(NEVER)
    assert policy.order([DECODE, SCORE], 0.0) == [DECODE, SCORE]
    policy.step_ended(StepKind.VERIFY, 1, 0.1)
    assert policy.order([DECODE, SCORE], 0.1) == [SCORE, DECODE]


def test_kinds_without_work_have_no_turn() -> None:
    policy = policy_of(0.04)
    assert policy.order([], 0.0) == []
    assert policy.order([PREFILL], 5.0) == [PREFILL]
