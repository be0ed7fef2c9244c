"""A row that is reported while it is drawn says the same, bit for bit, as one reported afterwards."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler import triton_sampler
from gpu_sampler.kernels import sample as sample_kernels
from gpu_sampler.kernels.softmax_stats import mended_groups, softmax_stats
from gpu_sampler.output import LaunchPlan, RowFlag, SampleOutput
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.triton_sampler import WITH_OVERLAY, LaunchFlags, kernels_of
from gpu_sampler.workspace import LogitRows
from tests.support.edges import LIMITS, values
from tests.support.interpreter import backwards

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
V = 700
THIRD = tuple(range(0, V, 3))
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1}
ROWS: tuple[tuple[dict[str, Any], str], ...] = (  # parameters, kind of values
    ({**PENALTIES, "logprobs": 20, "top_k": 50, "top_p": 0.9, "logprob_token_ids": (1, 2, V - 1)}, "smooth"),
    ({**PENALTIES, "logprobs": 3, "temperature": 0.7}, "bad"),  # its token may stand in no list
    ({**PENALTIES, "logprobs": 0, "temperature": 1.7}, "almost flat"),
    ({**PENALTIES, "logprobs": 2, "top_p": 0.9}, "almost flat"),  # judged and settled
    ({**PENALTIES, "logprobs": 2, "top_k": 300}, "bad"),
    ({"logit_bias": ((5, 40.0), (600, -3.0)), "logprobs": 256, "temperature": 0}, "tied"),
    ({"allowed_token_ids": THIRD, "logprobs": 5, "temperature": 0.6}, "bad"),
    ({"allowed_token_ids": THIRD, "logit_bias": ((3, 9.0),), "logprobs": 5, "min_p": 0.1}, "inf"),
    ({"allowed_token_ids": (7,), "logit_bias": ((7, -100.0),), "logprobs": 4}, "one"),  # no token, but a raw order
    ({**PENALTIES, "logprobs": 4}, "none"),
    ({"logprobs": 3, "temperature": 0.5}, "nan"),  # one order, drawn and raw
    ({**PENALTIES, "top_k": 5}, "smooth"),  # reports nothing
    ({"temperature": 0, "logprobs": 1}, "smooth"),
    ({**PENALTIES, "logprobs": 6}, "nan"),  # statistics of one kind serve both orders
    ({**PENALTIES, "logprobs": 6, "top_k": 9}, "inf"),
    ({**PENALTIES, "logprobs": 6, "temperature": 0}, "blocks"),
    ({**PENALTIES, "logprobs": 6}, "all bad"),
    ({"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 60, "logprobs": 4}, "nan"),  # all are banned
    ({"allowed_token_ids": THIRD, "logit_bias": ((3, 9.0),), "logprobs": 5}, "bad"),
)
OF_ONE_PROGRAM = [10, 11, 12]  # rows that the program that draws reports, if anyone
SLOTS = list(range(1, len(ROWS) + 1))


def admitted(device: str, times: int = 1) -> Any:
    """The kernels' sampler of so many times ROWS."""
    rows = ROWS * times
    sampler = Sampler(num_slots=len(rows) + 1, vocab_size=V, device=device, backend="triton", limits=LIMITS)
    for slot, (params, _) in enumerate(rows, 1):
        sampler.admit(slot, SamplingParams(max_tokens=64, **params), [5, 6, slot], seed=slot, output_ids=[7, 7])
    on_device: Any = sampler._triton
    on_device.apply()
    return on_device


def logits_of(device: str, step: int, dtype: torch.dtype = torch.float32, times: int = 1) -> torch.Tensor:
    rng = np.random.default_rng(step)
    return torch.from_numpy(np.stack([values(kind, V, rng) for _, kind in ROWS * times])).to(device, dtype)


def plan_of(kernels: tuple[str, ...]) -> LaunchPlan:
    return LaunchPlan((), kernels, masked=True, lists=True, n_top=256, n_chosen=3)


def steps_of(device: str, kernels: tuple[str, ...], dtype: torch.dtype, count: int = 2) -> list[SampleOutput]:
    on_device, slots = admitted(device), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    plan = plan_of(kernels)
    return [on_device.launch(logits_of(device, step, dtype), slots, plan) for step in range(count)]


