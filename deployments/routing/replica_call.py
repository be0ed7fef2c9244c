"""Makes one call of a replica: places it, counts it, awaits it, and turns every end into an error of ours."""

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import AnyCall, Load, Route, common
from deployments.routing.admission import Admission, overloaded
from deployments.routing.errors import (
    RETRY_AFTER_S,
    RetryableError,
    check,
    cut_short,
    deadline_passed,
    no_replica,
    ray_errors,
)
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.replica_selection import ReplicaSelector

GRACE_S = 1.0  # the engine ends late work itself; this is for a replica that no longer does


class ReplicaCaller:
    """Holds what all calls of one process share."""

    def __init__(
        self,
        health: HealthMonitor,
        loads: LoadTracker,
        selector: ReplicaSelector,
        admission: Admission,
        metrics: IngressMetrics,
    ) -> None:
        self.loads = loads
        self._health = health
        self._selector = selector
        self._admission = admission
        self._metrics = metrics

    def rank(self, call: AnyCall, exclude: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the replicas for the call, best first."""
        with self._metrics.timed("route"):
            selector = self._selector
            return selector.rank(selector.key_of(call), exclude, selector.cacheable(call))

    @contextlib.contextmanager
    def tracked(self, call: AnyCall, ranked: Sequence[str], tried: set[str]) -> Iterator[Route]:
        """Counts the call as load of the first replica of `ranked`, or of the one that the router chooses.

        Yields:
            The route of the call. When the block ends, the replica that the call did go to is added to `tried`.
        """
        ticket = self.loads.send(ranked[0] if ranked else "", self._admission.cost(call))
        try:
            yield Route(tuple(ranked), ticket)
        finally:
            tried.add(self.loads.close(ticket))

    def report_load(self, route: Route, reply: object) -> None:
        """Notes the load that the reply carries."""
        load = getattr(reply, "load", None)
        if isinstance(load, Load):
            self.loads.report(route.ticket, load)

    async def call(self, method: Any, call: AnyCall, route: Route, *args: object) -> object:
        """Calls a method that does not stream and returns its reply. Raises RetryableError or ApiError."""
        return await self.reply(method.remote(call, *args, route=route), call, route)

    async def reply(self, response: Any, call: AnyCall, route: Route) -> object:
        """Returns the reply to a call that was made. Raises RetryableError or ApiError."""
        first = common(call)
        try:
            with self.errors(route):
                async with asyncio.timeout(first.timeout_s + GRACE_S):
                    reply: object = await response
        except TimeoutError:
            response.cancel()
            raise deadline_passed() from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        self.report_load(route, reply)
        check(reply, first.isolated)
        return reply

    def check_others(self, error: RetryableError, call: AnyCall, tried: set[str]) -> None:
        """Raises ApiError `overloaded` once every replica was too busy, with the time until one will not be."""
        if error.cause == "busy" and self.loads.replicas and tried.issuperset(self.loads.replicas):
            raise overloaded(self._admission.wait_s(self._admission.cost(call), common(call).timeout_s)) from None

    @contextlib.contextmanager
    def errors(self, route: Route) -> Iterator[None]:
        """Turns what Ray raises into RetryableError or ApiError.

        A replica that was stopped on purpose and then ended casts no suspicion on its requests.
        """
        try:
            with ray_errors():
                yield
        except RetryableError as error:
            if error.isolated and self.loads.has_left(self.loads.where(route.ticket)):
                raise RetryableError("unavailable", error.error) from None
            raise
        except asyncio.CancelledError:
            running = asyncio.current_task()
            if running is not None and running.cancelling():
                raise
            raise cut_short() from None  # it was the call that was cancelled, by the replica

    def check_ready(self) -> None:
        """Raises ApiError where the call would wait in this process until a replica exists."""
        if self._health.draining:
            raise ApiError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        if not self._health.seen_ready:
            raise ApiError("not_ready", "The server is starting.", retry_after_s=RETRY_AFTER_S)
        if not self._health.replicas:
            raise no_replica()
