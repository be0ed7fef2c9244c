"""Calls: one call of a replica, placed, on the books, awaited, and its end in our own words."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import AnyTask, GenerateTask, LikelihoodTask, Load, Route, ScoreTask
from deployments.routing.admission import Admission, overloaded
from deployments.routing.errors import RETRY_AFTER_S, Again, check, cut_short, deadline_passed, no_replica, ray_errors
from deployments.routing.health_monitor import Board
from deployments.routing.load_tracker import Loads
from deployments.routing.replica_selection import Placement

Task = TypeVar("Task", ScoreTask, LikelihoodTask, GenerateTask)
GRACE_S = 1.0  # the engine ends late work itself; this is for a replica that no longer does


class Calls:
    """What all calls of one process share."""

    def __init__(
        self, board: Board, loads: Loads, placement: Placement, admission: Admission, metrics: IngressMetrics
    ) -> None:
        self.loads = loads
        self._board = board
        self._placement = placement
        self._admission = admission
        self._metrics = metrics

    def rank(self, task: AnyTask, exclude: Collection[str] = ()) -> tuple[str, ...]:
        with self._metrics.timed("route"):
            place = self._placement
            return place.rank(place.key_of(task), exclude, place.spared(task))

    @contextlib.contextmanager
    def sent(self, task: Task, ranked: Sequence[str], tried: set[str]) -> Iterator[Task]:
        """The task with its route, on the books of the first replica of `ranked`, or of the one that the router
        chooses, until the block ends; then the replica that it did go to is one of `tried`."""
        ticket = self.loads.send(ranked[0] if ranked else "", self._admission.cost(task))
        try:
            yield replace(task, route=Route(tuple(ranked), ticket))
        finally:
            tried.add(self.loads.close(ticket))

    def heard(self, sent: AnyTask, reply: object) -> None:
        load = getattr(reply, "load", None)
        if sent.route is not None and isinstance(load, Load):
            self.loads.report(sent.route.ticket, load)

    async def once(self, method: Any, task: AnyTask) -> object:
        """The reply of a call without a stream. Raises Again or ApiError."""
        return await self.answer(method.remote(task), task)

    async def answer(self, response: Any, task: AnyTask) -> object:
        """The reply to a call that was made. Raises Again or ApiError."""
        try:
            with self.errors(task):
                async with asyncio.timeout(task.remaining_s + GRACE_S):
                    reply: object = await response
        except TimeoutError:
            response.cancel()
            raise deadline_passed() from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        self.heard(task, reply)
        check(reply, task.isolated)
        return reply

    def check_others(self, again: Again, task: AnyTask, tried: set[str]) -> None:
        """Refuses what every replica is too busy for, and says when one will not be."""
        if again.cause == "busy" and self.loads.replicas and tried.issuperset(self.loads.replicas):
            raise overloaded(self._admission.wait_s(self._admission.cost(task), task.remaining_s)) from None

    @contextlib.contextmanager
    def errors(self, sent: AnyTask) -> Iterator[None]:
        """Whatever Ray raises becomes Again or ApiError. A replica that was told to stop, and then ended, was ended by
        nobody's request."""
        try:
            with ray_errors():
                yield
        except Again as again:
            if again.isolated and sent.route is not None and self.loads.has_left(self.loads.where(sent.route.ticket)):
                raise Again("unavailable", again.error) from None
            raise
        except asyncio.CancelledError:
            running = asyncio.current_task()
            if running is not None and running.cancelling():
                raise
            raise cut_short() from None  # it was the call that was cancelled, by the replica

    def check_ready(self) -> None:
        """Refuses at once what would wait for ever: a call waits in the caller while there is no replica."""
        if self._board.draining:
            raise ApiError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        if not self._board.seen_ready:
            raise ApiError("not_ready", "The server is starting.", retry_after_s=RETRY_AFTER_S)
        if not self._board.replicas:
            raise no_replica()


def due(task: Task, end: float) -> Task:
    """The task with the seconds that are left of it."""
    left = end - time.monotonic()
    if left <= 0:
        raise deadline_passed()
    return replace(task, remaining_s=left)
