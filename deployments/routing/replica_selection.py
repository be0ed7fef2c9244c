"""Placement: which replicas a task should go to, best first. Affinity while load is balanced, else spill.

Ring: consistent hashing (Karger et al. 1997). Every process builds the same ring from the same names, and a replica
that joins or leaves moves only the keys that are its own.
"""

import bisect
import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache

import numpy as np

from deployments.config.app_args import RouterArgs
from deployments.protocol import AnyTask, GenerateTask
from deployments.routing.load_tracker import Loads

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


LEAST_KEY_TOKENS = 32  # a shorter beginning is no reason to prefer a replica
WORTH = 2  # so many times what its cache may spare, a replica's queue may be longer than that of the next on the ring
BALANCE = 1.25  # of the mean load: bounded-load consistent hashing (Mirrokni, Thorup and Zadimoghaddam 2018)


class Placement:
    """Reads the process's `Loads`; holds nothing but the ring."""

    def __init__(
        self,
        loads: Loads,
        router: RouterArgs,
        suspects: Callable[[Collection[str]], Collection[str]] = lambda running: (),
    ) -> None:
        """`suspects` names those of the running replicas that fail their canaries: they are asked only if there is
        nobody else."""
        self._loads = loads
        self._router = router
        self._suspects = suspects
        self._ring = lru_cache(maxsize=4)(Ring)

    def rank(self, key: int | None, exclude: Collection[str] = (), spared: int | None = None) -> tuple[str, ...]:
        """The replicas for a request of this key, best first; without those of `exclude`. Empty if none is known.
        `spared`: tokens that its own replica may have cached. They are worth a longer queue than the next replica's,
        but not any: a short query before long items is soon computed again."""
        everyone = self._loads.replicas
        names = [name for name in everyone if name not in exclude]
        suspects = self._suspects(everyone)
        names = [name for name in names if name not in suspects] or names
        if not names:
            return ()
        loads = {name: self._loads.load(name) for name in names}
        bound = BALANCE * sum(loads.values()) / len(loads) + self._router.max_imbalance_tokens
        order = self._anywhere(loads) if key is None else [n for n in self._ring(everyone).walk(key) if n in loads]
        if key is not None and spared is not None and len(order) > 1:
            first, second = order[:2]
            if loads[first] > loads[second] + WORTH * spared:
                order[:2] = second, first
        free = [name for name in order if loads[name] <= bound]
        return (*free, *sorted((name for name in order if loads[name] > bound), key=loads.__getitem__))

    @staticmethod
    def _anywhere(loads: dict[str, float]) -> list[str]:
        """Any order, but the less loaded of the first two in front: two random choices are enough for balance."""
        order = random.sample(list(loads), len(loads))
        order[:2] = sorted(order[:2], key=loads.__getitem__)
        return order

    @staticmethod
    def spared(task: AnyTask) -> int:
        """Tokens of the task that a cache may hold, at most."""
        return _first_end(task) if isinstance(task, GenerateTask) else len(task.prefix)

    def key_of(self, task: AnyTask) -> int | None:
        """Where the ring is entered: the same for tasks of one prefix-cache domain that begin alike. None if the
        beginning is too short to be worth a cache hit."""
        ids = task.prompts[: _first_end(task)] if isinstance(task, GenerateTask) else task.prefix
        ids = ids[: self._router.prefix_tokens]
        if len(ids) < LEAST_KEY_TOKENS:
            return None
        return point(task.salt.encode("utf-8", "surrogatepass") + b"\0" + np.ascontiguousarray(ids).tobytes())


def _first_end(task: GenerateTask) -> int:
    return int(task.starts[1]) if len(task.starts) > 1 else 0
