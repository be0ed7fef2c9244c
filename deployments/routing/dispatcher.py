"""Sends requests to replicas over a `ReplicaTransport` and implements `Backend`.

A request is one call. A large scoring request becomes one call for each of its blocks, and small ones that wait for the
same replica share a call.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from deployments.config.app_args import AppArgs
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.observability.scrape import MetricsScraper
from deployments.protocol import (
    AnyCall,
    GenerateCall,
    GenerateReply,
    LikelihoodReply,
    ModelCard,
    ReplicaTransport,
    blank_pooling,
    blank_scores,
)
from deployments.quarantine import Quarantine
from deployments.routing.admission import Admission
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.micro_batcher import MicroBatcher
from deployments.routing.replica_call import RETRY_AFTER_S, ReplicaCaller, RetryableError, transport_errors, unexpected
from deployments.routing.replica_selection import ReplicaSelector
from deployments.routing.retry import RetryPolicy
from deployments.routing.sharding import Reply, Rows, count_blocks, cut, gather
from deployments.routing.stream_resume import ResumableStreams
from engine.requests import LikelihoodRequest, PoolingRequest, PoolingResult, ScoreRequest, ScoreResult

log = logging.getLogger("ray.serve")
T = TypeVar("T")
CARD_TIMEOUT_S = 10.0


class Dispatcher:
    """Implements `Backend`.

    Lost work is sent again: scoring is pure and a generation carries its seeds, so a second attempt gives
    what the first would have given. Generations continue where they were: see `deployments.routing.stream_resume`.
    """

    def __init__(
        self,
        transport: ReplicaTransport,
        args: AppArgs,
        health: HealthMonitor,
        metrics: IngressMetrics,
        scrape: MetricsScraper,
        loads: LoadTracker | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._transport = transport
        self._fanout = args.fanout
        self._health = health
        self._metrics = metrics
        self._scrape = scrape
        loads = loads or LoadTracker()
        self._admission = Admission(args.admission, args.admission, loads)
        selector = ReplicaSelector(loads, args.router, health.suspects)
        self._caller = ReplicaCaller(health, loads, selector, self._admission, metrics)
        self._batcher = MicroBatcher(transport, self._caller, args.fanout, metrics)
        self._retries = RetryPolicy(args.retry, Quarantine() if quarantine is None else quarantine, metrics)
        self.streams = ResumableStreams(transport, self._caller, self._retries)

    async def score(self, request: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        def blank(first: ScoreResult) -> ScoreResult:
            return blank_scores(request)

        return await self._sharded(request, ScoreResult, blank, all_or_nothing)

    async def pooling(self, request: PoolingRequest, all_or_nothing: bool = False) -> PoolingResult:
        def blank(first: PoolingResult) -> PoolingResult:
            return blank_pooling(request, first.values.shape[1])

        return await self._sharded(request, PoolingResult, blank, all_or_nothing)

    async def likelihood(self, request: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        def blank(first: LikelihoodReply) -> LikelihoodReply:
            return LikelihoodReply.blank(request)

        return await self._sharded(request, LikelihoodReply, blank, all_or_nothing)

    async def _sharded(
        self, request: Rows, kind: type[Reply], blank: Callable[[Reply], Reply], all_or_nothing: bool
    ) -> Reply:
        """Cuts a large request into blocks, the i-th for the i-th best replica. A lost block is sent again alone.

        `blank` makes a reply to the whole request that answers no row, from the first block's. If one block fails, the
        others are cancelled; if the caller is cancelled, all are. With `all_or_nothing` the
        first block that holds a failed row ends the request, and the rows after it have failed too.
        """
        self._retries.quarantine.check(request)
        ranked = self._caller.rank(request)
        count = count_blocks(request, len(ranked), self._fanout)
        self._admit(request, count)
        self._metrics.fanned_out(count)
        if count == 1:
            return await self._block(request, kind, ranked)
        blocks = cut(request, count, self._fanout.min_items)
        orders = [ranked[i:] + ranked[:i] for i in range(count)]
        calls = [self._block(block.request, kind, order) for block, order in zip(blocks, orders, strict=True)]
        try:
            replies = await _gather_until(calls, enough=lambda reply: all_or_nothing and bool(reply.status.any()))
            with self._metrics.timed("gather"):
                return gather(blank(replies[0]), blocks[: len(replies)], replies)
        except ApiError as error:
            if error.code == "quarantined_request":
                self._retries.quarantine_call(request)
            raise
        except ValueError as error:
            log.error("A replica's answer does not fit its request: %s", error)
            raise unexpected(replies) from None

    async def _block(self, request: Rows, kind: type[Reply], ranked: Sequence[str]) -> Reply:
        """Sends one block until a replica answers it. Later attempts rank the replicas anew."""
        state = self._retries.begin(request)
        while True:
            if not state.again:
                self._caller.check_ready()
            try:
                with self._caller.tracked(request, ranked, state.tried) as route:
                    reply = await self._batcher.send(state.next_call(request), route)
                break
            except RetryableError as error:
                if not state.admitted:
                    self._caller.check_others(error, request, state.tried)
                await state.wait(error, request)
                ranked = self._caller.rank(request, state.tried)
        state.served()
        if not isinstance(reply, kind):
            raise unexpected(reply)
        return reply

    async def generate(self, call: GenerateCall) -> GenerateReply:
        self._admit(call)
        return await self.streams.complete(call)

    def stream(self, call: GenerateCall) -> AsyncGenerator[GenerateReply, None]:
        self._admit(call)
        return self.streams.stream(call)

    def _admit(self, call: AnyCall, blocks: int = 1) -> None:
        with self._metrics.timed("admit"):
            self._admission.admit(call, blocks)

    def leave(self, replicas: Collection[str]) -> None:
        """Moves what is under way at these replicas to others."""
        self._caller.leave(replicas)
        self.streams.leave(replicas)

    def check_open(self, timeout_s: float, tenant: str) -> None:
        self._admission.check_open(timeout_s, tenant)

    async def card(self) -> ModelCard:
        self._caller.check_ready()
        try:
            with transport_errors():
                card = await asyncio.wait_for(self._transport.card(), CARD_TIMEOUT_S)
        except TimeoutError:
            raise ApiError("not_ready", "No replica answered.", retry_after_s=RETRY_AFTER_S) from None
        except RetryableError as error:
            raise error.error from None
        if not isinstance(card, ModelCard):
            raise unexpected(card)
        return card

    def readiness(self) -> dict[str, object]:
        return self._health.readiness()

    async def metrics(self) -> Sequence[bytes]:
        return await self._scrape.text()


async def _gather_until(calls: Sequence[Coroutine[Any, Any, T]], enough: Callable[[T], bool]) -> list[T]:
    """Returns the results in order, up to the first that is `enough`, and cancels the calls after it.

    The first failure cancels all other calls and is raised alone.
    """
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
