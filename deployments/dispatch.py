"""Dispatch: the `Backend` over a Serve handle. A request is one call, a large scoring request one for each of its
blocks."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from deployments.admission import Admission, overloaded
from deployments.attempts import (
    RETRY_AFTER_S,
    Again,
    check,
    deadline_passed,
    lost_midway,
    no_replica,
    ray_errors,
    unexpected,
)
from deployments.blocks import count_blocks, cut, gather
from deployments.board import Board
from deployments.config import AppArgs
from deployments.loads import Loads
from deployments.messages import (
    GenerateReply,
    GenerateTask,
    LikelihoodReply,
    LikelihoodTask,
    Load,
    ModelCard,
    Route,
    ScoreReply,
    ScoreTask,
)
from deployments.metrics import IngressMetrics
from deployments.placement import Placement
from deployments.scrape import Scrape
from deployments.wire.errors import ApiError

log = logging.getLogger("ray.serve")
Task = TypeVar("Task", ScoreTask, LikelihoodTask, GenerateTask)
Rows = TypeVar("Rows", ScoreTask, LikelihoodTask)
Reply = TypeVar("Reply", ScoreReply, LikelihoodReply)
T = TypeVar("T")
BUSY_ATTEMPTS = 3  # a replica that is too busy, and two others
GRACE_S = 1.0  # the engine ends late work itself; this is for a replica that no longer does


class Dispatch:
    """`Backend`. Retries where nothing was answered yet: scoring is pure and a generation carries its seeds, so a
    second attempt gives what the first would have given. Resuming a stream in the middle has its seam in
    `GenerateTask.emitted` and `epoch`."""

    def __init__(
        self,
        handle: Any,
        args: AppArgs,
        board: Board,
        metrics: IngressMetrics,
        scrape: Scrape,
        loads: Loads | None = None,
    ) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._retry = args.retry
        self._fanout = args.fanout
        self._board = board
        self._metrics = metrics
        self._scrape = scrape
        self._loads = loads or Loads()
        self._placement = Placement(self._loads, args.router, board.suspects)
        self._admission = Admission(args.admission, args.costs(), self._loads)

    async def score(self, task: ScoreTask) -> ScoreReply:
        return await self._shared_out(self._handle.score, task, ScoreReply, ScoreReply.blank)

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply:
        return await self._shared_out(self._handle.likelihood, task, LikelihoodReply, LikelihoodReply.blank)

    async def _shared_out(self, method: Any, task: Rows, kind: type[Reply], blank: Callable[[Rows], Reply]) -> Reply:
        """A large task is cut into blocks, the i-th for the i-th best replica; a lost block is sent again alone. If one
        fails for good the others are cancelled, and if the caller is cancelled all are. A task that is to be `whole`
        ends with the first block that holds a failed row, and the rows after it have failed too."""
        ranked = self._placement.rank(self._placement.key_of(task))
        count = count_blocks(task, len(ranked), self._fanout)
        self._admission.admit(task, count)
        self._metrics.fanned_out(count)
        if count == 1:
            return await self._block(method, task, kind, ranked)
        blocks = cut(task, count, self._fanout.min_items)
        turns = [ranked[i:] + ranked[:i] for i in range(count)]
        calls = [self._block(method, block.task, kind, turn) for block, turn in zip(blocks, turns, strict=True)]
        replies = await _together(calls, enough=lambda reply: task.whole and bool(reply.status.any()))
        try:
            return gather(blank(task), blocks[: len(replies)], replies)
        except ValueError as error:
            log.error("A replica did not answer what it was asked: %s", error)
            raise unexpected(replies) from None

    async def _block(self, method: Any, task: Rows, kind: type[Reply], ranked: Sequence[str]) -> Reply:
        reply = await self._unary(method, task, ranked)
        if not isinstance(reply, kind):
            raise unexpected(reply)
        return reply

    async def generate(self, task: GenerateTask) -> GenerateReply:
        self._admission.admit(task)
        reply = await self._unary(self._handle.generate, task)
        if not isinstance(reply, GenerateReply):
            raise unexpected(reply)
        return reply

    async def stream(self, task: GenerateTask) -> AsyncGenerator[GenerateReply, None]:
        """Closing it cancels the call, and with it the work at the replica."""
        self._admission.admit(task)
        end = time.monotonic() + task.remaining_s
        tried: set[str] = set()
        for attempt in range(1, self._most_attempts + 1):
            started = False
            ranked = self._placement.rank(self._placement.key_of(task), tried)
            try:
                with self._sent(_due(task, end), ranked, tried) as sent:
                    replies = self._one_stream(sent, end)
                    async with contextlib.aclosing(replies):
                        async for reply in replies:
                            started = True
                            yield reply
                return
            except Again as again:
                if started:
                    raise lost_midway(again) from None
                self._check_others(again, task, tried)
                await self._before_retry(again, attempt, end)
                task = replace(task, solo=task.solo or again.solo)

    async def card(self) -> ModelCard:
        self._check_ready()
        with ray_errors():
            card = await asyncio.wait_for(self._handle.card.remote(), 10)
        if not isinstance(card, ModelCard):
            raise unexpected(card)
        return card

    def readiness(self) -> dict[str, object]:
        return self._board.readiness()

    async def metrics(self) -> bytes:
        return await self._scrape.text()

    # One attempt.

    async def _unary(self, method: Any, task: Task, ranked: Sequence[str] | None = None) -> object:
        """`ranked` is for the first attempt; a later one looks anew, and for a replica that has not been tried."""
        end = time.monotonic() + task.remaining_s
        tried: set[str] = set()
        if ranked is None:
            ranked = self._placement.rank(self._placement.key_of(task))
        for attempt in range(1, self._most_attempts + 1):
            try:
                with self._sent(_due(task, end), ranked, tried) as sent:
                    return await self._one_call(method, sent)
            except Again as again:
                self._check_others(again, task, tried)
                await self._before_retry(again, attempt, end)
                task = replace(task, solo=task.solo or again.solo)
                ranked = self._placement.rank(self._placement.key_of(task), tried)
        raise RuntimeError("unreachable: the last attempt raises")

    @contextlib.contextmanager
    def _sent(self, task: Task, ranked: Sequence[str], tried: set[str]) -> Iterator[Task]:
        """The task with its route, on the books of the first replica of `ranked` until the block ends; then the replica
        that it did go to is one of `tried`. Without a known replica the router's choice is free."""
        if not ranked:
            yield task
            return
        ticket = self._loads.send(ranked[0], self._admission.cost(task))
        try:
            yield replace(task, route=Route(tuple(ranked), ticket))
        finally:
            tried.add(self._loads.close(ticket))

    def _heard(self, sent: Task, reply: object) -> None:
        load = getattr(reply, "load", None)
        if sent.route is not None and isinstance(load, Load):
            self._loads.report(sent.route.ticket, load)

    async def _one_call(self, method: Any, task: Task) -> object:
        self._check_ready()
        response = method.remote(task)
        try:
            with ray_errors():
                async with asyncio.timeout(task.remaining_s + GRACE_S):
                    reply: object = await response
        except TimeoutError:
            response.cancel()
            raise deadline_passed() from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        self._heard(task, reply)
        check(reply, task.solo)
        return reply

    async def _one_stream(self, task: GenerateTask, end: float) -> AsyncGenerator[GenerateReply, None]:
        self._check_ready()
        responses = self._streams.stream.remote(task)
        over = False
        try:
            while True:
                with ray_errors():
                    try:
                        async with asyncio.timeout(end + GRACE_S - time.monotonic()):
                            reply = await anext(responses)
                    except StopAsyncIteration:
                        over = True
                        return
                self._heard(task, reply)
                check(reply, task.solo)
                yield reply
        except TimeoutError:
            raise deadline_passed() from None
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
            raise no_replica()

    async def _before_retry(self, again: Again, attempt: int, end: float) -> None:
        """Waits a little; raises where there is no next attempt. A busy replica says nothing of the next one, and its
        refusal must not take long."""
        busy = again.cause == "busy"
        wait = 0.0 if busy else random.uniform(0, self._retry.wait_s)
        if attempt >= (BUSY_ATTEMPTS if busy else self._retry.attempts) or time.monotonic() + wait >= end:
            raise again.error from None
        self._metrics.retried(again.cause)
        if not busy:
            log.info("Another attempt: %s", again.cause)
        await asyncio.sleep(wait)

    def _check_others(self, again: Again, task: Task, tried: set[str]) -> None:
        """Refuses what every replica is too busy for, and says when one will not be."""
        if again.cause == "busy" and tried.issuperset(self._loads.replicas) and self._loads.replicas:
            raise overloaded(self._admission.wait_s(self._admission.cost(task), task.remaining_s)) from None

    @property
    def _most_attempts(self) -> int:
        return max(BUSY_ATTEMPTS, self._retry.attempts)


async def _together(calls: Sequence[Coroutine[Any, Any, T]], enough: Callable[[T], bool]) -> list[T]:
    """Results in order, up to the first that is `enough`: it cancels those after it. The first failure cancels all
    others and is raised alone."""
    results: list[T] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
            while len(results) < len(tasks) and not (results and enough(results[-1])):
                results.append(await tasks[len(results)])
            for task in tasks[len(results) :]:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise next((error for error in errors.exceptions if isinstance(error, ApiError)), errors) from None
    return results


def _due(task: Task, end: float) -> Task:
    """The task with the seconds that are left of it."""
    left = end - time.monotonic()
    if left <= 0:
        raise deadline_passed()
    return replace(task, remaining_s=left)
