"""The interpreter beside a step loop: short turns, young garbage at every sweep, everything now and then while idle."""

import gc
import sys
from typing import Any

import pytest

from engine.utils import garbage_collection

MICROSECOND = 1.1e-6  # Python keeps whole ones, and setting what it told may cut one off


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Generations, as they are collected. The clock stands at 100 s, the last full collection long ago."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", found.append)
    monkeypatch.setattr(garbage_collection, "_last_full", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    return found


def test_an_idle_loop_collects_everything_once_in_a_while(
    collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        garbage_collection.sweep(idle=True)
    assert collected == [2, 0, 0]
    monkeypatch.setattr("time.monotonic", lambda: 100.0 + garbage_collection.FULL_EVERY_S)
    garbage_collection.sweep(idle=True)
    assert collected == [2, 0, 0, 2]


def test_a_busy_loop_collects_young_garbage_only(collected: list[int]) -> None:
    for _ in range(3):
        garbage_collection.sweep(idle=False)
    assert collected == [0, 0, 0]


def interval() -> Any:
    return pytest.approx(sys.getswitchinterval(), abs=MICROSECOND)


def test_threads_take_turns_of_a_holders_length_while_anyone_holds() -> None:
    usual = sys.getswitchinterval()
    for _ in range(2):
        garbage_collection.hold()
    try:
        assert interval() == garbage_collection.TURN_S
        garbage_collection.release()
        assert interval() == garbage_collection.TURN_S
    finally:
        garbage_collection.release()
    assert usual == interval()
