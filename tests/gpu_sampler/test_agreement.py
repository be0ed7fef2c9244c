"""The check of agreement: it excuses what hangs on a rounding, and nothing else."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.reference.filters import Row
from gpu_sampler.reference.philox import Purpose, gumbel, words
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from tests.support.agreement import NOTHING, close_call, step_agrees
from tests.support.invariance import admit, random_cases

V = 300


def row(z_V: npt.NDArray[np.float32], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 5) -> Row:
    return Row(z_V, float(z_V.max()), 1.0, top_k, top_p, min_p, np.uint64(seed), 0, 0, np.empty(0, np.int64))


def tied_by(gap: float) -> npt.NDArray[np.float32]:
    """Two tokens of one group; the second wins by `gap`."""
    noise = gumbel(words(np.uint64(5), np.arange(2), 0, Purpose.SAMPLE_TOKEN))
    return np.array([0, float(noise[0]) - float(noise[1]) + gap], np.float32)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 1 - 1e-3}, {"min_p": 1e-6}], ids=str)
def test_two_best_values_are_close_below_1e_4_and_no_farther(filters: dict[str, Any]) -> None:
    assert close_call(row(tied_by(5e-5), **filters))
    assert not close_call(row(tied_by(2e-4), **filters))


def test_mass_and_min_p_are_close_within_1e_5() -> None:
    halves = np.zeros(2, np.float32)
    assert close_call(row(halves, top_p=0.5)) and close_call(row(halves, top_p=0.500001))
    assert not close_call(row(halves, top_p=0.501)) or close_call(row(halves))
    third = np.array([0, np.log(0.3)], np.float32)
    assert close_call(row(third, min_p=0.3)) and not close_call(row(third, min_p=0.2))


def test_wide_nucleus_is_close_only_where_a_draw_of_it_is() -> None:
    z_V = np.random.default_rng(1).normal(0, 0.05, 3000).astype(np.float32)
    calls = [close_call(row(z_V, top_p=0.5, seed=seed)) for seed in range(300)]
    assert sum(calls) <= 3


def test_few_random_rows_are_close_calls() -> None:
    z_RV = np.random.default_rng(2).normal(0, 1, (1000, V)).astype(np.float32)
    assert sum(close_call(row(z_V, top_k=50, top_p=0.9, seed=seed)) for seed, z_V in enumerate(z_RV)) <= 3


class OtherToken(Sampler):
    """The fault: one row of each batch draws its neighbour's id."""

    def sample(self, logits: Any, slots: Any) -> Any:
        found = super().sample(logits, slots)
        found.tokens[0] = (found.tokens[0] + 1) % V
        return found


def test_reference_agrees_with_itself_and_one_other_token_in_32_rows_does_not() -> None:
    cases = random_cases(32, V, 3)
    for kind, holds in ((Sampler, True), (OtherToken, False)):
        ours, reference = kind(num_slots=33, vocab_size=V), Sampler(num_slots=33, vocab_size=V)
        for slot, case in enumerate(cases, start=1):
            admit(ours, slot, case)
            admit(reference, slot, case)
        logits = torch.from_numpy(np.stack([case.logits_SV[0] for case in cases]))
        assert (NOTHING + step_agrees(ours, reference, logits, range(1, 33))).holds == holds


def test_row_that_one_sampler_reports_and_the_other_does_not_is_wrong() -> None:
    ours, reference = Sampler(num_slots=2, vocab_size=V), Sampler(num_slots=2, vocab_size=V)
    ours.admit(1, SamplingParams(temperature=0), [], seed=0)
    reference.admit(1, SamplingParams(temperature=0, logprobs=1), [], seed=0)
    assert "logprobs: one of the two is None" in step_agrees(ours, reference, torch.zeros(1, V), [1]).wrong[0]
