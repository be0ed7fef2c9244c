"""`update_token_counts` against its reference, over many steps of patching and counting; and both inside of a CUDA
graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.kernels.logits_processors import apply_logits_processors
from gpu_sampler.kernels.token_counts import update_token_counts
from gpu_sampler.reference import token_counts as reference
from gpu_sampler.reference.filters import clean
from gpu_sampler.reference.logits_processors import apply_logits_processors as processed_by_reference
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.state.device_state import DeviceState
from gpu_sampler.state.host_state import COUNT, SamplingState
from gpu_sampler.state.layout import Word
from tests.support.states import FEW, mixed_state, rough_logits

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # of the interpreter
V = 111
ROWS = 10
Ids = npt.NDArray[np.int32]
Count = Callable[[DeviceState, torch.Tensor, torch.Tensor], None]


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32)).to(device)


def state_agrees(device_state: DeviceState, state: SamplingState) -> bool:
    """Whether every word of the table and of the entries in use is the reference's."""
    own = [x.cpu().numpy() for x in (device_state.entry_ids, device_state.entry_counts, device_state.entry_bias)]
    if not np.array_equal(device_state.table.cpu().numpy(), state.table):
        return False
    for slot in range(state.num_slots):
        first, length = int(state.overlay_start[slot]), int(state.overlay_len[slot])
        for found, expected in zip(own, state.overlay(slot), strict=True):
            if not np.array_equal(found[first : first + length], expected):
                return False
        if not np.array_equal(own[0][int(state.stops_start[slot]) :][: len(state.lists(slot))], state.lists(slot)):
            return False
    return True


def rows_after_patch(device_state: DeviceState, logits_RV: npt.NDArray[np.float32], slots: Ids, device: str) -> Any:
    """f32 [R, V]: the rows after steps 1 and 2, but for allowed ids, which `softmax_stats` looks at."""
    rows, lengths = torch.from_numpy(logits_RV.copy()).to(device), ints(np.zeros((2, len(slots))), device)
    apply_logits_processors(rows, device_state, ints(slots, device), lengths[0], lengths[1])
    found, _ = clean(rows.cpu().numpy())
    ids, processed = device_state.side_ids.cpu().numpy(), device_state.side_processed.cpu().numpy()
    for row, (slot, length) in enumerate(zip(slots, lengths[0].tolist(), strict=True)):
        at = slice(
            int(device_state.table[slot, Word.OVERLAY_START]),
            int(device_state.table[slot, Word.OVERLAY_START]) + length,
        )
        np.maximum.at(found[row], ids[at], processed[at])
    return found


def many_steps_agree(device: str, seed: int, count: Count = update_token_counts, steps: int = 8) -> bool:
    state = mixed_state(seed, ROWS, V)
    device_state = DeviceState(state, device)
    device_state.apply()
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        slots = np.append(rng.permutation(np.arange(1, ROWS + 1))[: ROWS - 2], [0, 0]).astype(np.int32)
        tokens = rng.integers(0, FEW, len(slots)).astype(np.int32)
        tokens[rng.random(len(slots)) < 0.1] = INVALID_TOKEN
        logits = rough_logits(rng, len(slots), V)
        raw, _ = clean(logits)
        expected = np.stack(
            [processed_by_reference(row, state, int(slot)) for row, slot in zip(raw, slots, strict=True)]
        )
        found = rows_after_patch(device_state, logits, slots, device)
        for row, slot in enumerate(slots.tolist()):
            if slot in state.masks:
                found[row, ~state.allowed(slot)] = -np.inf
        if not np.array_equal(found, expected):
            return False
        reference.update_token_counts(state, slots, tokens)
        count(device_state, ints(slots, device), ints(tokens, device))
        device_state.table[:, Word.POSITION] = ints(state.position, device)  # which `sample` advances
        if not state_agrees(device_state, state):
            return False
    return True


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("seed", range(4))
def test_state_and_processed_rows_are_the_reference_word_for_word_over_many_steps(device: str, seed: int) -> None:
    assert many_steps_agree(device, seed)


