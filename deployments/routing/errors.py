"""Turns the ends of one call of a replica into errors of ours, and says which of them justify another attempt."""

import logging
from collections.abc import Sequence

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from deployments.errors import ApiError, of_failure
from deployments.protocol import Failure, GenerateReply, PromptChunk
from engine.requests import ErrorCode

log = logging.getLogger("ray.serve")
RETRY_AFTER_S = 1.0


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
        chunks: Sequence[PromptChunk] = reply.chunks
        reply = next((item.chunk for item in chunks if isinstance(item.chunk, Failure)), None)
    if not isinstance(reply, Failure):
        return
    error = of_failure(reply)
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


class ray_errors:
    """Turns what Ray raises inside it into RetryableError or ApiError. Our own errors and cancellation pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
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


def deadline_passed() -> ApiError:
    return ApiError("deadline_exceeded", "The deadline passed. Ask for less work in one request.")


def no_replica() -> ApiError:
    return ApiError("no_replica", "No replica is running.", retry_after_s=RETRY_AFTER_S)


def replica_lost() -> ApiError:
    return ApiError("replica_lost", "The replica that worked on this request was lost.", retry_after_s=RETRY_AFTER_S)


def cut_short() -> RetryableError:
    """Returns the error of a stream that ended before its request had."""
    return RetryableError("unavailable", replica_lost(), isolated=True)


def handed_off() -> RetryableError:
    return RetryableError("handoff", replica_lost())


def spent(error: RetryableError) -> ApiError:
    """Returns the answer where the retry budget is spent."""
    return error.error if error.cause == "busy" else replica_lost()


def unexpected(reply: object) -> ApiError:
    log.error("A replica answered a %s.", type(reply).__name__)
    return ApiError("internal_error", "The server failed on this request.")
