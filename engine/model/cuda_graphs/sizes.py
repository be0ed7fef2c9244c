"""Decides which sizes of steps are captured as CUDA graphs when a model starts, and which later.

Capturing every size takes seconds, for which a start would wait. A step needs a graph of at least its size, so a few
sizes serve all steps: the largest, whose memory the other graphs share, and the powers of two. The step thread captures
the rest when it has nothing else to do.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence


class GraphSizes:
    """Holds the sizes that are captured, and captures the others."""

    def __init__(self, sizes: Sequence[int], capture: Callable[[int], None]) -> None:
        """Captures the first sizes.

        Args:
            sizes: All sizes, ascending.
            capture: Captures one.
        """
        self._capture = capture
        self._captured = list[int]()
        descending = sizes[::-1]
        common = [size for size in descending if size == sizes[-1] or _is_power_of_two(size)]
        self._others = deque(size for size in descending if size not in common)
        for size in common:
            self._add(size)

    def __contains__(self, size: int) -> bool:
        """Returns whether a graph of exactly this size is captured."""
        place = bisect_left(self._captured, size)
        return self._captured[place : place + 1] == [size]

    def fitting(self, size: int) -> int | None:
        """Returns the smallest captured size that is at least `size`; None where none is."""
        place = bisect_left(self._captured, size)
        return self._captured[place] if place < len(self._captured) else None

    def capture_next(self) -> bool:
        """Captures the largest size that is left; returns False where none is. Raises what capturing raises."""
        if not self._others:
            return False
        self._add(self._others[0])
        self._others.popleft()
        return True

    def _add(self, size: int) -> None:
        self._capture(size)
        insort(self._captured, size)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0
