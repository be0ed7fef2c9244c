"""Works: the jobs that are alive, their deadlines, and the account of tokens they wait for.

Callers: who waits for the step thread, so that they can be answered without it.
"""

import contextlib
import heapq
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.batch.input_batch import StepKind
from engine.channels import Outbox
from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.metrics import Counters
from engine.requests import EngineError, ErrorCode, FinishReason, GenerateRequest, LikelihoodRequest, ScoreRequest
from engine.scheduler.request_state import Generation, Phase, Request, RequestTable, Scoring, Work
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step import Step
from engine.scheduler.token_stream import Chunks


class Callers:
    """Entered and left on callers' event loops; `answer` may be called from any thread."""

    def __init__(self) -> None:
        self._works: dict[int, Work] = {}  # by arrival

    def __len__(self) -> int:
        return len(self._works)

    def enter(self, work: Work) -> None:
        self._works[work.arrival] = work

    def leave(self, work: Work) -> None:
        del self._works[work.arrival]

    def answer(self) -> int:
        """Tells everyone that the engine is lost; how many. A job whose step thread turns again after all ends as if
        its caller had left."""
        works = list(self._works.values())
        for work in works:
            with contextlib.suppress(RuntimeError):  # a loop that is closed: its readers are gone with it
                work.receiver.loop.call_soon_threadsafe(work.receiver.put, lost(work))
        return len(works)


def lost(work: Work) -> EngineError:
    """What a job hears of an engine that will not go on: LOST if steps were made of it, for it may be the reason."""
    if work.started is None:
        return EngineError(ErrorCode.NOT_READY, "The engine has stopped.")
    return EngineError(ErrorCode.LOST, "The engine was lost while it worked on this request.")


QUEUE_S = 8.0  # a queue longer than this is refused: its end would wait too long
SWEPT_DEADLINES = 256
UNKNOWN_QUEUE = 262_144  # tokens, while the rate is unknown