def counted_twice(device_state: DeviceState, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    last = device_state.table[:, Word.LAST : Word.LAST + 16].clone()
    update_token_counts(device_state, slots_R, tokens_R)
    device_state.table[:, Word.LAST : Word.LAST + 16] = last
    update_token_counts(device_state, slots_R, tokens_R)


def not_remembered(device_state: DeviceState, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    last = device_state.table[:, Word.LAST : Word.LAST + 16].clone()
    update_token_counts(device_state, slots_R, tokens_R)
    device_state.table[:, Word.LAST : Word.LAST + 16] = last


def first_token_for_all(device_state: DeviceState, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    update_token_counts(device_state, slots_R, tokens_R[:1].expand(len(tokens_R)).contiguous())


def invalid_taken_for_0(device_state: DeviceState, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    update_token_counts(device_state, slots_R, tokens_R.clamp(min=0))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("fault", [counted_twice, not_remembered, first_token_for_all, invalid_taken_for_0])
def test_planted_fault_fails_the_same_check(device: str, fault: Count) -> None:
    assert not all(many_steps_agree(device, seed, fault, steps=3) for seed in range(3))


def test_state_resumed_on_the_host_is_the_one_that_the_device_came_to(device: str) -> None:
    params = SamplingParams(
        repetition_penalty=1.5, bad_words_ids=((1, 2, 3),), min_tokens=2, stop_token_ids=(4,), max_tokens=60
    )
    tokens = np.random.default_rng(1).integers(0, 30, 40).astype(np.int32)
    drawn, resumed = (SamplingState(num_slots=2, vocab_size=V, overlay_entries=200) for _ in range(2))
    drawn.admit(1, params, [3, 50], seed=9)
    resumed.admit(1, params, [3, 50], seed=9, output_ids=tokens)
    device_state = DeviceState(drawn, device)
    device_state.apply()
    for token in tokens:
        update_token_counts(device_state, ints([1], device), ints([token], device))
        device_state.table[1, Word.POSITION] += 1
    assert state_agrees(device_state, resumed)


@pytest.mark.parametrize("prompt", [1022, 1023, 1024, 2049])
def test_token_is_found_in_any_block_or_appended_behind_the_last(device: str, prompt: int) -> None:
    state = SamplingState(num_slots=2, vocab_size=4000, overlay_entries=2100)
    state.admit(1, SamplingParams(repetition_penalty=2.0, max_tokens=9), range(prompt), seed=0)
    device_state = DeviceState(state, device)
    device_state.apply()
    for token in (0, prompt - 1, 3999, prompt // 2, 3999, 3998, 1022, 1021):
        slots = np.array([1], np.int32)
        reference.update_token_counts(state, slots, np.array([token], np.int32))
        update_token_counts(device_state, ints(slots, device), ints([token], device))
        device_state.table[1, Word.POSITION] += 1
        assert state_agrees(device_state, state)
    assert state.overlay_len[1] == prompt + (3 if prompt == 1022 else 2)


def test_token_beyond_what_was_reserved_is_not_counted_and_touches_no_neighbour(device: str) -> None:
    state = SamplingState(num_slots=3, vocab_size=V, overlay_entries=9)
    for slot in (1, 2):
        state.admit(slot, SamplingParams(presence_penalty=1.0, max_tokens=2), [], seed=0)
    device_state = DeviceState(state, device)
    device_state.apply()
    for token in (3, 4, 5, 4):
        update_token_counts(device_state, ints([1], device), ints([token], device))
    first = int(state.overlay_start[1])
    assert device_state.entry_ids[first : first + 2].tolist() == [3, 4]
    assert (device_state.entry_counts[first : first + 2] & COUNT).tolist() == [1, 2]
    assert device_state.table[1, Word.OVERLAY_LEN] == 2 and device_state.table[2, Word.OVERLAY_LEN] == 0
    assert int(device_state.entry_counts.sum()) == 3


@pytest.mark.risk("S4")
def test_rows_of_no_slot_and_tokens_that_are_none_change_nothing(device: str) -> None:
    state = mixed_state(2, 6, V)
    device_state = DeviceState(state, device)
    device_state.apply()
    before = device_state.words.clone()
    slots = [0, 0, -1, 7, 2**31 - 1, 1, 2, 3, 4, 5, 6]
    tokens = [3, 4, 3, 3, 3, INVALID_TOKEN, V, 2**31 - 1, -(2**31), -2, V + 5]
    update_token_counts(device_state, ints(slots, device), ints(tokens, device))
    update_token_counts(device_state, ints([], device), ints([], device))
    assert (device_state.words == before).all()


def test_tensors_of_another_kind_are_refused_by_name(device: str) -> None:
    device_state = DeviceState(SamplingState(num_slots=3, vocab_size=V), device)
    given = ints([1, 2], device)
    with pytest.raises(ValueError, match=r"got slots torch.int64 \(2,\) on .*, expected contiguous int32 \(2,\)"):
        update_token_counts(device_state, given.long(), given)
    with pytest.raises(ValueError, match=r"got tokens torch.int32 \(1,\) on"):
        update_token_counts(device_state, given, given[:1])
    with pytest.raises(ValueError, match="got tokens"):
        update_token_counts(device_state, given, ints([1, 0, 2, 0], device)[::2])


@pytest.mark.gpu
def test_graph_of_a_step_replays_as_the_same_steps_one_by_one() -> None:
    """Nothing in either launcher waits for the device or reads from it, and what advances does so there."""
    slots, tokens = np.arange(1, ROWS + 1), np.random.default_rng(3).integers(0, FEW, (4, ROWS))
    logits = torch.from_numpy(rough_logits(np.random.default_rng(4), ROWS, V)).cuda().to(torch.bfloat16)

    def prepared() -> tuple[DeviceState, Callable[[], None], list[torch.Tensor]]:
        device_state = DeviceState(mixed_state(6, ROWS, V), "cuda")
        device_state.apply()
        own, step = ints(slots, "cuda"), ints(tokens[0], "cuda")
        rows, lengths = logits.clone(), ints(np.zeros((2, ROWS)), "cuda")

        def run() -> None:
            rows.copy_(logits)
            apply_logits_processors(rows, device_state, own, lengths[0], lengths[1])
            update_token_counts(device_state, own, step)

        return device_state, run, [step, rows, lengths]

    eager, run, (step, *seen) = prepared()
    expected = []
    for drawn in tokens:
        step.copy_(ints(drawn, "cuda"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected.append([x.clone() for x in (eager.words, eager.side_processed, *seen)])
    captured, run, (step, *seen) = prepared()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for drawn, wanted in zip(tokens, expected, strict=True):
        step.copy_(ints(drawn, "cuda"))
        graph.replay()
        for found, one in zip((captured.words, captured.side_processed, *seen), wanted, strict=True):
            assert torch.equal(found.view(torch.uint8), one.view(torch.uint8))
