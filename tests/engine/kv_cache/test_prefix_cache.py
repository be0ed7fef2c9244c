"""The allocator and the prefix tree against naive models, under random operations."""

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache.manager import MAX_STALE, PrefixCache, SlotAllocator, TreeNode
from engine.requests import Int32s


def ids(*values: int) -> Int32s:
    return np.array(values, np.int32)


def matched(tree: PrefixCache, key: Hashable, *values: int) -> list[int]:
    _, slots = tree.match(key, ids(*values))
    return list(slots.tolist())


def test_the_padding_slot_is_never_given_out() -> None:
    allocator = SlotAllocator(5)
    taken = allocator.allocate(4)
    assert taken is not None
    assert sorted(taken.tolist()) == [1, 2, 3, 4]
    assert allocator.allocate(1) is None


def test_taking_more_than_is_free_takes_nothing() -> None:
    allocator = SlotAllocator(5)
    assert allocator.allocate(5) is None
    assert allocator.num_free == 4


@pytest.mark.parametrize("wrong", [(0,), (3,), (1, 1), (1, 2, 1, 2), (-1,), (5,)])
def test_releasing_a_slot_without_an_owner_raises(wrong: tuple[int, ...]) -> None:
    allocator = SlotAllocator(5)
    taken = allocator.allocate(2)
    assert taken is not None
    assert sorted(taken.tolist()) == [1, 2]
    with pytest.raises(RuntimeError, match="had no owner"):
        allocator.release(ids(*wrong))
    allocator.release(taken)
    allocator.check()


def test_a_slot_is_given_back_once() -> None:
    allocator = SlotAllocator(5)
    allocator.allocate(2)
    allocator.release(ids(1))
    with pytest.raises(RuntimeError, match="had no owner"):
        allocator.release(ids(2, 1))


def test_freed_slots_are_announced() -> None:
    heard: list[int] = []
    allocator = SlotAllocator(4, on_free=lambda slots: heard.extend(slots.tolist()))
    taken = allocator.allocate(3)
    assert taken is not None
    allocator.release(taken[:2])
    assert sorted(heard) == sorted(taken[:2].tolist())


def test_a_split_keeps_what_a_lock_holds() -> None:
    tree = PrefixCache()
    tree.insert("", ids(1, 2, 3, 4), ids(10, 11, 12, 13))
    node, _ = tree.match("", ids(1, 2, 3, 4))
    tree.lock(node)
    tree.insert("", ids(1, 2, 9), ids(20, 21, 22))
    assert sorted(tree.evict(100).tolist()) == [22]
    assert matched(tree, "", 1, 2, 3, 4) == [10, 11, 12, 13]
    tree.unlock(node)
    assert sorted(tree.evict(100).tolist()) == [10, 11, 12, 13]
    tree.check()


@pytest.mark.parametrize("again", [(1, 2), (1, 2, 9)])
def test_a_lock_keeps_no_token_beyond_those_that_match(again: tuple[int, ...]) -> None:
    tree = PrefixCache()
    tree.insert("", ids(1, 2, 3, 4), ids(10, 11, 12, 13))
    node, slots = tree.match("", ids(*again))
    tree.lock(node)
    assert slots.tolist() == [10, 11]
    assert sorted(tree.evict(100).tolist()) == [12, 13]
    assert matched(tree, "", 1, 2, 3, 4) == [10, 11]
    tree.unlock(node)
    assert sorted(tree.evict(100).tolist()) == [10, 11]
    tree.check()


def test_the_least_recently_used_leaf_goes_first_and_only_as_much_as_needed() -> None:
    tree = PrefixCache()
    tree.insert("", ids(1, 2, 3), ids(10, 11, 12))
    tree.insert("", ids(5, 6, 7), ids(20, 21, 22))
    tree.match("", ids(1, 2, 3))
    assert tree.evict(2).tolist() == [21, 22]
    assert matched(tree, "", 5, 6, 7) == [20]
    assert matched(tree, "", 1, 2, 3) == [10, 11, 12]


