"""Makes one call of a replica: places it, counts it, awaits it, and turns every end into an error of ours."""

import asyncio
import logging
from collections.abc import Collection, Sequence

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from deployments.errors import ApiError, from_failure
from deployments.link.client import LinkLost
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import (
    AnyCall,
    Failure,
    GenerateReply,
    PendingReply,
    ReplicaTransport,
    Route,
    common,
)
from deployments.routing.admission import Admission, deadline_passed, overloaded
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.replica_selection import ReplicaSelector
from deployments.time_limit import TimeLimit
from engine.requests import ErrorCode, Load, TenantTokens

log = logging.getLogger("ray.serve")
RETRY_AFTER_S = 1.0
GRACE_S = 1.0  # the engine ends late work itself; this is for a replica that no longer does


class RetryableError(Exception):
    """Reports that an attempt failed in a way in which another may not. `error` is the answer if there is none."""

    def __init__(self, cause: str, error: ApiError, *, isolated: bool = False, refused: bool = False) -> None:
        """`isolated`: the next attempt runs alone. `refused`: the replica did not take it.

        A replica that did not refuse may have taken it, and counts as having done so: ingress admission counted what
        an ingress has on its way.
        """
        super().__init__(cause)
        self.cause = cause
        self.error = error
        self.isolated = isolated
        self.refused = refused


def check(reply: object, isolated: bool) -> None:
    """Raises for a Failure, alone or as the first among a reply's chunks."""
    if isinstance(reply, GenerateReply):
        for item in reply.chunks:
            if isinstance(item.chunk, Failure):
                reply = item.chunk
                break
    if not isinstance(reply, Failure):
        return
    error = from_failure(reply)
    if reply.code == ErrorCode.OVERLOADED:
        error.retry_after_s = RETRY_AFTER_S
        raise RetryableError("busy", error, refused=True)
    if reply.code == ErrorCode.STEP_FAILED and not isolated:
        raise RetryableError("step_failed", error, isolated=True)  # alone, so that only the request at fault fails
    if reply.code == ErrorCode.LOST:  # as if its process had died: perhaps because of this request
        raise RetryableError("died", replica_lost(), isolated=True)
    if reply.code in (ErrorCode.DRAINING, ErrorCode.NOT_READY):
        raise RetryableError("unavailable", error, refused=not reply.admitted)
    raise error


class TrackedCall:
    """Counts a call as load of its replica while a `with` block runs, which gets the call's route."""

    __slots__ = ("_loads", "_ranked", "_ticket", "_tried", "_work")

    def __init__(self, loads: LoadTracker, work: TenantTokens, ranked: Sequence[str], tried: set[str]) -> None:
        self._loads, self._work, self._ranked, self._tried = loads, work, ranked, tried

    def __enter__(self) -> Route:
        tenant, priority, tokens = self._work
        ranked = self._ranked
        self._ticket = self._loads.send(ranked[0] if ranked else "", tokens, tenant, priority)
        return Route(tuple(ranked), self._ticket)

    def __exit__(self, *_: object) -> None:
        self._tried.add(self._loads.close(self._ticket))


class CallErrors:
    """Turns what a transport raises in a `with` block into RetryableError or ApiError.

    A replica that was stopped on purpose and then ended casts no suspicion on its requests.
    """

    __slots__ = ("_loads", "_route")

    def __init__(self, loads: LoadTracker, route: Route) -> None:
        self._loads, self._route = loads, route

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, asyncio.CancelledError):
            running = asyncio.current_task()
            if running is not None and running.cancelling():
                return
            raise cut_short() from None  # it was the call that was cancelled, by the replica
        try:
            transport_errors().__exit__(kind, error, trace)
        except RetryableError as found:
            if found.isolated and self._loads.has_left(self._loads.where(self._route.ticket)):
                raise RetryableError("unavailable", found.error) from None
            raise


