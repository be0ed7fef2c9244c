"""How many tokens a step may have, before anything is known of the machine and afterwards."""

import itertools
import math
import random
from collections.abc import Mapping

import pytest
import torch

from engine.batch.input_batch import StepKind
from engine.config import MAX_RUNNING_BOUND, EngineConfig
from engine.scheduler.policy import (
    MIN_BUDGET,
    MIN_MEASURED,
    REACH,
    SHARED_STEP_S,
    STEP_S,
    TRY_PERIOD,
    UNKNOWN_BUDGET,
    RowTimeFit,
    StepTimeFit,
    StepTimeModel,
)

CPU = torch.device("cpu")
PREFILL, SCORE = StepKind.PREFILL, StepKind.SCORE
GAP_S = 0.05


def budgets(token_budget: int = 4096, step: float | None = 0.2, device: torch.device = CPU) -> StepTimeModel:
    return StepTimeModel(EngineConfig(token_budget=token_budget, max_step_s=step), device)


def test_before_any_step_only_running_rows_bound_the_next_one() -> None:
    assert budgets().max_tokens(PREFILL, None) == 4096
    assert budgets().max_tokens(PREFILL, GAP_S) == UNKNOWN_BUDGET
    assert budgets(token_budget=100).max_tokens(SCORE, GAP_S) == 100


def test_while_tenants_share_no_step_is_far_larger_than_those_measured() -> None:
    """The first large request after small ones alone, for which another tenant would wait."""
    made = budgets()
    assert made.max_tokens(SCORE, None, several_tenants=True) == UNKNOWN_BUDGET
    for _ in range(3):
        made.add(SCORE, 2 * UNKNOWN_BUDGET, 0.001)
    assert made.max_tokens(SCORE, None, several_tenants=True) == 2 * REACH * UNKNOWN_BUDGET


def test_a_step_beside_running_rows_is_what_the_gap_computes() -> None:
    made = budgets()
    made.add(PREFILL, 1000, 0.1)  # 10,000 tokens a second
    assert made.max_tokens(PREFILL, GAP_S) == pytest.approx(500, abs=1)
    assert made.max_tokens(SCORE, GAP_S) == UNKNOWN_BUDGET, "each kind has a rate of its own"


def test_alone_a_step_takes_no_longer_than_it_may() -> None:
    made = budgets()
    for tokens in (500, 1000, 3000):
        made.add(SCORE, tokens, tokens / 10_000)
    assert made.max_tokens(SCORE, None) == pytest.approx(2000, abs=1)


def beside(
    fixed: float, each: float, steps: int = 60, late: Mapping[int, float] | None = None, waiting: int = 100_000
) -> list[int]:
    """Returns budgets beside running rows, of steps that use them up and take `fixed + each * tokens` s, and what
    `late` says besides, but no less than nothing. The gap is 40 ms."""
    made, found = budgets(token_budget=16_384, device=torch.device("cuda")), list[int]()
    for number in range(steps):
        found.append(made.max_tokens(PREFILL, 0.04))
        size = min(waiting, found[-1])
        made.add(PREFILL, size, max(1e-5, fixed + each * size + (late or {}).get(number, 0.0)))
    return found


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [(0.002, 0.00002, 1_900), (0.03, 0.00001, 3_000), (0.055, 0.00002, 2_750), (0.03, 0.0, 16_384)],
    ids=["a small fixed part", "most of the gap: twice that", "more than the gap: twice that", "nothing else"],
)
def test_steps_beside_running_rows_hold_what_the_gap_is_worth(fixed: float, each: float, expected: int) -> None:
    """Where launching a step takes most of the gap whatever it holds, steps do not become ever smaller."""
    assert beside(fixed, each)[8:] == pytest.approx([expected] * 52, rel=0.05)


