"""How many tokens a step may have, before anything is known of the machine and afterwards."""

import pytest
import torch

from engine.batch import StepKind
from engine.budgets import LEAST_BUDGET, STEP_S, UNKNOWN_BUDGET, Budgets
from engine.config import EngineConfig

CPU = torch.device("cpu")
PREFILL, SCORE = StepKind.PREFILL, StepKind.SCORE


def budgets(
    token_budget: int = 4096, gap: float = 0.05, step: float | None = 0.2, device: torch.device = CPU
) -> Budgets:
    return Budgets(EngineConfig(token_budget=token_budget, decode_gap_s=gap, step_s=step), device)


def test_before_any_step_only_running_rows_bound_the_next_one() -> None:
    assert budgets().most(PREFILL, decoding=False) == 4096
    assert budgets().most(PREFILL, decoding=True) == UNKNOWN_BUDGET
    assert budgets(token_budget=100).most(SCORE, decoding=True) == 100


def test_a_step_beside_running_rows_is_what_the_gap_computes() -> None:
    made = budgets()
    made.took(PREFILL, 1000, 0.1)  # 10,000 tokens a second
    assert made.most(PREFILL, decoding=True) == 500
    assert made.most(SCORE, decoding=True) == UNKNOWN_BUDGET, "each kind has a rate of its own"


def test_alone_a_step_takes_no_longer_than_it_may() -> None:
    made = budgets()
    for tokens in (500, 1000, 3000):
        made.took(SCORE, tokens, tokens / 10_000)
    assert made.most(SCORE, decoding=False) == pytest.approx(2000, abs=1)


@pytest.mark.parametrize("decoding", [False, True])
def test_no_machine_is_so_slow_that_steps_become_tiny(decoding: bool) -> None:
    made = budgets()
    made.took(PREFILL, 1000, 1e6)
    assert made.most(PREFILL, decoding=decoding) == LEAST_BUDGET


def test_steps_too_small_to_measure_teach_nothing() -> None:
    made = budgets()
    made.took(PREFILL, LEAST_BUDGET - 1, 1e6)
    made.took(PREFILL, 1000, 0.0)
    assert made.most(PREFILL, decoding=True) == UNKNOWN_BUDGET


def test_without_a_length_in_the_configuration_steps_are_as_long_as_suits_the_device() -> None:
    for name, seconds in STEP_S.items():
        made = budgets(token_budget=100_000, step=None, device=torch.device(name))
        for tokens in (500, 1000, 3000):
            made.took(SCORE, tokens, tokens / 10_000)
        assert made.most(SCORE, decoding=False) == pytest.approx(10_000 * seconds, abs=1)
