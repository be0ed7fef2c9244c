"""Tests what a drawn token changes in the state: positions, counts, last tokens; and what it leaves alone."""

import numpy as np

from gpu_sampler.reference.token_counts import update_token_counts
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.state.host_state import COUNT, IN_PROMPT, SamplingState

V = 17


def state_of(*params: SamplingParams) -> SamplingState:
    state = SamplingState(num_slots=len(params) + 1, vocab_size=V, overlay_entries=99)
    for slot, one in enumerate(params, start=1):
        state.admit(slot, one, [3, 4], seed=0)
    return state


def drawn(state: SamplingState, slots: list[int], tokens: list[int]) -> None:
    update_token_counts(state, np.array(slots, np.int32), np.array(tokens, np.int32))


def test_positions_of_the_named_slots_advance_by_one() -> None:
    state = state_of(SamplingParams(), SamplingParams(), SamplingParams())
    drawn(state, [3, 1], [5, 5])
    drawn(state, [3], [5])
    assert state.position.tolist() == [0, 1, 0, 2]


def test_token_is_counted_in_its_entry_or_in_a_new_one() -> None:
    state = state_of(SamplingParams(repetition_penalty=2), SamplingParams(presence_penalty=1))
    for token in (3, 9, 3, 16):
        drawn(state, [1, 2], [token, token])
    found = [dict(zip(state.overlay(s).ids.tolist(), state.overlay(s).counts.tolist(), strict=True)) for s in (1, 2)]
    assert found[0] == {3: IN_PROMPT + 2, 4: IN_PROMPT, 9: 1, 16: 1}
    assert found[1] == {3: 2, 9: 1, 16: 1}  # the prompt is of no account without a repetition penalty
    assert found[0][3] & COUNT == 2


def test_rows_without_penalties_or_bad_words_keep_no_history() -> None:
    state = state_of(SamplingParams(logit_bias=((3, 1.0),)), SamplingParams(bad_words_ids=((3, 4),)))
    drawn(state, [1, 2], [3, 3])
    drawn(state, [1, 2], [4, 5])
    assert state.overlay(1).counts.tolist() == [0]
    assert (state.last_tokens[1] == INVALID_TOKEN).all()
    assert state.last_tokens[2].tolist() == [INVALID_TOKEN] * 14 + [3, 5]
    assert len(state.overlay(2).ids) == 0


def test_ring_keeps_the_newest_sixteen_tokens() -> None:
    state = state_of(SamplingParams(bad_words_ids=((3, 4),), max_tokens=40))
    for step in range(40):
        drawn(state, [1], [step % V])
    assert state.last_tokens[1].tolist() == [step % V for step in range(24, 40)]


def test_row_without_a_token_advances_and_counts_nothing() -> None:
    state = state_of(SamplingParams(presence_penalty=1, bad_words_ids=((1, 2),)))
    drawn(state, [1], [INVALID_TOKEN])
    assert state.position[1] == 1 and len(state.overlay(1).ids) == 0
    assert (state.last_tokens[1] == INVALID_TOKEN).all()


def test_padding_slot_may_be_named_many_times_and_no_rows_are_no_fault() -> None:
    state = state_of(SamplingParams())
    drawn(state, [0, 0, 1, 0], [3, 4, 5, 6])
    drawn(state, [], [])
    assert state.position.tolist() == [0, 1]
