"""Ring: consistent hashing (Karger et al. 1997). Every process builds the same ring from the same names, and a replica
that joins or leaves moves only the keys that are its own."""

import bisect
import hashlib
from collections.abc import Iterable, Iterator

VIRTUAL_NODES = 128  # of each replica: the busiest of 8 then owns about a sixth more than the mean


class Ring:
    def __init__(self, names: Iterable[str]) -> None:
        nodes = sorted((point(f"{name}#{copy}".encode()), name) for name in set(names) for copy in range(VIRTUAL_NODES))
        self._points = [where for where, _ in nodes]
        self._names = [name for _, name in nodes]
        self._count = len(set(self._names))

    def walk(self, key: int) -> Iterator[str]:
        """Every replica once, in the order in which the ring meets them from the key on."""
        seen: set[str] = set()
        start = bisect.bisect_left(self._points, key)
        for step in range(len(self._names)):
            if len(seen) == self._count:
                return
            name = self._names[(start + step) % len(self._names)]
            if name not in seen:
                seen.add(name)
                yield name


def point(data: bytes) -> int:
    """A place on the ring, in [0, 2^64): the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
