"""`count_ahead`: mass and count before draws, and ranks of tokens, with masks and side lists, against numpy."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.device_sampler import DeviceSampler
from gpu_sampler.kernels import count_ahead
from gpu_sampler.kernels.count_ahead import judge_draws, rank_drawn
from gpu_sampler.kernels.handover import JUDGE, PENDING, RANKING, VALUE
from gpu_sampler.kernels.patch_rows import patch_rows
from gpu_sampler.kernels.row_stats import row_stats
from gpu_sampler.kernels.select import select
from gpu_sampler.output import OutputWords
from gpu_sampler.params import SamplingParams
from gpu_sampler.reference.order import clean, rank
from gpu_sampler.reference.patch_rows import patch_rows as patched_by_twin
from gpu_sampler.sampler import Sampler
from gpu_sampler.testing.edges import LIMITS, values
from gpu_sampler.workspace import DRAWS

Float32s = npt.NDArray[np.float32]
POISON = -77
KINDS = ("almost flat", "flat", "zeros", "tied", "almost flat", "flat")
ROWS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.75, "temperature": 0.7},
    {"top_p": 0.9, "side": True},
    {"top_p": 0.97, "side": True, "mask": True},
    {"top_p": 0.9, "mask": True, "temperature": 1.7},
    {"top_k": 5},  # nothing to judge
)


def judged(device: str, size: int, dtype: torch.dtype) -> tuple[DeviceSampler, Sampler, torch.Tensor, Float32s]:
    """(sampler of the kernels behind `judge_draws`, the state, logits, rows drawn from) of rows that wait for it."""
    rng = np.random.default_rng(size)
    sampler = Sampler(num_slots=7, vocab_size=size, device=device, backend="triton", limits=LIMITS)
    for slot, given in enumerate(ROWS, start=1):
        asked = dict(given)
        if asked.pop("side", False):
            chosen = rng.choice(size, 30, replace=False).tolist()
            asked["logit_bias"] = tuple((token, float(token % 3) / 4) for token in chosen)
        if asked.pop("mask", False):
            asked["allowed_token_ids"] = tuple(np.flatnonzero(rng.random(size) < 0.8).tolist())
        sampler.admit(slot, SamplingParams(logprobs=1, **asked), [], seed=slot)
    drawn = torch.from_numpy(np.stack([values(kind, size, rng) for kind in KINDS])).to(dtype)
    raw = clean(drawn.float().numpy())[0]
    whole = np.stack([patched_by_twin(row, sampler.state, slot) for slot, row in enumerate(raw, start=1)])
    on_device: Any = sampler._on_device
    on_device.apply()
    logits, slots = drawn.to(device), torch.arange(1, 7, dtype=torch.int32, device=device)
    work, out = on_device.reserve(6), OutputWords.empty(6, 1, 0, torch.device(device)).split()
    for tensor in (work.ahead_count, work.ahead_mass):
        tensor.fill_(POISON)
    patch_rows(logits, on_device.image, slots, work.side_len, work.side_bad)
    row_stats(logits, slots, on_device.image.table, on_device.image.masks, work, processed=True)
    select(logits, slots, on_device.image, work, out, side=True, processed=True)
    judge_draws(logits, slots, on_device.image, work, side=True, count=True)
    return on_device, sampler, logits, whole


def masses_agree(whole_RV: Float32s, work: Any, temperatures: npt.NDArray[np.float32]) -> bool:
    """Counts equal and masses to 5e-6 of Z, for rows that wait to be judged; other rows are not touched."""
    counts, masses = work.ahead_count.cpu().numpy(), work.ahead_mass.cpu().numpy().astype(np.float64)
    ids, drawn = work.draw_ids.cpu().numpy(), work.draw_values.cpu().numpy()
    pending = work.ints[:, PENDING.value].tolist()
    seen = 0
    for row, z_V in enumerate(whole_RV):
        if pending[row] != JUDGE.value:
            if (counts[row] != POISON).any():
                return False
            continue
        weights = np.exp((z_V.astype(np.float64) - z_V.max()) / temperatures[row])
        for draw in range(DRAWS):
            token = int(ids[row, draw])
            before = (z_V > z_V[token]) | ((z_V == z_V[token]) & (np.arange(len(z_V)) < token))
            seen += 1
            near = abs(masses[row, :, draw].sum() - weights[before].sum()) <= 5e-6 * weights.sum()
            if drawn[row, draw] != z_V[token] or counts[row, :, draw].sum() != before.sum() or not near:
                return False
    return seen == 5 * DRAWS


SIZES = [700, 3001, *(pytest.param(size, marks=pytest.mark.gpu) for size in (32_003, 151_936, 262_144))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_masses_and_counts_before_each_draw_are_those_of_the_row(device: str, size: int, dtype: torch.dtype) -> None:
    on_device, sampler, _, whole = judged(device, size, dtype)
    assert masses_agree(whole, on_device.reserve(6), sampler.state.temperature[1:])


def test_rows_that_wait_are_queued_once_each_and_the_queue_is_emptied(device: str) -> None:
    on_device, _, logits, _ = judged(device, 700, torch.float32)
    work, slots = on_device.reserve(6), torch.arange(1, 7, dtype=torch.int32, device=device)
    waiting = torch.nonzero(work.ints[:6, PENDING.value] == JUDGE.value).flatten().tolist()
    assert int(work.queue[0]) == len(waiting) == 5
    assert sorted(work.queue[1 : 1 + len(waiting)].tolist()) == waiting
    row_stats(logits, slots, on_device.image.table, on_device.image.masks, work, processed=True)
    assert int(work.queue[0]) == 0


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_masses_have_the_same_bits_however_few_programs_share_the_parts(
    device: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_each = judged(device, 5001, torch.float32)[0].reserve(6)
    assert one_each.parts > 1
    monkeypatch.setattr(count_ahead, "JUDGE_PROGRAMS", programs)
    shared = judged(device, 5001, torch.float32)[0].reserve(6)
    assert torch.equal(shared.ahead_mass, one_each.ahead_mass) and torch.equal(shared.ahead_count, one_each.ahead_count)


def test_draws_judged_on_another_row_fail_the_same_check(device: str) -> None:
    on_device, sampler, _, whole = judged(device, 700, torch.float32)
    other = whole.copy()
    other[0] = np.roll(other[0], 1)
    assert not masses_agree(other, on_device.reserve(6), sampler.state.temperature[1:])
    on_device.reserve(6).ahead_count[3, 0, 2] += 1
    assert not masses_agree(whole, on_device.reserve(6), sampler.state.temperature[1:])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processed", [True, False])
def test_ranks_are_places_in_the_order_of_the_mode(device: str, size: int, processed: bool) -> None:
    """Each row counts what comes before a token; a row that has nothing to count keeps its rank."""
    on_device, sampler, logits, whole = judged(device, size, torch.float32)
    state, work = sampler.state, on_device.reserve(6)
    rng, slots = np.random.default_rng([size, 3]), torch.arange(1, 7, dtype=torch.int32, device=device)
    order = whole
    if not processed:  # what stands in the logits and, of the side list, in `side_raw`
        order = clean(logits.cpu().numpy())[0].copy()
        raw = on_device.image.side_raw.cpu().numpy()
        for slot in range(1, 7):
            first, length = int(state.overlay_start[slot]), int(state.overlay_len[slot])
            order[slot - 1, state.overlay(slot).ids] = raw[first : first + length]
        row_stats(logits, slots, on_device.image.table, on_device.image.masks, work, processed=False)
    picked = [rng.choice(np.flatnonzero(row > -np.inf)) for row in order]
    picked[2] = int(state.overlay(3).ids[7])
    out = OutputWords.empty(6, 0, 0, torch.device(device)).split()
    ranks: Any = out.ranks
    ranks.fill_(1)
    out.tokens.copy_(torch.tensor(picked, dtype=torch.int32))
    for row, token in enumerate(picked):
        work.ints[row, RANKING.value] = int(row != 4)
        work.floats[row, VALUE.value] = float(order[row, token])
    rank_drawn(logits, slots, on_device.image, work, out, side=True, processed=processed)
    expected = [rank(row, int(token)) for row, token in zip(order, picked, strict=True)]
    expected[4] = 1
    assert ranks.tolist() == expected
