"""A row's answer is its own: bitwise the same whoever its neighbours are, wherever it lives, and when it is resumed."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from tests.support.invariance import RowCase, admit, answer, mismatches, random_batches, random_cases

RUNS: list[tuple[int, LogprobsMode]] = [
    (111, "raw_logprobs"),
    (300, "raw_logprobs"),
    (111, "processed_logprobs"),
    (300, "processed_logprobs"),
]
CASES_A_RUN = 2500  # 10,000 in all


class CountingSampler(Sampler):
    """Ours, and what its rows went through."""

    flags: Counter[int]
    sizes: Counter[int]

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        output = super().sample(logits, slots)
        self.flags.update(output.flags.tolist())
        self.sizes[len(slots)] += 1
        return output


def make(slots: int, vocab_size: int, mode: LogprobsMode) -> Sampler:
    return Sampler(num_slots=slots, vocab_size=vocab_size, logprobs_mode=mode)


@pytest.mark.full(keep=1)
@pytest.mark.risk("D1", figure="exactness")
@pytest.mark.parametrize(("vocab_size", "mode"), RUNS)
def test_rows_answer_alone_as_in_any_batch_and_after_a_resume(vocab_size: int, mode: LogprobsMode) -> None:
    flags, sizes = Counter[int](), Counter[int]()
    samplers: list[Sampler] = []

    def counting(slots: int, size: int, mode: LogprobsMode) -> Sampler:
        sampler = CountingSampler(num_slots=slots, vocab_size=size, logprobs_mode=mode)
        sampler.flags, sampler.sizes = flags, sizes
        samplers.append(sampler)
        return sampler

    assert mismatches(random_cases(CASES_A_RUN, vocab_size, 1), counting, mode) == 0
    assert set(range(1, 33)) <= set(sizes)
    assert all(min(sampler.stats().rows[name] for name in BRANCHES) > 100 for sampler in samplers)
    expected = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN | (RowFlag.REJECTION if vocab_size > 256 else RowFlag(0))
    expected |= RowFlag.NUCLEUS_SCAN if vocab_size > 256 and mode == "processed_logprobs" else RowFlag(0)
    assert np.bitwise_or.reduce(list(flags)) == expected


BRANCHES = ("greedy", "plain", "candidates", "nucleus")


class KeyedByPlace(Sampler):
    """The fault: noise depends on where in the batch a row stands."""

    def keys(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.arange(len(slots))

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        rows, seeds = np.asarray(slots, np.int64), self.state.seed.copy()
        self.state.seed[rows] ^= self.keys(rows).astype(np.uint64)
        output = super().sample(logits, slots)
        self.state.seed[:] = seeds
        return output


class KeyedBySlot(KeyedByPlace):
    def keys(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return slots


class KeyedByBatchSize(KeyedByPlace):
    def keys(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.full(len(slots), len(slots))


class KeyedByItself(Sampler):
    """Each sampler has its own noise: a second replica answers otherwise."""

    made = itertools.count(1)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.number = next(self.made)  # not its address, which the next one may have again

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Any, *, seed: int, **rest: Any) -> None:
        super().admit(slot, params, prompt_ids, seed=seed ^ self.number, **rest)


class Forgetful(Sampler):
    """A resumed row begins again at position 0."""

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Any, *, seed: int, **rest: Any) -> None:
        super().admit(slot, params, prompt_ids, seed=seed, **rest)
        self.state.position[slot] = 0


class HalfPrecise(Sampler):
    """Rows of larger batches lose a bit: what a product whose rounding depends on its size would give."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        return super().sample(logits * np.float32(1.000001) if len(slots) > 8 else logits, slots)


@pytest.mark.full(keep=3)
@pytest.mark.risk("D1", planted=True)
@pytest.mark.parametrize(
    "fault",
    [KeyedByPlace, KeyedBySlot, KeyedByBatchSize, KeyedByItself, Forgetful, HalfPrecise],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(("vocab_size", "mode"), RUNS[::3])
def test_planted_fault_fails_the_same_check(fault: type[Sampler], vocab_size: int, mode: LogprobsMode) -> None:
    def faulty(slots: int, size: int, mode: LogprobsMode) -> Sampler:
        return fault(num_slots=slots, vocab_size=size, logprobs_mode=mode)

    cases = random_cases(64, vocab_size, 1)
    assert mismatches(cases, make, mode) == 0
    assert mismatches(cases, faulty, mode) > 4


def test_random_batches_hold_every_row_once_and_2_to_32_rows() -> None:
    for count in (2, 3, 33, 34, 35, 1000):
        batches = random_batches(count, np.random.default_rng(count))
        assert sorted(row for batch in batches for row in batch) == list(range(count))
        assert all(2 <= len(batch) <= 33 for batch in batches)


V = 300
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, logprobs=2),
    "plain": SamplingParams(logprobs=0),
    "silent": SamplingParams(),
    "candidates": SamplingParams(top_k=17, top_p=0.9, logprobs=20),
    "nucleus": SamplingParams(top_p=0.9, logprob_token_ids=(1, 299, 1)),
    "wide nucleus": SamplingParams(top_p=0.999, temperature=2.0, logprobs=5),
    "min-p": SamplingParams(min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logprobs=1, max_tokens=40),
    "mask": SamplingParams(allowed_token_ids=tuple(range(0, V, 3)), logprobs=3),
    "bans": SamplingParams(bad_words_ids=((5,), (6, 7)), min_tokens=9, stop_token_ids=(0,)),
}