class transport_errors:
    """Turns what Ray or a link raises inside it into RetryableError or ApiError. Others and cancellation pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case LinkLost(cause="died"):
                raise RetryableError("died", replica_lost(), isolated=True) from None  # as for RayActorError
            case LinkLost():  # a link that was cut casts no suspicion on its calls
                raise RetryableError("unavailable", replica_lost(), isolated=error.cause != "cut") from None
            case BackPressureError():
                full = ApiError("overloaded", "The server is full.", retry_after_s=RETRY_AFTER_S)
                raise RetryableError("busy", full, refused=True) from None
            case RequestCancelledError() | TaskCancelledError():
                raise RetryableError(
                    "unavailable", replica_lost()
                ) from None  # by a replica that ends: we cancel no call we await
            case DeploymentUnavailableError():
                raise no_replica() from None
            case ActorUnavailableError() | ReplicaUnavailableError():
                raise RetryableError("unavailable", replica_lost(), isolated=True) from None
            case RayActorError():
                # Perhaps this request killed it: alone, a second death takes no other request along.
                raise RetryableError("died", replica_lost(), isolated=True) from None
            case RayTaskError():
                log.error("A replica raised: %s", error)
                raise ApiError("internal_error", "The server failed on this request.") from None
            case RayError():
                log.error("Ray failed: %s", error)
                raise RetryableError("unavailable", replica_lost()) from None


def no_replica() -> ApiError:
    return ApiError("no_replica", "No replica is running.", retry_after_s=RETRY_AFTER_S)


def replica_lost() -> ApiError:
    return ApiError("replica_lost", "The replica that worked on this request was lost.", retry_after_s=RETRY_AFTER_S)


def cut_short() -> RetryableError:
    """Returns the error of a stream that ended before its request had."""
    return RetryableError("unavailable", replica_lost(), isolated=True)


def left_behind() -> RetryableError:
    """Returns the error of a call whose replica answers no canary. Perhaps this request has frozen it."""
    return RetryableError("unavailable", replica_lost(), isolated=True)


def handed_off() -> RetryableError:
    return RetryableError("handoff", replica_lost())


def spent(error: RetryableError) -> ApiError:
    """Returns the answer where the retry budget is spent."""
    return error.error if error.cause == "busy" else replica_lost()


def unexpected(reply: object) -> ApiError:
    log.error("A replica answered a %s.", type(reply).__name__)
    return ApiError("internal_error", "The server failed on this request.")


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
        self._limits: dict[int, TimeLimit] = {}  # by ticket of a call that waits for its reply, and may leave
        self._left: set[int] = set()  # tickets of calls whose replica was left

    def rank(self, call: AnyCall, exclude: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the replicas for the call, best first."""
        with self._metrics.timed("route"):
            return self._selector.rank_call(call, exclude)

    def tracked(self, call: AnyCall, ranked: Sequence[str], tried: set[str]) -> "TrackedCall":
        """Counts the call as load of the first replica of `ranked`, or of the one that the router chooses.

        Returns:
            A block that gives the route of the call. When it ends, the replica that the call did go to is added to
            `tried`.
        """
        return TrackedCall(self.loads, self._admission.work(call), ranked, tried)

    def report_load(self, route: Route, reply: object) -> None:
        """Notes the load that the reply carries."""
        load = getattr(reply, "load", None)
        if isinstance(load, Load):
            self.loads.report(route.ticket, load)

    async def call(self, transport: ReplicaTransport, call: AnyCall, route: Route, epoch: int = 0) -> object:
        """Sends a call that has one reply and returns it. Raises RetryableError or ApiError."""
        return await self.reply(transport.call(call, route, epoch), call, route)

    async def reply(self, response: PendingReply, call: AnyCall, route: Route) -> object:
        """Returns the reply to a call that was made. Raises RetryableError or ApiError."""
        first = common(call)
        try:
            limit = TimeLimit(first.timeout_s + GRACE_S)
            if not first.isolated:
                self._limits[route.ticket] = limit
            with self.errors(route), limit:
                reply: object = await response
        except TimeoutError:
            response.cancel()
            raise (left_behind() if route.ticket in self._left else deadline_passed()) from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        finally:
            self._limits.pop(route.ticket, None)
            self._left.discard(route.ticket)
        self.report_load(route, reply)
        check(reply, first.isolated)
        return reply

    def leave(self, replicas: Collection[str]) -> None:
        """Ends the calls that wait for these replicas, so that they are sent to others.

        A call that runs isolated stays: what becomes of the replica tells whether the request is at fault.
        """
        for ticket, limit in self._limits.items():
            if self.loads.where(ticket) in replicas:
                self._left.add(ticket)
                limit.expire()

    def check_others(self, error: RetryableError, call: AnyCall, tried: set[str]) -> None:
        """Raises ApiError `overloaded` once every replica was too busy, with the time until one will not be."""
        if error.cause == "busy" and self.loads.replicas and tried.issuperset(self.loads.replicas):
            raise overloaded(self._admission.wait_s(self._admission.work(call), common(call).timeout_s)) from None

    def errors(self, route: Route) -> "CallErrors":
        """Returns a block that turns what a transport raises into RetryableError or ApiError."""
        return CallErrors(self.loads, route)

    def check_ready(self) -> None:
        """Raises ApiError where the call would wait in this process until a replica exists."""
        if self._health.draining:
            raise ApiError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        if not self._health.passed_once.is_set():
            raise ApiError("not_ready", "The server is starting.", retry_after_s=RETRY_AFTER_S)
        if not self._health.replicas:
            raise no_replica()
