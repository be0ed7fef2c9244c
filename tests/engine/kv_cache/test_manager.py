"""Tests what the pool takes back from the prefix tree when nothing is free."""

import numpy as np
import pytest

from engine.kv_cache.manager import EVICTED_PART, KVCacheManager
from engine.requests import Int32s

LENGTH = 100  # tokens of a sequence
PLENTY = 40_000


def full_pool(slots: int) -> KVCacheManager:
    """Its tree holds sequences of `LENGTH` tokens, in the order in which they came, and a few slots are free."""
    pool = KVCacheManager(slots)
    for number in range(pool.allocator.num_free // LENGTH):
        taken = pool.allocate(LENGTH)
        assert taken is not None
        pool.prefix_cache.insert("a", sequence(number), taken)
    assert pool.allocator.num_free < LENGTH
    return pool


def sequence(number: int) -> Int32s:
    return np.full(LENGTH, number, np.int32)


def held(pool: KVCacheManager, number: int) -> int:
    """Tokens of a sequence that the tree has."""
    _, slots = pool.prefix_cache.match("a", sequence(number))
    return len(slots)


def test_an_allocation_from_full_storage_makes_room_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = full_pool(PLENTY), list[int]()
    evict = pool.prefix_cache.evict

    def noted(n: int) -> Int32s:
        asked.append(n)
        return evict(n)

    monkeypatch.setattr(pool.prefix_cache, "evict", noted)
    for _ in range(30):
        assert pool.allocate(10) is not None
    assert asked == [PLENTY // EVICTED_PART] * len(asked)
    assert 0 < len(asked) <= 30 * 10 // asked[0] + 1


def test_the_oldest_make_room_and_no_more_of_them_than_that() -> None:
    pool = full_pool(PLENTY)
    size = pool.prefix_cache.size
    pool.allocate(pool.allocator.num_free + 1)
    assert size - pool.prefix_cache.size == PLENTY // EVICTED_PART
    whole, part = divmod(PLENTY // EVICTED_PART, LENGTH)
    assert [held(pool, number) for number in range(whole + 2)] == [0] * whole + [LENGTH - part, LENGTH]


@pytest.mark.parametrize("wanted", [1, 7, 250])
def test_a_small_pool_gives_up_only_what_is_wanted(wanted: int) -> None:
    pool = full_pool(EVICTED_PART + 101)
    size, free = pool.prefix_cache.size, pool.allocator.num_free
    pool.allocate(free + wanted)
    assert size - pool.prefix_cache.size == wanted


def test_what_a_running_row_holds_stays_though_nothing_else_is_left() -> None:
    pool = full_pool(PLENTY)
    node, _ = pool.prefix_cache.match("a", sequence(0))
    pool.prefix_cache.lock(node)
    rest = pool.prefix_cache.size + pool.allocator.num_free - LENGTH
    assert pool.allocate(rest + 1) is None
    assert pool.allocate(rest) is not None
    assert held(pool, 0) == LENGTH
    pool.prefix_cache.unlock(node)
