"""Placement: which replicas a task should go to, best first. Affinity while load is balanced, else spill."""

import random
from collections.abc import Callable, Collection
from functools import lru_cache

import numpy as np

from deployments.config import RouterArgs
from deployments.fleet.loads import Loads
from deployments.fleet.ring import Ring, point
from deployments.messages import (
    AnyTask,
    GenerateTask,
)

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
        bound = BALANCE * sum(loads.values()) / len(loads) + self._router.slack_tokens
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
