"""Engine: the async interface of one model: requests in from any event loop, results back to it.

The engine checks and admits requests in the caller's thread; `engine.core` computes them on the step thread.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any

from engine.channels import Result, ResultCallback, ResultQueue, TokenSink
from engine.config import EngineConfig
from engine.core import EngineCore, LoopOptions
from engine.metrics import EngineStats
from engine.model.heads.info import HeadInfo
from engine.model.interface import CausalLM
from engine.model_runner import make_sampler
from engine.request_cost import request_cost
from engine.request_validation import RequestLimits, check_generate, check_likelihood, check_pooling, check_score
from engine.requests import (
    EngineError,
    EngineRequest,
    ErrorCode,
    GenerateChunk,
    GenerateRequest,
    LikelihoodRequest,
    LikelihoodResult,
    Load,
    PoolingRequest,
    PoolingResult,
    RowsRequest,
    ScoreRequest,
    ScoreResult,
    TenantTokens,
)
from engine.scheduler.request_state import (
    GenerationState,
    LabelScoreState,
    LikelihoodState,
    PoolingState,
    ScoringState,
    Submission,
    item_ends,
)
from engine.scheduler.request_tracker import lost
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingLimits
from gpu_sampler.startup_progress import StartupProgress

log = logging.getLogger(__name__)

NO_WORK = TenantTokens("", 0, 0)
RowsResult = ScoreResult | PoolingResult | LikelihoodResult
ONE_CHUNK = 1 << 62  # tokens a chunk: one chunk a branch


class Engine:
    """Serves `score`, `likelihood`, `generate` and `complete`, or `pooling`, between `start` and `stop`.

    A language model serves the first four. A model with a pooling head serves the last one alone.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        sampler: Sampler | None = None,
        *,
        limits: SamplingLimits | None = None,
        draft: CausalLM | None = None,
        options: LoopOptions | None = None,
    ) -> None:
        """Makes an engine that is not started.

        Args:
            model: the model.
            config: the engine's configuration.
            sampler: None: one as the configuration says.
            limits: bounds of sampling parameters; None: the defaults.
            draft: the draft model of speculation, if there is one.
            options: how the step loop runs; None: the defaults.
        """
        options = LoopOptions() if options is None else options
        limits = SamplingLimits() if limits is None else limits
        self.model = model
        self.config = config
        self.sampler = make_sampler(model, config, limits) if sampler is None else sampler
        self.core = EngineCore(model, config, self.sampler, draft, options)
        self.max_model_len = self.core.table.max_len
        self._bounds = RequestLimits(model.vocab_size, self.max_model_len, model.num_slots - 1, limits)
        self._clock = options.clock
        self._silent: float | None = None  # the heartbeat after which none came
        self._draining = False

    # Life.

    def warm_up(self, progress: StartupProgress, *, complete: bool = False) -> None:
        """Compiles and captures, so that no request waits for it.

        Args:
            progress: is given each part as it is done.
            complete: leaves nothing for later. Otherwise the step thread captures the less common sizes of CUDA graphs
                when it has nothing else to do, and shares contexts once the kernels for that are compiled.
        """
        self.core.runner.warm_up(progress)
        if complete:
            self.core.runner.complete(progress)

    def start(self) -> None:
        """Starts the step thread, also again after `stop`.

        On a CPU other threads that have computed with torch should have ended: see `engine.utils.cpu.run_apart`.
        """
        self.core.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Fails what is left and ends the step thread.

        Raises:
            RuntimeError: the thread does not end in time.
        """
        self.core.stop(timeout_s)

    @property
    def healthy(self) -> bool:
        """Tells whether the step thread runs. It is false for ever after a device error or a fault of the loop."""
        return self.core.healthy

    def is_lost(self, stall_s: float) -> bool:
        """Tells whether the step thread has ended, or has begun no round for `stall_s` seconds.

        If so, every waiting caller is answered, and no request is taken until a round begins.
        """
        beat = self.core.heartbeat
        if self.healthy and self._clock() - beat <= stall_s:
            return False
        self._silent = beat
        answered = self.core.tracker.answer_callers()
        if answered:
            log.error("The step thread is lost: %d callers were answered without it.", answered)
        return True

    async def drain(self, deadline_s: float) -> list[GenerateRequest]:
        """Accepts no more requests and waits for the others up to `deadline_s`. The rest then ends with DRAINING.

        Returns:
            The generations that were left, as requests that another engine continues exactly where they are.
        """
        self._draining = True
        end = self._clock() + deadline_s
        await self.core.passed()
        while self.core.tracker.live and self._clock() < end and self.healthy:
            await asyncio.sleep(min(0.01, deadline_s))
        left: list[GenerateRequest] = []
        error = EngineError(ErrorCode.DRAINING, "The replica is shutting down.")
        self.core.calls.post(lambda: left.extend(self.core.abandon_all(error)))
        await self.core.passed()
        return left

    # Requests, in the caller's thread.

    def check_room(self, requests: Sequence[GenerateRequest]) -> None:
        """Checks that the engine would take all of the requests now.

        They are of one tenant and priority. A caller that submits them as `already_admitted` afterwards has none
        refused once the others have cost something.

        Raises:
            EngineError: one of the requests is invalid, or the queue is full.
        """
        self._check_language_model()
        for request in requests:
            check_generate(request, self._bounds, new_tokens=0 if request.prompt_only else 1)
        self._check_open()
        fresh = [self._work(request) for request in requests if not request.already_admitted]
        if cost := sum(work.tokens for work in fresh):
            self.core.tracker.check_room(fresh[0]._replace(tokens=cost))

    def takes(self, requests: Sequence[RowsRequest | None]) -> list[bool]:
        """Tells which requests the queue would take, if they came now and in this order. None costs nothing."""
        return self.core.tracker.takes(NO_WORK if request is None else self._work(request) for request in requests)

    def _work(self, request: EngineRequest) -> TenantTokens:
        return TenantTokens(request.tenant, request.priority, request_cost(request, self.config.costs))

    def queue(self) -> Load:
        """Returns how much waits and whose it is, how fast it is worked off, and how much may wait."""
        return self.core.tracker.load()

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Scores labels after each row. Cancelling the caller cancels the request.

        Raises:
            EngineError: the request is invalid, was refused, or failed.
        """
        result = await self._result(self._score_state(request))
        if isinstance(result, ScoreResult):
            return result
        raise _error(result)

    async def likelihood(self, request: LikelihoodRequest) -> LikelihoodResult:
        """Computes the log-probabilities of given tokens. Cancelling the caller cancels the request.

        Raises:
            EngineError: the request is invalid, was refused, or failed.
        """
        result = await self._result(self._likelihood_state(request))
        if isinstance(result, LikelihoodResult):
            return result
        raise _error(result)

    async def pooling(self, request: PoolingRequest) -> PoolingResult:
        """Computes what the model's pooling head answers for each row. Cancelling the caller cancels the request.

        Raises:
            EngineError: the request is invalid, was refused, or failed.
        """
        result = await self._result(self._pooling_state(request))
        if isinstance(result, PoolingResult):
            return result
        raise _error(result)

    def begin_rows(
        self,
        request: ScoreRequest | PoolingRequest | LikelihoodRequest,
        deliver: Callable[[RowsResult | EngineError], None],
        ended: Callable[[], None],
    ) -> "RunningRequest":
        """Starts a scoring request, whose result is delivered on the running event loop, without a task that waits.

        Args:
            request: the request.
            deliver: gets what `score`, `pooling` or `likelihood` would return or raise.
            ended: is called once the request has ended, before its result is delivered, or was cancelled.

        Raises:
            EngineError: the request is invalid, or was refused.
        """
        results = ResultCallback(asyncio.get_running_loop(), None, (0, 0))
        state: ScoringState
        match request:
            case ScoreRequest():
                state = self._score_state(request, results)
            case PoolingRequest():
                state = self._pooling_state(request, results)
            case LikelihoodRequest():
                state = self._likelihood_state(request, results)
        running = RunningRequest(state, self._leave, deliver, 1, ended)
        results.deliver = running.take
        self._enter(state)
        return running

    def _score_state(self, request: ScoreRequest, results: ResultQueue | None = None) -> ScoringState:
        self._check_language_model()
        ends = item_ends(check_score(request, self._bounds))
        return LabelScoreState(request=request, ends=ends, **self._submit(request, "score", results))

    def _likelihood_state(self, request: LikelihoodRequest, results: ResultQueue | None = None) -> ScoringState:
        self._check_language_model()
        check_likelihood(request, self._bounds)
        return LikelihoodState(
            request=request, **self._submit(request, "generate" if request.keep else "score", results)
        )

    def _pooling_state(self, request: PoolingRequest, results: ResultQueue | None = None) -> ScoringState:
        head = self._pooling_head()
        ends = item_ends(check_pooling(request, self._bounds, head.task, whole_rows=head.whole_rows))
        return PoolingState(request=request, ends=ends, width=head.width, **self._submit(request, "score", results))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Yields new tokens of all branches as they come, in chunks of at least `stream_interval` tokens of a branch.

        Closing the iterator cancels the request.

        Raises:
            EngineError: the request is invalid, was refused, or failed.
        """
        return self._chunks(request, request.stream_interval)

    def begin(
        self,
        request: GenerateRequest,
        deliver: Callable[[GenerateChunk | EngineError], None],
        token_sink: TokenSink | None = None,
        stream: tuple[int, int] = (0, 0),
    ) -> "RunningRequest":
        """Starts a generation, whose results are delivered on the running event loop.

        Args:
            request: the request.
            deliver: gets what `generate` would yield or raise.
            token_sink: gets the single tokens that end nothing, with those of its other streams, which cost less than
                chunks; also for a moment after `cancel`. None: `deliver` gets these too.
            stream: names the generation for `token_sink`; 32-bit integers.

        Raises:
            EngineError: the request is invalid, or was refused.
        """
        self._check_language_model()
        check_generate(request, self._bounds)
        results = ResultCallback(asyncio.get_running_loop(), token_sink, stream)
        submission = self._submit(request, "generate", results)
        state = GenerationState(request=request, stream_interval=request.stream_interval, **submission)
        running = RunningRequest(state, self._leave, deliver, request.params.n)
        results.deliver = running.take
        self._enter(state)
        return running

    async def complete(self, request: GenerateRequest) -> list[GenerateChunk]:
        """Returns one chunk a branch, in order, once all have ended: far less work per token than `generate`."""
        async with aclosing(self._chunks(request, ONE_CHUNK)) as stream:
            chunks = [chunk async for chunk in stream]
        return sorted(chunks, key=lambda chunk: chunk.branch)

    async def _result(self, state: ScoringState) -> object:
        results = _queue_of(state)
        self._enter(state)
        try:
            return await results.get()
        finally:
            self._leave(state)

    async def _chunks(self, request: GenerateRequest, stream_interval: int) -> AsyncGenerator[GenerateChunk, None]:
        self._check_language_model()
        check_generate(request, self._bounds)
        submission = self._submit(request, "generate")
        state = GenerationState(request=request, stream_interval=stream_interval, **submission)
        results = _queue_of(state)
        self._enter(state)
        left = request.params.n
        try:
            while left:
                result = await results.get()
                if not isinstance(result, GenerateChunk):
                    raise _error(result)
                left -= result.finish is not None
                yield result
        finally:
            self._leave(state)

    def _enter(self, state: GenerationState | ScoringState) -> None:
        """Sends a request to the step thread."""
        self.core.calls.post_with_others(lambda: self.core.tracker.add(state), state.results.loop)
        self.core.tracker.callers[state.arrival] = state
        if not self.healthy:  # it has ended since the request was checked, and may have taken its last calls
            state.results.loop.call_soon(state.results.put, lost(state))

    def _leave(self, state: GenerationState | ScoringState) -> None:
        """Notes that the caller waits no more, and cancels a request that has not ended."""
        del self.core.tracker.callers[state.arrival]
        if not state.closed:
            self._cancel(state)

    def _cancel(self, state: GenerationState | ScoringState) -> None:
        self.core.calls.post(lambda: self.core.tracker.close(state))

    def _submit(self, request: EngineRequest, tree: str, results: ResultQueue | None = None) -> Submission:
        """Counts a request into the queue; `tree`: which prefix tree it shares. Results go to `results` if given.

        Without a prefix cache every request is a domain of its own: its branches and items still share.
        """
        self._check_open()
        domain: Hashable = (tree, request.cache_salt) if self.config.prefix_cache else object()
        work = self._work(request)
        arrival = self.core.tracker.admit(work, already_admitted=request.already_admitted)
        now = self._clock()
        return Submission(
            results=ResultQueue(asyncio.get_running_loop()) if results is None else results,
            arrival=arrival,
            submitted=now,
            deadline=now + request.timeout_s,
            domain=domain,
            queued=work.tokens,
        )

    def _check_language_model(self) -> None:
        if (head := self.model.pooling_head) is not None:
            message = f"`request` must be a PoolingRequest, since the model has a {head.kind} head. Given: another one."
            raise EngineError(ErrorCode.INVALID_VALUE, message, "request")

    def _pooling_head(self) -> HeadInfo:
        if (head := self.model.pooling_head) is None:
            message = "`request` must not be a PoolingRequest, since the model has a language-model head. Given: one."
            raise EngineError(ErrorCode.INVALID_VALUE, message, "request")
        return head

    def _check_open(self) -> None:
        if self._draining:
            raise EngineError(ErrorCode.DRAINING, "The replica is shutting down.")
        if not self.healthy or self.core.heartbeat == self._silent:
            raise EngineError(ErrorCode.NOT_READY, "The engine is not running.")

    # Figures.

    def check(self) -> None:
        """Raises RuntimeError unless the account of pool slots adds up; on the step thread, or after `stop`."""
        self.core.check()

    def stats(self) -> EngineStats:
        """Returns the engine's figures."""
        return self.core.stats(draining=self._draining)


