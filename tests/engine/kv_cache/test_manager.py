"""What the pool takes back from the prefix tree when nothing is free."""

import numpy as np
import pytest

from engine.kv_cache.manager import EVICTED_PART, Pool
from engine.requests import Int32s

LENGTH = 100  # tokens of a sequence
PLENTY = 40_000


def full_pool(slots: int) -> Pool:
    """Its tree holds sequences of `LENGTH` tokens, in the order in which they came, and a few slots are free."""
    pool = Pool(slots)
    for number in range(pool.allocator.free // LENGTH):
        taken = pool.take(LENGTH)
        assert taken is not None
        pool.tree.insert("a", sequence(number), taken)
    assert pool.allocator.free < LENGTH
    return pool


def sequence(number: int) -> Int32s:
    return np.full(LENGTH, number, np.int32)


def held(pool: Pool, number: int) -> int:
    """Tokens of a sequence that the tree has."""
    return pool.tree.match("a", sequence(number)).present


def test_whoever_comes_to_a_full_pool_makes_room_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = full_pool(PLENTY), list[int]()
    evict = pool.tree.evict

    def noted(n: int) -> Int32s:
        asked.append(n)
        return evict(n)

    monkeypatch.setattr(pool.tree, "evict", noted)
    for _ in range(30):
        assert pool.take(10) is not None
    assert asked == [PLENTY // EVICTED_PART] * len(asked)
    assert 0 < len(asked) <= 30 * 10 // asked[0] + 1


def test_the_oldest_make_room_and_no_more_of_them_than_that() -> None:
    pool = full_pool(PLENTY)
    size = pool.tree.size
    pool.take(pool.allocator.free + 1)
    assert size - pool.tree.size == PLENTY // EVICTED_PART
    whole, part = divmod(PLENTY // EVICTED_PART, LENGTH)
    assert [held(pool, number) for number in range(whole + 2)] == [0] * whole + [LENGTH - part, LENGTH]


@pytest.mark.parametrize("wanted", [1, 7, 250])
def test_a_small_pool_gives_up_only_what_is_wanted(wanted: int) -> None:
    pool = full_pool(EVICTED_PART + 101)
    size, free = pool.tree.size, pool.allocator.free
    pool.take(free + wanted)
    assert size - pool.tree.size == wanted


def test_what_a_running_row_holds_stays_though_nothing_else_is_left() -> None:
    pool = full_pool(PLENTY)
    node = pool.tree.match("a", sequence(0)).node
    pool.tree.lock(node)
    rest = pool.tree.size + pool.allocator.free - LENGTH
    assert pool.take(rest + 1) is None
    assert pool.take(rest) is not None
    assert held(pool, 0) == LENGTH
    pool.tree.unlock(node)
