"""RunningBatch: the rows that it keeps from step to step are those that it would find anew."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.scheduler.request_state import RequestTable, SequenceState
from engine.scheduler.running_batch import ISOLATED_TURNS, RunningBatch
from gpu_sampler.sampler import Sampler


def _batch() -> RunningBatch:
    table = RequestTable(8, 16, 50, torch.device("cpu"))
    sampler = Sampler(num_slots=9, vocab_size=50, device=torch.device("cpu"))
    return RunningBatch(EngineConfig(), KVCacheManager(64), table, sampler)


class _Row:
    """Stands for a sequence, as far as the choice of rows looks at it."""

    def __init__(self, slot: int, *, isolated: bool = False, tenant: str = "") -> None:
        self.slot, self.parent, self.turn = slot, SimpleNamespace(isolated=isolated, tenant=tenant), 0


def _row(slot: int, *, isolated: bool = False, tenant: str = "") -> Any:
    return _Row(slot, isolated=isolated, tenant=tenant)


@given(st.lists(st.tuples(st.sampled_from(("add", "discard", "next")), st.integers(1, 5)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_all_rows_share_a_step_in_the_order_in_which_they_came(moves: list[tuple[str, int]]) -> None:
    batch = _batch()
    plain: dict[int, SequenceState] = {}
    for move, slot in moves:
        if move == "add" and slot not in plain:
            plain[slot] = _row(slot)
            batch.start_decoding(plain[slot])
        elif move == "discard":
            batch.discard(plain.pop(slot, _row(0)))
        slots, rows = batch.next_rows()
        assert (slots.tolist(), rows) == (list(plain), list(plain.values()))
        assert batch.decoding == plain


def test_an_isolated_request_takes_turns_with_the_others_until_it_is_isolated_no_more() -> None:
    batch = _batch()
    alone = _row(2, isolated=True)
    for row in (_row(1), alone, _row(3)):
        batch.start_decoding(row)
    turns = list[list[int]]()
    for _ in range(2 * (ISOLATED_TURNS + 1)):
        first = batch.isolated_first
        turns.append(batch.next_rows().slots.tolist())
        assert first is (turns[-1] == [2])
    assert turns == 2 * ([[2]] * ISOLATED_TURNS + [[1, 3]])
    alone.parent.isolated = False
    assert [batch.next_rows().slots.tolist() for _ in range(2)] == [[1, 2, 3]] * 2
    assert not batch.isolated_first


def _heavy_and_light() -> RunningBatch:
    batch = _batch()
    for slot in (1, 2, 3, 4, 6, 7):
        batch.start_decoding(_row(slot, tenant="heavy"))
    batch.start_decoding(_row(5, tenant="light"))
    return batch


def test_a_part_of_the_rows_holds_those_of_a_small_tenant_and_the_others_in_turn() -> None:
    batch = _heavy_and_light()
    parts = [batch.next_rows(3).slots.tolist() for _ in range(6)]
    assert parts == [[1, 2, 5], [3, 4, 5], [6, 7, 5]] * 2
    assert batch.next_rows(7).slots.tolist() == batch.next_rows().slots.tolist() == [1, 2, 3, 4, 6, 7, 5]


def test_a_part_too_small_for_all_tenants_holds_them_in_turn() -> None:
    batch = _batch()
    for slot in range(1, 6):
        batch.start_decoding(_row(slot, tenant=str(slot)))
    taken = Counter(slot for _ in range(50) for slot in batch.next_rows(2).slots.tolist())
    assert set(taken) == {1, 2, 3, 4, 5} and max(taken.values()) - min(taken.values()) <= 1


@pytest.mark.risk("R17")
def test_a_part_of_one_row_is_a_tenants_turn_and_not_a_rows() -> None:
    """Else the only row of a tenant would wait until all of another had been in a step."""
    batch = _heavy_and_light()
    parts = [batch.next_rows(1).slots.tolist() for _ in range(12)]
    assert parts == [[1], [5], [2], [5], [3], [5], [4], [5], [6], [5], [7], [5]]


def test_the_odd_row_of_a_part_is_each_tenants_in_turn() -> None:
    batch = _batch()
    for slot in range(1, 9):
        batch.start_decoding(_row(slot, tenant="one" if slot < 5 else "another"))
    taken = Counter(slot for _ in range(40) for slot in batch.next_rows(3).slots.tolist())
    assert set(taken.values()) == {3 * 40 // 8}


def test_an_isolated_request_is_not_cut() -> None:
    batch = _batch()
    batch.start_decoding(_row(1))
    alone = [_row(2, isolated=True), _row(3, isolated=True)]
    alone[1].parent = alone[0].parent
    for row in alone:
        batch.start_decoding(row)
    assert batch.next_rows(1).slots.tolist() == [2, 3]
