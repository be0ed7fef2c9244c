"""Dispatch: the `Backend` over a Serve handle. One request is one call; every Ray error becomes an ApiError."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from deployments.board import Board
from deployments.config import AppArgs
from deployments.messages import (
    Failure,
    GenerateReply,
    GenerateTask,
    LikelihoodReply,
    LikelihoodTask,
    ModelCard,
    PromptChunk,
    ScoreReply,
    ScoreTask,
)
from deployments.metrics import IngressMetrics
from deployments.scrape import Scrape
from deployments.wire.errors import ApiError, of_failure
from engine.jobs import ErrorCode

log = logging.getLogger("ray.serve")
Task = TypeVar("Task", ScoreTask, LikelihoodTask, GenerateTask)
GRACE_S = 1.0  # the engine ends late work itself; this is for a replica that no longer does
RETRY_AFTER_S = 1.0


class Again(Exception):
    """This attempt failed in a way that another may not; `error` is what to answer if there is none."""

    def __init__(self, cause: str, error: ApiError, *, solo: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.error = error
        self.solo = solo


class Dispatch:
    """`Backend`. Retries where nothing was answered yet: scoring is pure and a generation carries its seeds, so a
    second attempt gives what the first would have given. Resuming a stream in the middle has its seam in
    `GenerateTask.emitted` and `epoch`."""

    def __init__(self, handle: Any, args: AppArgs, board: Board, metrics: IngressMetrics, scrape: Scrape) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._retry = args.retry
        self._board = board
        self._metrics = metrics
        self._scrape = scrape

    async def score(self, task: ScoreTask) -> ScoreReply:
        reply = await self._unary(self._handle.score, task)
        if not isinstance(reply, ScoreReply):
            raise _unexpected(reply)
        return reply

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply:
        reply = await self._unary(self._handle.likelihood, task)
        if not isinstance(reply, LikelihoodReply):
            raise _unexpected(reply)
        return reply

    async def generate(self, task: GenerateTask) -> GenerateReply:
        reply = await self._unary(self._handle.generate, task)
        if not isinstance(reply, GenerateReply):
            raise _unexpected(reply)
        return reply

    async def stream(self, task: GenerateTask) -> AsyncGenerator[GenerateReply, None]:
        """Closing it cancels the call, and with it the work at the replica."""
        end = time.monotonic() + task.remaining_s
        for attempt in range(1, self._retry.attempts + 1):
            started = False
            replies = self._one_stream(_due(task, end), end)
            try:
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        started = True
                        yield reply
                return
            except Again as again:
                if started:
                    raise _lost_midway(again) from None
                await self._before_retry(again, attempt, end)
                task = replace(task, solo=task.solo or again.solo)

    async def card(self) -> ModelCard:
        self._check_ready()
        with _ray_errors():
            card = await asyncio.wait_for(self._handle.card.remote(), 10)
        if not isinstance(card, ModelCard):
            raise _unexpected(card)
        return card

    def readiness(self) -> dict[str, object]:
        return self._board.readiness()

    async def metrics(self) -> bytes:
        return await self._scrape.text()

    # One attempt.

    async def _unary(self, method: Any, task: Task) -> object:
        end = time.monotonic() + task.remaining_s
        for attempt in range(1, self._retry.attempts + 1):
            try:
                return await self._one_call(method, _due(task, end))
            except Again as again:
                await self._before_retry(again, attempt, end)
                task = replace(task, solo=task.solo or again.solo)
        raise RuntimeError("unreachable: the last attempt raises")

    async def _one_call(self, method: Any, task: Task) -> object:
        self._check_ready()
        response = method.remote(task)
        try:
            with _ray_errors():
                async with asyncio.timeout(task.remaining_s + GRACE_S):
                    reply: object = await response
        except TimeoutError:
            response.cancel()
            raise _deadline() from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        _check(reply, task.solo)
        return reply

    async def _one_stream(self, task: GenerateTask, end: float) -> AsyncGenerator[GenerateReply, None]:
        self._check_ready()
        responses = self._streams.stream.remote(task)
        over = False
        try:
            while True:
                with _ray_errors():
                    try:
                        async with asyncio.timeout(end + GRACE_S - time.monotonic()):
                            reply = await anext(responses)
                    except StopAsyncIteration:
                        over = True
                        return
                _check(reply, task.solo)
                yield reply
        except TimeoutError:
            raise _deadline() from None
        finally:
            if not over:
                responses.cancel()

    def _check_ready(self) -> None:
        """Refuses at once what would wait for ever: a call waits in the caller while there is no replica."""
        if self._board.draining:
            raise ApiError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        if not self._board.seen_ready:
            raise ApiError("not_ready", "The server is starting.", retry_after_s=RETRY_AFTER_S)
        if not self._board.replicas:
            raise _no_replica()

    async def _before_retry(self, again: Again, attempt: int, end: float) -> None:
        """Waits a little; raises where there is no next attempt."""
        wait = random.uniform(0, self._retry.wait_s)
        if attempt >= self._retry.attempts or time.monotonic() + wait >= end:
            raise again.error from None
        self._metrics.retried(again.cause)
        log.info("Another attempt: %s", again.cause)
        await asyncio.sleep(wait)


def _due(task: Task, end: float) -> Task:
    """The task with the seconds that are left of it."""
    left = end - time.monotonic()
    if left <= 0:
        raise _deadline()
    return replace(task, remaining_s=left)


def _check(reply: object, solo: bool) -> None:
    """Raises for a Failure, alone or as the first of a reply's chunks."""
    if isinstance(reply, GenerateReply):
        chunks: Sequence[PromptChunk] = reply.chunks
        reply = next((item.chunk for item in chunks if isinstance(item.chunk, Failure)), None)
    if not isinstance(reply, Failure):
        return
    error = of_failure(reply)
    if reply.code == ErrorCode.OVERLOADED:
        error.retry_after_s = RETRY_AFTER_S
        raise Again("busy", error)
    if reply.code == ErrorCode.STEP_FAILED and not solo:
        raise Again("step_failed", error, solo=True)  # alone, so that only the culprit fails
    if reply.code in (ErrorCode.DRAINING, ErrorCode.NOT_READY):
        raise Again("unavailable", error)
    raise error