class RunningRequest:
    """Represents a request that `Engine.begin` or `Engine.begin_rows` started."""

    def __init__(
        self,
        state: GenerationState | ScoringState,
        leave: Callable[[GenerationState | ScoringState], None],
        deliver: Callable[[Any], None],
        answers: int,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """`answers`: results that end something: one of each branch, or one of all rows."""
        self._state: GenerationState | ScoringState | None = state
        self._leave = leave
        self._deliver = deliver
        self._left = answers
        self._ended = ended

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self._state is None

    def take(self, result: Result) -> None:
        """Takes a result from the step thread, on the event loop."""
        if self.over:
            return
        if isinstance(result, EngineError):
            result = _error(result)
            self._left = 0
        else:
            self._left -= not isinstance(result, GenerateChunk) or result.finish is not None
        deliver = self._deliver
        if not self._left:
            self.cancel()
        deliver(result)

    def cancel(self) -> None:
        """Ends the request. Does nothing once it has ended."""
        if (state := self._state) is not None:
            self._state = None
            del self._deliver  # both lead here: a cycle would wait for the garbage collector
            self._leave(state)
            if self._ended is not None:
                self._ended()


def _queue_of(state: GenerationState | ScoringState) -> ResultQueue:
    """Returns the queue that a caller of this module waits at."""
    if not isinstance(state.results, ResultQueue):
        raise TypeError(f"{type(state.results).__name__} is no queue.")
    return state.results


def _error(result: object) -> EngineError:
    """Returns the error that an accepted request was answered with."""
    if isinstance(result, EngineError):
        result.admitted = True
        return result
    raise TypeError(f"a request was answered with a {type(result).__name__}")