def test_domains_share_nothing() -> None:
    tree = PrefixCache()
    tree.insert(("score", ""), ids(1, 2), ids(10, 11))
    assert matched(tree, ("generate", ""), 1, 2) == []
    assert matched(tree, ("score", "salt"), 1, 2) == []
    assert matched(tree, ("score", ""), 1, 2) == [10, 11]


def test_a_dropped_domain_returns_everything_unlocked_and_leaves_no_root() -> None:
    tree = PrefixCache()
    tree.insert("a", ids(1, 2, 3), ids(10, 11, 12))
    tree.insert("a", ids(1, 2, 4, 5), ids(20, 21, 22, 23))
    assert sorted(tree.drop("a").tolist()) == [10, 11, 12, 22, 23]
    assert tree.size == 0
    assert not tree._roots


def test_dropped_domains_leave_few_entries_behind() -> None:
    tree = PrefixCache()
    tree.insert("a", ids(1, 2), ids(10, 11))
    for number in range(1_000):
        tree.insert(number, ids(1, 2, 3), ids(20, 21, 22))
        tree.drop(number)
    assert len(tree._heap) <= 2 + MAX_STALE
    assert sorted(tree.evict(100).tolist()) == [10, 11]


class NaiveTree:
    """The same promise, token by token: a map from prefixes to slots."""

    def __init__(self) -> None:
        self.slots: dict[tuple[str, tuple[int, ...]], int] = {}

    def match(self, key: str, sequence: tuple[int, ...]) -> list[int]:
        found = []
        for n in range(1, len(sequence) + 1):
            if (key, sequence[:n]) not in self.slots:
                break
            found.append(self.slots[key, sequence[:n]])
        return found

    def forget(self, gone: set[int]) -> None:
        self.slots = {prefix: slot for prefix, slot in self.slots.items() if slot not in gone}

    def leaves(self) -> set[int]:
        inner = {(key, prefix[:-1]) for key, prefix in self.slots}
        return {slot for prefix, slot in self.slots.items() if prefix not in inner}


SEQUENCES = st.lists(st.integers(0, 2), min_size=0, max_size=9).map(tuple)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "lock", "unlock", "evict"]), st.sampled_from("ab"), SEQUENCES
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_random_operations_agree_with_a_naive_tree(operations: list[tuple[str, str, tuple[int, ...]]]) -> None:
    allocator, tree, naive = SlotAllocator(60), PrefixCache(), NaiveTree()
    held: list[tuple[TreeNode, str, tuple[int, ...], list[int]]] = []
    for verb, key, sequence in operations:
        array = ids(*sequence)
        if verb == "match":
            assert matched(tree, key, *sequence) == naive.match(key, sequence)
        elif verb == "insert":
            slots = allocator.allocate(len(sequence))
            if slots is None:
                continue
            before = naive.match(key, sequence)
            _, stored, present = tree.insert(key, array, slots)
            assert present == len(before)
            allocator.release(slots[:present])
            for n in range(present, len(sequence)):
                naive.slots[key, sequence[: n + 1]] = int(slots[n])
            assert stored.tolist() == naive.match(key, sequence)
        elif verb == "lock":
            node, stored = tree.match(key, array)
            tree.lock(node)
            held.append((node, key, sequence, stored.tolist()))
        elif verb == "unlock" and held:
            tree.unlock(held.pop(len(sequence) % len(held))[0])
        elif verb == "evict":
            gone = tree.evict(len(sequence))
            allocator.release(gone)
            naive.forget(set(gone.tolist()))
        tree.check()
        allocator.check()
        assert allocator.num_free + tree.size == 59
        for _, kept_key, kept, slots_before in held:  # what is locked stays, slot for slot
            assert naive.match(kept_key, kept)[: len(slots_before)] == slots_before
    for node, *_ in held:
        tree.unlock(node)
    allocator.release(tree.evict(1_000))
    assert allocator.num_free == 59
    assert not tree._roots
