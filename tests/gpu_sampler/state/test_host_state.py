"""SamplingState: what admit, stage and release leave behind, what they refuse, and how much memory there is."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_sampler.reference.token_counts import update_token_counts
from gpu_sampler.sampling_params import INVALID_TOKEN, ParamError, SamplingLimits, SamplingParams
from gpu_sampler.state.host_state import COUNT, IN_PROMPT, MIN_TEMPERATURE, OverlayFull, SamplingState, SlotFlag
from gpu_sampler.state.layout import Word

V = 111
PLAIN = SamplingParams()
FULL = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    logit_bias=((3, 1.5), (8, -2.0)),
    allowed_token_ids=tuple(range(0, V, 2)),
    bad_words_ids=((5,), (6, 7), (1, 2, 3)),
    max_tokens=9,
    min_tokens=4,
    stop_token_ids=(9, 2, 9),
    seed=17,
    logprobs=3,
    logprob_token_ids=(4, 4, 110),
)


ENTRIES = 96  # FULL takes 49 of them: 13 tokens, 2 stop ids, 2 bad words
PLACES = {"table", "overlay_start", "stops_start", "words_start", "mask_row"}


def new_state(slots: int = 5, entries: int = ENTRIES, vocab_size: int = V) -> SamplingState:
    return SamplingState(num_slots=slots, vocab_size=vocab_size, overlay_entries=entries)


def snapshot(state: SamplingState, slot: int, *, place: bool = True) -> dict[str, Any]:
    """Everything that belongs to a slot. Without `place`, not where in the arena and among the masks it lives."""
    overlay = state.overlay(slot)
    found: dict[str, Any] = {
        name: value[slot].tobytes()
        for name, value in vars(state).items()
        if isinstance(value, np.ndarray) and not name.startswith("entry_") and (place or name not in PLACES)
    }
    found["overlay"] = [part.tobytes() for part in (*overlay, state.lists(slot))]
    found["mask"] = state.masks[slot].tobytes() if slot in state.masks else None
    found["stop_ids"] = state.stop_ids[slot].tolist() if slot in state.stop_ids else None
    return found | {"bad_words": state.bad_words.get(slot)}


def random_params(draw: st.DrawFn) -> SamplingParams:
    ids = st.integers(0, V - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-7, 0.5, 2.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, V + 1])),
        top_p=draw(st.sampled_from([1e-9, 0.5, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.2, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 2.0])),
        logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=9)).items()),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=5).map(tuple)),
        bad_words_ids=tuple(draw(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=3))),
        max_tokens=draw(st.integers(1, 60)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=2))),
        logprobs=draw(st.sampled_from([None, 0, 20])),
        logprob_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=128).map(tuple)),
    )


Step = tuple[str, int, SamplingParams, list[int], list[int], float]


@st.composite
def step(draw: st.DrawFn) -> Step:
    tokens = st.lists(st.integers(0, V - 1), max_size=20)
    verb = draw(st.sampled_from(["admit", "admit", "admit", "count", "stage", "release"]))
    slot, prompt, output = draw(st.integers(1, 4)), draw(tokens), draw(tokens)
    return verb, slot, random_params(draw), prompt, output, draw(st.sampled_from([0.0, 0.3, 2.0]))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.lists(step(), max_size=25))
def test_admit_stage_and_release_in_any_order_never_leak_overlap_or_touch_another_slot(steps: list[Step]) -> None:
    state, live, room = new_state(), set[int](), dict.fromkeys(range(5), 0)
    for verb, slot, params, prompt, output, temperature in steps:
        before = {other: snapshot(state, other) for other in range(5)}
        changed = True
        if verb == "admit":
            try:
                state.admit(slot, params, prompt, seed=slot, output_ids=output)
                live.add(slot)
                room[slot] = params.max_tokens
                fresh = new_state()
                fresh.admit(slot, params, prompt, seed=slot, output_ids=output)
                assert snapshot(state, slot, place=False) == snapshot(fresh, slot, place=False)
            except (OverlayFull, ParamError):
                changed = False
        elif verb == "count" and slot in live and state.position[slot] < room[slot]:
            update_token_counts(state, np.array([slot], np.int32), np.array([len(prompt)], np.int32))
        elif verb == "stage":
            state.stage(slot, temperature=temperature)
        else:
            state.release(slot)
            live.discard(slot)
        untouched = range(5) if not changed else set(range(5)) - {slot}
        assert all(snapshot(state, other) == before[other] for other in untouched)
        check_arena(state)
    for slot in range(1, 5):
        state.release(slot)
    assert state._extent_allocator.free == ENTRIES


def check_arena(state: SamplingState) -> None:
    """No place has two owners. Behind its entries a slot has its lists, and the side list finds room in both."""
    places: list[int] = []
    for slot in range(state.num_slots):
        start, cap = int(state.overlay_start[slot]), int(state.overlay_cap[slot])
        places.extend(range(start, start + cap))
        places.extend(range(start + cap, start + cap + len(state.lists(slot))))
        assert len(state.lists(slot)) == state.n_stops[slot] + 17 * state.n_words[slot]
    assert len(places) == len(set(places)) == len(state.entry_ids) - state._extent_allocator.free
    assert (state.overlay_len <= state.overlay_cap).all()
    rows = [int(state.mask_row[slot]) for slot in state.masks]
    assert len(set(rows)) == len(rows) and all(0 <= row < state.mask_rows for row in rows)
    assert (state.mask_row >= 0).sum() == len(rows)
    for slot in range(state.num_slots):
        ids = state.overlay(slot).ids
        assert len(set(ids.tolist())) == len(ids) and ((ids >= 0) & (ids < state.vocab_size)).all()


def test_every_field_is_as_the_parameters_say() -> None:
    state = new_state()
    state.admit(3, FULL, [3, 3, 12], seed=-1, branch=2)
    numbers = [state.temperature, state.top_k, state.top_p, state.min_p, state.repetition, state.frequency]
    assert [array[3] for array in numbers] == [np.float32(x) for x in (0.7, 5, 0.9, 0.1, 1.3, 0.5)]
    assert (state.presence[3], state.min_tokens[3], state.branch[3], state.position[3]) == (-0.5, 4, 2, 0)
    assert state.seed[3] == np.uint64(2**64 - 1)
    assert (state.n_top[3], state.n_chosen[3], state.chosen_ids[3, :4].tolist()) == (3, 3, [4, 4, 110, INVALID_TOKEN])
    assert SlotFlag(int(state.flags[3])) == ~SlotFlag.GREEDY
    overlay = state.overlay(3)
    found = {int(i): (int(c), float(b)) for i, c, b in zip(*overlay, strict=True)}
    assert found == {3: (IN_PROMPT, 1.5), 12: (IN_PROMPT, 0.0), 8: (0, -2.0), 5: (0, -np.inf)}
    assert state.stop_ids[3].tolist() == [2, 9]
    assert state.bad_words[3] == ((6, 7), (1, 2, 3))
    assert state.lists(3).tolist() == [2, 9, 2, *[0] * 14, 6, 7, 3, *[0] * 13, 1, 2, 3]
    assert state.log_min_p[3] == np.float32(np.log(np.float64(np.float32(0.1))))
    assert np.flatnonzero(state.allowed(3)).tolist() == list(range(0, V, 2))


@pytest.mark.parametrize("mask", range(1, 9))
def test_allow_masks_hold_for_vocabularies_that_fill_no_byte(mask: int) -> None:
    state = new_state(vocab_size=128 + mask)
    state.admit(1, SamplingParams(allowed_token_ids=(0, 7, 127 + mask)), [], seed=0)
    assert state.allowed(1).shape == (128 + mask,)
    assert np.flatnonzero(state.allowed(1)).tolist() == [0, 7, 127 + mask]


def test_next_admit_resets_every_field() -> None:
    state, fresh = new_state(), new_state()
    state.admit(2, FULL, [1, 2, 3], seed=2**63, branch=7, output_ids=[4, 5, 4])
    update_token_counts(state, np.array([2], np.int32), np.array([77], np.int32))
    state.release(2)
    state.admit(2, PLAIN, [], seed=0)
    fresh.admit(2, PLAIN, [], seed=0)
    assert snapshot(state, 2, place=False) == snapshot(fresh, 2, place=False)
    assert state._extent_allocator.free == fresh._extent_allocator.free == ENTRIES


def test_admit_over_a_live_slot_takes_its_place() -> None:
    state = new_state()
    state.admit(2, FULL, [1, 2, 3], seed=1)
    state.admit(2, PLAIN, [], seed=0)
    assert state._extent_allocator.free == ENTRIES and 2 not in state.masks


def test_request_that_finds_no_room_waits_and_leaves_its_slot_as_it_was() -> None:
    state = new_state()
    counted = SamplingParams(presence_penalty=1.0, max_tokens=40)
    state.admit(1, counted, [], seed=0)
    state.admit(2, FULL, [3, 8], seed=0)
    before = [snapshot(state, slot) for slot in range(5)]
    for slot in (2, 3):
        with pytest.raises(OverlayFull, match="40 overlay entries are needed"):
            state.admit(slot, counted, [], seed=0)
    assert [snapshot(state, slot) for slot in range(5)] == before
    state.release(1)
    state.admit(3, counted, [], seed=0)


def test_request_that_could_never_fit_is_refused_by_name() -> None:
    state = new_state()
    counted = SamplingParams(presence_penalty=1.0, max_tokens=97)
    with pytest.raises(ParamError, match=r"`max_tokens` must be such that at most 96 are needed. Given: 97 overlay"):
        state.admit(1, counted, [], seed=0)
    listed = SamplingParams(bad_words_ids=tuple((token, 1) for token in range(6)))  # 17 places each
    with pytest.raises(ParamError, match="Given: 102 overlay"):
        state.admit(1, listed, [], seed=0)
    assert state._extent_allocator.free == ENTRIES
    small = new_state(vocab_size=96)  # there are no more than 96 different tokens
    small.admit(1, dataclasses.replace(counted, max_tokens=2**31 - 1), list(range(96)), seed=0)
    assert small._extent_allocator.free == 0


@pytest.mark.parametrize("bad", [{"temperature": np.nan}, {"top_k": -2}, {"logprob_token_ids": (V,)}, {"n": 0}])
def test_bad_parameters_are_refused_here_too_and_leave_the_slot_as_it_was(bad: dict[str, Any]) -> None:
    state = new_state()
    state.admit(1, FULL, [1], seed=3)
    before = snapshot(state, 1)
    with pytest.raises(ParamError):
        state.admit(1, SamplingParams(**bad), [], seed=0)
    assert snapshot(state, 1) == before


def test_limits_of_the_server_hold_at_admission() -> None:
    state = SamplingState(num_slots=2, vocab_size=V, limits=SamplingLimits(max_logprob_token_ids=2))
    with pytest.raises(ParamError, match="logprob_token_ids"):
        state.admit(1, SamplingParams(logprob_token_ids=(1, 2, 3)), [], seed=0)


@pytest.mark.parametrize("slot", [-1, 0, 5, 2**31 - 1])
def test_slots_that_do_not_exist_and_the_padding_slot_are_refused(slot: int) -> None:
    state = new_state()
    message = r"`slot` must be in \[1, 5\); 0 is padding"
    with pytest.raises(ValueError, match=message):
        state.admit(slot, PLAIN, [], seed=0)
    with pytest.raises(ValueError, match=message):
        state.stage(slot, top_k=1)
    with pytest.raises(ValueError, match=message):
        state.release(slot)


def test_padding_slot_is_greedy_and_never_advances() -> None:
    state = new_state()
    before = snapshot(state, 0)
    state.admit(1, FULL, [1], seed=3)
    update_token_counts(state, np.array([0, 1, 0, 0], np.int32), np.array([3, 4, 5, 6], np.int32))
    assert snapshot(state, 0) == before
    assert SlotFlag(int(state.flags[0])) == SlotFlag.GREEDY and state.temperature[0] == 0


def test_stage_changes_all_named_numbers_or_none() -> None:
    state = new_state()
    state.admit(1, FULL, [], seed=3)
    before = snapshot(state, 1)
    with pytest.raises(ValueError, match="`seed` cannot be staged"):
        state.stage(1, temperature=0.5, seed=3)
    with pytest.raises(ParamError, match="top_p"):
        state.stage(1, temperature=0.5, top_p=1.5)
    assert snapshot(state, 1) == before
    state.apply()
    state.stage(1, temperature=0.0, top_k=V + 9)
    assert (state.temperature[1], state.top_k[1]) == (0, V)
    assert state.flags[1] & SlotFlag.GREEDY and state.take_dirty() == ((), (1,))
    state.stage(1, temperature=1e-9, top_k=-1, top_p=0.25, min_p=0.5)
    assert [a[1] for a in (state.temperature, state.top_k, state.top_p, state.min_p)] == [
        np.float32(MIN_TEMPERATURE),
        0,
        0.25,
        0.5,
    ]
    assert not state.flags[1] & SlotFlag.GREEDY
    assert (state.log_min_p[1], state.dirty) == (np.float32(np.log(0.5)), True)
    state.apply()
    assert not state.dirty
    state.stage(1, min_p=1e-300)  # 0 as a float32, which is off
    assert (state.min_p[1], state.log_min_p[1]) == (0, -np.inf)


def test_dirty_slots_are_reported_once_and_by_what_changed() -> None:
    state = new_state()
    for slot in (4, 1, 2):
        state.admit(slot, PLAIN, [], seed=0)
    state.stage(1, top_k=3)
    state.stage(3, top_k=3)
    state.release(2)  # its places may have another owner by the time they would be sent
    assert state.take_dirty() == ((1, 4), (3,))
    assert not state.dirty and state.take_dirty() == ((), ())
    state.stage(4, top_k=3)
    state.release(4)
    assert not state.dirty
    state.admit(2, FULL, [], seed=0)
    state.take_dirty()
    state.touch()  # a device that has seen nothing of the slots in use
    assert state.take_dirty() == ((1, 2), ())


def test_request_that_finds_no_allow_mask_waits_and_leaves_its_slot_as_it_was() -> None:
    state = SamplingState(num_slots=5, vocab_size=V, overlay_entries=ENTRIES, mask_rows=2)
    masked = SamplingParams(allowed_token_ids=(3,), presence_penalty=1.0, max_tokens=4)
    for slot in (1, 2):
        state.admit(slot, masked, [], seed=0)
    before = [snapshot(state, slot) for slot in range(5)]
    for slot in (1, 3):
        with pytest.raises(OverlayFull, match="an allow mask is needed, all 2 are in use"):
            state.admit(slot, masked, [], seed=0)
    assert [snapshot(state, slot) for slot in range(5)] == before and state._extent_allocator.free == ENTRIES - 8
    state.admit(3, PLAIN, [], seed=0)
    state.release(1)
    state.admit(3, masked, [], seed=0)
    assert sorted(state.mask_row[[2, 3]].tolist()) == [0, 1]
    assert [new_state(slots=300, vocab_size=size).mask_rows for size in (V, 32_000, 151_936)] == [300, 300, 256]
    assert new_state(slots=5000, vocab_size=32_000).mask_rows == (1 << 22) // 4000


def test_bad_word_that_another_one_ends_is_left_out() -> None:
    words = ((1, 2, 3), (2, 3), (9, 2, 3), (3, 2), (2, 3), (3,), (2, 3, 4), (7, 7, 7), (7, 7))
    state = new_state(entries=999)
    state.admit(1, SamplingParams(bad_words_ids=words), [], seed=0)
    assert state.bad_words[1] == ((2, 3), (3, 2), (2, 3, 4), (7, 7))


def test_columns_are_views_of_the_table_that_a_device_is_sent() -> None:
    state = new_state()
    state.admit(3, FULL, [3], seed=2**63 + 5, branch=2)
    row = state.table[3]
    assert (row[Word.SEED_LOW], row[Word.SEED_HIGH], row[Word.BRANCH]) == (5, -(2**31), 2)
    assert row.view(np.float32)[Word.TEMPERATURE] == np.float32(0.7)
    arrays = {name: value for name, value in vars(state).items() if isinstance(value, np.ndarray)}
    columns = [value for name, value in arrays.items() if len(value) == 5 and name != "draft_ids"]  # sent by themselves
    assert len(columns) == 26 and all(np.shares_memory(column, state.table) for column in columns)
    assert sum(column[0].nbytes for column in columns if column is not state.table) == state.table[0].nbytes


def test_ids_without_a_logit_never_reach_the_overlay() -> None:
    state = new_state(entries=2 * ENTRIES)
    outside = [-1, V, 2**31 - 1, -(2**31)]
    state.admit(1, FULL, [*outside, 12], seed=0, output_ids=[*outside, 13, 13])
    state.admit(2, FULL, [12], seed=0, output_ids=[13, 13])
    assert [part.tolist() for part in state.overlay(1)] == [part.tolist() for part in state.overlay(2)]
    assert (state.position[1], state.position[2]) == (6, 2)


def test_memory_does_not_grow_with_slots_times_vocabulary() -> None:
    def size(slots: int, vocab_size: int) -> int:
        state = SamplingState(num_slots=slots, vocab_size=vocab_size, overlay_entries=4096)
        for slot in range(1, 4):
            state.admit(slot, dataclasses.replace(FULL, allowed_token_ids=None), range(20), seed=0)
        arrays = [value for value in vars(state).values() if isinstance(value, np.ndarray)]
        return sum(array.nbytes for array in arrays if array.base is None)  # a column is a view of the table

    assert size(257, 151_936) == size(257, V)
    assert size(257, V) - size(129, V) <= 128 * 1024
    masked = SamplingState(num_slots=3, vocab_size=151_936, overlay_entries=16)
    masked.admit(1, SamplingParams(allowed_token_ids=(1,)), [], seed=0)
    assert masked.masks[1].nbytes == 151_936 // 8
    masked.release(1)
    assert not masked.masks


@pytest.mark.parametrize("params", [PLAIN, FULL, SamplingParams(bad_words_ids=((1, 2),)), SamplingParams(min_tokens=3)])
@pytest.mark.parametrize("length", [0, 1, 3, 16, 17, 40])
def test_resume_leaves_exactly_what_drawing_one_by_one_leaves(params: SamplingParams, length: int) -> None:
    params = dataclasses.replace(params, max_tokens=40)
    output = np.random.default_rng(length).integers(0, 30, length).astype(np.int32)
    whole, resumed = new_state(), new_state()
    whole.admit(3, params, [1, 2, 2, 9], seed=5, branch=1)
    for token in output:
        update_token_counts(whole, np.array([3], np.int32), np.array([token]))
    resumed.admit(3, params, [1, 2, 2, 9], seed=5, branch=1, output_ids=output)
    assert snapshot(resumed, 3) == snapshot(whole, 3)
    assert same_arrays(resumed, whole)


def same_arrays(a: SamplingState, b: SamplingState) -> bool:
    def arrays(state: SamplingState) -> list[npt.NDArray[Any]]:
        return [value for value in vars(state).values() if isinstance(value, np.ndarray)]

    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def test_token_beyond_what_was_reserved_is_not_counted_and_touches_no_neighbour() -> None:
    state = new_state()
    state.admit(1, SamplingParams(presence_penalty=1.0, max_tokens=2), [], seed=0)
    state.count(1, 3)
    state.count(1, 4, 5)
    state.count(1, 3)
    assert (state.overlay(1).counts & COUNT).tolist() == [2, 5]
    state.admit(2, SamplingParams(presence_penalty=1.0, max_tokens=2), [], seed=0)
    before = [snapshot(state, slot) for slot in (1, 2)]
    state.count(1, 5)
    assert [snapshot(state, slot) for slot in (1, 2)] == before


@pytest.mark.parametrize(("slots", "vocab_size", "masks"), [(0, 5, 1), (5, 0, 1), (-1, 5, 1), (5, 5, 0)])
def test_state_without_slots_vocabulary_or_masks_is_refused(slots: int, vocab_size: int, masks: int) -> None:
    with pytest.raises(ValueError, match=rf"must be >= 1. Given: {slots}, {vocab_size}, {masks}"):
        SamplingState(num_slots=slots, vocab_size=vocab_size, mask_rows=masks)


def test_no_share_of_top_p_is_rounded_to_nothing() -> None:
    state = new_state()
    state.admit(1, dataclasses.replace(PLAIN, top_p=1e-46), [1], seed=7)
    assert 0 < state.top_p[1] < 1e-30


@pytest.mark.parametrize("seed", [7, np.int32(7), np.int64(7), np.uint64(7)])
def test_seeds_of_any_integer_are_alike(seed: Any) -> None:
    state = new_state()
    state.admit(1, PLAIN, [1], seed=seed)
    assert state.seed[1] == 7
