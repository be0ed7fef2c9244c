"""A row that is reported while it is drawn says the same, bit for bit, as one reported afterwards."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.device_sampler import PATCHED, Need, kernels_of
from gpu_sampler.kernels.row_stats import row_stats
from gpu_sampler.output import LaunchPlan, SampleOutput
from gpu_sampler.params import SamplingParams
from gpu_sampler.sampler import Sampler
from gpu_sampler.testing.edges import LIMITS, values

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
)
SLOTS = list(range(1, len(ROWS) + 1))


def admitted(device: str) -> Any:
    """The kernels' sampler of ROWS."""
    sampler = Sampler(num_slots=len(ROWS) + 1, vocab_size=V, device=device, backend="triton", limits=LIMITS)
    for slot, (params, _) in zip(SLOTS, ROWS, strict=True):
        sampler.admit(slot, SamplingParams(max_tokens=64, **params), [5, 6, slot], seed=slot, output_ids=[7, 7])
    on_device: Any = sampler._on_device
    on_device.apply()
    return on_device


def logits_of(device: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = np.random.default_rng(step)
    return torch.from_numpy(np.stack([values(kind, V, rng) for _, kind in ROWS])).to(device, dtype)


def steps_of(device: str, kernels: tuple[str, ...], dtype: torch.dtype) -> list[SampleOutput]:
    on_device, slots = admitted(device), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    plan = LaunchPlan((), kernels, masked=True, lists=True, n_top=256, n_chosen=3)
    return [on_device.launch(logits_of(device, step, dtype), slots, plan) for step in range(2)]


def equal(found: SampleOutput, expected: SampleOutput) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_report_beside_the_draw_is_the_report_behind_it(device: str, dtype: torch.dtype) -> None:
    need = PATCHED | Need.MASK
    together, apart = kernels_of(need), kernels_of(need, apart=True)
    assert "select_with_report" in together and "report" not in together and "report" in apart
    found, expected = steps_of(device, together, dtype), steps_of(device, apart, dtype)
    for own, other in zip(found, expected, strict=True):
        assert equal(own, other)
    last: Any = expected[-1]
    assert last.tokens[8] == -1 and last.top_ids[8].max() == -1  # no token: nothing is reported
    assert (last.ranks[:8] > 0).all() and last.ranks[:8].max() > 256


def test_report_without_its_end_fails_the_same_check(device: str) -> None:
    need = PATCHED | Need.MASK
    unfinished = tuple(name for name in kernels_of(need) if name != "rank_drawn")
    found = steps_of(device, unfinished, torch.float32)
    assert not equal(found[0], steps_of(device, kernels_of(need), torch.float32)[0])


@pytest.mark.parametrize("row", [7, 10])
def test_groups_without_a_bad_value_keep_their_statistics(device: str, row: int) -> None:
    """What mends a row may be two programs, and one may read what the other writes."""
    on_device, slots = admitted(device), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    logits, work = logits_of(device, 3), on_device.reserve(len(ROWS))
    work.side_len.zero_()
    names = ("maxima", "sums", "raw_maxima", "raw_sums")
    for name in names:
        getattr(work, name).zero_()
    row_stats(logits, slots, on_device.image.table, on_device.image.masks, work, processed=False)
    before = {name: getattr(work, name)[row].clone() for name in names}
    padded = torch.nn.functional.pad(logits[row], (0, -V % 128), value=0.0).view(-1, 128)
    spoilt = (~(padded < torch.inf)).any(dim=1)
    plan = LaunchPlan((), ("row_stats", "select_with_report", "rank_drawn"), masked=True, lists=True, n_top=20)
    on_device.launch(logits, slots, plan)
    after = {name: getattr(work, name)[row] for name in names}
    assert spoilt.sum() == 1
    for name in names:
        assert torch.equal(after[name][~spoilt], before[name][~spoilt])
    assert torch.isfinite(after["sums"]).all()