def mended_by(device: str, kernels: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima and sums that the first step leaves."""
    on_device, slots = admitted(device), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    on_device.launch(logits_of(device, 0), slots, plan_of(kernels))
    work = on_device.reserve(len(ROWS))
    return work.maxima.clone(), work.sums.clone()


def equal(found: SampleOutput, expected: SampleOutput) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_report_beside_the_draw_is_the_report_behind_it(device: str, dtype: torch.dtype) -> None:
    need = WITH_OVERLAY | LaunchFlags.MASK
    together, apart = kernels_of(need), kernels_of(need, apart=True)
    assert "sample_with_report" in together and "report" not in together and "report" in apart
    found, expected = steps_of(device, together, dtype), steps_of(device, apart, dtype)
    for own, other in zip(found, expected, strict=True):
        assert equal(own, other)
    last: Any = expected[-1]
    assert last.tokens[8] == -1 and last.top_ids[8].max() == -1  # no token: nothing is reported
    assert (last.ranks[:8] > 0).all() and last.ranks[:8].max() > 256


@pytest.mark.gpu
def test_many_reports_beside_draws_are_those_behind_them(device: str) -> None:
    """Programs of a row that run at the same time, again and again."""
    times, need = 32, WITH_OVERLAY | LaunchFlags.MASK
    found, expected = admitted(device, times), admitted(device, times)
    slots = torch.arange(1, len(ROWS) * times + 1, dtype=torch.int32, device=device)
    for step in range(40):
        logits = logits_of(device, step, times=times)
        own = found.launch(logits.clone(), slots, plan_of(kernels_of(need)))
        assert equal(own, expected.launch(logits, slots, plan_of(kernels_of(need, apart=True)))), step


@pytest.mark.full
def test_report_without_its_end_fails_the_same_check(device: str) -> None:
    need = WITH_OVERLAY | LaunchFlags.MASK
    unfinished = tuple(name for name in kernels_of(need) if name != "token_rank")
    found = steps_of(device, unfinished, torch.float32)
    assert not equal(found[0], steps_of(device, kernels_of(need), torch.float32)[0])


@pytest.fixture(scope="module")
def expected() -> list[SampleOutput]:
    """Returns what a report in a launch of its own says."""
    where = "cpu" if INTERPRETED else "cuda"
    return steps_of(where, kernels_of(WITH_OVERLAY | LaunchFlags.MASK, apart=True), torch.float32)


@pytest.mark.full
@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
def test_program_that_reports_may_run_before_the_one_that_draws(device: str, expected: list[SampleOutput]) -> None:
    with backwards():
        found = steps_of(device, kernels_of(WITH_OVERLAY | LaunchFlags.MASK), torch.float32)
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.full
@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
def test_statistics_mended_by_the_first_program_fail_the_same_check(
    device: str, expected: list[SampleOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: Any = mended_groups

    def in_place(row: Any, m_row: Any, s_row: Any, to_m: Any, to_s: Any, *rest: Any) -> Any:
        return theirs(row, m_row, s_row, m_row, s_row, *rest)

    monkeypatch.setattr(sample_kernels, "mended_groups", in_place)
    with backwards():
        found = steps_of(device, kernels_of(WITH_OVERLAY | LaunchFlags.MASK), torch.float32)
    bad = int(RowFlag.BAD_VALUE)
    assert ((found[0].flags & bad) < (expected[0].flags & bad)).any()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("chances", [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (0.9, 0.9), (1.0, 1.0)])
def test_words_that_are_mended_meanwhile_change_no_report(
    device: str, expected: list[SampleOutput], monkeypatch: pytest.MonkeyPatch, chances: tuple[float, float]
) -> None:
    """Each of the maxima and sums as the program that reports may find it: as it was, or as it is mended to."""
    rng, kernels = np.random.default_rng(7), kernels_of(WITH_OVERLAY | LaunchFlags.MASK)
    mended = mended_by(device, kernels)

    def some_mended(rows: LogitRows, **flags: Any) -> int:
        splits, work = softmax_stats(rows, **flags), rows.work
        for words, into, chance in zip((work.maxima, work.sums), mended, chances, strict=True):
            here = torch.from_numpy(rng.random(tuple(words.shape)) < chance).to(device)
            here[OF_ONE_PROGRAM] = False
            words.copy_(torch.where(here, into, words))
        return splits

    monkeypatch.setattr(triton_sampler, "softmax_stats", some_mended)
    found = steps_of(device, kernels, torch.float32, 1)[0]
    seen = torch.full_like(found.flags, int(RowFlag.BAD_VALUE))  # the program that draws may miss it here
    assert equal(found._replace(flags=found.flags | seen), expected[0]._replace(flags=expected[0].flags | seen))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("row", [7, 10])
def test_groups_without_a_bad_value_keep_their_statistics(device: str, row: int) -> None:
    """A row may be mended by two programs, and one may read what the other writes. The raw ones of rows that have none
    of their own are where the other mends."""
    on_device, slots = admitted(device), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    logits, work = logits_of(device, 3), on_device.reserve(len(ROWS))
    work.side_len.zero_()
    names = ("maxima", "sums", "raw_maxima", "raw_sums")
    for name in names:
        getattr(work, name).zero_()
    softmax_stats(LogitRows(logits, slots, on_device.device_state, work, side=True, processed=False), masked=True)
    before = {name: getattr(work, name)[row].clone() for name in names}
    padded = torch.nn.functional.pad(logits[row], (0, -V % 128), value=0.0).view(-1, 128)
    spoilt = (~(padded < torch.inf)).any(dim=1)
    plan = LaunchPlan((), ("softmax_stats", "sample_with_report", "token_rank"), masked=True, lists=True, n_top=20)
    on_device.launch(logits, slots, plan)
    after = {name: getattr(work, name)[row] for name in names}
    assert spoilt.sum() == 1
    for name in names:
        assert torch.equal(after[name][~spoilt], before[name][~spoilt])
    assert torch.isfinite(after["sums"]).all()
