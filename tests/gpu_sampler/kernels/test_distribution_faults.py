"""Planted faults: the compiled kernels, given a wrong number or wrapped by one wrong step, must fail the very checks
that they pass in test_distribution_gpu.py. A fault's name says what it does to the distribution; each is drawn without
it first."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler import triton_sampler
from gpu_sampler.state.layout import Word
from gpu_sampler.workspace import LogitRows
from tests.support.cases import BIAS, OUTPUTS, PAIR, PROMPT, coarse_logits, flat, raised
from tests.support.cases import case as case_of
from tests.support.draws import DISTRIBUTION_ALPHA, LawCase, rows_of
from tests.support.many import Batch, check_many, joint_p_value, lagged

pytestmark = pytest.mark.gpu
ROWS, STEPS = 2048, 128
V, WIDE_V = 333, 4096

CASES: dict[str, LawCase] = {
    "plain": case_of(coarse_logits(V, 1)),
    "top-k": case_of(coarse_logits(V, 4), top_k=50),
    "top-k and top-p": case_of(coarse_logits(V, 10, 0.7), top_k=40, top_p=0.6),
    "min-p": case_of(coarse_logits(V, 7), min_p=0.1),
    "ties at k": case_of(flat(V), top_k=41),
    "ties at p": case_of(np.where(np.arange(V) % 83 == 4, np.float32(0.5), np.float32(-np.inf)), top_p=0.5),
    "huge nucleus": case_of(coarse_logits(WIDE_V, 15, 0.3), top_p=0.9),
    "huge nucleus of equals": case_of(flat(WIDE_V), top_p=0.75),
    "wide min-p": case_of(coarse_logits(WIDE_V, 16, 0.3), min_p=0.25),
    "penalties": case_of(raised(coarse_logits(V, 9), (*PROMPT, *OUTPUTS), 4.0), repetition_penalty=1.25),
    "bias, top-p": case_of(raised(coarse_logits(V, 11), (5, 19), 3.0), top_p=0.8, logit_bias=BIAS),
    "allowed ids": case_of(coarse_logits(V, 12), allowed_token_ids=tuple(range(0, V, 3))),
}

Fault = Callable[[Batch, LawCase], None]


def hotter(batch: Batch, case: LawCase) -> None:
    batch.state.temperature[1:] *= np.float32(1.1)


def one_more_at_k(batch: Batch, case: LawCase) -> None:
    batch.state.top_k[1:] += 1


def one_fewer_at_k(batch: Batch, case: LawCase) -> None:
    batch.state.top_k[1:] -= 1


def equal_mass_stays(batch: Batch, case: LawCase) -> None:
    """`<=` for `<` at p: a p larger by one bit keeps what has a mass of exactly p before it."""
    batch.state.top_p[1:] = np.nextafter(batch.state.top_p[1:], np.float32(2))


def joint_filters(batch: Batch, case: LawCase) -> None:
    """Top-p on the masses of the whole row: a mass before a token is below p of that iff it is below p / m of the top-k
    set, whose mass is m."""
    whole_V, cut_V = case.with_params(top_k=0, top_p=1.0).distribution(), case.with_params(top_p=1.0).distribution()
    batch.state.top_p[1:] = min(1.0, case.params.top_p / float(whole_V[cut_V > 0].sum()))


def no_min_p(batch: Batch, case: LawCase) -> None:
    batch.state.log_min_p[1:] = -np.inf


def no_mask(batch: Batch, case: LawCase) -> None:
    for slot in batch.state.masks:
        batch.state.masks[slot] = np.full_like(batch.state.masks[slot], 255)


def no_repetition(batch: Batch, case: LawCase) -> None:
    batch.state.repetition[1:] = 1


def one_seed(batch: Batch, case: LawCase) -> None:
    batch.state.seed[1:] = batch.state.seed[1]


def a_seed_for_two(batch: Batch, case: LawCase) -> None:
    batch.state.seed[2::2] = batch.state.seed[1::2]


IN_THE_STATE: list[tuple[Fault, str]] = [
    (hotter, "plain"),
    (hotter, "huge nucleus"),
    (hotter, "penalties"),
    (one_more_at_k, "top-k"),
    (one_fewer_at_k, "top-k"),
    (one_more_at_k, "ties at k"),
    (equal_mass_stays, "ties at p"),
    (equal_mass_stays, "huge nucleus of equals"),
    (joint_filters, "top-k and top-p"),
    (no_min_p, "min-p"),
    (no_min_p, "wide min-p"),
    (no_mask, "allowed ids"),
    (no_repetition, "penalties"),
    (one_seed, "plain"),
]


@pytest.mark.parametrize(("fault", "name"), IN_THE_STATE, ids=[f"{f.__name__} in {name}" for f, name in IN_THE_STATE])
def test_fault_in_the_state_is_rejected(fault: Fault, name: str) -> None:
    case = CASES[name]
    assert check_many(case, Batch(rows_of(case, ROWS, 31)).draws(STEPS)).passes
    batch = Batch(rows_of(case, ROWS, 31))
    fault(batch, case)
    found = check_many(case, batch.draws(STEPS))
    print(f"{fault.__name__} in {name}: {found}")
    assert found.p_value < DISTRIBUTION_ALPHA


def around(monkeypatch: pytest.MonkeyPatch, name: str, after: Callable[..., None]) -> None:
    """Wraps a launcher of the step: `after` is called with its arguments behind it."""
    right = getattr(triton_sampler, name)

    def wrong(*given: Any, **named: Any) -> None:
        right(*given, **named)
        after(*given)

    monkeypatch.setattr(triton_sampler, name, wrong)


def no_overlay(logits: Any, device_state: Any, slots: Any, side_len: torch.Tensor, side_bad: Any) -> None:
    """The overlay left out of the sum of the row, and of everything else."""
    side_len.zero_()


def one_entry_lost(logits: Any, device_state: Any, slots: Any, side_len: torch.Tensor, side_bad: Any) -> None:
    side_len.sub_(1).clamp_(min=0)


def raw_values(logits: Any, device_state: Any, slots: Any, side_len: Any, side_bad: Any) -> None:
    """Entries are drawn by what they were before bias and penalties."""
    device_state.side_processed.copy_(device_state.side_raw)


def nothing_before(rows: LogitRows) -> None:
    """The first draw of a wide nucleus is accepted always."""
    rows.work.ahead_mass.zero_()


def one_group_forgotten(rows: LogitRows) -> None:
    rows.work.sums[:, 0] = 0.0


BEHIND_A_LAUNCH: list[tuple[Callable[..., None], str, str]] = [
    (no_overlay, "apply_logits_processors", "penalties"),
    (no_overlay, "apply_logits_processors", "bias, top-p"),
    (one_entry_lost, "apply_logits_processors", "penalties"),
    (raw_values, "apply_logits_processors", "bias, top-p"),
    (nothing_before, "nucleus_rejection", "huge nucleus"),
    (nothing_before, "nucleus_rejection", "huge nucleus of equals"),
    (one_group_forgotten, "softmax_stats", "plain"),
    (one_group_forgotten, "softmax_stats", "huge nucleus"),
]


@pytest.mark.parametrize(
    ("fault", "launcher", "name"), BEHIND_A_LAUNCH, ids=[f"{f.__name__} in {name}" for f, _, name in BEHIND_A_LAUNCH]
)
def test_fault_behind_a_launch_is_rejected(
    fault: Callable[..., None], launcher: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    assert check_many(case, Batch(rows_of(case, ROWS, 32)).draws(STEPS)).passes
    around(monkeypatch, launcher, fault)
    found = check_many(case, Batch(rows_of(case, ROWS, 32)).draws(STEPS))
    print(f"{fault.__name__} in {name}: {found}")
    assert found.p_value < DISTRIBUTION_ALPHA


def test_seed_of_a_neighbour_is_rejected_though_each_row_has_its_distribution() -> None:
    def pairs(fault: Fault | None) -> float:
        batch = Batch(rows_of(PAIR, ROWS, 33))
        if fault:
            fault(batch, PAIR)
        return joint_p_value(PAIR, *lagged(batch.draws(STEPS).T.contiguous(), 1))

    assert pairs(None) > DISTRIBUTION_ALPHA
    assert pairs(a_seed_for_two) < DISTRIBUTION_ALPHA


def seed_of_its_slot(batch: Batch, case: LawCase) -> None:
    batch.state.seed[:] ^= np.arange(batch.state.num_slots, dtype=np.uint64)


@pytest.mark.parametrize("name", CASES)
def test_seed_mixed_with_the_slot_is_rejected_though_each_row_has_its_distribution(name: str) -> None:
    def moves(fault: Fault | None) -> bool:
        """Whether rows draw otherwise in the slots of others."""
        rows = rows_of(CASES[name], 64, 35)
        batches = Batch(rows), Batch(rows[::-1])
        if fault:
            for batch in batches:
                fault(batch, CASES[name])
        there, back = (batch.draws(8) for batch in batches)
        return not torch.equal(there, back.flip(1))

    assert not moves(None)
    assert moves(seed_of_its_slot)


@pytest.mark.parametrize("replayed", [False, True])
def test_position_that_stands_still_is_rejected(replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a graph is replayed: its launches repeat, their noise must not."""

    def pairs() -> float:
        return joint_p_value(PAIR, *lagged(Batch(rows_of(PAIR, ROWS, 34)).draws(STEPS, replayed=replayed), 1))

    def put_back(rows: Any, *rest: Any) -> None:
        rows.state.table[1:, Word.POSITION] -= 1

    assert pairs() > DISTRIBUTION_ALPHA
    around(monkeypatch, "sample", put_back)
    assert pairs() < DISTRIBUTION_ALPHA
