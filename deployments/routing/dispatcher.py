"""Dispatch: the `Backend` over a Serve handle. A request is one call, a large scoring request one for each of its
blocks, and small ones that wait share one."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from deployments.config.app_args import AppArgs
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.observability.scrape import MetricsScraper
from deployments.protocol import (
    AnyTask,
    GenerateReply,
    GenerateTask,
    LikelihoodReply,
    LikelihoodTask,
    ModelCard,
    ScoreReply,
    ScoreTask,
)
from deployments.quarantine import Quarantine
from deployments.routing.admission import Admission
from deployments.routing.errors import RETRY_AFTER_S, Again, ray_errors, unexpected
from deployments.routing.health_monitor import Board
from deployments.routing.load_tracker import Loads
from deployments.routing.micro_batcher import Convoys
from deployments.routing.replica_call import Calls, due
from deployments.routing.replica_selection import Placement
from deployments.routing.retry import Retries
from deployments.routing.sharding import count_blocks, cut, gather
from deployments.routing.stream_resume import Streams

log = logging.getLogger("ray.serve")
Rows = TypeVar("Rows", ScoreTask, LikelihoodTask)
Reply = TypeVar("Reply", ScoreReply, LikelihoodReply)
T = TypeVar("T")
CARD_S = 10.0


class Dispatch:
    """`Backend`. What a replica loses is sent again: scoring is pure and a generation carries its seeds, so a second
    attempt gives what the first would have given. Generations go on in the middle: see
    `deployments.routing.stream_resume`."""

    def __init__(
        self,
        handle: Any,
        args: AppArgs,
        board: Board,
        metrics: IngressMetrics,
        scrape: MetricsScraper,
        loads: Loads | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._handle = handle
        self._fanout = args.fanout
        self._board = board
        self._metrics = metrics
        self._scrape = scrape
        loads = loads or Loads()
        self._admission = Admission(args.admission, args.costs(), loads)
        placement = Placement(loads, args.router, board.suspects)
        self._calls = Calls(board, loads, placement, self._admission, metrics)
        self._convoys = Convoys(handle, self._calls, args.fanout, metrics)
        self._retries = Retries(args.retry, Quarantine() if quarantine is None else quarantine, metrics)
        self.streams = Streams(handle, self._calls, self._retries)

    async def score(self, task: ScoreTask) -> ScoreReply:
        return await self._shared_out(self._handle.score, task, ScoreReply, ScoreReply.blank)

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply:
        return await self._shared_out(self._handle.likelihood, task, LikelihoodReply, LikelihoodReply.blank)

    async def _shared_out(self, method: Any, task: Rows, kind: type[Reply], blank: Callable[[Rows], Reply]) -> Reply:
        """A large task is cut into blocks, the i-th for the i-th best replica; a lost block is sent again alone. If one
        fails for good the others are cancelled, and if the caller is cancelled all are. A task that is to be `whole`
        ends with the first block that holds a failed row, and the rows after it have failed too."""
        self._retries.quarantine.check(task)
        ranked = self._calls.rank(task)
        count = count_blocks(task, len(ranked), self._fanout)
        self._admit(task, count)
        self._metrics.fanned_out(count)
        if count == 1:
            return await self._block(method, task, kind, ranked)
        blocks = cut(task, count, self._fanout.min_items)
        turns = [ranked[i:] + ranked[:i] for i in range(count)]
        calls = [self._block(method, block.task, kind, turn) for block, turn in zip(blocks, turns, strict=True)]
        try:
            replies = await _together(calls, enough=lambda reply: task.whole and bool(reply.status.any()))
            with self._metrics.timed("gather"):
                return gather(blank(task), blocks[: len(replies)], replies)
        except ApiError as error:
            if error.code == "quarantined_request":
                self._retries.convict(task)
            raise
        except ValueError as error:
            log.error("A replica did not answer what it was asked: %s", error)
            raise unexpected(replies) from None

    async def _block(self, method: Any, task: Rows, kind: type[Reply], ranked: Sequence[str]) -> Reply:
        reply = await self._attempts(method, task, ranked)
        if not isinstance(reply, kind):
            raise unexpected(reply)
        return reply

    async def generate(self, task: GenerateTask) -> GenerateReply:
        self._admit(task)
        return await self.streams.whole(task)

    def stream(self, task: GenerateTask) -> AsyncGenerator[GenerateReply, None]:
        self._admit(task)
        return self.streams.stream(task)

    def _admit(self, task: AnyTask, shares: int = 1) -> None:
        with self._metrics.timed("admit"):
            self._admission.admit(task, shares)

    def check_open(self, remaining_s: float) -> None:
        self._admission.check_open(remaining_s)

    async def card(self) -> ModelCard:
        self._calls.check_ready()
        try:
            with ray_errors():
                card = await asyncio.wait_for(self._handle.card.remote(), CARD_S)
        except TimeoutError:
            raise ApiError("not_ready", "No replica answered.", retry_after_s=RETRY_AFTER_S) from None
        except Again as again:
            raise again.error from None
        if not isinstance(card, ModelCard):
            raise unexpected(card)
        return card

    def readiness(self) -> dict[str, object]:
        return self._board.readiness()

    async def metrics(self) -> bytes:
        return await self._scrape.text()

    async def _attempts(self, method: Any, task: Rows, ranked: Sequence[str]) -> object:
        """`ranked` is for the first attempt; a later one looks anew, and for a replica that has not been tried."""
        course = self._retries.course(task)
        while True:
            if not course.again:
                self._calls.check_ready()
            try:
                with self._calls.sent(course.marked(due(task, course.end)), ranked, course.tried) as sent:
                    reply = await self._convoys.carry(method, sent)
                course.served()
                return reply
            except Again as again:
                if not course.accepted:
                    self._calls.check_others(again, task, course.tried)
                await course.next(again)
                ranked = self._calls.rank(task, course.tried)


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
