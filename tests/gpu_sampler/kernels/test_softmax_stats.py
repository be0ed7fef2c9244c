"""`softmax_stats` against its reference: maxima and sums by group, raw and processed, and what spoils them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gpu_sampler.kernels.softmax_stats as kernel
from gpu_sampler.kernels.common import FLAGS
from gpu_sampler.kernels.verify_rows import VerifyRuns, expand
from gpu_sampler.reference.filters import clean
from gpu_sampler.reference.softmax_stats import GROUP, softmax_stats
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import VerifyRules
from gpu_sampler.state.device_state import DeviceState, VerifyState
from gpu_sampler.state.host_state import SamplingState, SlotFlag
from gpu_sampler.workspace import NO_DRAW, LogitRows, Workspace
from tests.support.edges import LIMITS, as_given, values

KINDS = ("smooth", "flat", "blocks", "one", "none", "steep", "nan", "inf", "bad", "all bad")
PARAMS: tuple[dict[str, Any], ...] = (  # temperature, with a mask or not, wanting log-probabilities or not
    {"temperature": 0, "logprobs": 1},
    {},
    {"temperature": 0.3, "logprobs": 1},
    {"allowed_token_ids": True, "logprobs": 1},
    {"allowed_token_ids": True, "temperature": 1.7},
    {"temperature": 1e-5, "logprobs": 1},
)
POISON = 12345.0
Float32s = npt.NDArray[np.float32]


class Stats(NamedTuple):
    maxima_RG: Float32s
    sums_RG: Float32s
    raw_maxima_RG: Float32s
    raw_sums_RG: Float32s


def rows_and_state(size: int) -> tuple[Float32s, SamplingState]:
    """A row of each kind for each of the parameters, slot by slot."""
    count = len(KINDS) * len(PARAMS)
    state = SamplingState(num_slots=count + 1, vocab_size=size, limits=LIMITS)
    rng = np.random.default_rng(size)
    rows = []
    for slot in range(1, count + 1):
        asked: dict[str, Any] = dict(PARAMS[(slot - 1) // len(KINDS)])
        if asked.get("allowed_token_ids"):
            asked["allowed_token_ids"] = tuple(range(size % 3, size, 3)) or (0,)
        state.admit(slot, SamplingParams(**asked), [], seed=slot)
        rows.append(values(KINDS[slot % len(KINDS)], size, rng))
    return np.stack(rows), state


def stats_of(logits: torch.Tensor, state: SamplingState, *, processed: bool = False, slots: Any = None) -> Stats:
    rows, size = logits.shape
    device_state = DeviceState(state, logits.device)
    device_state.apply()
    work = Workspace(rows + 2, size, logits.device)  # two rows more, as a guard
    held = (work.maxima, work.sums, work.raw_maxima, work.raw_sums)
    for tensor in held:
        tensor.fill_(POISON)
    named = torch.arange(1, rows + 1, dtype=torch.int32, device=logits.device) if slots is None else slots
    given = LogitRows(logits, named, device_state, work, side=False, processed=processed)
    kernel.softmax_stats(given, masked=bool(state.masks))
    assert all((tensor[rows:] == POISON).all() for tensor in held)
    return Stats(*(tensor[:rows].cpu().numpy() for tensor in held))


def group_agrees(own: tuple[float, float], wanted: tuple[float, float], spoilt: bool) -> bool:
    if spoilt:
        return not (np.isfinite(own[1]) and own[0] < np.inf)
    return bool(own[0] == wanted[0] and abs(own[1] - wanted[1]) <= 2e-6 * wanted[1])


def all_agree(found: Stats, given_RV: Float32s, state: SamplingState, first_slot: int = 1) -> bool:
    """A group that NaN or +inf spoilt must show it; all others are the reference's."""
    z_RV, _ = clean(given_RV)
    for row, z_V in enumerate(z_RV):
        slot = row + first_slot
        temperature = float(state.temperature[slot]) or 1.0
        padded = np.full(-(-len(z_V) // GROUP) * GROUP, np.float32(0))
        padded[: len(z_V)] = given_RV[row]
        spoilt_G = (~(padded < np.inf)).reshape(-1, GROUP).max(axis=1).tolist()
        drawn_V = np.where(state.allowed(slot), z_V, -np.inf).astype(np.float32) if slot in state.masks else z_V
        wanted = softmax_stats(drawn_V, temperature)
        pairs = zip(found.maxima_RG[row], found.sums_RG[row], wanted.maxima_G, wanted.sums_G, spoilt_G, strict=True)
        if not all(group_agrees((m, s), (wm, ws), bad) for m, s, wm, ws, bad in pairs):
            return False
        if state.flags[slot] & 4 and (slot in state.masks or temperature != 1):
            raw = softmax_stats(z_V, 1.0)
            own = zip(found.raw_maxima_RG[row], found.raw_sums_RG[row], raw.maxima_G, raw.sums_G, spoilt_G, strict=True)
            if not all(group_agrees((m, s), (wm, ws), bad) for m, s, wm, ws, bad in own):
                return False
        elif (found.raw_sums_RG[row] != POISON).any():
            return False
    return True


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("size", "dtype", "layout"),
    [(1, F32, 0), (127, BF16, 1), (128, F16, 0), (129, F32, 1), (1111, BF16, 0), (2049, F16, 1)],
)
def test_statistics_are_the_reference_and_spoilt_groups_show(
    device: str, size: int, dtype: torch.dtype, layout: int
) -> None:
    rows, state = rows_and_state(size)
    logits = list(as_given(rows, dtype, device))[layout]
    assert all_agree(stats_of(logits, state), logits.to("cpu", torch.float32).numpy(), state)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32_003, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_statistics_of_long_rows_are_the_reference(device: str, size: int, dtype: torch.dtype) -> None:
    for layout in (0, 1):
        test_statistics_are_the_reference_and_spoilt_groups_show(device, size, dtype, layout)


def test_statistics_taken_of_another_row_or_mask_fail_the_same_check(device: str) -> None:
    rows, state = rows_and_state(700)
    logits = torch.from_numpy(rows).to(device)
    found = stats_of(logits, state)
    assert all_agree(found, rows, state)
    assert not all_agree(Stats(*(part[::-1] for part in found)), rows, state)
    without = SamplingState(num_slots=state.num_slots, vocab_size=700)
    without.table[:] = state.table
    without.mask_row[:] = -1
    without.flags[:] &= ~np.uint32(8)
    assert not all_agree(stats_of(logits, without), rows, state)


def test_processed_statistics_write_no_raw_ones(device: str) -> None:
    rows, state = rows_and_state(300)
    found = stats_of(torch.from_numpy(rows).to(device), state, processed=True)
    assert (found.raw_sums_RG == POISON).all() and (found.raw_maxima_RG == POISON).all()


@pytest.mark.parametrize("size", [1111, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_number_of_splits_and_of_rows_changes_no_bit(device: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, state = rows_and_state(size)
    logits = torch.from_numpy(rows).to(device)
    whole = stats_of(logits, state)
    for programs in (1, 2 * len(rows), 3 * len(rows)):
        monkeypatch.setattr(kernel, "STATS_PROGRAMS", programs)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(stats_of(logits, state), whole, strict=True))
    for row in (0, 17, len(rows) - 1):
        slots = torch.tensor([row + 1], dtype=torch.int32, device=device)
        alone = stats_of(logits[row : row + 1], state, slots=slots)
        assert all(a.tobytes() == b[row].tobytes() for a, b in zip(alone, whole, strict=True))


RUN_RULES: tuple[VerifyRules, ...] = (
    VerifyRules(),
    VerifyRules(rule="block", seeded="standard"),
    VerifyRules(rule="synthetic", seeded="strict", synthetic=(0.5,)),
)
DRAFT_IDS = ((5, 6, 7), (5, -1, -1), (-1, 4, 4), (1, 2, 3), (9, 8, -1))  # of a slot each
KINDS_OF_DRAFTS = (1, 2, 1, 0, 1)
OF_SLOTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "logprobs": 2},
    {"top_p": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 5},
    {},
)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("rules", RUN_RULES, ids=lambda rules: str(rules.rule))
def test_rows_of_runs_are_those_of_expand_and_summed_alike(device: str, rules: VerifyRules) -> None:
    size, count, steps = 700, len(OF_SLOTS), len(DRAFT_IDS[0])
    state = SamplingState(num_slots=count + 1, vocab_size=size, limits=LIMITS)
    for slot, asked in enumerate(OF_SLOTS, start=1):
        state.admit(slot, SamplingParams(**asked), [], seed=slot)
    device_state = DeviceState(state, torch.device(device))
    device_state.apply()
    rows, rng = count * (steps + 1), np.random.default_rng(7)
    logits = torch.from_numpy(np.stack([values("smooth", size, rng) for _ in range(rows)])).to(device)
    slots_B = torch.tensor([2, 1, 4, 5, 3], dtype=torch.int32, device=device)
    ids = torch.tensor(DRAFT_IDS, dtype=torch.int32, device=device)
    kinds = torch.tensor(KINDS_OF_DRAFTS, dtype=torch.uint8, device=device)
    ahead, beside = VerifyState(device_state, count, steps), VerifyState(device_state, count, steps)
    works = [Workspace(rows, size, torch.device(device)) for _ in range(2)]
    expand(device_state, slots_B, VerifyRuns(ahead, ids, kinds, rules), works[0])
    first = LogitRows(logits, ahead.slots, ahead, works[0], side=False, processed=False)
    kernel.softmax_stats(first, masked=False)
    runs = VerifyRuns(beside, ids, kinds, rules)
    second = LogitRows(logits, slots_B, device_state, works[1], side=False, processed=False)
    kernel.softmax_stats(second, masked=False, runs=runs)
    assert torch.equal(ahead.table, beside.table) and torch.equal(ahead.slots, beside.slots)
    assert torch.equal(works[0].ints[:, NO_DRAW.value], works[1].ints[:, NO_DRAW.value])
    by_distribution = int(works[0].ints[:, NO_DRAW.value].sum())
    assert 0 < int((ahead.slots == 0).sum()) < rows and (by_distribution > 0) == (rules.rule != "synthetic")
    drawn = ahead.slots != 0
    for name in ("maxima", "sums"):
        assert torch.equal(getattr(works[0], name)[drawn], getattr(works[1], name)[drawn])
    wants = (ahead.table[ahead.slots.long(), FLAGS.value] & int(SlotFlag.WANTS_LOGPROBS)) != 0
    assert torch.equal(works[0].raw_sums[wants], works[1].raw_sums[wants])
