"""Retries: whether and when a task is sent again, and what a second death means.

Budget: how many retries an ingress may send, so that trouble is not multiplied.
"""

import asyncio
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from deployments.config.app_args import RetryArgs
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import AnyTask, GenerateTask, LikelihoodTask, ScoreTask
from deployments.quarantine import Quarantine, fingerprint, quarantined
from deployments.routing.errors import Again, deadline_passed, spent

LATEST = 63  # service times that the median is of


class Budget:
    """Retries over a sliding window, as a share of the requests in it."""

    def __init__(self, retry: RetryArgs, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry = retry
        self._clock = clock
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        self._requests.append(self._clock())
        self._forget()

    def take(self) -> bool:
        """Whether one more retry may be sent; it is counted if so."""
        self._forget()
        allowed = self._retry.budget_min_retries + self._retry.budget_fraction * len(self._requests)
        if len(self._retries) + 1 > allowed:
            return False
        self._retries.append(self._clock())
        return True

    def _forget(self) -> None:
        since = self._clock() - self._retry.budget_window_s
        for times in (self._requests, self._retries):
            while times and times[0] <= since:
                times.popleft()


class ServiceTimes:
    """The median of the latest service times, in seconds. 0 until there is one."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._median: float | None = 0.0

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self._median = None

    @property
    def median(self) -> float:
        if self._median is None:
            self._median = statistics.median(self._latest)
        return self._median


log = logging.getLogger("ray.serve")
Task = TypeVar("Task", ScoreTask, LikelihoodTask, GenerateTask)
SOLO_TOKENS = 8  # a stream may have lost so many tokens on their way: until then it is where its replica died
PLACE_WAIT_S = (0.01, 0.25)  # of accepted work that a replica did not take: the first wait and the longest
LOSSES = ("died", "unavailable", "handoff")


class Retries:
    """What all tasks of one process share: the budget, the service times by kind of task, the quarantine."""

    def __init__(self, retry: RetryArgs, quarantine: Quarantine, metrics: IngressMetrics) -> None:
        self.retry = retry
        self.quarantine = quarantine
        self.metrics = metrics
        self.budget = Budget(retry)
        self.service: dict[type, ServiceTimes] = {}

    def course(self, task: Task) -> "Course[Task]":
        """Raises ApiError for a task that is in quarantine."""
        self.quarantine.check(task)
        self.budget.request()
        return Course(shared=self, task=task)

    def convict(self, task: AnyTask) -> None:
        self.quarantine.add(((fingerprint(task), self.retry.quarantine_s),))


@dataclass(slots=True, kw_only=True)
class Course(Generic[Task]):
    """All attempts at one task."""

    shared: Retries
    task: Task  # as the client sent it
    started: float = field(default_factory=time.monotonic)
    tried: set[str] = field(default_factory=set)
    attempts: int = 1
    lost: bool = False
    accepted: bool = False  # a replica had taken it: the next one takes it beyond its queue's bound
    isolated: bool = False
    waits: int = 0

    @property
    def end(self) -> float:
        return self.started + self.task.remaining_s

    @property
    def again(self) -> bool:
        """Whether this is no first attempt: work that was accepted waits for a replica if there is none."""
        return self.attempts > 1 or self.lost

    @property
    def isolated_tokens(self) -> int:
        """How many a suspect stream must bring until it is past the point where it was lost."""
        every = self.task.every if isinstance(self.task, GenerateTask) else 1
        return SOLO_TOKENS if every == 1 else SOLO_TOKENS + every

    def marked(self, task: Task) -> Task:
        """The task as it is to be run: alone where it is a suspect."""
        if isinstance(task, GenerateTask) and self.isolated:
            task = replace(task, isolated_tokens=self.isolated_tokens)
        return replace(task, isolated=self.isolated or task.isolated, accepted=self.accepted) if self.again else task

    async def next(self, failure: Again, *, resumed: bool = False) -> None:
        """Waits a little before the next attempt; raises ApiError where there is none."""
        shared = self.shared
        if failure.cause == "died" and self.isolated:
            log.warning("A request ended a second replica: it is refused for %.0f s.", shared.retry.quarantine_s)
            shared.convict(self.task)
            raise quarantined() from None
        self.isolated = self.isolated or failure.isolated
        self.accepted = self.accepted or not failure.refused
        if self.accepted and failure.refused:
            await self._wait_for_place()
            return
        self._count(failure)
        # A busy replica says nothing of the next one, and a refusal must not take long.
        wait = 0.0 if failure.cause == "busy" else random.uniform(0, shared.retry.max_backoff_s)
        least = 0.0 if resumed else self._service_s()
        if time.monotonic() + wait + least >= self.end:
            raise failure.error from None
        if resumed:
            shared.metrics.resumed(failure.cause)
        else:
            shared.metrics.retried(failure.cause)
        if failure.cause != "busy":  # of which there are as many as refusals
            log.info("Another attempt: %s", failure.cause)
        await asyncio.sleep(wait)

    async def _wait_for_place(self) -> None:
        """Of what was accepted: for its turn to be run alone, for room in Ray's queue, or for a replica in place of
        those that take nothing any more. It is no failure, costs neither attempts nor budget, and ends with the
        deadline."""
        least, most = PLACE_WAIT_S
        self.waits += 1
        wait = random.uniform(0.5, 1.0) * min(most, least * 2.0 ** min(self.waits, 16))
        if time.monotonic() + wait >= self.end:
            raise deadline_passed() from None
        await asyncio.sleep(wait)

    def _count(self, failure: Again) -> None:
        """Raises where attempts or budget are spent."""
        first = failure.cause in LOSSES and not self.lost
        self.lost = self.lost or failure.cause in LOSSES
        if failure.cause == "handoff":
            return
        self.attempts += 1
        if self.attempts > self.shared.retry.max_attempts:
            raise failure.error from None
        if not first and not self.shared.budget.take():
            self.shared.metrics.retry_budget_spent()
            raise spent(failure) from None

    def _service_s(self) -> float:
        found = self.shared.service.get(type(self.task))
        return found.median if found is not None else 0.0

    def served(self) -> None:
        """Notes how long a task took that was answered at its first attempt."""
        if not self.again:
            self.shared.service.setdefault(type(self.task), ServiceTimes()).add(time.monotonic() - self.started)
