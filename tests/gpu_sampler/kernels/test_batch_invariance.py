"""A row's answer from the kernels is its own, bit for bit: alone, among neighbours of any kind (which change how the
kernels are compiled), in any order, slot and number, padded, replayed from a graph, stopped and resumed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.output import SampleOutput
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams
from tests.support.invariance import RowCase, admit, answer, mismatches, random_cases

V = 300
MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")
THIRD = tuple(range(0, V, 3))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "plain": {"logprobs": 0, "temperature": 0.7},
    "silent": {},
    "candidates": {"top_k": 17, "top_p": 0.9, "logprobs": 20},
    "many candidates": {"top_k": 270, "logprobs": 2},
    "nucleus": {"top_p": 0.5, "logprob_token_ids": (1, 299, 1)},
    "wide nucleus": {"top_p": 0.999, "temperature": 2.0, "logprobs": 5},
    "min-p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 1},
    "mask": {"allowed_token_ids": THIRD, "logprobs": 3},
    "mask and bias": {"allowed_token_ids": THIRD, "logit_bias": ((6, 9.0),), "top_p": 0.9, "logprobs": 1},
    "bans": {"bad_words_ids": ((5,), (6, 7)), "min_tokens": 9, "stop_token_ids": (0,)},
}
SILENT = ("silent", "min-p", "bans")
PLAIN = ("greedy", "plain", "candidates", "nucleus")
WITHOUT: dict[str, tuple[str, ...]] = {
    "overlays": tuple(kind for kind in KINDS if kind not in ("penalties", "mask and bias", "bans")),
    "masks": tuple(kind for kind in KINDS if "mask" not in kind),
    "log-probabilities": SILENT,
    "masks, overlays and wide rows": PLAIN,
}


class OnKernels(Sampler):
    """The kernels behind the reference's types: arrays in, arrays out."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        rows = torch.tensor(np.asarray(logits), device=self.device)
        return self.fetch(super().sample(rows, self.named(slots))).result()

    def named(self, slots: Any) -> Any:
        """The slots that are taken for those given."""
        return slots


Made = Callable[..., Sampler]


def make(slots: int, mode: LogprobsMode, device: str, kind: type[Sampler] = OnKernels, size: int = V) -> Sampler:
    return kind(num_slots=slots, vocab_size=size, device=device, logprobs_mode=mode, backend="triton")


def case_of(kind: str, size: int = V, steps: int = 1) -> RowCase:
    number = list(KINDS).index(kind)
    logits_SV = np.random.default_rng([number, size]).normal(0, 0.5, (steps, size)).astype(np.float32)
    params = SamplingParams(max_tokens=40, **KINDS[kind])
    return RowCase(
        params=params, prompt=(1, 5, 6), outputs=(6,) * (number % 4), seed=77 + number, branch=0, logits_SV=logits_SV
    )


def answers(
    sampler: Sampler, cases: Sequence[RowCase], slots: Sequence[int], order: Sequence[int], pads: int = 0
) -> list[bytes]:
    """One step: the answer of each case, which lives in its slot, in a batch of that order with padding rows in it."""
    for case, slot in zip(cases, slots, strict=True):
        admit(sampler, slot, case)
    logits = [cases[i].logits_SV[0] for i in order]
    named = [slots[i] for i in order]
    for pad in range(pads):
        logits.insert(3 * pad % len(logits), np.full(len(logits[0]), (np.nan, 3.0)[pad % 2], np.float32))
        named.insert(3 * pad % len(named), 0)
    output = sampler.sample(np.stack(logits), named)
    rows = {slot: row for row, slot in enumerate(named)}
    found = [answer(output, rows[slot], case.params) for case, slot in zip(cases, slots, strict=True)]
    for slot in slots:
        sampler.release(slot)
    return found


def alone(sampler: Sampler, cases: Sequence[RowCase]) -> list[bytes]:
    return [answers(sampler, [case], [1], [0])[0] for case in cases]


def moved_rows_agree(device: str, mode: LogprobsMode, kind: type[Sampler] = OnKernels, size: int = V) -> bool:
    """Every kind alone; then all of them in another order and in other slots, with padding rows among them."""
    cases = [case_of(name, size) for name in KINDS]
    rng = np.random.default_rng(5)
    sampler = make(41, mode, device, kind, size)
    expected = alone(sampler, cases)
    slots, order = (1 + rng.permutation(40)[: len(cases)]).tolist(), rng.permutation(len(cases)).tolist()
    return answers(sampler, cases, slots, order, pads=3) == expected


def other_neighbours_agree(device: str, mode: LogprobsMode, kind: type[Sampler] = OnKernels, size: int = V) -> bool:
    """Batches without any row of some feature give the same bits as the batch of all."""
    sampler = make(41, mode, device, kind, size)
    cases = {name: case_of(name, size) for name in KINDS}
    everyone = range(len(KINDS))
    whole = dict(zip(KINDS, answers(sampler, list(cases.values()), [1 + i for i in everyone], everyone), strict=True))
    for names in WITHOUT.values():
        some = answers(sampler, [cases[name] for name in names], range(1, len(names) + 1), range(len(names)))
        if some != [whole[name] for name in names]:
            return False
    return True


