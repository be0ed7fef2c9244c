"""Keeps sizes in ascending order, for sums of capped sizes and for the largest ones."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)  # keys have an order
BLOCK = 256  # entries of a block at first; one of twice as many is cut


class SizeIndex(Generic[K]):
    """Keeps a positive size for each of n keys, in sorted blocks with their sums.

    A change or a sum reads one block and the sums of all: 10,000 keys cost a few times as much as one. Not thread-safe.
    """

    def __init__(self, sizes: Mapping[K, float]) -> None:
        """Copies the sizes, all above 0."""
        self._sizes = dict(sizes)
        entries = sorted((size, key) for key, size in sizes.items())
        self._blocks = [entries[at : at + BLOCK] for at in range(0, len(entries), BLOCK)]
        self._sums = [sum(size for size, _ in block) for block in self._blocks]

    def __len__(self) -> int:
        return len(self._sizes)

    def get(self, key: K) -> float:
        """Returns the size of a key, 0 where it has none."""
        return self._sizes.get(key, 0)

    def set(self, key: K, size: float) -> None:
        """Gives a key its size; one that is not above 0 removes it."""
        before = self._sizes.get(key, 0)
        if before:
            self._remove((before, key))
        if size > 0:
            self._sizes[key] = size
            self._insert((size, key))
        elif before:
            del self._sizes[key]

    def capped_sum(self, cap: float) -> float:
        """Returns the sum of `min(size, cap)` over all keys."""
        whole = bisect_right(self._blocks, cap, key=_largest_size)  # blocks without a size above the cap
        total, below = sum(self._sums[:whole]), sum(map(len, self._blocks[:whole]))
        if whole < len(self._blocks):
            block = self._blocks[whole]
            count = bisect_right(block, cap, key=_size)
            total, below = total + sum(size for size, _ in block[:count]), below + count
        return total + cap * (len(self._sizes) - below)

    def descending(self) -> Iterator[tuple[float, K]]:
        """Yields sizes with their keys, the largest first."""
        for block in reversed(self._blocks):
            yield from reversed(block)

    def _insert(self, entry: tuple[float, K]) -> None:
        at = min(bisect_left(self._blocks, entry, key=_last), len(self._blocks) - 1)
        if at < 0:
            self._blocks, self._sums = [[entry]], [entry[0]]
            return
        block = self._blocks[at]
        insort(block, entry)
        self._sums[at] += entry[0]
        if len(block) >= 2 * BLOCK:
            parts = [block[:BLOCK], block[BLOCK:]]
            self._blocks[at : at + 1] = parts
            self._sums[at : at + 1] = [sum(size for size, _ in part) for part in parts]

    def _remove(self, entry: tuple[float, K]) -> None:
        at = bisect_left(self._blocks, entry, key=_last)
        block = self._blocks[at]
        del block[bisect_left(block, entry)]
        self._sums[at] -= entry[0]
        if not block:
            del self._blocks[at], self._sums[at]


def _last(block: list[tuple[float, K]]) -> tuple[float, K]:
    return block[-1]


def _size(entry: tuple[float, K]) -> float:
    return entry[0]


def _largest_size(block: list[tuple[float, K]]) -> float:
    return block[-1][0]
