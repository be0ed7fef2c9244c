"""Planted faults: each must be rejected by the very check that the samplers pass in test_distribution.py and
test_distribution_independence.py. A fault is planted in its noise or in what the sampler is given, whose draws are then
held against the distribution it should have had."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.reference import filters
from gpu_sampler.reference.philox import Purpose
from gpu_sampler.reference.softmax_stats import GROUP
from tests.support.cases import CASES, PAIR, factorial_p_values, factorial_rows, group_and_place
from tests.support.distribution import kept_tokens, processed_values, total_order
from tests.support.draws import (
    DISTRIBUTION_ALPHA,
    DRAWS,
    DrawRow,
    Draws,
    LawCase,
    against_joint_distribution,
    check,
    reference_draws,
    rows_of,
)

Int64s = npt.NDArray[np.int64]
Fault = Callable[[LawCase], LawCase]


def planted(fault: Fault, draws: Draws = reference_draws) -> Draws:
    """Draws of a sampler with the fault: `fault` turns what the row asks for into what a faulty one would do."""
    altered: dict[int, LawCase] = {}

    def draw(rows: Sequence[DrawRow], steps: int) -> Int64s:
        for row in rows:
            if id(row.case) not in altered:
                altered[id(row.case)] = fault(row.case)
        return draws([row._replace(case=altered[id(row.case)]) for row in rows], steps)

    return draw


def hotter(case: LawCase) -> LawCase:
    return case.with_params(temperature=min(case.params.temperature * 1.1, 2.0))


def one_more_at_k(case: LawCase) -> LawCase:
    return case.with_params(top_k=case.params.top_k + 1) if case.params.top_k > 0 else case


def one_fewer_at_k(case: LawCase) -> LawCase:
    return case.with_params(top_k=case.params.top_k - 1) if case.params.top_k > 1 else case


def equal_mass_stays(case: LawCase) -> LawCase:
    """`<=` for `<` at p: a p larger by one bit keeps what has a mass of exactly p before it."""
    return case.with_params(top_p=float(np.nextafter(np.float32(case.params.top_p), np.float32(2))))


def first_dropped(case: LawCase) -> LawCase:
    first = total_order(processed_values(case.logits_V, case.params, case.prompt, case.outputs))[0]
    return case.with_params(bad_words_ids=(*case.params.bad_words_ids, (first,)))


def joint_filters(case: LawCase) -> LawCase:
    """Top-p on the masses of the whole row, its tokens then cut with those of top-k and min-p."""
    values = processed_values(case.logits_V, case.params, case.prompt, case.outputs)
    kept = [set(kept_tokens(values, replace(case.params, top_k=0, min_p=0.0)))]
    kept.append(set(kept_tokens(values, replace(case.params, top_p=1.0))))
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return case.with_params(allowed_token_ids=tuple(sorted(kept[0] & kept[1])), **off)


def counted_twice(case: LawCase) -> LawCase:
    """Every output token in the counts of the penalties twice; bans and the position see the outputs as they are."""
    return replace(case, outputs=case.outputs + case.outputs)


def without_min_tokens(case: LawCase) -> LawCase:
    return case.with_params(min_tokens=0)


def without_bad_words(case: LawCase) -> LawCase:
    return case.with_params(bad_words_ids=())


def without_prompt(case: LawCase) -> LawCase:
    """Repetition sees the outputs only."""
    return replace(case, prompt=())


FAULTS = [
    (hotter, "plain"),
    (hotter, "plain, eight groups, hot"),
    (hotter, "plain, eight groups, cold"),
    (hotter, "wide nucleus"),
    (hotter, "everything"),
    (one_more_at_k, "top-k"),
    (one_fewer_at_k, "top-k"),
    (one_more_at_k, "ties at k"),
    (one_fewer_at_k, "top-k and top-p"),
    (equal_mass_stays, "ties at p"),
    (equal_mass_stays, "wide nucleus, ties at p"),
    (first_dropped, "plain"),
    (first_dropped, "plain, eight groups, hot"),
    (first_dropped, "everything"),
    (joint_filters, "top-k and top-p"),
    (joint_filters, "top-k, top-p and min-p"),
    (counted_twice, "penalties"),
    (without_min_tokens, "everything"),
    (without_bad_words, "bias and bans, two-level"),
    (without_prompt, "penalties, wide nucleus"),
]
# The distribution moves by a total variation of 0.039 only: of ten starts 4,096 draws reject it with about half, 8,192
# with all.
DRAWS_FOR: dict[Fault, int] = {counted_twice: 2 * DRAWS}
IN_THE_FACTORIAL = [hotter, one_more_at_k, first_dropped, joint_filters, counted_twice, without_min_tokens]


@pytest.mark.full(keep=1)
@pytest.mark.risk("D2", planted=True)
@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[f"{fault.__name__} in {name}" for fault, name in FAULTS])
def test_fault_is_rejected(fault: Fault, name: str) -> None:
    count = DRAWS_FOR.get(fault, DRAWS)
    assert check(CASES[name], planted(fault), count=count).p_value < DISTRIBUTION_ALPHA


@pytest.mark.full
@pytest.mark.parametrize("fault", IN_THE_FACTORIAL)
def test_fault_is_rejected_by_the_factorial_too(fault: Fault) -> None:
    tokens_R = planted(fault)(factorial_rows()[0], 1)[:, 0]
    assert min(factorial_p_values(tokens_R).values()) < DISTRIBUTION_ALPHA


def test_noise_shared_by_all_rows_is_rejected() -> None:
    def one_seed(rows: Sequence[DrawRow], steps: int) -> Int64s:
        return reference_draws([row._replace(seed=rows[0].seed) for row in rows], steps)

    assert check(CASES["plain"], one_seed).p_value < DISTRIBUTION_ALPHA


def test_noise_shared_by_pairs_of_rows_is_rejected_though_each_row_has_its_distribution() -> None:
    rows = rows_of(PAIR, 4096)
    rows[1::2] = rows[::2]
    tokens_R2 = reference_draws(rows)[:, 0].reshape(-1, 2)
    assert against_joint_distribution(PAIR, PAIR, tokens_R2).p_value < DISTRIBUTION_ALPHA


def test_counter_that_does_not_advance_is_rejected() -> None:
    rows = rows_of(PAIR, 2048)
    tokens_R2 = np.concatenate([reference_draws(rows), reference_draws(rows)], axis=1)
    assert against_joint_distribution(PAIR, PAIR, tokens_R2).p_value < DISTRIBUTION_ALPHA


def test_noise_that_ignores_its_group_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the group draw used again inside the group: each level alone has its distribution."""
    right = filters._noise

    def shared(rows: Sequence[filters.Row], ids: Int64s, purpose: Purpose, round_: int | Int64s = 0) -> Any:
        return right(rows, ids % GROUP, Purpose.SAMPLE_GROUP, round_)

    monkeypatch.setattr(filters, "_noise", shared)
    assert group_and_place(reference_draws) < DISTRIBUTION_ALPHA


@pytest.mark.full
def test_rejection_that_takes_its_first_draw_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_mass_before", lambda row, weights_V, token: -1.0)
    assert check(CASES["wide nucleus"], reference_draws).p_value < DISTRIBUTION_ALPHA


def test_singles_that_stay_in_their_groups_too_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the overlay compete twice: alone, and with the weight that their group still has."""
    monkeypatch.setattr(filters.Row, "others_V", property(lambda row: row.z_V))
    assert check(CASES["bias and bans, two-level"], reference_draws).p_value < DISTRIBUTION_ALPHA