def case_of(kind: str, number: int) -> RowCase:
    logits_SV = np.random.default_rng(number).normal(0, 0.5, (2, V)).astype(np.float32)
    return RowCase(
        params=KINDS[kind], prompt=(1, 5, 6), outputs=(6,) * number, seed=77 + number, branch=0, logits_SV=logits_SV
    )


CASES = [case_of(kind, number) for number, kind in enumerate(KINDS)]


def one_step(cases: Sequence[RowCase], slots: Sequence[int], order: Sequence[int], pads: int = 0) -> list[bytes]:
    """The answer of each case, which lives in its slot, in a batch of that order and with padding rows between."""
    sampler = make(64, V, "raw_logprobs")
    for case, slot in zip(cases, slots, strict=True):
        admit(sampler, slot, case)
    logits = [cases[i].logits_SV[0] for i in order]
    named = [slots[i] for i in order]
    for pad in range(pads):
        logits.insert(2 * pad % len(logits), np.full(V, (np.nan, 3.0)[pad % 2], np.float32))
        named.insert(2 * pad % len(named), 0)
    output = sampler.sample(np.stack(logits), named)
    rows = {slot: row for row, slot in enumerate(named)}
    return [answer(output, rows[slot], case.params) for case, slot in zip(cases, slots, strict=True)]


ALONE = [one_step([case], [1], [0])[0] for case in CASES]


def test_rows_may_be_permuted() -> None:
    rng = np.random.default_rng(2)
    for _ in range(5):
        assert one_step(CASES, range(1, 11), rng.permutation(10).tolist()) == ALONE


def test_rows_may_live_in_any_slot() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        assert one_step(CASES, (1 + rng.permutation(63)[:10]).tolist(), range(10)) == ALONE


@pytest.mark.parametrize("pads", [1, 2, 7])
def test_batch_may_be_padded_with_rows_of_slot_0(pads: int) -> None:
    assert one_step(CASES, range(1, 11), range(10), pads) == ALONE


@pytest.mark.parametrize("kind", KINDS)
def test_neighbour_of_each_kind_may_join_or_leave(kind: str) -> None:
    neighbour = case_of(kind, 23)
    for i, case in enumerate(CASES):
        for order in ((0, 1), (1, 0)):
            assert one_step([case, neighbour], [3, 2], order)[0] == ALONE[i]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 1, 5, 17])
def test_stream_stopped_and_resumed_anywhere_goes_on_bitwise(kind: str, at: int) -> None:
    params = replace(KINDS[kind], max_tokens=40)
    logits = np.random.default_rng(9).normal(0, 0.7, (20, 1, V)).astype(np.float32)

    def stream(sampler: Sampler, slot: int, first: int, outputs: list[int]) -> list[bytes]:
        sampler.admit(slot, params, [1, 5], seed=2**63 + 5, branch=1, output_ids=outputs)
        found = []
        for step in range(first, 20):
            output = sampler.sample(logits[step], [slot])
            outputs.append(int(output.tokens[0]))
            found.append(answer(output, 0, params))
        return found

    emitted: list[int] = []
    whole = stream(make(3, V, "raw_logprobs"), 1, 0, emitted)
    resumed = make(9, V, "raw_logprobs")
    resumed.admit(7, KINDS["penalties"], [8], seed=1)  # somebody was here
    resumed.sample(logits[0], [7])
    resumed.release(7)
    assert stream(resumed, 7, at, emitted[:at]) == whole[at:]


def test_branches_of_one_request_differ_and_each_is_as_alone() -> None:
    logits = np.zeros((17, V), np.float32)
    params = SamplingParams(n=17)

    def tokens(branches: Sequence[int]) -> list[int]:
        sampler = make(18, V, "raw_logprobs")
        for slot, branch in enumerate(branches, start=1):
            sampler.admit(slot, params, [], seed=5, branch=branch)
        return [int(token) for token in sampler.sample(logits[: len(branches)], range(1, len(branches) + 1)).tokens]

    together = tokens(range(17))
    assert len(set(together)) > 12
    assert [tokens([branch])[0] for branch in range(17)] == together
    assert tokens(range(16, -1, -1)) == together[::-1]


BAD_ROWS = {
    "nan": (np.nan, 3),
    "inf": (np.inf, 3),
    "all nan": (np.nan, 0),
    "all -inf": (-np.inf, 0),
    "all inf": (np.inf, 0),
}


@pytest.mark.risk("R11")
@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_row_of_bad_values_is_flagged_and_its_neighbours_are_bitwise_as_before(bad: str, mode: LogprobsMode) -> None:
    value, only = BAD_ROWS[bad]
    sampler, untouched = make(12, V, mode), make(12, V, mode)
    logits = np.stack([case.logits_SV[0] for case in CASES])
    for slot, case in enumerate(CASES, start=1):
        admit(sampler, slot, case)
        admit(untouched, slot, case)
    whole = untouched.sample(logits, range(1, 11))
    for victim in range(10):
        for slot, case in enumerate(CASES, start=1):
            admit(sampler, slot, case)
        broken = logits.copy()
        broken[victim, only : only + 1 if only else None] = value
        found = sampler.sample(broken, range(1, 11))
        expected = RowFlag.BAD_VALUE if "-inf" not in bad else RowFlag(0)
        expected |= RowFlag(0) if only else RowFlag.NO_TOKEN
        assert found.flags[victim] & (RowFlag.BAD_VALUE | RowFlag.NO_TOKEN) == expected
        assert (found.tokens[victim] == INVALID_TOKEN) == (not only)
        for row, case in enumerate(CASES):
            if row != victim:
                assert answer(found, row, case.params) == answer(whole, row, case.params)
