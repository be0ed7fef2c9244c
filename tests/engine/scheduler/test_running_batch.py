"""Decoding: what is kept from step to step is what would be found anew."""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.request_state import Request
from engine.scheduler.running_batch import Decoding


def _row(slot: int, *, isolated: bool = False) -> Any:
    return SimpleNamespace(slot=slot, parent=SimpleNamespace(isolated=isolated))


@given(st.lists(st.tuples(st.sampled_from(("add", "discard", "next")), st.integers(1, 5)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_all_rows_share_a_step_in_the_order_in_which_they_came(moves: list[tuple[str, int]]) -> None:
    decoding = Decoding()
    plain: dict[int, Request] = {}
    for move, slot in moves:
        if move == "add" and slot not in plain:
            plain[slot] = cast(Request, _row(slot))
            decoding.add(plain[slot])
        elif move == "discard":
            decoding.discard(plain.pop(slot, cast(Request, _row(0))))
        slots, rows = decoding.next()
        assert (slots.tolist(), rows) == (list(plain), list(plain.values()))
        assert bool(decoding) == bool(plain)


def test_a_solo_job_takes_turns_with_the_others_until_it_is_solo_no_more() -> None:
    decoding = Decoding()
    alone = _row(2, isolated=True)
    for row in (_row(1), alone, _row(3)):
        decoding.add(row)
    turns = [decoding.next()[0].tolist() for _ in range(4)]
    assert sorted(turns[:2]) == sorted(turns[2:]) == [[1, 3], [2]]
    alone.parent.isolated = False
    assert [decoding.next()[0].tolist() for _ in range(2)] == [[1, 2, 3]] * 2
