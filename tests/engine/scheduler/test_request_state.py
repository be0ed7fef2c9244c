"""The request table: what a slot holds while a row runs, and that nothing of it outlives the row."""

from collections.abc import Callable

import numpy as np
import torch

from engine.channels import ResultQueue
from engine.requests import GenerateRequest
from engine.scheduler.request_state import GenerationState, LabelScoreState, RequestTable, SequenceState


def row(job: GenerateRequest) -> SequenceState:
    results: ResultQueue = None  # type: ignore[assignment]
    state = GenerationState(request=job, results=results, arrival=1, submitted=0.0, deadline=1.0, domain="", queued=0)
    return state.branches[0]


def test_slot_zero_is_never_given_and_a_slot_comes_back(generate_job: Callable[..., GenerateRequest]) -> None:
    table = RequestTable(3, 16, 50, torch.device("cpu"))
    rows = [row(generate_job([n, 7, 8])) for n in range(3)]
    slots = [table.admit(request, request.tokens(), 9) for request in rows]
    assert sorted(slots) == [1, 2, 3]
    assert (table.free, table.live) == (0, 3)
    assert table.tokens[rows[1].slot, :3].tolist() == [1, 7, 8]
    table.release(rows[1])
    assert (table.free, table.live) == (1, 2)


def test_the_device_gets_the_last_token_of_a_sequence_that_goes_on(
    generate_job: Callable[..., GenerateRequest],
) -> None:
    table = RequestTable(2, 16, 50, torch.device("cpu"))
    resumed = row(generate_job([5, 7, 8]))
    resumed.output = np.array([9, 6], np.int32)
    slot = table.admit(resumed, resumed.tokens(), 9)
    assert table.tokens[slot, :5].tolist() == [5, 7, 8, 9, 6] and int(table.token_table[slot, 4]) == 6


def test_stop_ids_are_a_rows_own_and_leave_with_it(generate_job: Callable[..., GenerateRequest]) -> None:
    table = RequestTable(2, 16, 50, torch.device("cpu"))
    first, second = row(generate_job([1], stop_token_ids=(4, 49))), row(generate_job([1]))
    slots = np.array([table.admit(request, request.tokens(), 9) for request in (first, second)])
    both = slots.repeat(3)
    tokens = np.array([4, 49, -1] * 2, np.int32)
    assert table.is_stop(both, tokens).tolist() == [True, True, False, False, False, False]
    table.release(first)
    assert not table.is_stop(both, tokens).any()


def test_pool_slots_are_appended_by_position(generate_job: Callable[..., GenerateRequest]) -> None:
    table = RequestTable(2, 16, 50, torch.device("cpu"))
    slot = table.admit(row(generate_job([1, 2])), np.array([1, 2], np.int32), 9)
    table.add_slots(slot, np.array([30, 31], np.int32))
    table.add_slots(slot, np.array([12], np.int32))
    assert table.slots[slot, : table.capacity[slot]].tolist() == [30, 31, 12]


def test_an_empty_item_is_the_prefixs_last_token_again() -> None:
    request = type("Job", (), {"prefix": np.arange(5), "ids": np.array([7, 8]), "starts": np.array([0, 2, 2])})()
    state = LabelScoreState.__new__(LabelScoreState)
    state.request = request
    assert [(context, ids.tolist()) for context, ids in map(state.item, range(2))] == [(5, [7, 8]), (4, [4])]
