"""Extents of one shared array, given out and taken back: where the overlays of all slots live."""

from bisect import insort
from typing import NamedTuple


class Extent(NamedTuple):
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class ExtentAllocator:
    """First fit over a sorted list of free extents; neighbours are joined when they come back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._holes: list[Extent] = [Extent(0, size)] if size else []

    def take(self, length: int) -> Extent | None:
        """An extent of `length`, or None (and nothing taken) where no hole is that large."""
        if length == 0:
            return Extent(0, 0)
        for index, hole in enumerate(self._holes):
            if hole.length >= length:
                rest = Extent(hole.start + length, hole.length - length)
                self._holes[index : index + 1] = [rest] if rest.length else []
                self.free -= length
                return Extent(hole.start, length)
        return None

    def give(self, extent: Extent) -> None:
        """Takes an extent back. RuntimeError where part of it was free already: a fault of ours."""
        if extent.length == 0:
            return
        if any(extent.start < hole.end and hole.start < extent.end for hole in self._holes):
            raise RuntimeError("an extent was freed that nobody owned")
        insort(self._holes, extent)
        self.free += extent.length
        joined: list[Extent] = []
        for hole in self._holes:
            if joined and joined[-1].end == hole.start:
                joined[-1] = Extent(joined[-1].start, joined[-1].length + hole.length)
            else:
                joined.append(hole)
        self._holes = joined
