"""Extents of the shared array: never overlapping, never lost, joined when they come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_sampler.state.overlay import Extent, ExtentAllocator


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 17)), max_size=60))
def test_extents_never_overlap_and_none_is_lost(size: int, steps: list[tuple[bool, int]]) -> None:
    arena = ExtentAllocator(size)
    held: list[Extent] = []
    for give, number in steps:
        if give and held:
            arena.give(held.pop(number % len(held)))
        else:
            before = arena.free
            extent = arena.take(number)
            if extent is None:
                assert arena.free == before
                assert longest_gap(size, held) < number
            else:
                assert extent.length == number
                held.append(extent)
        places = [place for extent in held for place in range(extent.start, extent.end)]
        assert len(places) == len(set(places)) and all(0 <= place < size for place in places)
        assert arena.free == size - len(places)
    for extent in held:
        arena.give(extent)
    assert arena.take(size) == Extent(0, size)


def longest_gap(size: int, held: list[Extent]) -> int:
    taken = {place for extent in held for place in range(extent.start, extent.end)}
    best = run = 0
    for place in range(size):
        run = 0 if place in taken else run + 1
        best = max(best, run)
    return best


def test_first_hole_that_is_large_enough_is_taken() -> None:
    arena = ExtentAllocator(17)
    first, second, third = arena.take(3), arena.take(5), arena.take(9)
    assert (first, second, third) == (Extent(0, 3), Extent(3, 5), Extent(8, 9))
    assert arena.take(1) is None and arena.take(0) == Extent(0, 0)
    arena.give(Extent(0, 3))
    arena.give(Extent(8, 9))
    assert arena.take(4) == Extent(8, 4)
    assert arena.take(3) == Extent(0, 3)


@pytest.mark.parametrize("freed", [Extent(0, 3), Extent(2, 3), Extent(3, 1), Extent(16, 2), Extent(17, 1)])
def test_giving_back_a_free_extent_is_a_fault_of_ours(freed: Extent) -> None:
    arena = ExtentAllocator(17)
    arena.take(5)
    arena.give(Extent(0, 3))
    with pytest.raises(RuntimeError, match="no slot owned"):
        arena.give(freed)
        arena.give(freed)  # one that was held is free by now
    assert arena.free <= 17
