"""Engine: jobs in from asyncio, steps on one thread (`engine.core`), results back to asyncio.

Everything that an engine says of itself, gathered from its parts at one moment.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any

from engine.channels import Outbox, Receiver
from engine.config import EngineConfig
from engine.core import Flight, StepThread
from engine.kv_cache.manager import KVCacheManager
from engine.metrics import Counters, Counts, EngineStats, Queue, Throughput
from engine.model.interface import CausalLM
from engine.model.startup_progress import StartupProgress
from engine.model_runner import Launcher
from engine.output_processor import GenerationResults, ScoreResults
from engine.request_cost import request_cost
from engine.request_validation import RequestLimits, check_generate, check_likelihood, check_score
from engine.requests import (
    EngineError,
    EngineRequest,
    ErrorCode,
    GenerateChunk,
    GenerateRequest,
    Int32s,
    LikelihoodRequest,
    LikelihoodResult,
    ScoreRequest,
    ScoreResult,
)
from engine.sampler_interface import RowSampler, make_sampler
from engine.scheduler.request_state import (
    Generation,
    RequestTable,
    Scoring,
    generation,
    item_ends,
    likelihood,
    scoring,
)
from engine.scheduler.request_tracker import Callers, Works
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step import Step
from engine.scheduler.token_stream import Chunks
from engine.spec_decode.verify import make_proposer
from engine.utils.cpu import yields
from engine.warmup.background_compile import background_compile_for
from gpu_sampler.sampling_params import SamplingLimits


def engine_stats(
    counters: Counters,
    model: CausalLM,
    pool: KVCacheManager,
    works: Works,
    table: RequestTable,
    scheduler: Scheduler,
    *,
    hand_overs: int,
    sampler: Any,
    heartbeat_age_s: float,
    healthy: bool,
    draining: bool,
) -> EngineStats:
    """Read by any thread while the step thread goes on: figures of one moment need not add up."""
    alive = list(works.alive.values())
    return EngineStats(
        steps=dict(counters.steps),
        step_tokens=dict(counters.step_tokens),
        step_seconds=dict(counters.step_seconds),
        step_rows=dict(counters.step_rows),
        steps_by_seconds=_frozen(counters.by_seconds),
        steps_by_tokens=_frozen(counters.by_tokens),
        steps_by_rows=_frozen(counters.by_rows),
        plans=counters.plans,
        plan_seconds=counters.plan_seconds,
        head_seconds=counters.head_seconds,
        graph_replays=model.graph_replays,
        failed_steps=counters.failed_steps,
        hand_overs=hand_overs,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        computed_tokens=sum(counters.step_tokens.values()),
        generated_tokens=counters.generated_tokens,
        wasted_tokens=counters.wasted_tokens,
        padding_tokens=model.padded_tokens,
        queued_tokens=works.queued_tokens,
        queued_requests=sum(work.started is None for work in alive),
        live_requests=len(alive),
        live_rows=table.live,
        kv_slots_used=pool.used,
        kv_slots_cached=pool.prefix_cache.size,
        kv_slots_free=pool.allocator.num_free,
        tree_locks=pool.prefix_cache.locks,
        evictions=pool.prefix_cache.evicted,
        preemptions=scheduler.rows.preemptions,
        nonfinite_rows=counters.nonfinite_rows,
        drafts=counters.drafts,
        drafts_reached=tuple(counters.drafts_reached),
        drafts_accepted=tuple(counters.drafts_accepted),
        drafted_tokens=counters.drafted_tokens,
        drafts_missing_q=counters.drafts_missing_q,
        draft_seconds=counters.draft_seconds,
        verify_seconds=counters.verify_seconds,
        heartbeat_age_s=heartbeat_age_s,
        tokens_per_s=counters.tokens_per_s,
        drain_per_s=counters.throughput.tokens_per_s,
        sampler=sampler,
        healthy=healthy,
        draining=draining,
    )


def _frozen(counts: dict[str, list[int]]) -> dict[str, Counts]:
    return {kind: tuple(found) for kind, found in counts.items()}


log = logging.getLogger(__name__)

WHOLE = 1 << 62  # tokens a chunk: one chunk a branch


class Engine:
    """Made, `start`ed, asked through `score`, `likelihood`, `generate` and `complete` from any event loop, then
    `stop`ped."""

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        sampler: RowSampler | None = None,
        *,
        limits: SamplingLimits | None = None,
        draft: CausalLM | None = None,
        overlap: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[Step], None] | None = None,
    ) -> None:
        """`sampler` None: the real one as the configuration says. `overlap` None: on CUDA only; never with speculation,
        because what a verify step accepts decides the next one. `before_step` is called by the step thread before each
        launch."""
        self.model = model
        self.config = config
        self.max_model_len = min(model.max_model_len, model.num_slots - 1)
        limits = SamplingLimits() if limits is None else limits
        self.sampler = make_sampler(model, config, limits) if sampler is None else sampler
        self._bounds = RequestLimits(model.vocab_size, self.max_model_len, model.num_slots - 1, limits)
        self._clock = clock
        self.table = RequestTable(
            config.max_running, self.max_model_len, model.vocab_size, model.device, twin=draft is not None
        )
        self._proposer = make_proposer(config.speculation, draft, self.table, self.sampler)
        self.pool = KVCacheManager(model.num_slots, _forgetting(model, draft))
        self.scheduler = Scheduler(
            config, self.pool, self.table, self.sampler, self.max_model_len, model.vocab_size, model.max_targets
        )
        self._counters = Counters(throughput=Throughput(config.costs.decode_token_cost))
        self._outbox = Outbox()
        chunks = Chunks(self.table, self._outbox)
        self.works = Works(config, self.scheduler, self.pool, self.table, chunks, self._outbox, self._counters, clock)
        flight = Flight(
            model,
            Launcher(model, self.sampler, self.table, config.speculation, self._proposer),
            self.scheduler,
            self.pool,
            self.works,
            GenerationResults(self.table, self.scheduler, chunks, self._counters, self.works.fail, self.works.end),
            ScoreResults(self.scheduler.score_steps, self._outbox, self._counters, self.works.end),
            self._counters,
            clock,
            before_step,
            self.check,
        )
        speculates = config.speculation.method != "none"
        self._steps = StepThread(
            model.device,
            self.scheduler,
            self.works,
            flight,
            self._outbox,
            self._counters,
            clock,
            overlap=not speculates and (model.device.type == "cuda" if overlap is None else overlap),
            waits=speculates and model.device.type == "cuda",
            yields=yields(config, model.device.type),
        )
        self._silent: float | None = None  # the heartbeat after which nothing came
        self._callers = Callers()
        self._draining = False

    # Life.

    def warm_up(self, progress: StartupProgress) -> None:
        """Compiles and captures, so that no request waits for it. `progress` is given each part as it is done."""
        with background_compile_for(self.model, self.config) as ahead:
            self.model.warm_up(progress)
            ahead.wait(progress)
        if self.model.device.type == "cuda":
            config = self.config.speculation
            self.sampler.warm_up(
                self.config.max_running,
                lambda line: progress(line, 0.0),
                drafts=0 if self._proposer is None else config.num_speculative_tokens,
                rules=config.rules,
                dtype=self.model.dtype,
            )
        if self._proposer is not None:
            self._proposer.warm_up(progress)  # captures what the sampler launches: after it

    def start(self) -> None:
        self.scheduler.small_loads.largest = self.model.prefill_graph_limit  # known once it was warmed up
        self._steps.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Fails what is left and ends the step thread. RuntimeError if it does not end in time."""
        self._steps.stop(timeout_s)

    @property
    def healthy(self) -> bool:
        """False for good after a device error or a fault of the loop itself."""
        return self._steps.healthy

    def is_lost(self, stall_s: float) -> bool:
        """Whether it has ended, or has not turned for `stall_s` seconds; it turns several times a second without work,
        too. Whoever still waits for it is answered, and nobody is taken on until it turns again."""
        beat = self._steps.heartbeat
        if self.healthy and self._clock() - beat <= stall_s:
            return False
        self._silent = beat
        answered = self._callers.answer()
        if answered:
            log.error("The step thread is lost: %d callers were answered without it.", answered)
        return True

    async def drain(self, deadline_s: float) -> list[GenerateRequest]:
        """Accepts no more jobs and waits for the others up to `deadline_s`. What is left then ends with DRAINING;
        generations are returned as jobs that another engine continues exactly where they are."""
        self._draining = True
        end = self._clock() + deadline_s
        await self._steps.passed()
        while self.works.alive and self._clock() < end and self.healthy:
            await asyncio.sleep(min(0.01, deadline_s))
        jobs: list[GenerateRequest] = []
        error = EngineError(ErrorCode.DRAINING, "The replica is shutting down.")
        self._steps.inbox.post(lambda: jobs.extend(self._steps.abandon_all(error)))
        await self._steps.passed()
        return jobs

    # The asyncio face.

    def check_room(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises EngineError unless the engine would take all of the requests now.

        A caller that submits them as `already_admitted` afterwards has none refused once the others have cost
        something.
        """
        for request in requests:
            check_generate(request, self._bounds, new_tokens=0 if request.prompt_only else 1)
        self._check_open()
        if cost := sum(self._cost(request) for request in requests if not request.already_admitted):
            self.works.check_room(cost)

    def takes(self, requests: Sequence[ScoreRequest | LikelihoodRequest | None]) -> list[bool]:
        """Returns which of the requests the queue would take if they came now and in this order. None costs nothing."""
        return self.works.takes([0 if request is None else self._cost(request) for request in requests])

    def _cost(self, request: EngineRequest) -> int:
        return request_cost(request, self.config.costs)

    def queue(self) -> Queue:
        return Queue(self.works.queued_tokens, self._counters.throughput.tokens_per_s, self.works.most_queued)

    async def score(self, job: ScoreRequest) -> ScoreResult:
        """Raises EngineError. Cancelling the caller cancels the job."""
        ends = item_ends(check_score(job, self._bounds))
        cost = self._cost(job)
        accepted = self._accept(job, cost)
        domain = self._domain("score", job.cache_salt)
        work = scoring(job, ends, Receiver(asyncio.get_running_loop()), *accepted, domain, cost)
        result = await self._ask(work)
        if isinstance(result, ScoreResult):
            return result
        raise _error(result)

    async def likelihood(self, job: LikelihoodRequest) -> LikelihoodResult:
        """Raises EngineError. Cancelling the caller cancels the job."""
        check_likelihood(job, self._bounds)
        cost = self._cost(job)
        accepted = self._accept(job, cost)
        domain = self._domain("generate" if job.keep else "score", job.cache_salt)
        result = await self._ask(likelihood(job, Receiver(asyncio.get_running_loop()), *accepted, domain, cost))
        if isinstance(result, LikelihoodResult):
            return result
        raise _error(result)

    async def _ask(self, work: Scoring) -> object:
        self._steps.inbox.post(lambda: self.works.enter(work))
        self._callers.enter(work)
        try:
            return await work.receiver.get()
        finally:
            self._callers.leave(work)
            self._forget_later(work)

    def generate(self, job: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Yields new tokens of all branches as they come: a chunk holds `stream_interval` tokens of a branch or more.

        Closing the iterator cancels the request. Raises EngineError."""
        return self._chunks(job, job.stream_interval)

    async def complete(self, job: GenerateRequest) -> list[GenerateChunk]:
        """One chunk a branch, in order, once all have ended: far less work per token than `generate`."""
        async with aclosing(self._chunks(job, WHOLE)) as stream:
            chunks = [chunk async for chunk in stream]
        return sorted(chunks, key=lambda chunk: chunk.branch)

    async def _chunks(self, job: GenerateRequest, every: int) -> AsyncGenerator[GenerateChunk, None]:
        check_generate(job, self._bounds)
        work = self._admit_generation(job, Receiver(asyncio.get_running_loop()), every)
        self._callers.enter(work)
        left = job.params.n
        try:
            while left:
                result = await work.receiver.get()
                if not isinstance(result, GenerateChunk):
                    raise _error(result)
                left -= result.finish is not None
                yield result
        finally:
            self._callers.leave(work)
            self._forget_later(work)

    def _forget_later(self, work: Generation | Scoring) -> None:
        if not work.closed:
            self._steps.inbox.post(lambda: self.works.close(work))

    # Submission, in the caller's thread.

    def _admit_generation(self, job: GenerateRequest, receiver: Receiver, every: int) -> Generation:
        cost = self._cost(job)
        accepted = self._accept(job, cost)
        work = generation(job, receiver, *accepted, self._domain("generate", job.cache_salt), every, cost)
        self._steps.inbox.post(lambda: self.works.enter(work))
        return work

    def _accept(self, job: EngineRequest, cost: int) -> tuple[int, float, float]:
        """Arrival number, time and deadline, if the queue takes `cost` more tokens. An empty queue takes any job."""
        self._check_open()
        arrival = self.works.arrive(cost, already_admitted=job.already_admitted)
        now = self._clock()
        return arrival, now, now + job.timeout_s

    def _check_open(self) -> None:
        if self._draining:
            raise EngineError(ErrorCode.DRAINING, "The replica is shutting down.")
        if not self.healthy or self._steps.heartbeat == self._silent:
            raise EngineError(ErrorCode.NOT_READY, "The engine is not running.")

    def _domain(self, kind: str, salt: str) -> Hashable:
        """Without a prefix cache every job is a domain of its own: its branches and items still share."""
        return (kind, salt) if self.config.prefix_cache else object()

    # Figures.

    def check(self) -> None:
        """RuntimeError where the account of slots does not add up. Only between steps, on the step thread or after
        `stop`."""
        self.pool.check(self.works.slots_owned())

    def stats(self) -> EngineStats:
        return engine_stats(
            self._counters,
            self.model,
            self.pool,
            self.works,
            self.table,
            self.scheduler,
            hand_overs=self._outbox.hand_overs,
            sampler=self.sampler.stats(),
            heartbeat_age_s=self._clock() - self._steps.heartbeat,
            healthy=self.healthy,
            draining=self._draining,
        )


def _forgetting(*models: CausalLM | None) -> Callable[[Int32s], None] | None:
    """Tells the models that ask for it, which only a test's do, of pool slots that became free."""
    told = [model.forget for model in models if model is not None and hasattr(model, "forget")]

    def forget(slots: Int32s) -> None:
        for one in told:
            one(slots)

    return forget if told else None


def _error(result: object) -> EngineError:
    """What an accepted job was answered with."""
    if isinstance(result, EngineError):
        result.admitted = True
        return result
    raise TypeError(f"a job was answered with a {type(result).__name__}")
