"""Board: which replicas this ingress has seen pass a canary, and since when."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

from deployments.canary import CanaryReply
from deployments.config import HealthArgs

log = logging.getLogger("ray.serve")
EAGER_S = 0.2  # between canaries until the first has passed
GRACE_S = 2.0  # for a broadcast beyond the canary's own limit
Status = Literal["ready", "starting", "unready", "draining"]


class CanaryMetrics(Protocol):
    def canary(self, failure: str | None, seconds: float) -> None: ...


class Broadcast(Protocol):
    """Calls a method on all replicas; an exception in the place of an answer that did not come."""

    async def __call__(self, method: str, timeout_s: float) -> Sequence[object]: ...


class Board:
    """Written by its own loop once `start`ed, read by everyone."""

    def __init__(
        self,
        broadcast: Broadcast,
        health: HealthArgs,
        metrics: CanaryMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broadcast = broadcast
        self._health = health
        self._metrics = metrics
        self._clock = clock
        self._passed: dict[str, float] = {}  # replica: when it last passed
        self._suspects: set[str] = set()  # passed once, and not lately
        self._task: asyncio.Task[None] | None = None
        self.replicas = 0  # as the last broadcast saw them
        self.seen_ready = False
        self.draining = False
        self.leaving = False  # told to stop, and still answering: see deployments.drain

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self.draining = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # the loop must outlive whatever one round meets; the board then grows old by itself
                log.exception("A round of canaries failed.")
            await asyncio.sleep(self._health.period_s if self.seen_ready else EAGER_S)

    async def look(self) -> None:
        """One round of canaries."""
        answers = await self._broadcast("canary", self._health.timeout_s + GRACE_S)
        now = self._clock()
        self.replicas = len(answers)
        for answer in answers:
            if not isinstance(answer, CanaryReply):
                self._metrics.canary("error", 0.0)
                continue
            self._metrics.canary(answer.failure, answer.seconds)
            if answer.failure is None:
                self._passed[answer.replica] = now
                self.seen_ready = True
            else:
                log.warning("The canary of replica %s failed: %s", answer.replica, answer.failure)
        late = {name for name, when in self._passed.items() if now - when > 2 * self._health.period_s}
        self._passed = {name: when for name, when in self._passed.items() if name not in late}
        self._suspects = (self._suspects | late) - self._passed.keys()

    def suspects(self, running: Collection[str]) -> Collection[str]:
        """Those of the running replicas that have passed before and not within two periods."""
        self._suspects.intersection_update(running)  # names never come back: forget the others
        return self._suspects

    @property
    def ready(self) -> int:
        """Replicas that passed within two periods."""
        since = self._clock() - 2 * self._health.period_s
        return sum(when >= since for when in self._passed.values())

    @property
    def status(self) -> Status:
        if self.draining or self.leaving:
            return "draining"
        if self.ready >= self._health.min_replicas:
            return "ready"
        return "unready" if self.seen_ready else "starting"

    def readiness(self) -> dict[str, object]:
        """The body of /readyz. `canary_age_s` is that of the newest pass."""
        newest = max(self._passed.values(), default=None)
        return {
            "status": self.status,
            "replicas_ready": self.ready,
            "replicas_total": self.replicas,
            "canary_age_s": None if newest is None else round(self._clock() - newest, 3),
        }
