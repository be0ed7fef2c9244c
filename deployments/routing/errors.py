"""Attempts: how one call of a replica can end, and which ends another replica may better. Ray's errors become ours."""

import logging
from collections.abc import Sequence

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from deployments.errors import ApiError, from_failure
from deployments.protocol import Failure, GenerateReply, PromptChunk
from engine.requests import ErrorCode

log = logging.getLogger("ray.serve")
RETRY_AFTER_S = 1.0


class Again(Exception):
    """This attempt failed in a way that another may not; `error` is what to answer if there is none."""

    def __init__(self, cause: str, error: ApiError, *, isolated: bool = False, refused: bool = False) -> None:
        """`isolated`: alone next time. `refused`: the replica did not take it. Otherwise it may have, and is said to
        have:
        what an ingress has on its way to one replica was counted by gate 1."""
        super().__init__(cause)
        self.cause = cause
        self.error = error
        self.isolated = isolated
        self.refused = refused


def check(reply: object, isolated: bool) -> None:
    """Raises for a Failure, alone or as the first of a reply's chunks."""
    if isinstance(reply, GenerateReply):
        chunks: Sequence[PromptChunk] = reply.chunks
        reply = next((item.chunk for item in chunks if isinstance(item.chunk, Failure)), None)
    if not isinstance(reply, Failure):
        return
    error = from_failure(reply)
    if reply.code == ErrorCode.OVERLOADED:
        error.retry_after_s = RETRY_AFTER_S
        raise Again("busy", error, refused=True)
    if reply.code == ErrorCode.STEP_FAILED and not isolated:
        raise Again("step_failed", error, isolated=True)  # alone, so that only the culprit fails
    if reply.code == ErrorCode.LOST:  # as if its process had died: perhaps because of this task
        raise Again("died", replica_lost(), isolated=True)
    if reply.code in (ErrorCode.DRAINING, ErrorCode.NOT_READY):
        raise Again("unavailable", error, refused=not reply.accepted)
    raise error


class ray_errors:
    """Inside it, whatever Ray raises becomes Again or an ApiError; our own errors and cancellation pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case BackPressureError():
                full = ApiError("overloaded", "The server is full.", retry_after_s=RETRY_AFTER_S)
                raise Again("busy", full, refused=True) from None
            case RequestCancelledError() | TaskCancelledError():
                raise Again(
                    "unavailable", replica_lost()
                ) from None  # by a replica that ends: we cancel no call we await
            case DeploymentUnavailableError():
                raise no_replica() from None
            case ActorUnavailableError() | ReplicaUnavailableError():
                raise Again("unavailable", replica_lost(), isolated=True) from None
            case RayActorError():
                # Perhaps this task killed it: alone, a second death at least takes nobody along.
                raise Again("died", replica_lost(), isolated=True) from None
            case RayTaskError():
                log.error("A replica raised: %s", error)
                raise ApiError("internal_error", "The server failed on this request.") from None
            case RayError():
                log.error("Ray failed: %s", error)
                raise Again("unavailable", replica_lost()) from None


def deadline_passed() -> ApiError:
    return ApiError("deadline_exceeded", "The deadline passed. Ask for less work in one request.")


def no_replica() -> ApiError:
    return ApiError("no_replica", "No replica is running.", retry_after_s=RETRY_AFTER_S)


def replica_lost() -> ApiError:
    return ApiError("replica_lost", "The replica that worked on this request was lost.", retry_after_s=RETRY_AFTER_S)


def cut_short() -> Again:
    """A stream that ended before its task had."""
    return Again("unavailable", replica_lost(), isolated=True)


def handed_off() -> Again:
    return Again("handoff", replica_lost())


def spent(again: Again) -> ApiError:
    """What to answer where a retry would be one too many of all."""
    return again.error if again.cause == "busy" else replica_lost()


def unexpected(reply: object) -> ApiError:
    log.error("A replica answered a %s.", type(reply).__name__)
    return ApiError("internal_error", "The server failed on this request.")
