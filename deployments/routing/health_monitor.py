"""Monitors which replicas pass their canaries, as one ingress sees it."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

from deployments.broadcast import Broadcast
from deployments.config.sections import HealthArgs
from deployments.health_probe import CanaryReply
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.periodic import PeriodicTask
from deployments.start_failure import StartFailure

log = logging.getLogger("ray.serve")
EAGER_S = 0.2  # between canaries until the first has passed
GRACE_S = 2.0  # for an answer beyond the canary's own limit
PERIODS = 2  # a pass counts for so many
Status = Literal["ready", "starting", "failed", "unready", "draining"]


async def no_failure() -> StartFailure | None:
    """Knows of no failed start."""
    return None


class HealthMonitor(PeriodicTask):
    """Sends canaries to all replicas once `start`ed.

    Readers judge by the clock, so that the status turns to unready by itself when no answer comes.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        health: HealthArgs,
        metrics: IngressMetrics,
        clock: Callable[[], float] = time.monotonic,
        start_failure: Callable[[], Awaitable[StartFailure | None]] = no_failure,
    ) -> None:
        super().__init__()
        self._broadcast = broadcast
        self._health = health
        self._metrics = metrics
        self._clock = clock
        self._start_failure = start_failure
        self._asked = clock()  # when Serve was last asked for a failed start
        self._failure: StartFailure | None = None
        self._passed: dict[str, float] = {}  # replica: when it last passed
        self._since: dict[str, float] = {}  # replica: since when we know that it runs
        self._rounds: set[asyncio.Task[None]] = set()
        self._judged: Collection[str] = ()
        self._suspects: Collection[str] = ()  # among these
        self._judge_at = -math.inf  # when another could be suspected
        self.replicas = 0  # as the last broadcast saw them
        self.passed_once = asyncio.Event()  # set by the first pass of any replica
        self.draining = False
        self.leaving = False  # stopping, and still answering: see deployments.routing.drain

    async def first_pass(self, limit_s: float) -> None:
        """Waits until a canary has passed, at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.passed_once.wait(), limit_s)

    async def stop(self) -> None:
        self.draining = True
        await super().stop()
        for task in self._rounds:
            task.cancel()
        await asyncio.gather(*self._rounds, return_exceptions=True)

    async def _run(self) -> None:
        """Starts a round each period and when woken, even while an earlier one still waits for a replica that hangs."""
        while True:
            began = self._clock()
            task = asyncio.create_task(self._round())
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)
            if not self.passed_once.is_set():
                await asyncio.wait({task}, timeout=self._health.period_s)
            rest = self._health.period_s - (self._clock() - began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, rest) if self.passed_once.is_set() else EAGER_S):
                    await self._woken.wait()
            self._woken.clear()

    async def _round(self) -> None:
        try:
            await self.look()
            await self._look_for_failure()
        except Exception:  # the loop must outlive a failed round; the passes then grow old by themselves
            log.exception("A round of canaries failed.")

    async def look(self) -> None:
        """Runs one round of canaries. Each answer counts from when it comes."""
        answers = await self._broadcast("canary", self._health.timeout_s + GRACE_S, on_answer=self._take)
        self.replicas = len(answers)
        since = self._oldest()
        self._passed = {name: when for name, when in self._passed.items() if when >= since}

    async def _look_for_failure(self) -> None:
        """Asks once a period, until a canary has passed, whether Serve has given up on the replicas."""
        if self.passed_once.is_set() or self._clock() - self._asked < self._health.period_s:
            return
        self._asked = self._clock()
        before, self._failure = self._failure, await self._start_failure()
        if self._failure is not None and self._failure != before:
            log.error("No replica can start: %s: %s", *self._failure)

    def _take(self, answer: object) -> None:
        if not isinstance(answer, CanaryReply):
            self._metrics.canary("timeout" if isinstance(answer, TimeoutError) else "error", 0.0)
            return
        self._metrics.canary(answer.failure, answer.seconds)
        if answer.failure is None:
            self._passed[answer.replica] = self._clock()
            if answer.replica in self._suspects:
                self._judge_at = -math.inf
            self.replicas = max(self.replicas, 1)
            self.passed_once.set()
        else:
            log.warning("The canary of replica %s failed: %s", answer.replica, answer.failure)

    def _oldest(self) -> float:
        """Returns the earliest time of a pass that still counts."""
        return self._clock() - PERIODS * self._health.period_s

    def suspects(self, running: Collection[str]) -> Collection[str]:
        """Returns the running replicas that have not passed within two periods, though they are known as long.

        Each call of a client asks, so the answer is kept until it may change. New replicas are sent a canary then, and
        not with the next period.
        """
        now = self._clock()
        if now < self._judge_at and running == self._judged:
            return self._suspects
        since = self._oldest()
        if not self._since.keys() >= set(running):
            self.wake()
        self._since = {name: self._since.get(name, now) for name in running}
        seen = {name: max(known, self._passed.get(name, known)) for name, known in self._since.items()}
        self._judged, self._suspects = tuple(running), {name for name, when in seen.items() if when < since}
        first = min((when for when in seen.values() if when >= since), default=math.inf)
        self._judge_at = first + PERIODS * self._health.period_s
        return self._suspects

    @property
    def ready(self) -> int:
        """The number of replicas that passed within two periods."""
        since = self._oldest()
        return sum(when >= since for when in self._passed.values())

    @property
    def status(self) -> Status:
        if self.draining or self.leaving:
            return "draining"
        if self.ready >= self._health.min_replicas:
            return "ready"
        if self.passed_once.is_set():
            return "unready"
        return "starting" if self._failure is None else "failed"

    def readiness(self) -> dict[str, object]:
        """Returns the body of /readyz. `canary_age_s` is the age of the newest pass, `reason` the class of the error
        that a start has failed with."""
        newest = max(self._passed.values(), default=None)
        status = self.status
        return {
            "status": status,
            **({"reason": self._failure.reason} if status == "failed" and self._failure else {}),
            "replicas_ready": self.ready,
            "replicas_total": self.replicas,
            "canary_age_s": None if newest is None else round(self._clock() - newest, 3),
        }
