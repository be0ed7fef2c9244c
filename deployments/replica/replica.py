"""Serves one engine, its thread and its health through methods that Ray Serve calls from other processes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client.metrics_core import Metric

from deployments.config.app_args import AppArgs
from deployments.health_probe import Canary, CanaryReply
from deployments.link.handshake import LinkAddress
from deployments.link.server import LinkServer
from deployments.observability.exposition import Snapshot, snapshot
from deployments.observability.replica_metrics import ReplicaMetrics
from deployments.observability.versions import package_versions
from deployments.protocol import (
    FAULT,
    MAX_MICRO_BATCH,
    Failure,
    GenerateCall,
    GenerateReply,
    LikelihoodReply,
    ModelCard,
    PromptChunk,
    PromptScores,
    Route,
    RowsCall,
    RowsReply,
    RunningCall,
    StreamReceiver,
)
from deployments.quarantine import Entries, IsolationGuard, IsolationLease
from deployments.replica.make_engine import make_engine
from deployments.replica.utilization import Utilization
from deployments.replica.weights_registry import WeightsPeers
from deployments.stream_buffer import StreamBuffer
from engine.engine import Engine, RowsResult
from engine.model.interface import CausalLM
from engine.request_validation import with_writable_arrays
from engine.requests import (
    EngineError,
    ErrorCode,
    GenerateChunk,
    GenerateRequest,
    LikelihoodRequest,
    LikelihoodResult,
    Load,
    PoolingRequest,
    PoolingResult,
    RowStatus,
    ScoreRequest,
    ScoreResult,
)
from engine.utils.cpu import run_apart

log = logging.getLogger("ray.serve")
STOP_S = 10.0
SHARED_CANARY = 0.5  # periods: all ingresses share a canary that passed so recently
LOST_STOP_S = 1.0
PACKAGES = ("torch", "transformers", "flashinfer-python", "triton")


class ReplicaServer:
    """Answers calls with one engine: create it, `start` it, call it, `stop` it.

    A hostile request gives a `Failure`, which is a value, and never a crash. The methods that take a `route` leave it
    to Serve's router in the calling process.
    """

    def __init__(
        self,
        args: AppArgs,
        replica: str,
        deployment: str = "Replica",
        *,
        host: str = "",
        peers: WeightsPeers | None = None,
    ) -> None:
        """
        Args:
            args: The configuration.
            replica: This replica's unique id.
            deployment: The deployment's name.
            host: The address of this host at which other hosts of the cluster reach it; empty for none.
            peers: Compares weights with the application's other replicas; None: there are none.
        """
        self._args = args
        self._host = host if args.router.link == "auto" else ""
        self._peers = peers
        self._replica = replica
        self._deployment = deployment
        self._metrics = ReplicaMetrics()
        self._guard = IsolationGuard()
        self._turn_load: Load | None = None
        self._utilization = Utilization(args.engine.max_running)
        self._links = LinkServer(replica, self, self._metrics.links)

    async def start(self, model: CausalLM | None = None) -> None:
        """Loads, checks, warms up and passes a first canary. Raises where the replica must not serve."""
        started = time.perf_counter()
        made = await asyncio.to_thread(run_apart, partial(make_engine, self._args, self._progress, model))
        self.engine, self._digest = made
        self.engine.start()
        self._card = self._make_card(self.engine)
        self._canary = Canary(self.engine, self._args.health.tolerance_nats)
        failure, seconds = await self._canary.run(timeout_s=max(60.0, self._args.health.timeout_s))
        self._progress("canary", seconds)
        if failure is not None:
            raise RuntimeError(f"The first canary failed: {failure}.")
        if self._peers is not None:
            configured = f"{self._args.model!r} {self._args.speculation!r}"
            await self._peers.join(configured, self._card.weights_digest)
        if self._args.router.link != "off":
            await self._links.start(self._host)
        self._progress("total", time.perf_counter() - started)

    async def drain(self, timeout_s: float) -> None:
        """Waits until the calls of links have ended, at most `timeout_s`. Serve waits for its own."""
        await self._links.drain(timeout_s)

    async def leave(self) -> None:
        """Leaves the replicas that compare weights."""
        if self._peers is not None:
            await self._peers.leave()

    def stop(self) -> None:
        """Closes links and stops the engine. A step thread that hangs gets little time: it ends with the process."""
        self._links.stop()
        self.engine.stop(LOST_STOP_S if self.engine.is_lost(self._args.health.step_timeout_s) else STOP_S)

    def _progress(self, stage: str, seconds: float) -> None:
        log.info("Start-up: %s took %.2f s.", stage, seconds)
        self._metrics.warmed_up(stage, seconds)

    def _make_card(self, engine: Engine) -> ModelCard:
        model = self._args.model
        return ModelCard(
            name=model.name,
            root=model.root,
            revision=model.revision,
            vocab_size=engine.model.vocab_size,
            max_model_len=engine.max_model_len,
            bos_token_id=engine.model.bos_token_id,
            eos_token_ids=engine.model.eos_token_ids,
            logprobs_mode=self._args.sampler.logprobs_mode,
            versions=package_versions(PACKAGES),
            head=engine.model.pooling_head,
            weights_digest=self._digest,
        )

    # Scoring.

    async def score(self, request: ScoreRequest, route: Route | None = None) -> ScoreResult | Failure:
        try:
            request = with_writable_arrays(request, ScoreRequest)
            with self._guard.admit(request):
                found = await self.engine.score(request)
        except EngineError as error:
            return self._failure(error)
        self._metrics.waited(found.queue_s)
        return found._replace(load=self.load())

    async def pooling(self, request: PoolingRequest, route: Route | None = None) -> PoolingResult | Failure:
        try:
            request = with_writable_arrays(request, PoolingRequest)
            with self._guard.admit(request):
                found = await self.engine.pooling(request)
        except EngineError as error:
            return self._failure(error)
        self._metrics.waited(found.queue_s)
        return found._replace(load=self.load())

    async def likelihood(self, request: LikelihoodRequest, route: Route | None = None) -> LikelihoodReply | Failure:
        try:
            request = with_writable_arrays(request, LikelihoodRequest)
            with self._guard.admit(request):
                found = await self.engine.likelihood(request)
        except EngineError as error:
            return self._failure(error)
        self._metrics.waited(found.queue_s)
        return _likelihood_reply(found)._replace(load=self.load())

    def begin_rows(self, request: RowsCall, deliver: Callable[[RowsReply], None]) -> RunningCall | Failure:
        """Starts a scoring request without a task of its own. Its reply, without a load, is given to `deliver`."""

        def replied(result: RowsResult | EngineError) -> None:
            if isinstance(result, EngineError):
                deliver(self._failure(result))
                return
            self._metrics.waited(result.queue_s)
            deliver(_likelihood_reply(result) if isinstance(result, LikelihoodResult) else result)

        try:
            lease = self._guard.admit(request)
            try:
                return self.engine.begin_rows(request, replied, lease.release)
            except BaseException:
                lease.release()
                raise
        except EngineError as error:
            return self._failure(error)

    async def score_batch(
        self, requests: tuple[RowsCall, ...], route: Route | None = None
    ) -> tuple[RowsReply | None, ...] | Failure:
        """Answers each request of a micro-batch as if it had come alone.

        Args:
            requests: 1 to MAX_MICRO_BATCH requests.
            route: For the router of the calling process.

        Returns:
            The replies in order, or one Failure for a call that is no micro-batch. If the queue has no room for one of
            the requests the replica takes none, so that no refusal waits until the others are computed. None then
            marks the requests that there was room for: they may be sent again. All replies carry the replica's load at
            the end, since some have waited for others. Cancelling the call cancels every request.
        """
        if (
            not isinstance(requests, tuple)
            or not 1 <= len(requests) <= MAX_MICRO_BATCH
            or not all(map(_rows, requests))
        ):
            message = f"`requests` must be 1 to {MAX_MICRO_BATCH} scoring requests."
            return Failure(ErrorCode.INVALID_VALUE, message, "requests")
        refused: Sequence[RowsReply | None] = self._refusals(requests)
        if any(refused):
            return tuple(refused)
        tasks = [asyncio.ensure_future(self._answer(request)) for request in requests]
        try:
            await asyncio.sleep(0)  # after which each is admitted or refused, since others came first
            refused = [task.result() if _is_refused(task) else None for task in tasks]
            if any(refused):
                return tuple(refused)
            replies = map(_reply, await asyncio.gather(*tasks, return_exceptions=True))
            now = self.load()
            return tuple(reply if reply.load is None else reply._replace(load=now) for reply in replies)
        finally:
            for task in tasks:
                task.cancel()

    def _answer(self, request: RowsCall) -> Awaitable[RowsReply]:
        match request:
            case ScoreRequest():
                return self.score(request)
            case PoolingRequest():
                return self.pooling(request)
            case LikelihoodRequest():
                return self.likelihood(request)

    def _refusals(self, requests: Sequence[RowsCall]) -> list[Failure | None]:
        """Returns a Failure for each request that the queue would refuse if they came now and in this order."""
        taken = self.engine.takes([_well_formed(request) for request in requests])
        full = EngineError(ErrorCode.OVERLOADED, "The queue is full.")
        return [None if took else self._failure(full) for took in taken]

    # Generation.

    async def generate(
        self, requests: GenerateCall, epoch: int = 0, route: Route | None = None
    ) -> GenerateReply | Failure:
        """Answers with one chunk a branch, in order of prompt and branch.

        A prompt that fails ends the others: their client gets an error in any case.
        """
        try:
            requests = self._admitted(requests)
            with self._guard.admit(requests):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._complete(q, request)) for q, request in enumerate(requests)]
        except EngineError as error:
            return self._failure(error)
        except BaseExceptionGroup as group_error:
            return self._failure(_first_engine_error(group_error))
        chunks = [chunk for task in tasks for chunk in task.result()]
        self._metrics.waited(min(item.chunk.queue_s for item in chunks if not isinstance(item.chunk, Failure)))
        return GenerateReply(tuple(chunks), epoch, self.load())

    def _admitted(self, requests: GenerateCall) -> GenerateCall:
        """Returns the requests once the engine has room for all of them: a part of an answer is worth nothing."""
        if not isinstance(requests, tuple) or not requests:
            raise EngineError(ErrorCode.INVALID_VALUE, "`requests` must be a tuple of GenerateRequests.", "request")
        requests = tuple(with_writable_arrays(request, GenerateRequest) for request in requests)
        first = requests[0]
        if len(requests) == 1 and first.prompt_logprobs is None and not first.prompt_only:
            return requests  # the engine checks it when it takes it
        self.engine.check_room(requests)
        return tuple(replace(request, already_admitted=True) for request in requests)

    async def _complete(self, prompt: int, request: GenerateRequest) -> list[PromptChunk]:
        scores = await self._prompt_scores(request)
        found = [] if scores is None else [PromptChunk(prompt, scores)]
        if not request.prompt_only:
            found += [PromptChunk(prompt, chunk) for chunk in await self.engine.complete(request)]
        return found

    async def _prompt_scores(self, request: GenerateRequest) -> PromptScores | None:
        """Returns the prompt's scores if they are wanted. The generation after it finds the prompt in the cache."""
        if request.prompt_logprobs is None:
            return None
        prompt_request = request.prompt_request()
        if prompt_request is None:
            return PromptScores.of_one_token()
        found = await self.engine.likelihood(prompt_request)
        if (found.status != RowStatus.OK).any():
            raise EngineError(ErrorCode.NONFINITE_LOGITS, "The model's output for this request was not finite.")
        return PromptScores(
            found.logprobs,
            found.ranks,
            found.top_ids,
            found.top_logprobs,
            found.chosen_logprobs,
            found.queue_s,
            found.compute_s,
        )

    async def stream(
        self, requests: GenerateCall, epoch: int = 0, route: Route | None = None
    ) -> AsyncIterator[GenerateReply | Failure]:
        """Yields what each step brought. While the consumer is busy, chunks are joined into one message.

        A failed prompt is a Failure among the chunks, and the others go on.
        """
        buffer = StreamBuffer()
        running = self.begin_stream(requests, buffer)
        if isinstance(running, Failure):
            yield running
            return
        try:
            async for chunks in buffer:
                yield GenerateReply(chunks, epoch, self.load())
        finally:  # also where the consumer has gone: nothing may go on computing
            running.cancel()

    def begin_stream(self, requests: GenerateCall, receiver: StreamReceiver) -> "_StreamedCall | Failure":
        """Starts a generation whose parts are given to `receiver` as they are made, without a task of its own.

        A failed prompt is a Failure among the parts, and the others go on.
        """
        try:
            requests = self._admitted(requests)
            running = _StreamedCall(receiver, self._guard.admit(requests), self._metrics, len(requests))
        except EngineError as error:
            return self._failure(error)
        try:
            for prompt, request in enumerate(requests):
                self._begin(prompt, request, running)
        except BaseException:
            running.cancel()
            raise
        return running

    def _begin(self, prompt: int, request: GenerateRequest, call: "_StreamedCall") -> None:
        """Starts a prompt's generation, with a task only where the prompt is scored."""
        if request.prompt_logprobs is not None or request.prompt_only:
            call.works.append(asyncio.create_task(self._pump(prompt, request, call)))
            return

        def deliver(result: GenerateChunk | EngineError) -> None:
            call.add(PromptChunk(prompt, self._failure(result) if isinstance(result, EngineError) else result))
            if running.over:
                call.close_one()

        try:
            running = self.engine.begin(request, deliver, call.receiver.token_sink, (call.receiver.number, prompt))
        except EngineError as error:
            call.add(PromptChunk(prompt, self._failure(error)))
            call.close_one()
            return
        call.works.append(running)

    async def _pump(self, prompt: int, request: GenerateRequest, call: "_StreamedCall") -> None:
        try:
            scores = await self._prompt_scores(request)
            if scores is not None:
                call.add(PromptChunk(prompt, scores))
            if request.prompt_only:
                return
            async with contextlib.aclosing(self.engine.generate(request)) as chunks:
                async for chunk in chunks:
                    call.add(PromptChunk(prompt, chunk))
        except EngineError as error:
            call.add(PromptChunk(prompt, self._failure(error)))
        except Exception:
            log.exception("A prompt of a stream raised.")
            call.add(PromptChunk(prompt, FAULT))
        finally:
            call.close_one()

    def _failure(self, error: EngineError) -> Failure:
        self._metrics.failed(error.code.value)
        load = self.engine.queue() if error.code is ErrorCode.OVERLOADED else None
        return Failure(error.code, error.message, error.field, load, error.admitted)

    def load(self) -> Load:
        """Returns the load as of this turn of the event loop: a step wakes all streams and links in one turn."""
        if self._turn_load is None:
            self._turn_load = self.engine.queue()
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._turn_load

    def _end_turn(self) -> None:
        self._turn_load = None

    # State.

    async def card(self) -> ModelCard:
        return self._card

    async def link_address(self) -> LinkAddress | None:
        """Returns where ingresses open links; None if there are none."""
        return self._links.address

    async def canary(self) -> CanaryReply:
        health = self._args.health
        if self._peers is not None and self._peers.refusal is not None:
            return CanaryReply(self._replica, "mismatch", 0.0)
        failure, seconds = await self._canary.shared(health.timeout_s, SHARED_CANARY * health.period_s)
        return CanaryReply(self._replica, failure, seconds)

    async def quarantine(self, entries: Entries) -> None:
        """Refuses the requests of these fingerprints from now on."""
        self._guard.quarantine.add(entries)

    def metric_families(self) -> tuple[Metric, ...]:
        return self._metrics.families(self.engine.stats(), self._card)

    async def collect(self) -> Snapshot:
        """Returns this process's metrics."""
        return await snapshot(self._deployment, self._replica, self.metric_families())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns what Serve records every few seconds while autoscaling is on."""
        return self._utilization.read(self.engine.stats())

    def check_health(self) -> None:
        """Raises if the engine is lost, its thread hangs, or an older replica has other weights.

        Serve then replaces this replica.
        """
        if self._peers is not None and self._peers.refusal is not None:
            raise self._peers.refusal
        if not self.engine.is_lost(self._args.health.step_timeout_s):
            return
        if not self.engine.healthy:
            raise RuntimeError("The engine is not healthy.")
        raise RuntimeError(f"The step thread has not turned for {self._args.health.step_timeout_s:g} s.")


class _StreamedCall:
    """Represents a streamed generation call: the work of each of its prompts."""

    def __init__(self, receiver: StreamReceiver, lease: IsolationLease, metrics: ReplicaMetrics, prompts: int) -> None:
        self.receiver = receiver
        self.works: list[RunningCall] = []
        self._lease = lease
        self._metrics = metrics
        self._open = prompts
        self._waited = False  # the time in the queue is noted
        self._cancelled = False

    def add(self, item: PromptChunk) -> None:
        """Gives a part to the receiver."""
        if not self._waited:
            self._waited = True
            if not isinstance(item.chunk, Failure):
                self._metrics.waited(item.chunk.queue_s)
        self._lease.received(item)
        if not self._cancelled:
            self.receiver.add(item)

    def close_one(self) -> None:
        """Notes the end of a prompt's work."""
        self._open -= 1
        if not self._open:
            self._lease.release()
            if not self._cancelled:
                self.receiver.end()

    def cancel(self) -> None:
        """Ends the work that is left."""
        self._cancelled = True
        for work in self.works:
            work.cancel()
        self._lease.release()


