"""`judge_draws`: mass and count before draws, with masks and side lists, against numpy."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.kernels import nucleus_rejection as kernel
from gpu_sampler.kernels.nucleus_rejection import judge_draws
from gpu_sampler.kernels.softmax_stats import row_stats
from gpu_sampler.kernels.workspace import DRAWS, JUDGE, PENDING
from tests.support.wide import WideRows, wide_rows

Float32s = npt.NDArray[np.float32]
POISON = -77
SIZES = [700, 3001, *(pytest.param(size, marks=pytest.mark.gpu) for size in (32_003, 151_936, 262_144))]


def judged(device: str, size: int, dtype: torch.dtype) -> WideRows:
    """Rows whose draws `judge_draws` has judged."""
    rows = wide_rows(device, size, dtype)
    for tensor in (rows.work.ahead_count, rows.work.ahead_mass):
        tensor.fill_(POISON)
    judge_draws(rows.logits, rows.slots, rows.image, rows.work, side=True, count=True)
    return rows


def masses_agree(rows: WideRows, whole_RV: Float32s) -> bool:
    """Counts equal and masses to 5e-6 of Z, for rows that wait to be judged; other rows are not touched."""
    work, temperatures = rows.work, rows.sampler.state.temperature[1:]
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


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_masses_and_counts_before_each_draw_are_those_of_the_row(device: str, size: int, dtype: torch.dtype) -> None:
    rows = judged(device, size, dtype)
    assert masses_agree(rows, rows.whole_RV)


def test_rows_that_wait_are_queued_once_each_and_the_queue_is_emptied(device: str) -> None:
    _, logits, slots, image, work, _ = judged(device, 700, torch.float32)
    waiting = torch.nonzero(work.ints[:6, PENDING.value] == JUDGE.value).flatten().tolist()
    assert int(work.queue[0]) == len(waiting) == 5
    assert sorted(work.queue[1 : 1 + len(waiting)].tolist()) == waiting
    row_stats(logits, slots, image.table, image.masks, work, processed=True)
    assert int(work.queue[0]) == 0


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("programs", [1, 3, 7])
def test_masses_have_the_same_bits_however_few_programs_share_the_parts(
    device: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_each = judged(device, 5001, torch.float32).work
    assert one_each.parts > 1
    monkeypatch.setattr(kernel, "JUDGE_PROGRAMS", programs)
    shared = judged(device, 5001, torch.float32).work
    assert torch.equal(shared.ahead_mass, one_each.ahead_mass) and torch.equal(shared.ahead_count, one_each.ahead_count)


def test_draws_judged_on_another_row_fail_the_same_check(device: str) -> None:
    rows = judged(device, 700, torch.float32)
    other = rows.whole_RV.copy()
    other[0] = np.roll(other[0], 1)
    assert not masses_agree(rows, other)
    rows.work.ahead_count[3, 0, 2] += 1
    assert not masses_agree(rows, rows.whole_RV)