class _ray_errors:
    """Inside it, whatever Ray raises becomes Again or an ApiError; our own errors and cancellation pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case BackPressureError():
                full = ApiError("overloaded", "The server is full.", retry_after_s=RETRY_AFTER_S)
                raise Again("busy", full) from None
            case RequestCancelledError() | TaskCancelledError():
                raise ApiError("replica_lost", "The request was cancelled.", retry_after_s=RETRY_AFTER_S) from None
            case DeploymentUnavailableError():
                raise _no_replica() from None
            case ActorUnavailableError() | ReplicaUnavailableError():
                raise Again("unavailable", _replica_lost(), solo=True) from None
            case RayActorError():
                # Perhaps this task killed it: alone, a second death at least takes nobody along.
                raise Again("died", _replica_lost(), solo=True) from None
            case RayTaskError():
                log.error("A replica raised: %s", error)
                raise ApiError("internal_error", "The server failed on this request.") from None
            case RayError():
                log.error("Ray failed: %s", error)
                raise Again("unavailable", _replica_lost()) from None


def _deadline() -> ApiError:
    return ApiError("deadline_exceeded", "The deadline passed. Ask for less work in one request.")


def _no_replica() -> ApiError:
    return ApiError("no_replica", "No replica is running.", retry_after_s=RETRY_AFTER_S)


def _replica_lost() -> ApiError:
    return ApiError("replica_lost", "The replica that worked on this request was lost.", retry_after_s=RETRY_AFTER_S)


def _lost_midway(again: Again) -> ApiError:
    return _replica_lost() if again.cause in ("died", "unavailable") else again.error


def _unexpected(reply: object) -> ApiError:
    log.error("A replica answered a %s.", type(reply).__name__)
    return ApiError("internal_error", "The server failed on this request.")