def resumed_rows_agree(device: str, mode: LogprobsMode, kind: type[Sampler] = OnKernels) -> bool:
    """All kinds go on for two steps; each step is that of rows admitted anew with the tokens before it."""
    cases = [case_of(name, V, 2) for name in KINDS]
    slots = range(1, len(cases) + 1)
    sampler, resumed = make(len(cases) + 1, mode, device, kind), make(len(cases) + 1, mode, device, kind)
    emitted: list[list[int]] = [[] for _ in cases]
    for slot, case in zip(slots, cases, strict=True):
        admit(sampler, slot, case)
    for step in range(2):
        logits = np.stack([case.logits_SV[step] for case in cases])
        for slot, case in zip(slots, cases, strict=True):
            admit(resumed, slot, case, emitted[slot - 1])
        one, other = sampler.sample(logits, slots), resumed.sample(logits, slots)
        for row, case in enumerate(cases):
            if answer(one, row, case.params) != answer(other, row, case.params):
                return False
            emitted[row].append(int(one.tokens[row]))
    return True


CHECKS = {check.__name__: check for check in (moved_rows_agree, other_neighbours_agree, resumed_rows_agree)}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("check", "mode"),
    [
        ("moved_rows_agree", "raw_logprobs"),
        ("other_neighbours_agree", "raw_logprobs"),
        ("other_neighbours_agree", "processed_logprobs"),
        ("resumed_rows_agree", "processed_logprobs"),
    ],
)
def test_each_row_is_bitwise_as_alone(device: str, check: str, mode: LogprobsMode) -> None:
    assert CHECKS[check](device, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", CHECKS)
def test_each_row_is_bitwise_as_alone_in_both_modes(device: str, check: str, mode: LogprobsMode) -> None:
    assert CHECKS[check](device, mode)


class KeyedByRow(OnKernels):
    """The fault: noise depends on where in the batch a row stands."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        rows = np.asarray(slots)
        self.state.seed[rows] ^= np.arange(len(rows), dtype=np.uint64)
        self.state.touch()
        return super().sample(logits, slots)


class NeighboursMask(OnKernels):
    """The fault: the mask of one row is taken for all rows of its batch."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        masked = [slot for slot in slots if slot in self.state.masks]
        for slot in slots if masked else ():
            self.state.mask_row[slot] = self.state.mask_row[masked[0]]
        return super().sample(logits, slots)


class Rounded(OnKernels):
    """The fault: batches of plain rows are computed a little otherwise, as another kernel would."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        return super().sample(logits * np.float32(1 + 2**-20 * (len(slots) == len(PLAIN))), slots)


class StandsStill(OnKernels):
    """The fault: the position of a row is not advanced."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        on_device: Any = self._on_device
        before = self.state.position.copy()
        found = super().sample(logits, slots)
        on_device.image.table[:, 3] = torch.from_numpy(before).to(self.device)
        return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (KeyedByRow, moved_rows_agree),
        (NeighboursMask, other_neighbours_agree),
        (Rounded, other_neighbours_agree),
        (StandsStill, resumed_rows_agree),
    ],
    ids=lambda one: one.__name__,
)
def test_planted_fault_fails_the_same_check(device: str, fault: type[Sampler], check: Callable[..., bool]) -> None:
    assert not check(device, "raw_logprobs", fault)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1111, 151_936])
def test_neighbour_of_each_kind_may_join_or_leave(device: str, size: int, mode: LogprobsMode) -> None:
    sampler = make(4, mode, device, size=size)
    cases = [case_of(name, size) for name in KINDS]
    expected = alone(sampler, cases)
    for i, case in enumerate(cases):
        for neighbour in cases:
            for order in ((0, 1), (1, 0)):
                other = replace(neighbour, seed=5)
                assert answers(sampler, [case, other], [3, 2], order)[0] == expected[i]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [32_003, 151_936])
@pytest.mark.parametrize("rows", [2, 32, 256])
def test_batches_of_any_size_answer_as_rows_alone(device: str, rows: int, size: int, mode: LogprobsMode) -> None:
    sampler = make(rows + 1, mode, device, size=size)
    kinds = [case_of(name, size) for name in KINDS]
    cases = [replace(kinds[i % len(kinds)], seed=i) for i in range(rows)]
    together = answers(sampler, cases, range(1, rows + 1), range(rows))
    assert alone(sampler, cases) == together


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [111, 1111])
def test_random_rows_answer_alone_as_in_any_batch_and_after_a_resume(size: int, mode: LogprobsMode) -> None:
    def made(slots: int, size: int, mode: LogprobsMode) -> Sampler:
        return make(slots, mode, "cuda", size=size)

    assert mismatches(random_cases(1000, size, 1), made, mode) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_out", [(), *WITHOUT])
def test_graph_replays_as_steps_one_by_one_and_no_two_replays_share_noise(left_out: str, mode: LogprobsMode) -> None:
    names = WITHOUT[left_out] if left_out else tuple(KINDS)
    cases, steps = [case_of(name) for name in names], 4
    slots = range(1, len(cases) + 1)
    rows = torch.from_numpy(np.stack([case.logits_SV[0] for case in cases])).cuda()
    eager, captured = (make(len(cases) + 1, mode, "cuda", Sampler) for _ in range(2))
    for slot, case in zip(slots, cases, strict=True):
        for sampler in (eager, captured):
            admit(sampler, slot, case)
    expected = [packed(eager.sample(rows.clone(), slots)) for _ in range(steps)]
    plan, own, logits = captured.plan_rows(slots), torch.tensor(slots, dtype=torch.int32).cuda(), rows.clone()
    captured.sample(logits, slots)  # compiles, and brings the state
    for slot, case in zip(slots, cases, strict=True):
        admit(captured, slot, case)
    on_device: Any = captured._on_device
    on_device.apply()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.launch(logits, own, plan)
    found = []
    for _ in range(steps):
        logits.copy_(rows)  # the sampler wrote into them
        graph.replay()
        found.append(packed(output))
    assert found == expected
    assert len(set(found)) == steps  # the logits are the same: only the noise differs


def packed(output: SampleOutput) -> bytes:
    return b"".join(part.cpu().numpy().tobytes() for part in output if part is not None)
