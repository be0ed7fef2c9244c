"""The device's copy of the state: it is what the host's arrays say, and only what changed is ever sent."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.state.device_state import DeviceState
from gpu_sampler.state.host_state import OverlayFull, SamplingState
from gpu_sampler.state.layout import Word
from gpu_sampler.state.upload_kernel import scatter_state
from tests.support.states import mixed_params, mixed_state

V = 111
COUNTED = SamplingParams(presence_penalty=1.0, bad_words_ids=((1, 2),), min_tokens=3, stop_token_ids=(9,), max_tokens=8)


def image_agrees(device_state: DeviceState, state: SamplingState, slots: Iterable[int]) -> bool:
    """Whether each slot has on the device, word for word, what the host says: numbers, entries, lists, mask."""
    table, ids, counts = (
        device_state.table.cpu().numpy(),
        device_state.entry_ids.cpu().numpy(),
        device_state.entry_counts.cpu().numpy(),
    )
    bias, masks = device_state.entry_bias.cpu().numpy(), device_state.masks.cpu().numpy()
    for slot in slots:
        own, words = state.overlay(slot), table[slot]
        at = slice(words[Word.OVERLAY_START], words[Word.OVERLAY_START] + words[Word.OVERLAY_LEN])
        behind = slice(words[Word.STOPS_START], words[Word.WORDS_START] + 17 * words[Word.N_WORDS])
        pairs = [(words, state.table[slot]), (ids[at], own.ids), (counts[at], own.counts)]
        pairs += [(bias[at].view(np.int32), own.bias.view(np.int32)), (ids[behind], state.lists(slot))]
        if slot in state.masks:
            bits = np.unpackbits(masks[words[Word.MASK_ROW]].view(np.uint8), bitorder="little")
            pairs.append((bits[: state.vocab_size], state.allowed(slot)))
            if bits[state.vocab_size :].any():
                return False
        if not all(np.array_equal(found, expected) for found, expected in pairs):
            return False
    return True


@pytest.mark.parametrize("lengths", [[1], [0, 3, 0], [1023, 1024, 1025, 1, 0, 2049], [17] * 40])
def test_runs_land_where_they_belong_and_nowhere_else(device: str, lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    payload = rng.integers(-(2**31), 2**31, sum(lengths)).astype(np.int32)
    expected = np.full(sum(lengths) + 7 * len(lengths) + 7, -77, np.int32)
    runs, place, source = [], 7, 0
    for length in lengths:
        runs.append((place, source, length))
        expected[place : place + length] = payload[source : source + length]
        place, source = place + length + 7, source + length
    order = rng.permutation(len(runs))
    packed = np.concatenate([np.array(runs, np.int32)[order].reshape(-1), payload])
    words = torch.full((len(expected),), -77, dtype=torch.int32, device=device)
    scatter_state(words, torch.from_numpy(packed).to(device), runs=len(runs), longest=max(lengths))
    np.testing.assert_array_equal(words.cpu().numpy(), expected)


def test_no_runs_are_no_fault_and_tensors_of_another_kind_are(device: str) -> None:
    words = torch.zeros(9, dtype=torch.int32, device=device)
    scatter_state(words, words[:0], runs=0, longest=0)
    with pytest.raises(ValueError, match=r"got words torch.float32 \(9,\) on .*, expected int32 \(\*\)"):
        scatter_state(words.float(), words, runs=1, longest=1)
    with pytest.raises(ValueError, match="got 4 runs and 9 words of them, expected 3 words a run"):
        scatter_state(words, words, runs=4, longest=1)


def test_image_is_the_mirror_before_and_after_every_change(device: str) -> None:
    state = mixed_state(3, 9, V)
    device_state = DeviceState(state, device)  # of slots that were admitted before there was an image, too
    device_state.apply()
    assert image_agrees(device_state, state, range(10))
    rng, in_use = np.random.default_rng(5), set(range(10))
    for _ in range(12):
        for slot in rng.integers(1, 10, 3).tolist():
            verb = rng.choice(["admit", "admit", "stage", "release"])
            if verb == "admit":
                state.admit(slot, mixed_params(rng, V), rng.integers(0, V, 9).tolist(), seed=slot, output_ids=[1, 2])
                in_use.add(slot)
            elif verb == "stage" and slot in in_use:
                state.stage(slot, temperature=float(rng.random()), min_p=float(rng.random()))
            elif verb == "release":
                state.release(slot)
                in_use.discard(slot)
        device_state.apply()
        assert image_agrees(device_state, state, sorted(in_use))


@pytest.mark.parametrize("change", ["seed", "entry_ids", "entry_bias", "masks"])
def test_word_that_was_not_sent_fails_the_same_check(device: str, change: str) -> None:
    state = SamplingState(num_slots=3, vocab_size=V)
    state.admit(1, dataclasses.replace(COUNTED, allowed_token_ids=(1, 9)), [], seed=0, output_ids=[4])
    device_state = DeviceState(state, device)
    device_state.apply()
    assert image_agrees(device_state, state, [1])
    if change == "masks":
        state.masks[1][0] ^= 1
    else:
        getattr(state, change)[1 if change == "seed" else 0] = 5
    device_state.apply()
    assert not image_agrees(device_state, state, [1])


def test_step_without_changes_sends_nothing_and_one_with_many_sends_once(device: str) -> None:
    state = SamplingState(num_slots=5, vocab_size=V)
    device_state = DeviceState(state, device)
    device_state.apply()
    assert device_state.uploads == 0  # free slots
    for slot in (1, 2, 3):
        state.admit(slot, COUNTED, [], seed=0)
    state.stage(4, top_k=3)
    device_state.apply()
    device_state.apply()
    assert device_state.uploads == 1
    state.admit(1, COUNTED, [], seed=0)
    state.release(1)
    device_state.apply()
    assert device_state.uploads == 1 and not state.dirty


def test_staged_numbers_leave_alone_what_the_device_has_advanced(device: str) -> None:
    state = SamplingState(num_slots=5, vocab_size=V)
    state.admit(2, COUNTED, [], seed=7)
    device_state = DeviceState(state, device)
    device_state.apply()
    for word, value in ((Word.POSITION, 3), (Word.OVERLAY_LEN, 2), (Word.LAST + 15, 9)):
        device_state.table[2, word] = value
    before = device_state.table.cpu().numpy().copy()
    state.stage(2, temperature=0.25, top_k=4, top_p=0.5, min_p=0.125)
    device_state.apply()
    changed = np.flatnonzero((device_state.table.cpu().numpy() != before).any(axis=0)).tolist()
    assert changed == [Word.TEMPERATURE, Word.TOP_K, Word.TOP_P, Word.MIN_P, Word.LOG_MIN_P]
    floats = device_state.table.view(torch.float32)[2].tolist()
    assert floats[Word.TEMPERATURE] == 0.25 and floats[Word.LOG_MIN_P] == np.float32(np.log(0.125))
    state.stage(2, temperature=0.0, min_p=0.0)
    device_state.apply()
    assert device_state.table[2, Word.FLAGS] == int(state.flags[2])
    assert device_state.table.view(torch.float32)[2, Word.LOG_MIN_P] == -np.inf
    state.admit(2, COUNTED, [], seed=7)  # and only a new request begins again
    device_state.apply()
    assert image_agrees(device_state, state, [2])


def test_arena_that_goes_from_slot_to_slot_holds_the_newest_owner(device: str) -> None:
    state = SamplingState(num_slots=4, vocab_size=V, overlay_entries=26)  # room for one of these requests
    device_state = DeviceState(state, device)
    for slot in (1, 2, 3, 1):
        state.admit(slot, COUNTED, [], seed=slot, output_ids=[slot, 5])
        with pytest.raises(OverlayFull):
            state.admit(1 if slot == 3 else slot + 1, COUNTED, [], seed=0)
        state.release(slot)
        state.admit(slot, COUNTED, [], seed=slot, output_ids=[slot, 6])
        device_state.apply()
        assert image_agrees(device_state, state, [slot])
        state.release(slot)


def test_pinned_buffers_take_turns_and_grow(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SamplingState(num_slots=3, vocab_size=V, overlay_entries=4096)
    device_state = DeviceState(state, device)
    places: list[tuple[int, int]] = []
    concatenate = np.concatenate

    def recorded(parts: Any, out: Any = None, **rest: Any) -> Any:
        if out is not None:
            places.append((out.ctypes.data, out.size))
        return concatenate(parts, out=out, **rest)

    monkeypatch.setattr(np, "concatenate", recorded)
    for _ in range(4):
        state.stage(1, top_k=3)
        device_state.apply()
    state.admit(2, SamplingParams(repetition_penalty=2.0, max_tokens=9), list(range(V)), seed=0)
    device_state.apply()
    at = [place for place, _ in places]
    assert at[0] == at[2] != at[1] == at[3]
    assert places[0][1] == 2 * 3 + 6 and places[4][1] == 4 * 3 + Word.SLOT_WORDS + 3 * V
    assert image_agrees(device_state, state, [1, 2])


def test_image_of_a_large_server_stays_below_40_mb() -> None:
    device_state = DeviceState(SamplingState(num_slots=1025, vocab_size=151_936), "cpu")
    assert device_state.masks.shape == (256, 4748)
    tensors = (device_state.words, device_state.side_ids, device_state.side_raw, device_state.side_processed)
    assert device_state.nbytes == sum(x.numel() * 4 for x in tensors) < 40_000_000


def test_state_of_more_words_than_an_i32_counts_is_refused() -> None:
    state = SamplingState(num_slots=3, vocab_size=V, overlay_entries=1)
    state.entry_ids = np.broadcast_to(np.int32(-1), 2**31 // 3)  # no such memory is taken
    with pytest.raises(ValueError, match=r"expected fewer than 2\^31"):
        DeviceState(state, "cpu")


@pytest.mark.gpu
def test_buffer_is_not_written_while_its_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowded_uploads_agree()
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    assert not crowded_uploads_agree()  # a later step has overwritten an earlier one before it was copied


def crowded_uploads_agree() -> bool:
    state = SamplingState(num_slots=14, vocab_size=20_000)
    device_state = DeviceState(state, "cuda")
    params = SamplingParams(repetition_penalty=2.0, max_tokens=1)
    for slot in (12, 13):  # both buffers have their size before anything waits
        state.admit(slot, params, range(20_000), seed=0)
        device_state.apply()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles, more than 0.5 s: all that follows waits behind it
    for slot in range(1, 12):
        state.admit(slot, params, range(20_000), seed=slot)
        device_state.apply()
    torch.cuda.synchronize()
    return image_agrees(device_state, state, range(1, 12))


@pytest.mark.gpu
def test_changes_are_refused_while_a_graph_is_captured_and_kept_for_afterwards() -> None:
    state = SamplingState(num_slots=3, vocab_size=V)
    device_state = DeviceState(state, "cuda")
    state.admit(1, COUNTED, [], seed=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="apply them before its capture"):
        device_state.apply()
    device_state.apply()
    assert image_agrees(device_state, state, [1])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        device_state.apply()
