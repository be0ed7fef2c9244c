"""Whole steps of the kernels against the numpy sampler: edges of every filter, random mixtures, all types of logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams
from tests.support.agreement import NOTHING, Agreement, step_agrees
from tests.support.edges import admit_edge, as_given, edge_case, edges, pair_of_samplers
from tests.support.invariance import RowCase, admit, random_cases

MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")
RAW, PROCESSED = MODES
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL_FLAGS = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN | RowFlag.WIDE | RowFlag.REJECTION | RowFlag.NUCLEUS_SCAN
Samplers = Callable[[int, int, str, LogprobsMode], tuple[Sampler, Sampler]]


def edges_agree(
    device: str, size: int, mode: LogprobsMode, dtype: torch.dtype, layout: int = 0, every: int = 1
) -> Agreement:
    """All edges in one batch, or every second of them. `layout` 0: dense rows, 1: rows of another stride."""
    named = dict(list(edges(size).items())[size // 2 % every :: every])
    if dtype == F16:
        named.pop("plain, huge", None)
    ours, reference = pair_of_samplers(len(named) + 1, size, device, mode)
    cases = [edge_case(edge, size, seed) for seed, edge in enumerate(named.values())]
    for slot, (edge, case) in enumerate(zip(named.values(), cases, strict=True), start=1):
        for sampler in (ours, reference):
            admit_edge(sampler, slot, edge, case)
    rows = np.stack([case.logits_SV[0] for case in cases])
    found = step_agrees(ours, reference, list(as_given(rows, dtype, device))[layout], range(1, len(cases) + 1))
    names = list(named)
    return found._replace(wrong=tuple(f"{names[int(one.split()[1].strip(','))]}: {one}" for one in found.wrong))


def cases_agree(
    device: str, cases: Sequence[RowCase], mode: LogprobsMode, make: Samplers = pair_of_samplers
) -> Agreement:
    """Each case for as many steps as it has logits. A close call of one step may be a wrong row of the next."""
    steps, size = cases[0].logits_SV.shape
    ours, reference = make(len(cases) + 1, size, device, mode)
    for slot, case in enumerate(cases, start=1):
        for sampler in (ours, reference):
            admit(sampler, slot, case)
    found = NOTHING
    for step in range(steps):
        logits = torch.from_numpy(np.stack([case.logits_SV[step] for case in cases])).to(device)
        found += step_agrees(ours, reference, logits, range(1, len(cases) + 1))
    return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("size", "mode", "dtype", "layout"),
    [
        (1, RAW, F32, 0),
        (3, PROCESSED, BF16, 0),
        (17, RAW, F16, 1),
        (127, PROCESSED, BF16, 1),
        (128, RAW, F32, 0),
        (129, PROCESSED, F32, 1),
        (700, RAW, F16, 1),
        (1111, RAW, BF16, 0),
        (1111, PROCESSED, F32, 1),
    ],
)
def test_edges_agree_with_the_reference(
    device: str, size: int, mode: LogprobsMode, dtype: torch.dtype, layout: int
) -> None:
    found = edges_agree(device, size, mode, dtype, layout, every=1 if size in (1, 129, 1111) else 2)
    assert found.holds, found
    if (size, mode) == (1111, PROCESSED):  # then the edges have raised every flag that a plain step can
        assert found.flags == ALL_FLAGS


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("size", "mode"), [(111, RAW), (300, PROCESSED)])
def test_random_mixtures_agree_with_the_reference(device: str, size: int, mode: LogprobsMode) -> None:
    found = cases_agree(device, random_cases(16, size, 5), mode)
    assert found.holds, found


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((1, F32), (3, BF16), (17, F16), (127, BF16), (128, F32), (129, F16), (700, BF16), (1111, F32)),
        *((3001, BF16), (32_003, BF16), (32_003, F16), (151_936, BF16), (151_936, F32), (262_144, BF16)),
    ],
)
def test_edges_agree_at_every_size_and_type(device: str, size: int, mode: LogprobsMode, dtype: torch.dtype) -> None:
    found = edges_agree(device, size, mode, dtype) + edges_agree(device, size, mode, dtype, 1)
    assert found.holds, found


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "rows"), [(111, 4096), (1111, 2048), (32_003, 1024), (151_936, 256)])
def test_thousands_of_random_rows_agree(device: str, size: int, rows: int, mode: LogprobsMode) -> None:
    cases = [replace(case, logits_SV=case.logits_SV[:1]) for case in random_cases(rows, size, 6)]
    found = cases_agree(device, cases, mode, partial(pair_of_samplers, entries=128 * rows))
    assert found.holds, found


@pytest.mark.gpu
def test_rows_behind_the_first_2_to_the_31_logits_agree(device: str) -> None:
    """4,096 rows of 600,001 logits: row offsets do not fit into 32 bits. The reference looks at the last rows."""
    size, rows, seen = 600_001, 4096, 8
    case = replace(random_cases(1, 111, 3)[0], params=SamplingParams(top_k=50, top_p=0.9, logprobs=5), outputs=())
    ours, _ = pair_of_samplers(rows + 1, size, device, RAW)
    other, reference = pair_of_samplers(seen + 1, size, device, RAW)
    for slot in range(1, rows + 1):
        admit(ours, slot, replace(case, seed=slot))
    for slot in range(1, seen + 1):
        for sampler in (other, reference):
            admit(sampler, slot, replace(case, seed=rows - seen + slot))
    logits = torch.randn(rows, size, device=device, dtype=BF16)
    last = logits[-seen:].clone()
    whole = ours.fetch(ours.sample(logits, range(1, rows + 1))).result()
    assert step_agrees(other, reference, last.clone(), range(1, seen + 1)).holds
    for slot in range(1, seen + 1):
        admit(other, slot, replace(case, seed=rows - seen + slot))
    alone = other.fetch(other.sample(last, range(1, seen + 1))).result()
    for name, part, own in zip(SampleOutput._fields, whole, alone, strict=True):
        assert part[-seen:].tobytes() == own.tobytes(), name


@pytest.mark.parametrize("mode", MODES)
def test_probabilities_of_all_tokens_sum_to_1(device: str, mode: LogprobsMode) -> None:
    size = 111
    params = [SamplingParams(logprob_token_ids=tuple(range(size)), **own) for own in SUMMED]
    ours, _ = pair_of_samplers(len(params) + 1, size, device, mode)
    for slot, one in enumerate(params, start=1):
        ours.admit(slot, one, [], seed=slot)
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (len(params), size)).astype(np.float32)).to(device)
    chosen: Any = ours.fetch(ours.sample(logits, range(1, len(params) + 1))).result().chosen_logprobs
    np.testing.assert_allclose(np.exp(chosen.astype(np.float64)).sum(axis=1), 1, atol=2e-6)


SUMMED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 7, "logprobs": 9},
    {"top_p": 0.9},
    {"min_p": 0.01},
    {"logit_bias": ((3, 9.0), (7, -9.0)), "top_p": 0.97},
]


class Faulty(Sampler):
    """A sampler of kernels that report one wrong number."""

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Any, **rest: Any) -> None:
        super().admit(slot, params, prompt_ids, **rest)
        self.spoil(slot)

    def spoil(self, slot: int) -> None:
        raise NotImplementedError


class OneMore(Faulty):
    """`>` for `>=` at k."""

    def spoil(self, slot: int) -> None:
        self.state.top_k[slot] += self.state.top_k[slot] > 0


class OtherPlace(Faulty):
    """A resumed row is one position behind."""

    def spoil(self, slot: int) -> None:
        self.state.position[slot] = max(0, self.state.position[slot] - 1)


class OtherNoise(Faulty):
    """The slot is mixed into the seed."""

    def spoil(self, slot: int) -> None:
        self.state.seed[slot] ^= np.uint64(slot)


class NoBias(Faulty):
    """The overlay is left out."""

    def spoil(self, slot: int) -> None:
        self.state.overlay(slot).bias[:] = 0


class SlightlyWarm(Faulty):
    """T wrong by 1 part in 1,000, which moves log-probabilities first."""

    def spoil(self, slot: int) -> None:
        self.state.temperature[slot] *= np.float32(1.001)


class NextId(Faulty):
    """Chosen ids off by one."""

    def spoil(self, slot: int) -> None:
        self.state.chosen_ids[slot] += 1


TELLING = [
    RowCase(
        params=SamplingParams(max_tokens=16, **own),
        prompt=(3,),
        outputs=(5, 6),
        seed=number,
        branch=0,
        logits_SV=np.random.default_rng(number).normal(0, 1, (1, 111)).astype(np.float32),
    )
    for number, own in enumerate([*({} for _ in range(4)), *SUMMED[1:], {"logprob_token_ids": (1, 9)}])
]
FAULTS: Sequence[tuple[type[Faulty], LogprobsMode]] = [
    (OneMore, PROCESSED),
    (OtherPlace, RAW),
    (OtherNoise, RAW),
    (NoBias, RAW),
    (SlightlyWarm, PROCESSED),
    (NextId, RAW),
]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("fault", "mode"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_planted_fault_fails_the_same_check(device: str, fault: type[Faulty], mode: LogprobsMode) -> None:
    def faulty(slots: int, size: int, device: str, mode: LogprobsMode) -> tuple[Sampler, Sampler]:
        _, reference = pair_of_samplers(slots, size, device, mode)
        return fault(num_slots=slots, vocab_size=size, device=device, logprobs_mode=mode, backend="triton"), reference

    assert not cases_agree(device, TELLING, mode, faulty).holds


@pytest.mark.full
def test_rows_that_tell_faults_agree_without_one(device: str) -> None:
    for mode in MODES:
        found = cases_agree(device, TELLING, mode)
        assert found.holds, found


def test_no_rows_are_no_fault(device: str) -> None:
    ours, _ = pair_of_samplers(2, 111, device, RAW)
    found = ours.sample(torch.empty((0, 111), device=device), [])
    assert found.tokens.shape == found.flags.shape == (0,)


def test_logits_of_another_type_are_refused(device: str) -> None:
    ours, _ = pair_of_samplers(2, 111, device, RAW)
    with pytest.raises(ValueError, match=r"`logits` are torch.float64, expected one of torch.bfloat16"):
        ours.sample(torch.zeros((1, 111), dtype=torch.float64, device=device), [0])
