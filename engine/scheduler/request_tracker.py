"""RequestTracker: every request from its admission to its end: the account of queued tokens, deadlines, and callers."""

import contextlib
import heapq
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from engine.batch.input_batch import StepKind
from engine.channels import Result, ResultDispatcher
from engine.config import EngineConfig
from engine.metrics import StepRecorder
from engine.request_cost import TenantQueues
from engine.requests import (
    EngineError,
    ErrorCode,
    FinishReason,
    GenerateRequest,
    LikelihoodRequest,
    Load,
    RowsRequest,
    TenantTokens,
)
from engine.scheduler.request_state import GenerationState, Phase, RequestState, ScoringState, SequenceState
from engine.scheduler.scheduler import Scheduler, Step
from engine.scheduler.token_stream import TokenStream

MAX_QUEUE_S = 8.0  # a tenant that waits longer gets no more in: its last request would wait too long
MAX_STALE_DEADLINES = 256
UNKNOWN_QUEUE = 262_144  # tokens, while the rate is unknown
REPORTED_QUEUES = 8  # of tenants, in each report


class RequestTracker:
    """Tracks the live requests.

    Callers' threads use the methods of the first part; the step thread alone uses the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        stream: TokenStream,
        results: ResultDispatcher,
        recorder: StepRecorder,
        clock: Callable[[], float],
    ) -> None:
        self.live: dict[int, GenerationState | ScoringState] = {}  # by arrival
        self.callers: dict[int, RequestState] = {}  # requests whose callers wait, by arrival
        self._config = config
        self._scheduler = scheduler
        self._stream = stream
        self._results = results
        self._recorder = recorder
        self._clock = clock
        self._deadlines: list[tuple[float, int]] = []  # a heap of deadlines and arrivals
        self._queue_lock = threading.Lock()
        self._queues = TenantQueues()
        self._arrivals = 0

    # Callers' threads.

    @property
    def queued_tokens(self) -> int:
        """Returns the tokens that wait, of all tenants."""
        return int(self._queues.total)

    @property
    def max_queued_tokens(self) -> int:
        """Returns the tokens that may be served before the end of a new request: at least as many as a step takes.

        Tenants are served in equal shares, so T tenants may have at most 1 + 1/2 + .. + 1/T times as many waiting.
        """
        if self._config.max_queued_tokens is not None:
            return self._config.max_queued_tokens
        rate = self._recorder.throughput.tokens_per_s
        return max(self._config.token_budget, int(MAX_QUEUE_S * rate)) if rate else UNKNOWN_QUEUE

    def load(self) -> Load:
        """Returns how much waits and whose it is, how fast it is worked off, and how much may wait."""
        with self._queue_lock:
            total, count = self.queued_tokens, len(self._queues)
            largest = self._queues.largest(REPORTED_QUEUES)
        rate = self._recorder.throughput.tokens_per_s
        return Load(total, rate, self.max_queued_tokens, largest, count - len(largest))

    def check_room(self, work: TenantTokens) -> None:
        """Checks that the queue takes a request's tokens. An empty queue takes any request.

        Raises:
            EngineError: OVERLOADED, its tenant has too much before it.
        """
        with self._queue_lock:
            self._check_room(work)

    def _check_room(self, work: TenantTokens) -> None:
        if not self._has_room(self._queues, work):
            raise EngineError(ErrorCode.OVERLOADED, "The queue is full.")

    def _has_room(self, queues: TenantQueues, work: TenantTokens) -> bool:
        limit = self.max_queued_tokens
        if queues.total + work.tokens <= limit:
            return True  # whatever is before it: a queue that is not full keeps no order
        before = queues.before(*work)
        return not before or before + work.tokens <= limit

    def takes(self, works: Iterable[TenantTokens]) -> list[bool]:
        """Tells which requests would be taken if they came now and in this order."""
        taken = list[bool]()
        with self._queue_lock:
            queues = self._queues.copy()
        for work in works:
            taken.append(self._has_room(queues, work))
            if taken[-1]:
                queues.add(*work)
        return taken

    def admit(self, work: TenantTokens, *, already_admitted: bool) -> int:
        """Counts a request's tokens into the queue and returns its arrival number.

        A request that is `already_admitted` was counted before, so the bound is not for it.

        Raises:
            EngineError: OVERLOADED, its tenant has too much before it.
        """
        with self._queue_lock:
            if not already_admitted:
                self._check_room(work)
            self._queues.add(*work)
            self._arrivals += 1
            return self._arrivals

    def answer_callers(self) -> int:
        """Tells every waiting caller that the engine is lost, and returns how many there were.

        Any thread may call it. If the step thread runs on after all, such a request ends as if its caller had left.
        """
        waiting = list(self.callers.values())
        for state in waiting:
            with contextlib.suppress(RuntimeError):  # a loop that is closed: its readers are gone with it
                state.results.loop.call_soon_threadsafe(state.results.put, lost(state))
        return len(waiting)

    # The step thread.

    def add(self, state: GenerationState | ScoringState) -> None:
        """Takes a request in. A branch that had all its tokens before (a resumed stream) ends here."""
        self.live[state.arrival] = state
        self._scheduler.tenants.enter(state.tenant, self._clock())
        self._recorder.prompt_tokens += _prompt_tokens(state.request)
        if state.deadline < math.inf:
            self._watch_deadline(state)
        if isinstance(state, GenerationState):
            for sequence in state.branches:
                finish = self._finished_before(sequence)
                if finish is not None:
                    self._stream.finished_before(sequence, finish, self._clock())
                    sequence.phase = Phase.CLOSED
                    state.open -= 1
            if state.open == 0:
                self.end(state)
                return
        self._scheduler.add(state)

    def _watch_deadline(self, state: RequestState) -> None:
        """Notes a deadline. Entries of ended requests are swept out once they are the majority."""
        heapq.heappush(self._deadlines, (state.deadline, state.arrival))
        if len(self._deadlines) > 2 * len(self.live) + MAX_STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.live]
            heapq.heapify(self._deadlines)

    def _finished_before(self, sequence: SequenceState) -> FinishReason | None:
        if not len(sequence.output):
            return None
        if int(sequence.output[-1]) in sequence.parent.request.params.stop_token_ids:
            return FinishReason.STOP
        over = len(sequence.prompt) + len(sequence.output) >= self._scheduler.running.limit(sequence)
        return FinishReason.LENGTH if over else None

    def expire(self, now: float) -> None:
        """Ends requests that are past their deadline, so that no step planned at `now` holds any of them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            state = self.live.get(heapq.heappop(self._deadlines)[1])
            if state is not None:
                self.fail(state, EngineError(ErrorCode.DEADLINE_EXCEEDED, "The deadline has passed."))

    def computed(self, step: Step) -> None:
        """Takes what a step computed off the queue's account."""
        if step.kind in (StepKind.DECODE, StepKind.VERIFY):
            return
        taken: dict[tuple[str, int], int] = {}  # tokens by tenant and priority
        for state, tokens in step.charges:
            done = isinstance(state, ScoringState) and state.launched
            if isinstance(state, GenerationState):
                done = all(sequence.phase in (Phase.DECODE, Phase.CLOSED) for sequence in state.branches)
            tokens = state.queued if done else min(state.queued, tokens)
            state.queued -= tokens
            key = state.tenant, state.priority
            taken[key] = taken.get(key, 0) + tokens
        self._uncount(taken)

    def _uncount(self, taken: Mapping[tuple[str, int], int]) -> None:
        """Takes tokens of tenants and priorities off the queue's account: each queue once, since callers wait too."""
        with self._queue_lock:
            for (tenant, priority), tokens in taken.items():
                self._queues.add(tenant, priority, -tokens)

    def fail(self, state: RequestState, error: EngineError) -> None:
        """Answers a request with an error and ends it."""
        if state.closed or state.arrival not in self.live:
            return
        self._results.add(state.results, error)
        unsound = error.code in (ErrorCode.NONFINITE_LOGITS, ErrorCode.STEP_FAILED)
        self.close(self.live[state.arrival], keep=not unsound)

    def close(self, state: GenerationState | ScoringState, *, keep: bool = True) -> None:
        """Ends a request before its time.

        It leaves the queue now; what it holds is freed after the steps in flight.

        Args:
            state: the request.
            keep: whether its keys and values are sound and stay in the tree.
        """
        if state.closed or state.arrival not in self.live:
            return
        if isinstance(state, GenerationState):
            for sequence in state.branches:
                if sequence.phase is not Phase.CLOSED:
                    self._scheduler.running.close(sequence, keep=keep)
        self.end(state)

    def finish(self, state: ScoringState, result: Result) -> None:
        """Answers a scoring request with its result and ends it."""
        self._recorder.cached_tokens += sum(state.cached.tolist())
        self._results.add(state.results, result)
        self.end(state)

    def end(self, state: GenerationState | ScoringState) -> None:
        """Removes a request that is over."""
        state.closed = True
        if self.live.pop(state.arrival, None) is not None:
            self._scheduler.tenants.leave(state.tenant, self._clock())
        self._scheduler.remove(state)
        if state.queued:
            self._uncount({(state.tenant, state.priority): state.queued})
            state.queued = 0
        if isinstance(state, ScoringState):
            self._scheduler.score_batcher.release(state)
        else:
            self._recorder.cached_tokens += state.cached
            state.branches.clear()  # each leads here: a cycle would wait for the garbage collector
        if not self._config.prefix_cache:
            kv_cache = self._scheduler.kv_cache
            kv_cache.free_later(lambda: kv_cache.free(kv_cache.prefix_cache.drop(state.domain)))

    def abandon(self, error: EngineError) -> list[GenerateRequest]:
        """Fails every request. No step is in flight.

        Returns:
            The generations, as requests that another engine continues exactly where they are.
        """
        resumable = []
        for state in list(self.live.values()):
            if isinstance(state, GenerationState):
                resumable.append(self._resumable(state))
            self.fail(state, error)
        return resumable

    def _resumable(self, state: GenerationState) -> GenerateRequest:
        table = self._scheduler.table
        emitted = []
        for sequence in state.branches:
            slot = sequence.slot
            running = slot and sequence.phase is not Phase.CLOSED
            known = int(table.known[slot])
            emitted.append(table.tokens[slot, len(sequence.prompt) : known].copy() if running else sequence.output)
        left = max(0.0, state.deadline - self._clock())
        return replace(state.request, emitted=tuple(emitted), timeout_s=left)

    def slots_owned(self) -> int:
        """Returns the pool slots that running sequences and scoring requests own, the tree's not included."""
        table = self._scheduler.table
        running = (sequence for sequence in table.sequences if sequence is not None)
        owned = sum(int(table.capacity[sequence.slot]) - sequence.shared for sequence in running)
        for state in self.live.values():
            if isinstance(state, ScoringState):
                owned += len(state.prefix_slots) - state.prefix_owned + len(state.part_slots)
        return owned

    def answer_lost(self) -> None:
        """Answers every request and frees nothing: after a fault the process has to go."""
        for state in self.live.values():
            self._results.add(state.results, lost(state))
            state.closed = True


def lost(state: RequestState) -> EngineError:
    """Makes the error of a request whose engine has ended: LOST if steps computed it, for it may be the reason."""
    if state.started is None:
        return EngineError(ErrorCode.NOT_READY, "The engine has stopped.")
    return EngineError(ErrorCode.LOST, "The engine was lost while it worked on this request.")


def _prompt_tokens(request: RowsRequest | GenerateRequest) -> int:
    """Returns the tokens of the prompt, or of all rows, each counted in full."""
    if isinstance(request, GenerateRequest):
        return len(request.prompt)
    shared = int(request.shared.sum()) if isinstance(request, LikelihoodRequest) else 0
    return (len(request.starts) - 1) * len(request.prefix) + len(request.ids) + shared