class Works:
    """Touched by the step thread only, but for `arrive`, which callers' threads use."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        pool: KVCacheManager,
        table: RequestTable,
        chunks: Chunks,
        outbox: Outbox,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.alive: dict[int, Generation | Scoring] = {}  # by arrival
        self.queued_tokens = 0
        self._config = config
        self._scheduler = scheduler
        self._kv_cache = pool
        self._table = table
        self._chunks = chunks
        self._outbox = outbox
        self._counters = counters
        self._clock = clock
        self._deadlines: list[tuple[float, int]] = []
        self._queue_lock = threading.Lock()
        self._arrivals = 0

    def check_room(self, cost: int) -> None:
        """OVERLOADED if the queue cannot take `cost` more tokens; an empty queue takes any job."""
        if self.queued_tokens and self.queued_tokens + cost > self.most_queued:
            raise EngineError(ErrorCode.OVERLOADED, "The queue is full.")

    def takes(self, costs: Sequence[int]) -> list[bool]:
        """Which of jobs of such costs would be taken, if they came now and in this order."""
        taken, queued = list[bool](), self.queued_tokens
        for cost in costs:
            taken.append(not queued or queued + cost <= self.most_queued)
            queued += cost if taken[-1] else 0
        return taken

    def arrive(self, cost: int, *, already_admitted: bool) -> int:
        """An arrival number. `already_admitted`: it was counted before, so that the bound is not for it."""
        with self._queue_lock:
            if not already_admitted:
                self.check_room(cost)
            self.queued_tokens += cost
            self._arrivals += 1
            return self._arrivals

    @property
    def most_queued(self) -> int:
        """Tokens that may wait: at least what one step takes."""
        if self._config.max_queued_tokens is not None:
            return self._config.max_queued_tokens
        rate = self._counters.throughput.tokens_per_s
        return max(self._config.token_budget, int(QUEUE_S * rate)) if rate else UNKNOWN_QUEUE

    def enter(self, work: Generation | Scoring) -> None:
        """Takes a job in. A branch that had all its tokens before (a resumed stream) ends here."""
        self.alive[work.arrival] = work
        job = work.job
        self._counters.prompt_tokens += len(job.prompt) if isinstance(job, GenerateRequest) else _row_tokens(job)
        if work.deadline < math.inf:
            self._watch(work)
        if isinstance(work, Generation):
            for request in work.branches:
                finish = self._finished_before(request)
                if finish is not None:
                    self._chunks.finished_before(request, finish, self._clock())
                    request.phase = Phase.CLOSED
                    work.open -= 1
            if work.open == 0:
                self.end(work)
                return
        self._scheduler.add(work)

    def _watch(self, work: Work) -> None:
        """Notes its deadline. Jobs that have ended would stand there until theirs passes: they are swept out once they
        are the most, so that the list is as long as the work and not as the time."""
        heapq.heappush(self._deadlines, (work.deadline, work.arrival))
        if len(self._deadlines) > 2 * len(self.alive) + SWEPT_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.alive]
            heapq.heapify(self._deadlines)

    def _finished_before(self, request: Request) -> FinishReason | None:
        if not len(request.output):
            return None
        if int(request.output[-1]) in request.parent.job.params.stop_token_ids:
            return FinishReason.STOP
        over = len(request.prompt) + len(request.output) >= self._scheduler.rows.limit(request)
        return FinishReason.LENGTH if over else None

    def expire(self, now: float) -> None:
        """Ends what is past its deadline: no step that is planned at `now` holds any of it."""
        while self._deadlines and self._deadlines[0][0] <= now:
            work = self.alive.get(heapq.heappop(self._deadlines)[1])
            if work is not None:
                self.fail(work, EngineError(ErrorCode.DEADLINE_EXCEEDED, "The deadline has passed."))

    def computed(self, step: Step) -> None:
        """Takes what the step computed off the queue's account."""
        if step.kind in (StepKind.DECODE, StepKind.VERIFY):
            return
        for work, tokens in step.charges:
            idle = isinstance(work, Scoring) and work.launched
            if isinstance(work, Generation):
                idle = all(request.phase in (Phase.DECODE, Phase.CLOSED) for request in work.branches)
            self._count_down(work, work.queued if idle else min(work.queued, tokens))

    def _count_down(self, work: Work, tokens: int) -> None:
        work.queued -= tokens
        with self._queue_lock:
            self.queued_tokens -= tokens

    def fail(self, work: Work, error: EngineError) -> None:
        if work.closed or work.arrival not in self.alive:
            return
        self._outbox.add(work.receiver, error)
        unsound = error.code in (ErrorCode.NONFINITE_LOGITS, ErrorCode.STEP_FAILED)
        self.close(self.alive[work.arrival], keep=not unsound)

    def close(self, work: Generation | Scoring, *, keep: bool = True) -> None:
        """Ends a job before its time: at once for the queue, after the steps in flight for what it holds."""
        if work.closed or work.arrival not in self.alive:
            return
        if isinstance(work, Generation):
            for request in work.branches:
                if request.phase is not Phase.CLOSED:
                    self._scheduler.forget(request)
                    self._scheduler.rows.close(request, keep=keep)
        self.end(work)

    def end(self, work: Generation | Scoring) -> None:
        """The job is over: nobody waits for it any more."""
        work.closed = True
        self.alive.pop(work.arrival, None)
        self._scheduler.remove(work)
        if work.queued:
            self._count_down(work, work.queued)
        if isinstance(work, Scoring):
            self._scheduler.score_steps.release(work)
        else:
            self._counters.cached_tokens += work.cached
        if not self._config.prefix_cache:
            self._kv_cache.free_later(lambda: self._kv_cache.free(self._kv_cache.prefix_cache.drop(work.domain)))

    def abandon(self, error: EngineError) -> list[GenerateRequest]:
        """Fails every job; generations are returned as jobs that another engine continues. No step is in flight."""
        jobs = []
        for work in list(self.alive.values()):
            if isinstance(work, Generation):
                jobs.append(self._resumable(work))
            self.fail(work, error)
        return jobs

    def _resumable(self, work: Generation) -> GenerateRequest:
        emitted = []
        for request in work.branches:
            slot = request.slot
            running = slot and request.phase is not Phase.CLOSED
            known = int(self._table.known[slot])
            emitted.append(self._table.tokens[slot, len(request.prompt) : known].copy() if running else request.output)
        left = max(0.0, work.deadline - self._clock())
        return replace(work.job, emitted=tuple(emitted), timeout_s=left)

    def slots_owned(self) -> int:
        """Pool slots that belong to a running row or a scoring job, and to neither the tree nor the free list."""
        owned = sum(
            int(self._table.capacity[request.slot]) - request.shared
            for request in self._table.requests
            if request is not None
        )
        for work in self.alive.values():
            if isinstance(work, Scoring):
                owned += len(work.prefix_slots) - work.prefix_owned + len(work.part_slots)
        return owned

    def give_up(self) -> None:
        """Answers everybody and frees nothing: after a fault the process has to go."""
        for work in self.alive.values():
            self._outbox.add(work.receiver, lost(work))
            work.closed = True


def _row_tokens(job: ScoreRequest | LikelihoodRequest) -> int:
    """Tokens of all rows, each counted in full."""
    shared = int(job.shared.sum()) if isinstance(job, LikelihoodRequest) else 0
    return (len(job.starts) - 1) * len(job.prefix) + len(job.ids) + shared
