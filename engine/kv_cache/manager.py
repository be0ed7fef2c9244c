"""Allocates the KV storage's slots for the step loop, and keeps computed prefixes in a radix tree that requests share.

A page is one token slot. A slot is free, or the prefix cache's, or a request's; slot 0 takes padding and has no owner.
The step loop alone uses these classes. The tree is that of RadixAttention (Zheng et al. 2023, "SGLang").
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from engine.requests import Int32s

NO_SLOTS: Int32s = np.empty(0, np.int32)
MAX_STALE = 64  # entries of removed nodes in the eviction heap, beside as many as there are others
EVICTED_PART = 256  # an eviction frees this part of the slots: a few leaves at a time would make each request pay


class SlotAllocator:
    """Allocates the slots 1 .. num_slots - 1 from a stack of free ones.

    A slot is free where the stack holds it at the place that was noted when it was put there: the sparse set of Briggs
    and Torczon (1993, "An Efficient Representation for Sparse Sets"), whose members are taken out without a note.
    """

    def __init__(self, num_slots: int, on_free: Callable[[Int32s], None] | None = None) -> None:
        """
        Args:
            num_slots: At least 2.
            on_free: Receives the slots that become free, i32 [n]; the toy model poisons them.

        Raises:
            ValueError: `num_slots` is below 2.
        """
        if num_slots < 2:
            raise ValueError(f"`num_slots` must be >= 2 (slot 0 is padding). Given: {num_slots}.")
        self.num_slots = num_slots
        self._stack = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # the top is at self._count - 1
        self._count = num_slots - 1
        self._place = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # of each slot in the stack, when last put there
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return self._count

    def allocate(self, n: int) -> Int32s | None:
        """Returns `n` slots, i32 [n]; None, and takes nothing, where fewer are free."""
        if n > self._count:
            return None
        self._count -= n
        return self._stack[self._count : self._count + n][::-1].copy()

    def release(self, slots: Int32s) -> None:
        """Frees slots.

        Raises:
            RuntimeError: A slot is free already, twice in `slots`, or does not exist. This is a fault of the engine;
                two requests would write into each other.
        """
        n = len(slots)
        if n == 0:
            return
        places = np.arange(self._count, self._count + n, dtype=np.int32)
        known = self._count + n < self.num_slots and slots.min() >= 1 and slots.max() < self.num_slots
        if not known or self._any_free(slots) or not self._put(slots, places):
            raise RuntimeError("a slot was freed that had no owner")
        self._count += n
        if self._on_free is not None:
            self._on_free(slots)

    def _any_free(self, slots: Int32s) -> bool:
        places = self._place[slots]
        return bool(((places < self._count) & (self._stack[places] == slots)).any())

    def _put(self, slots: Int32s, places: Int32s) -> bool:
        """Puts slots at places of the stack; returns whether they are distinct: one that is not has one place noted."""
        self._stack[places] = slots
        self._place[slots] = places
        return bool((self._place[slots] == places).all())

    def check(self) -> None:
        """Raises RuntimeError unless the stack names every free slot exactly once."""
        free = self._stack[: self._count]
        if (free < 1).any() or (self._place[free] != np.arange(self._count)).any():
            raise RuntimeError("the free stack and the noted places disagree")


class TreeNode:
    """Holds tokens that follow its parent's, and the slots of their keys and values."""

    __slots__ = ("alive", "children", "key", "locks", "parent", "queued", "slots", "stamp", "tokens")

    def __init__(self, parent: "TreeNode | None", key: Hashable, tokens: Int32s, slots: Int32s) -> None:
        self.parent = parent
        self.key = key  # of the root
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, TreeNode] = {}  # by first token
        self.locks = 0
        self.stamp = 0  # time of last use
        self.queued = False  # an entry of the eviction heap names it
        self.alive = True


