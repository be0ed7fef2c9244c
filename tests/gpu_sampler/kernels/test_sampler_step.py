"""Tests the cost and the reach of a step of the kernels: its launches, waits and memory, and nothing outside of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import gpu_sampler.triton_sampler as triton_sampler
from gpu_sampler.output import OutputWords
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Proposal
from gpu_sampler.startup_progress import StartupProgress
from gpu_sampler.triton_sampler import LaunchFlags, kernels_of
from tests.support.edges import LIMITS, values
from tests.support.guards import GUARD, POISON, Guarded

V = 700
RAW: LogprobsMode = "raw_logprobs"
PROCESSED: LogprobsMode = "processed_logprobs"
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"logprobs": 20, "temperature": 0.7, "logprob_token_ids": (1, 2, 3)},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.9, "logprobs": 1},
    {"top_k": 300, "min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 1, "bad_words_ids": ((5,), (6, 7))},
    {"allowed_token_ids": tuple(range(0, V, 3)), "logit_bias": ((3, 9.0),), "logprobs": 3},
    {},
)
BASE = ("softmax_stats", "sample")
LAUNCHES: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [  # params, launches raw, launches processed
    ({"temperature": 0}, BASE, BASE),
    ({"temperature": 0, "logprobs": 20}, BASE, BASE),
    ({}, BASE, BASE),
    ({"temperature": 0.7, "logprobs": 20}, (*BASE, "token_rank"), (*BASE, "token_rank")),
    ({"top_k": 50, "top_p": 0.9, "logprobs": 20}, BASE, BASE),
    ({"top_k": 50, "top_p": 0.9, "min_p": 0.1}, BASE, BASE),
    ({"top_k": 257}, (*BASE, "nucleus_fallback"), (*BASE, "nucleus_fallback")),
    (
        {"top_p": 0.9},
        (*BASE, "nucleus_rejection", "nucleus_fallback"),
        (*BASE, "nucleus_rejection", "nucleus_fallback"),
    ),
    (
        {"top_p": 0.9, "logprobs": 1},
        (*BASE, "nucleus_rejection", "nucleus_fallback"),
        (*BASE, "nucleus_rejection", "nucleus_fallback"),
    ),
    ({"logit_bias": ((3, 1.0),)}, ("apply_logits_processors", *BASE), ("apply_logits_processors", *BASE)),
    (
        {"logit_bias": ((3, 1.0),), "logprobs": 1, "temperature": 0},
        ("apply_logits_processors", "softmax_stats", "sample_with_report", "token_rank"),
        ("apply_logits_processors", *BASE),
    ),
    (
        {"presence_penalty": 1.0},
        ("apply_logits_processors", *BASE, "update_token_counts"),
        ("apply_logits_processors", *BASE, "update_token_counts"),
    ),
    (
        {"bad_words_ids": ((1, 2),)},
        ("apply_logits_processors", *BASE, "update_token_counts"),
        ("apply_logits_processors", *BASE, "update_token_counts"),
    ),
]


def make(slots: int, device: str, mode: LogprobsMode = RAW, size: int = V) -> Sampler:
    return Sampler(num_slots=slots, vocab_size=size, device=device, logprobs_mode=mode, backend="triton", limits=LIMITS)


def admitted(device: str, rows: tuple[dict[str, Any], ...] = MIXED, mode: LogprobsMode = RAW) -> Sampler:
    sampler = make(len(rows) + 1, device, mode)
    for slot, params in enumerate(rows, start=1):
        sampler.admit(slot, SamplingParams(max_tokens=4096, **params), [5], seed=slot)
    return sampler


def logits_of(rows: int, device: str, size: int = V) -> torch.Tensor:
    rng = np.random.default_rng(rows)
    kinds = ("almost flat", "smooth", "bad")
    return torch.from_numpy(np.stack([values(kinds[i % 3], size, rng) for i in range(rows)])).to(device)


@pytest.mark.parametrize(("params", "raw", "processed"), LAUNCHES, ids=str)
def test_launches_of_a_step_are_those_that_its_rows_need(
    device: str, params: dict[str, Any], raw: tuple[str, ...], processed: tuple[str, ...]
) -> None:
    for mode, expected in ((RAW, raw), (PROCESSED, processed)):
        plan = admitted(device, (params,), mode).plan_rows([1, 0])
        assert plan.kernels == expected
        moved = {"logit_bias", "presence_penalty", "bad_words_ids"} & params.keys()
        assert moved or len(plan.kernels) <= 4


def test_launches_of_a_batch_are_those_of_its_rows_together(device: str) -> None:
    for mode in (RAW, PROCESSED):
        sampler = admitted(device, MIXED, mode)
        every = kernels_of(LaunchFlags(sum(LaunchFlags)) & ~LaunchFlags.FLASHINFER)
        if mode == PROCESSED:  # which reports no row anew
            every = kernels_of(LaunchFlags(sum(LaunchFlags)) & ~(LaunchFlags.FLASHINFER | LaunchFlags.REPORT))
        together = {name for slot in range(len(MIXED) + 1) for name in sampler.plan_rows([slot]).kernels}
        plan = sampler.plan_rows(range(len(MIXED) + 1))
        assert plan.kernels == tuple(name for name in every if name in together) and plan.masked
        assert sampler.plan_rows([0]).kernels == BASE and not sampler.plan_rows([1, 2, 3]).masked


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what is launched, those of `sample` by what it is asked for."""
    launched: list[str] = []

    def recording(name: str, launcher: Any) -> Any:
        def launch(*args: Any, **flags: Any) -> Any:
            together = "sample_with_report" if flags.get("with_report") else name
            launched.append("report" if flags.get("report") else together)
            return launcher(*args, **flags)

        return launch

    with monkeypatch.context() as patch:
        for name in {*kernels_of(LaunchFlags(sum(LaunchFlags)))} - {"report", "flashinfer"}:
            patch.setattr(triton_sampler, name, recording(name, getattr(triton_sampler, name)))
        yield launched


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("slots", [(1,), (2,), (3, 4), (6,), range(1, len(MIXED) + 1)], ids=str)
def test_what_is_launched_is_what_was_planned(device: str, slots: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = admitted(device)
    with recorded(monkeypatch) as launched:
        sampler.sample(logits_of(len(slots), device), slots)
    assert tuple(launched) == sampler.plan_rows(slots).kernels


class FirstTokens:
    """Stands for FlashInfer: takes the first token of each row."""

    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, progress: StartupProgress) -> None: ...

    def sample(self, z_RV: torch.Tensor, top_k_R: torch.Tensor | None, top_p_R: torch.Tensor) -> torch.Tensor:
        return z_RV.argmax(1)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers made from here on draw by FirstTokens what FlashInfer may draw."""
    monkeypatch.setattr("gpu_sampler.sampler.choose", lambda *_: "flashinfer")
    monkeypatch.setattr("gpu_sampler.flashinfer_sampler.FlashInferSampler", FirstTokens)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.mark.parametrize("mode", [RAW, PROCESSED])
def test_a_row_reports_the_same_beside_one_that_flashinfer_draws(
    device: str, mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    reports = {"allowed_token_ids": tuple(range(0, V, 3)), "logit_bias": ((3, 9.0),), "logprobs": 3, "temperature": 0.7}
    rows: tuple[dict[str, Any], ...] = (reports, {"top_k": 50})
    alone, beside = (admitted(device, rows, mode) for _ in range(2))
    assert "flashinfer" in beside.plan_rows([1, 2]).kernels and "flashinfer" not in alone.plan_rows([1]).kernels
    logits = logits_of(2, device)
    expected, found = alone.sample(logits[:1].clone(), [1]), beside.sample(logits.clone(), [1, 2])
    for name, part in expected._asdict().items():
        assert torch.equal(getattr(found, name)[:1], part), name


def test_rows_of_a_verify_step_are_counted_by_the_code_that_draws_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    sampler = admitted(device, ({"top_k": 50}, {"temperature": 0}))
    proposal = Proposal(np.full((2, 0), -1, np.int32), np.zeros(2, np.uint8))
    for drawn in (sampler.sample(logits_of(2, device), [1, 2]), sampler.verify(logits_of(2, device), [1, 2], proposal)):
        assert len(drawn.tokens) == 2
    expected = {"greedy": 2, "plain": 0, "candidates": 1, "nucleus": 0, "flashinfer": 1}
    assert sampler.stats().rows == expected


def guards_hold(device: str, mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch, spill: bool = False) -> bool:
    """One step of a mixed batch with guards around output, workspace, side lists and logits."""
    guarded, empty = Guarded(), OutputWords.empty

    def guarded_output(rows: int, n_top: int | None, n_chosen: int, device: torch.device) -> OutputWords:
        found = empty(rows, n_top, n_chosen, device)
        return found._replace(words=guarded.like(found.words))

    monkeypatch.setattr(OutputWords, "empty", guarded_output)
    sampler, rows = admitted(device, MIXED, mode), len(MIXED)
    on_device: Any = sampler._triton
    guarded.guard(on_device.reserve(rows))
    for name in ("side_ids", "side_raw", "side_processed"):
        setattr(on_device.device_state, name, guarded.like(getattr(on_device.device_state, name)).zero_())
    logits = guarded.like(torch.empty((rows, V), device=device)).copy_(logits_of(rows, device))
    sampler.sample(logits, range(1, rows + 1))
    output = guarded.buffers[-1]
    assert len(guarded.buffers) > 15 and not (output[GUARD:-GUARD] == POISON).any()  # all of it was written
    if spill:
        output[-GUARD] = 0
    return guarded.intact()


@pytest.mark.full(keep=1)
@pytest.mark.risk("S4")
@pytest.mark.parametrize("mode", [RAW, PROCESSED])
def test_step_writes_nothing_outside_of_its_buffers(
    device: str, mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guards_hold(device, mode, monkeypatch)


@pytest.mark.risk("S4", planted=True)
def test_word_behind_a_buffer_fails_the_same_check(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not guards_hold(device, RAW, monkeypatch, spill=True)


def test_rows_without_a_token_touch_no_state_but_their_position(device: str) -> None:
    sampler = admitted(device)
    on_device: Any = sampler._triton
    on_device.apply()
    before = on_device.device_state.words.clone()
    rows = len(MIXED)
    sampler.sample(torch.full((rows + 1, V), -torch.inf, device=device), range(rows + 1))
    after = on_device.device_state.words
    changed = torch.nonzero(after != before).flatten().tolist()
    assert changed == [168 * slot + 3 for slot in range(1, rows + 1)]  # not slot 0, which is padding


@pytest.mark.gpu
def test_step_waits_for_nothing_once_it_is_warm(device: str) -> None:
    for mode in (RAW, PROCESSED):
        sampler, rows = admitted(device, MIXED, mode), len(MIXED)
        steps = [logits_of(rows, device) for _ in range(4)]
        for logits in steps[:2]:
            sampler.sample(logits, range(1, rows + 1))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for logits in steps[2:]:
                sampler.sample(logits, range(1, rows + 1))
            sampler.stage(2, temperature=0.5)
            sampler.sample(steps[0], range(1, rows + 1))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.full
def test_warm_up_launches_every_variant_and_draws_as_before(device: str) -> None:
    warmed, cold = admitted(device), admitted(device)
    reported: list[float] = []
    warmed.warm_up(len(MIXED), lambda stage, seconds: reported.append(seconds))
    assert len(reported) == 8 and min(reported) > 0  # four kinds of steps, with and without log-probabilities
    found, expected = (
        sampler.sample(logits_of(len(MIXED), device), range(1, len(MIXED) + 1)) for sampler in (warmed, cold)
    )
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.gpu
def test_check_of_waiting_sees_a_wait(device: str) -> None:
    output = admitted(device).sample(logits_of(len(MIXED), device), range(1, len(MIXED) + 1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            output.tokens.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_state_of_1024_slots_is_below_40_mb_and_does_not_grow(device: str) -> None:
    sampler = make(1025, device, size=151_936)
    on_device: Any = sampler._triton
    assert on_device.device_state.nbytes < 40e6
    logits = torch.randn(64, 151_936, device=device, dtype=torch.bfloat16)
    for slot in range(1, 65):
        sampler.admit(slot, SamplingParams(max_tokens=999, **MIXED[slot % len(MIXED)]), [5], seed=slot)
    held = []
    for step in range(210):
        if step % 10 == 0:  # slots change hands
            sampler.release(1 + step % 64)
            sampler.admit(1 + step % 64, SamplingParams(presence_penalty=1.0, max_tokens=999), [5], seed=step)
        sampler.fetch(sampler.sample(logits.clone(), range(1, 65))).result()
        held.append(torch.cuda.memory_allocated())
    assert max(held[10:]) == max(held[:10])
