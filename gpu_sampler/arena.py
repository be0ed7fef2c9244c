"""Budgets shared by all slots: contiguous extents of the overlay, and rows of allow masks."""

import numpy as np
import numpy.typing as npt


class OverlayFull(Exception):
    """The arena has no room now; there will be when running requests end."""


class Extents:
    """First-fit extents of [0, size). Neighbouring free extents are joined, so an empty arena is one extent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, length), by start

    @property
    def free(self) -> int:
        return sum(length for _, length in self._free)

    def take(self, length: int) -> int:
        """Start of a new extent. Raises OverlayFull where none is long enough."""
        if length == 0:
            return 0
        for i, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[i : i + 1] = [(start + length, room - length)] if room > length else []
                return start
        raise OverlayFull(f"No extent of {length} entries among {self.free} free of {self.size}.")

    def give(self, start: int, length: int) -> None:
        """Returns an extent that `take` gave."""
        if length == 0:
            return
        joined: list[tuple[int, int]] = []
        for left, room in sorted([*self._free, (start, length)]):
            if joined and sum(joined[-1]) == left:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((left, room))
        self._free = joined

    def holes(self) -> list[tuple[int, int]]:
        """The free extents, by start."""
        return list(self._free)


class MaskArena:
    """Allow masks of one bit a token, in rows that are made when first needed and used again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = np.zeros((0, -(-vocab_size // 8)), np.uint8)
        self._free: list[int] = []

    @property
    def used(self) -> int:
        return len(self._rows) - len(self._free)

    def take(self, allowed_ids: tuple[int, ...]) -> int:
        """A row whose bits are set at these ids, all in [0, V)."""
        if not self._free:
            more = max(4, len(self._rows))
            self._free = list(range(len(self._rows) + more - 1, len(self._rows) - 1, -1))
            self._rows = np.concatenate([self._rows, np.zeros((more, self._rows.shape[1]), np.uint8)])
        row = self._free.pop()
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[list(allowed_ids)] = True
        self._rows[row] = np.packbits(bits)
        return row

    def give(self, row: int) -> None:
        self._free.append(row)

    def allowed(self, row: int) -> npt.NDArray[np.bool_]:
        """bool [V]"""
        return np.unpackbits(self._rows[row], count=self._vocab_size).view(np.bool_)