class PrefixCache:
    """Keeps computed tokens in a radix tree with one root for each `key`, a domain that shares nothing with others.

    `lock` protects a node, and thereby all its ancestors, from eviction. A split leaves the old node object as the
    lower part, so that its holders still hold everything above it.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, TreeNode] = {}
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._stale = 0  # entries of the heap whose nodes were removed
        self._clock = 0
        self._ties = 0
        self.size = 0  # slots that it owns
        self.evicted = 0  # tokens, since start-up
        self.locks = 0  # held now

    def match(self, key: Hashable, ids: Int32s) -> tuple[TreeNode, Int32s]:
        """Finds the longest prefix of `ids` that it has under `key`.

        Returns:
            The node that ends with the last token that matches, the root if nothing matches; and the slots of the
            tokens that match, i32 [m].
        """
        root = self._roots.get(key)
        if root is None:
            return TreeNode(None, key, NO_SLOTS, NO_SLOTS), NO_SLOTS  # an empty root is not kept
        node, parts, _ = self._walk(root, ids)
        return node, np.concatenate(parts) if parts else NO_SLOTS

    def insert(
        self, key: Hashable, ids: Int32s, slots: Int32s, node: TreeNode | None = None, known: int = 0
    ) -> tuple[TreeNode, Int32s, int]:
        """Keeps `ids`, whose keys and values are in `slots`.

        The cache takes over slots[present:]. It had the first `present` tokens already, in slots of its own; the caller
        keeps its copies of these.

        Args:
            key: The domain.
            ids: i32 [m].
            slots: i32 [m].
            node: A locked one that ends with the first `known` tokens, whose slots are the cache's.
            known: 0: it has to find them.

        Returns:
            The node and the slots of `ids`, as `match` does, and `present`.
        """
        if not len(ids):
            return *self.match(key, ids), 0
        start = node if node is not None and known else self._root(key)
        node, parts, depth = self._walk(start, ids, known)
        if depth < len(ids):
            leaf = TreeNode(node, key, ids[depth:].copy(), slots[depth:].copy())
            node.children[int(ids[depth])] = leaf
            parts.append(leaf.slots)
            self.size += len(leaf.slots)
            node = leaf
            self._touch(node)
            self._offer(node)
        return node, np.concatenate((slots[:known], *parts)), depth

    def lock(self, node: TreeNode) -> None:
        """Protects a node and its ancestors from eviction."""
        node.locks += 1
        self.locks += 1

    def unlock(self, node: TreeNode) -> None:
        if node.locks < 1:
            raise RuntimeError("a node was unlocked that had no lock")
        node.locks -= 1
        self.locks -= 1
        self._offer(node)
        self._drop_empty_root(node)

    def evict(self, n: int) -> Int32s:
        """Removes the least recently used unlocked leaves; returns their slots, `n` or as many as there are."""
        parts: list[Int32s] = []
        wanted = n
        while wanted > 0 and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.alive:
                self._stale -= 1
                continue
            if node.locks or node.children:
                continue  # offered again when that changes
            if stamp != node.stamp:
                self._offer(node)
                continue
            parts.append(self._cut(node, wanted))
            wanted -= len(parts[-1])
        return np.concatenate(parts) if parts else NO_SLOTS

    def drop(self, key: Hashable) -> Int32s:
        """Removes all that is unlocked under `key`, a domain that has ended; returns its slots.

        Entries of the eviction heap are swept out once most are of removed nodes.
        """
        root = self._roots.get(key)
        if root is None:
            return NO_SLOTS
        parts = []
        for node in self._below(root)[::-1]:  # children before parents
            if node.locks == 0 and not node.children:
                self._stale += node.queued
                parts.append(self._cut(node, len(node.slots)))
        if 2 * self._stale > len(self._heap) + MAX_STALE:
            self._heap, self._stale = [entry for entry in self._heap if entry[2].alive], 0
            heapq.heapify(self._heap)
        return np.concatenate(parts) if parts else NO_SLOTS

    def owned(self) -> Int32s:
        """Returns all slots that it owns, i32 [size]."""
        parts = [node.slots for root in self._roots.values() for node in self._below(root)]
        return np.concatenate(parts) if parts else NO_SLOTS

    def check(self) -> None:
        """Raises RuntimeError where an invariant of the tree is broken."""
        slots = self.owned()
        if len(slots) != self.size or len(np.unique(slots)) != self.size:
            raise RuntimeError("the tree's size and its slots disagree, or it has a slot twice")
        for root in self._roots.values():
            for node in self._below(root):
                first = int(node.tokens[0]) if len(node.tokens) == len(node.slots) > 0 else None
                if first is None or node.parent is None or node.parent.children.get(first) is not node:
                    raise RuntimeError("a node is empty or hangs in the wrong place")
                if not node.children and not node.locks and not node.queued:
                    raise RuntimeError("a leaf can never be evicted")

    def _root(self, key: Hashable) -> TreeNode:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = TreeNode(None, key, NO_SLOTS, NO_SLOTS)
        return root

    def _walk(self, node: TreeNode, ids: Int32s, depth: int = 0) -> tuple[TreeNode, list[Int32s], int]:
        """Goes down from a node that ends with the first `depth` of `ids`. Touches the nodes.

        Returns:
            The node that ends with the last token that it shares with `ids`, the slots on the way, and how many of
            `ids` that are.

        A node is split where the match ends within it: a lock of the rest would keep tokens without a user.
        """
        parts: list[Int32s] = []
        while depth < len(ids):
            child = node.children.get(int(ids[depth]))
            if child is None:
                break
            shared = _common(child.tokens, ids[depth:])
            node = child if shared == len(child.tokens) else self._split(node, child, shared)
            parts.append(node.slots)
            depth += shared
        self._touch(node)
        return node, parts, depth

    def _touch(self, node: TreeNode) -> None:
        self._clock += 1
        above: TreeNode | None = node
        while above is not None:
            above.stamp = self._clock
            above = above.parent

    def _split(self, parent: TreeNode, node: TreeNode, kept: int) -> TreeNode:
        """Returns a new child of `parent` with the first `kept` tokens of `node`, which keeps the rest under it."""
        upper = TreeNode(parent, node.key, node.tokens[:kept], node.slots[:kept])
        upper.stamp = node.stamp
        parent.children[int(node.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[kept:], node.slots[kept:], upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _cut(self, node: TreeNode, n: int) -> Int32s:
        """Removes the last `n` tokens of an unlocked leaf, or the whole leaf; returns their slots."""
        kept = max(0, len(node.slots) - n)
        freed = node.slots[kept:]
        self.size -= len(freed)
        self.evicted += len(freed)
        if kept:
            node.tokens, node.slots = node.tokens[:kept], node.slots[:kept]
            self._offer(node)
            return freed
        node.alive = False
        parent = node.parent
        if parent is not None:
            del parent.children[int(node.tokens[0])]
            self._offer(parent)
            self._drop_empty_root(parent)
        return freed

    def _offer(self, node: TreeNode) -> None:
        """Puts an unlocked leaf on the eviction heap, once."""
        if node.parent is None or node.queued or node.locks or node.children or not node.alive:
            return
        self._ties += 1
        node.queued = True
        heapq.heappush(self._heap, (node.stamp, self._ties, node))

    def _drop_empty_root(self, node: TreeNode) -> None:
        if node.parent is None and not node.children and not node.locks and self._roots.get(node.key) is node:
            del self._roots[node.key]

    def _below(self, root: TreeNode) -> list[TreeNode]:
        """Returns every node under `root`, parents before children."""
        nodes = list(root.children.values())
        for node in nodes:  # the list grows meanwhile
            nodes.extend(node.children.values())
        return nodes


class KVCacheManager:
    """Allocates and frees slots. `allocate` evicts prefixes that no request holds; `free_later` delays a release until
    no step in flight names its slots."""

    def __init__(self, num_slots: int, on_free: Callable[[Int32s], None] | None = None) -> None:
        self.allocator = SlotAllocator(num_slots, on_free)
        self.prefix_cache = PrefixCache()
        self.on_pressure: Callable[[], None] = lambda: None  # idle holders release what can be computed again
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._launched = 0
        self._finished = 0

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and has not finished."""
        return self._launched > self._finished

    @property
    def settled(self) -> bool:
        """Whether no step is in flight and no release waits."""
        return not self._waiting and not self.in_flight

    @property
    def used(self) -> int:
        """Slots that are neither free nor the prefix cache's."""
        return self.allocator.num_slots - 1 - self.allocator.num_free - self.prefix_cache.size

    def allocate(self, n: int) -> Int32s | None:
        """Returns `n` slots, i32 [n]; None if there are not as many without those of running rows."""
        if n > self.allocator.num_free:
            self._evict(n - self.allocator.num_free)
        if n > self.allocator.num_free:
            self.on_pressure()
            self._evict(n - self.allocator.num_free)
        return self.allocator.allocate(n)

    def free(self, slots: Int32s) -> None:
        self.allocator.release(slots)

    def free_later(self, release: Callable[[], None]) -> None:
        """Runs `release` now if no step is in flight, else when the newest step has finished."""
        if self.in_flight:
            self._waiting.append((self._launched, release))
        else:
            release()

    def launch(self) -> None:
        """Counts a step as launched."""
        self._launched += 1

    def finish(self) -> None:
        """Counts the oldest step in flight as finished, and runs the releases that waited for it."""
        self._finished += 1
        while self._waiting and self._waiting[0][0] <= self._finished:
            self._waiting.popleft()[1]()

    def check(self, owned: int) -> None:
        """Checks the slots' accounts.

        Raises:
            RuntimeError: A slot is not exactly one of free, the prefix cache's, or one of `owned` slots of requests.
        """
        self.allocator.check()
        self.prefix_cache.check()
        if self.used != owned:
            raise RuntimeError(f"{self.used} slots are in use and {owned} are owned")

    def _evict(self, n: int) -> None:
        """Frees at least `n` slots of the prefix cache, if there are as many without a lock."""
        if n > 0:
            self.allocator.release(self.prefix_cache.evict(max(n, self.allocator.num_slots // EVICTED_PART)))


def _common(a: Int32s, b: Int32s) -> int:
    """Returns the length of the common prefix."""
    n = min(len(a), len(b))
    first = (a[:n] != b[:n]).tobytes().find(1)
    return n if first < 0 else first