def _likelihood_reply(found: LikelihoodResult) -> LikelihoodReply:
    """Returns what responses need of a result, without a load."""
    return LikelihoodReply(
        found.logprobs,
        found.greedy,
        found.status,
        found.cached,
        found.queue_s,
        found.compute_s,
        Load(0, 0.0),
        found.head_s,
    )


def _rows(request: object) -> bool:
    return isinstance(request, RowsCall)


def _well_formed(request: RowsCall) -> RowsCall | None:
    """Returns the request, or None for one whose arrays have no cost: the engine says why when the request comes."""
    try:
        return with_writable_arrays(request, type(request))
    except EngineError:
        return None


def _is_refused(task: "asyncio.Future[RowsReply]") -> bool:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return False
    reply = task.result()
    return isinstance(reply, Failure) and reply.code is ErrorCode.OVERLOADED


def _reply(reply: RowsReply | BaseException) -> RowsReply:
    """Returns a Failure for a request that raised, which is a fault of ours: it is sent again alone."""
    if not isinstance(reply, BaseException):
        return reply
    log.error("A request of a micro-batch raised.", exc_info=reply)
    return FAULT


def _first_engine_error(group: BaseExceptionGroup[BaseException]) -> EngineError:
    """Returns the EngineError of a task group. Anything else in the group is a fault of ours and is raised."""
    errors = [error for error in group.exceptions if isinstance(error, EngineError)]
    if not errors or len(errors) < len(group.exceptions):
        raise group
    return min(errors, key=lambda error: error.code is ErrorCode.OVERLOADED)