def test_a_budget_from_the_mean_rate_would_become_ever_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the fault: a budget in proportion to the mean rate. The gap is gone before the first token."""

    def in_proportion(times: StepTimeFit, seconds: float) -> float:
        return seconds * times._n / times._s if times._n else math.inf

    monkeypatch.setattr(StepTimeFit, "tokens_within", in_proportion)
    assert beside(0.055, 0.00002)[-1] == MIN_BUDGET["cuda"]


@pytest.mark.parametrize("slow", [0, 1, 20, 50])
def test_one_slow_step_is_forgotten(slow: int) -> None:
    """Also where all the others are alike, as where so many tokens come at a time."""
    late = {slow: 2.0}
    assert beside(0.03, 0.00001, late=late)[slow + 9 :] == pytest.approx([3_000] * (51 - slow), rel=0.05)
    assert min(beside(0.03, 0.00001, late=late, waiting=300)[slow + 9 :]) >= 300


@pytest.mark.parametrize("delay", [0.02, 0.05, 0.5])
def test_a_step_that_is_read_late_takes_its_time_from_the_next(delay: float) -> None:
    late = {20: delay, 21: -delay, 30: delay, 31: -delay}
    sizes = beside(0.03, 0.00001, late=late)[20:]
    assert all(3_000 / 2 < size < 3_000 * 2.1 for size in sizes)


def test_a_machine_that_became_slower_is_believed_at_the_second_step() -> None:
    """Were no slow step believed, running rows would wait five times as long as they may."""
    made = budgets()
    for each in [0.00001] * 20 + [0.00005] * 12:
        size = made.max_tokens(PREFILL, 0.04)
        made.add(PREFILL, size, 0.002 + each * size)
    assert made.max_tokens(PREFILL, 0.04) == pytest.approx(760, rel=0.1)


def test_times_that_jump_to_and_fro_are_believed_too() -> None:
    """Were each passed over because the one before was of the other kind, the line would stay what it once was."""
    made, sizes = budgets(), list[int]()
    for each in [0.00001] * 20 + [0.00005, 0.000002] * 20:
        sizes.append(made.max_tokens(PREFILL, 0.04))
        made.add(PREFILL, sizes[-1], 0.002 + each * sizes[-1])
    assert sizes[19] == pytest.approx(3_800, rel=0.05)
    assert min(sizes[40:]) < sizes[19] / 2


def test_while_rows_wait_no_step_is_far_larger_than_those_measured() -> None:
    sizes = beside(0.03, 0.0)
    assert sizes[0] == UNKNOWN_BUDGET
    assert all(later <= REACH * now for now, later in itertools.pairwise(sizes))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gap_s", [None, 0.05])
def test_no_machine_is_so_slow_that_steps_become_tiny(gap_s: float | None, device: str) -> None:
    made = budgets(device=torch.device(device))
    made.add(PREFILL, 1000, 1e6)
    assert made.max_tokens(PREFILL, gap_s) == MIN_BUDGET[device]


def test_steps_too_small_to_measure_teach_nothing() -> None:
    made = budgets()
    made.add(PREFILL, MIN_MEASURED - 1, 1e6)
    made.add(PREFILL, 1000, 0.0)
    assert made.max_tokens(PREFILL, GAP_S) == UNKNOWN_BUDGET


def test_without_a_length_in_the_configuration_steps_are_as_long_as_suits_the_device() -> None:
    for name, seconds in STEP_S.items():
        made = budgets(token_budget=100_000, step=None, device=torch.device(name))
        for tokens in (500, 1000, 3000):
            made.add(SCORE, tokens, tokens / 10_000)
        assert made.max_tokens(SCORE, None) == pytest.approx(10_000 * seconds, abs=1)


@pytest.mark.parametrize(("step", "seconds"), [(None, 0.4), (0.1, 0.1)])
def test_alone_a_step_is_long_enough_for_what_each_takes(step: float | None, seconds: float) -> None:
    """Each step takes 50 ms besides its tokens, as with a model whose weights do not fit a CPU's caches."""
    made = budgets(token_budget=16_384, step=step)
    for tokens in (100, 200, 400):
        made.add(SCORE, tokens, 0.05 + 0.001 * tokens)
    assert made.max_tokens(SCORE, None) == pytest.approx((seconds - 0.05) / 0.001, abs=1)
    assert made.max_tokens(SCORE, GAP_S) == pytest.approx(50, abs=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_while_requests_of_several_tenants_come_steps_of_every_kind_are_short(device: str) -> None:
    made, seconds = budgets(token_budget=16_384, step=None, device=torch.device(device)), SHARED_STEP_S[device]
    for size in (500, 1000, 2000):
        made.add(SCORE, size, size / 10_000)
        made.add_rows(False, size // 50, size / 50 / 200)  # 5 ms a row
    wanted = max(MIN_BUDGET[device], 10_000 * seconds)
    assert made.max_tokens(SCORE, None, several_tenants=True) == pytest.approx(wanted, abs=1)
    assert made.max_tokens(SCORE, None) > 3 * wanted
    assert made.max_rows(False) == pytest.approx(200 * seconds, abs=1)
    assert made.max_rows(True) == MAX_RUNNING_BOUND, "steps with drafts have a rate of their own, not yet known"


def rows_of_steps(fixed: float, each: float, made: StepTimeModel, steps: int) -> list[int]:
    """Returns the rows of the last decode steps of some, in order of size. Each takes `fixed + each * rows` s, of 64
    rows that run. One of them tries another size."""
    found = list[int]()
    for _ in range(steps):
        found.append(min(64, made.max_rows(False)))
        made.add_rows(False, found[-1], fixed + each * found[-1])
    return sorted(found[-TRY_PERIOD:])


def after_steps_of(rows: int, fixed: float, each: float) -> StepTimeModel:
    made = budgets(step=None)
    for _ in range(50):
        made.add_rows(False, rows, fixed + each * rows)
    return made


@pytest.mark.parametrize("first", [1, 2, 64])
def test_rows_are_as_many_as_a_short_step_holds(first: int) -> None:
    rows = int(1000 * SHARED_STEP_S["cpu"]) - 2
    *usual, tried = rows_of_steps(0.002, 0.001, after_steps_of(first, 0.002, 0.001), 60)
    assert usual == [pytest.approx(rows, abs=1)] * (TRY_PERIOD - 1) and tried <= 2 * rows


@pytest.mark.parametrize("fixed", [0.01, 0.2])
@pytest.mark.parametrize("first", [1, 2, 64])
def test_rows_that_cost_little_beside_the_step_itself_all_share_one(fixed: float, first: int) -> None:
    tried, *usual = rows_of_steps(fixed, 0.0001, after_steps_of(first, fixed, 0.0001), 60 + TRY_PERIOD)
    assert usual == [64] * (TRY_PERIOD - 1) and tried >= 16


def after_a_delay() -> StepTimeModel:
    """Decode steps take 10 ms and 0.1 ms a row, but one of two rows took twice as long."""
    made = budgets()
    for rows in (1, 1, 1, 1, 2):
        made.add_rows(False, rows, 0.0101 * rows)
    return made


@pytest.mark.risk("R17")
def test_a_line_that_a_delay_made_steep_does_not_hold_steps_at_one_row() -> None:
    assert rows_of_steps(0.01, 0.0001, after_a_delay(), 60 + TRY_PERIOD)[1:] == [64] * (TRY_PERIOD - 1)


@pytest.mark.risk("R17")
def test_no_step_has_far_more_rows_than_those_measured() -> None:
    made = budgets(step=None)
    for rows, seconds in [(1, 0.0021), (2, 0.002)] * 5:  # as if a row made a step shorter
        made.add_rows(False, rows, seconds)
    assert made.max_rows(False) == REACH * 2


def behind_a_flat_line() -> StepTimeModel:
    """A batch had grown to 64 rows while each of its steps took as long as one of them all: the machine did something
    else. Decode steps take 2.5 ms and 0.35 ms a row."""
    made, longest = budgets(step=None), 0.0025 + 0.00035 * 64
    for size in [*range(4, 64, 4), *[64] * 64]:
        made.add_rows(False, size, longest)
    return made


@pytest.mark.risk("R17")
def test_a_flat_line_does_not_let_steps_stay_long() -> None:
    usual = rows_of_steps(0.0025, 0.00035, behind_a_flat_line(), 64)[1:-1]
    assert usual == [pytest.approx((SHARED_STEP_S["cpu"] - 0.0025) / 0.00035, abs=1)] * (TRY_PERIOD - 2)


@pytest.mark.risk("R17", planted=True)
def test_lines_that_are_never_tried_again_would_hold_steps_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowTimeFit, "tries_a_size", False)
    assert rows_of_steps(0.0025, 0.00035, behind_a_flat_line(), 64) == [64] * TRY_PERIOD
    assert rows_of_steps(0.01, 0.0001, after_a_delay(), 60 + TRY_PERIOD) == [1] * TRY_PERIOD


@pytest.mark.risk("R17")
def test_a_line_that_falls_expects_no_step_below_zero() -> None:
    fit = RowTimeFit()
    for rows, seconds in [(1, 0.01), (4, 0.001)] * 5:
        fit.add(rows, seconds)
    for _ in range(20):
        fit.add(64, 0.02)  # counted at its own time, or as much more than expected as counts
    assert 16 <= fit.tokens_within(0.006) <= 64


def few_rows_of_disturbed_steps(seed: int, batches: int = 12) -> float:
    """Returns the rows that one in twenty decode steps has at most, where a step takes 2.2 ms and 0.11 ms a row, or
    several times that: a machine is busy whenever a batch begins or ends, which is when few rows are left."""
    made, drawn, found = budgets(step=None), random.Random(seed), list[int]()
    for batch, at in itertools.product(range(batches), range(260)):
        running = 64 if at < 220 else drawn.randint(1, 3)
        busy = drawn.choice((1.0, drawn.uniform(1, 2), drawn.uniform(2, 6))) if not 40 <= at < 220 else 1.0
        rows = min(running, made.max_rows(False))
        made.add_rows(False, rows, (0.0022 + 0.00011 * rows) * busy)
        if batch > 1 and running == 64:
            found.append(rows)
    return sorted(found)[len(found) // 20]


@pytest.mark.risk("R17")
@pytest.mark.parametrize("seed", range(4))
def test_steps_on_a_busy_machine_do_not_shrink_to_a_few_rows(seed: int) -> None:
    assert few_rows_of_disturbed_steps(seed) >= 16


@pytest.mark.risk("R17", planted=True)
@pytest.mark.parametrize("seed", range(4))
def test_a_line_that_began_again_on_a_busy_machine_would_let_them(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(RowTimeFit, "add", StepTimeFit.add)
    assert few_rows_of_disturbed_steps(seed) <= 8
