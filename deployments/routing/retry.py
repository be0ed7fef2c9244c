"""Decides whether and when a call is sent again, and which request is quarantined after a second death."""

import asyncio
import logging
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deployments.config.sections import RetryArgs
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import AnyCall, Call, common, with_fields
from deployments.quarantine import Quarantine, fingerprint, quarantined
from deployments.routing.admission import deadline_passed
from deployments.routing.replica_call import RetryableError, spent
from engine.requests import EngineRequest, GenerateRequest

log = logging.getLogger("ray.serve")
MAX_SERVICE_TIMES = 63  # the median is that of so many
ISOLATED_TOKENS = 8  # a stream may have lost so many tokens on their way: until then it is where its replica died
ADMITTED_WAIT_S = (0.01, 0.25)  # before admitted work that a replica did not take is sent again: first and longest
LOSSES = ("died", "unavailable", "handoff")


class RetryBudget:
    """Bounds the retries of an ingress to a share of its requests over a sliding window: trouble must not multiply."""

    def __init__(self, retry: RetryArgs, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry = retry
        self._clock = clock
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        self._requests.append(self._clock())
        self._forget()

    def take(self) -> bool:
        """Returns whether one more retry may be sent, and counts it if so."""
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


class RetryPolicy:
    """Holds what all calls of one process share: the budget, service times by kind of call, and the quarantine."""

    def __init__(
        self,
        retry: RetryArgs,
        quarantine: Quarantine,
        metrics: IngressMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.retry = retry
        self.quarantine = quarantine
        self.metrics = metrics
        self.clock = clock
        self.budget = RetryBudget(retry, clock)
        self.service_s = defaultdict[type, deque[float]](lambda: deque(maxlen=MAX_SERVICE_TIMES))  # the latest ones

    def begin(self, call: AnyCall) -> "RetryState":
        """Returns the state of a new call. Raises ApiError for one that is quarantined."""
        self.quarantine.check(call)
        self.budget.request()
        first = common(call)
        interval = first.stream_interval if isinstance(first, GenerateRequest) else 1
        now = self.clock()
        return RetryState(
            policy=self,
            kind=type(first),
            started=now,
            end=now + first.timeout_s,
            isolated_tokens=ISOLATED_TOKENS if interval == 1 else ISOLATED_TOKENS + interval,
        )

    def quarantine_call(self, call: AnyCall) -> None:
        self.quarantine.add(((fingerprint(call), self.retry.quarantine_s),))


@dataclass(slots=True, kw_only=True)
class RetryState:
    """Follows all attempts at one call."""

    policy: RetryPolicy
    kind: type[EngineRequest]
    started: float
    end: float  # the deadline
    isolated_tokens: int  # that a suspect stream must bring until it is past the point where it was lost
    tried: set[str] = field(default_factory=set)
    attempts: int = 1
    lost: bool = False
    admitted: bool = False  # a replica had taken it: the next one takes it beyond its queue's bound
    isolated: bool = False
    waits: int = 0

    @property
    def again(self) -> bool:
        """Whether this is not the first attempt: admitted work waits for a replica if there is none."""
        return self.attempts > 1 or self.lost

    def next_call(self, call: Call) -> Call:
        """Returns the call with its remaining time, marked as it is to run. Raises ApiError past the deadline."""
        left = self.end - self.policy.clock()
        if left <= 0:
            raise deadline_passed()
        if not self.again:  # it leaves where this state began
            return call
        first = common(call)
        changes: dict[str, Any] = {
            "timeout_s": left,
            "isolated": self.isolated or first.isolated,
            "already_admitted": self.admitted,
        }
        if self.isolated and isinstance(first, GenerateRequest):
            changes["isolated_tokens"] = self.isolated_tokens
        return with_fields(call, **changes)

    async def wait(self, failure: RetryableError, call: AnyCall, *, resumed: bool = False) -> None:
        """Waits a little before the next attempt. Takes and raises what `next_wait_s` does."""
        await asyncio.sleep(self.next_wait_s(failure, call, resumed=resumed))

    def next_wait_s(self, failure: RetryableError, call: AnyCall, *, resumed: bool = False) -> float:
        """Counts a failed attempt; returns the seconds to wait before the next one.

        Args:
            failure: The end of the last attempt.
            call: The call, as it was when this state began.
            resumed: The next attempt continues a stream.

        Raises:
            ApiError: There is no next attempt.
        """
        policy = self.policy
        if failure.cause == "died" and self.isolated:
            log.warning("A request ended a second replica: it is refused for %.0f s.", policy.retry.quarantine_s)
            policy.quarantine_call(call)
            raise quarantined() from None
        self.isolated = self.isolated or failure.isolated
        self.admitted = self.admitted or not failure.refused
        if self.admitted and failure.refused:
            return self._wait_for_place_s()
        # A busy replica says nothing about the next one, and a refusal must not take long.
        wait = 0.0 if failure.cause == "busy" else random.uniform(0, policy.retry.max_backoff_s)
        service_s = 0.0 if resumed else self._service_s()
        if policy.clock() + wait + service_s >= self.end:
            raise failure.error from None
        self._count(failure)
        if resumed:
            policy.metrics.resumed(failure.cause)
        else:
            policy.metrics.retried(failure.cause)
        if failure.cause != "busy":  # these are as many as refusals
            log.info("Another attempt: %s", failure.cause)
        return wait

    def _wait_for_place_s(self) -> float:
        """Returns the wait of work that was admitted and found no place: for isolation, or at any replica.

        This is no failure. It costs neither attempts nor budget, and ends with the deadline.
        """
        first, longest = ADMITTED_WAIT_S
        self.waits += 1
        wait = random.uniform(0.5, 1.0) * min(longest, first * 2.0 ** min(self.waits, 16))
        if self.policy.clock() + wait >= self.end:
            raise deadline_passed() from None
        return wait

    def _count(self, failure: RetryableError) -> None:
        """Counts an attempt. Raises ApiError where attempts or budget are spent."""
        first = failure.cause in LOSSES and not self.lost
        self.lost = self.lost or failure.cause in LOSSES
        if failure.cause == "handoff":
            return
        self.attempts += 1
        if self.attempts > self.policy.retry.max_attempts:
            raise failure.error from None
        if not first and not self.policy.budget.take():
            self.policy.metrics.retry_budget_spent(failure.cause)
            raise spent(failure) from None

    def _service_s(self) -> float:
        """Returns the median of the latest times of such calls; 0 until there is one."""
        latest = self.policy.service_s[self.kind]
        return statistics.median(latest) if latest else 0.0

    def served(self) -> None:
        """Notes how long a call took that was answered at its first attempt."""
        if not self.again:
            self.policy.service_s[self.kind].append(self.policy.clock() - self.started)
