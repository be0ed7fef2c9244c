"""The kernels' answer to a row is its own: the same bits alone, in any batch, in any slot, resumed on another sampler.

The check is that of tests/gpu_sampler/test_invariance.py. It compares compiled variants too: a row alone is drawn by
kernels without side lists and masks where its batch needs those with them.
"""

import itertools
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.params import SamplingParams
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.testing.invariance import mismatches, random_cases

pytestmark = pytest.mark.gpu
BRANCHES = ("greedy", "plain", "candidates", "nucleus")
RUNS: list[tuple[int, LogprobsMode]] = [
    (111, "raw_logprobs"),
    (300, "raw_logprobs"),
    (111, "processed_logprobs"),
    (300, "processed_logprobs"),
]
CASES_A_RUN = 2500  # 10,000 in all


class OnDevice(Sampler):
    """Our kernels, and what their rows went through."""

    flags: ClassVar = Counter[int]()
    made: ClassVar = itertools.count(1)

    def __init__(self, slots: int, vocab_size: int, mode: LogprobsMode) -> None:
        super().__init__(num_slots=slots, vocab_size=vocab_size, device="cuda", logprobs_mode=mode, backend="triton")
        self.number = next(self.made)

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        output = super().sample(logits, slots)
        self.flags.update(output.flags.tolist())
        return output


@pytest.mark.parametrize(("vocab_size", "mode"), RUNS)
def test_rows_answer_alone_as_in_any_batch_and_after_a_resume(vocab_size: int, mode: LogprobsMode) -> None:
    samplers: list[OnDevice] = []

    def make(slots: int, size: int, mode: LogprobsMode) -> Sampler:
        samplers.append(OnDevice(slots, size, mode))
        return samplers[-1]

    OnDevice.flags.clear()
    assert mismatches(random_cases(CASES_A_RUN, vocab_size, 1), make, mode) == 0
    assert all(min(sampler.stats().rows[name] for name in BRANCHES) > 100 for sampler in samplers)
    expected = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN | (RowFlag.REJECTION if vocab_size > 256 else RowFlag(0))
    expected |= RowFlag.NUCLEUS_SCAN if vocab_size > 256 and mode == "processed_logprobs" else RowFlag(0)
    assert np.bitwise_or.reduce(list(OnDevice.flags)) == expected


class KeyedBySlot(OnDevice):
    """The fault: noise depends on where a row lives."""

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Any, *, seed: int, **rest: Any) -> None:
        super().admit(slot, params, prompt_ids, seed=seed ^ slot, **rest)


class KeyedByItself(OnDevice):
    """The fault: each sampler has its own noise, so that a second replica answers otherwise."""

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Any, *, seed: int, **rest: Any) -> None:
        super().admit(slot, params, prompt_ids, seed=seed ^ self.number, **rest)


class Forgetful(OnDevice):
    """The fault: a resumed row begins again at position 0."""

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Any, *, seed: int, **rest: Any) -> None:
        super().admit(slot, params, prompt_ids, seed=seed, **rest)
        self.state.position[slot] = 0


class HalfPrecise(OnDevice):
    """The fault: rows of larger batches lose a bit, as after a product whose rounding depends on its size."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        return super().sample(logits * 1.000001 if len(slots) > 8 else logits, slots)


@pytest.mark.parametrize("fault", [KeyedBySlot, KeyedByItself, Forgetful, HalfPrecise], ids=lambda f: f.__name__)
def test_planted_fault_fails_the_same_check(fault: type[OnDevice]) -> None:
    cases = random_cases(64, 300, 1)
    assert mismatches(cases, OnDevice, "raw_logprobs") == 0
    assert mismatches(cases, fault, "raw_logprobs") > 4
