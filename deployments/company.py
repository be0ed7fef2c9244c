"""Company: the tasks of a convoy at a replica, each answered as if it had come alone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from deployments.messages import (
    MOST_IN_CONVOY,
    Convoy,
    Failure,
    LikelihoodReply,
    LikelihoodTask,
    Load,
    ScoreReply,
    ScoreTask,
)
from engine.jobs import ErrorCode

log = logging.getLogger("ray.serve")
Reply = ScoreReply | LikelihoodReply | Failure


async def answered(
    convoy: Convoy,
    score: Callable[[ScoreTask], Awaitable[ScoreReply | Failure]],
    likelihood: Callable[[LikelihoodTask], Awaitable[LikelihoodReply | Failure]],
    refusals: Callable[[Sequence[ScoreTask | LikelihoodTask]], Sequence[Failure | None]],
    load: Callable[[], Load],
) -> tuple[Reply | None, ...] | Failure:
    """The replies in order; a Failure of all of them for what is no convoy. Where there is no room for one of them none
    is taken, so that no refusal waits until the others are computed: None, in `refusals` too, says who may come again
    without it. All tell the replica's `load` as it is in the end: some have waited for the others since they took
    theirs. Cancelled, it cancels every task."""
    tasks: object = getattr(convoy, "tasks", None)
    if not isinstance(tasks, tuple) or not 1 <= len(tasks) <= MOST_IN_CONVOY or not all(map(_scores, tasks)):
        return Failure(ErrorCode.INVALID_VALUE, f"`tasks` must be 1 to {MOST_IN_CONVOY} scoring tasks.", "tasks")
    refused: Sequence[Reply | None] = refusals(tasks)
    if any(refused):
        return tuple(refused)
    calls: list[Awaitable[Reply]] = [score(task) if isinstance(task, ScoreTask) else likelihood(task) for task in tasks]
    works = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.sleep(0)  # after which each has been taken, or refused, since others came first
        refused = [work.result() if _is_refused(work) else None for work in works]
        if any(refused):
            return tuple(refused)
        replies = map(_said, await asyncio.gather(*works, return_exceptions=True))
        now = load()
        return tuple(reply if reply.load is None else reply._replace(load=now) for reply in replies)
    finally:
        for work in works:
            work.cancel()


def _is_refused(work: "asyncio.Future[Reply]") -> bool:
    if not work.done() or work.cancelled() or work.exception() is not None:
        return False
    reply = work.result()
    return isinstance(reply, Failure) and reply.code is ErrorCode.OVERLOADED


def _scores(task: object) -> bool:
    return isinstance(task, ScoreTask | LikelihoodTask)


def _said(reply: Reply | BaseException) -> Reply:
    """A task that raises, which is a fault of ours, is sent again alone: the others must not meet it."""
    if not isinstance(reply, BaseException):
        return reply
    log.error("A task of a convoy raised.", exc_info=reply)
    return Failure(ErrorCode.STEP_FAILED, "The server failed on this request.", None)
