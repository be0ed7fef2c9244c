"""StepThread: the one thread that plans, launches and reads steps.

take calls -> plan step n + 1 -> launch it -> read step n -> hand its results over in one call. On CUDA a step is
launched before the one before it is read: sampled tokens stay on the device (`RequestTable.token_table`), and a row
that turns out to have ended has run once more, whose token is dropped. On the CPU each step is read at once. With
speculation it is on CUDA, too, and what it gave is handed over once the next step is launched.

Flight: the steps that were launched and not yet read, oldest first.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from engine.batch.input_batch import StepKind
from engine.channels import Inbox, Outbox
from engine.kv_cache.manager import KVCacheManager
from engine.metrics import Counters
from engine.model.interface import CausalLM
from engine.model_runner import Launched, Launcher
from engine.output_processor import GenerationResults, ScoreResults
from engine.requests import EngineError, ErrorCode, GenerateRequest, Int64s
from engine.scheduler.request_state import Scoring
from engine.scheduler.request_tracker import Works, lost
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step import Step
from engine.utils import garbage_collection
from engine.utils.cpu import yield_cores
from engine.utils.cuda import is_lost

log = logging.getLogger(__name__)


class Flight:
    """Launches and reads for the step thread. Whatever a step raises costs its own jobs and nobody else; only the loss
    of the device is raised on. `before_step` is called before each launch, `check` once a failed step has settled."""

    def __init__(
        self,
        model: CausalLM,
        launcher: Launcher,
        scheduler: Scheduler,
        pool: KVCacheManager,
        works: Works,
        generation_results: GenerationResults,
        score_results: ScoreResults,
        counters: Counters,
        clock: Callable[[], float],
        before_step: Callable[[Step], None] | None,
        check: Callable[[], None],
    ) -> None:
        self._model = model
        self._launcher = launcher
        self._scheduler = scheduler
        self._kv_cache = pool
        self._works = works
        self._generation_results = generation_results
        self._score_results = score_results
        self._counters = counters
        self._clock = clock
        self._before_step = before_step
        self._check = check
        self._launched: deque[Launched] = deque()
        self._uncounted: deque[Callable[[], None]] = deque()
        self._last_read = 0.0

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, step: Step) -> None:
        step.launched = self._clock()
        step.begin()
        self._kv_cache.launch()
        try:
            if self._before_step is not None:
                self._before_step(step)
            self._launched.append(self._launcher.launch(step))
        except Exception as error:
            self.land()  # releases wait for steps in order
            self._failed(step, error)

    def land(self) -> None:
        """Reads every step."""
        while self._launched:
            self.read()

    def read(self) -> None:
        """Finishes the oldest step."""
        launched = self._launched.popleft()
        step = launched.step
        try:
            sampled = None if launched.sampled is None else launched.sampled.result()
            verified = None if launched.verified is None else launched.verified.result()
            scores = None if launched.scores is None else launched.scores.result()
            targets = None if launched.targets is None else launched.targets.result()
        except Exception as error:
            self._failed(step, error)
            return
        now = self._clock()
        seconds = now - max(step.launched, self._last_read)
        self._last_read = now
        if launched.head is not None:
            self._timed_head(step, launched.head.seconds())
        self._scheduler.account(step.kind, step.tokens, seconds)
        tokens, accepted = step.tokens, None
        if verified is not None:
            accepted = np.minimum(verified.counts - 1, step.drafts)
        if step.kind in (StepKind.DECODE, StepKind.VERIFY):
            tokens = len(step.slots) if verified is None else int(verified.counts.sum())
            self._scheduler.pace.took(step.drafting, len(step.slots), tokens, seconds)
        self._uncounted.append(partial(self._count, launched, tokens, accepted, seconds, now))
        self._works.computed(step)
        if scores is not None:
            self._score_results.scored(step, scores, now)
        elif targets is not None:
            self._score_results.likelihoods(step, targets, now)
        elif verified is not None:
            self._generation_results.verified(step, verified, now)
        elif sampled is not None:
            self._generation_results.sampled(step, sampled, now)
        else:
            self._generation_results.completed(step, np.empty(0, np.bool_))
        self._finish(step)

    def count(self) -> None:
        """Brings the figures of the steps that were read: before anybody hears of these, and no sooner than there is
        time for it."""
        while self._uncounted:
            self._uncounted.popleft()()

    def _count(self, launched: Launched, tokens: int, accepted: Int64s | None, seconds: float, now: float) -> None:
        """`tokens` were computed or sampled, `accepted` [B] of the drafts of a verify step."""
        step, counters = launched.step, self._counters
        counters.step(step.kind, len(step.sequences), step.tokens, seconds)
        if launched.drafting is not None:
            counters.drafting(launched.drafting.seconds(), 0.0 if accepted is None else seconds)
        if accepted is not None:
            counters.verified(step.drafts, accepted, step.missing_q)
        decoded = step.kind in (StepKind.DECODE, StepKind.VERIFY)
        counters.throughput.step(tokens, now - seconds, now, decoded=decoded, waiting=step.waiting)

    def _timed_head(self, step: Step, seconds: float) -> None:
        """Each of the step's jobs waited for all of it."""
        self._counters.head_seconds += seconds
        for work in step.works():
            if isinstance(work, Scoring):
                work.head_s += seconds

    def _finish(self, step: Step) -> None:
        self._kv_cache.finish()
        if step.scratch:
            self._kv_cache.free(np.concatenate(step.scratch))

    def _failed(self, step: Step, error: Exception) -> None:
        """Only the step's own jobs pay; a device that is lost costs the engine."""
        log.error("A %s step failed: %s", step.kind, type(error).__name__, exc_info=error)
        self._counters.failed_steps += 1
        gone = is_lost(self._model.device, error)
        for work in step.works():
            failed = EngineError(ErrorCode.STEP_FAILED, "The step that computed this request failed.")
            self._works.fail(work, lost(work) if gone else failed)
        if gone:
            raise error
        self._finish(step)
        if self._kv_cache.settled:
            self._check()


IDLE_WAIT_S = 0.25
BLOCKED_WAIT_S = 0.005
STEPS_PER_SWEEP = 256


class StepThread:
    """`inbox` takes calls for it from any thread; `heartbeat` is when it last began a turn, which it does several times
    a second without work, too."""

    def __init__(
        self,
        device: torch.device,
        scheduler: Scheduler,
        works: Works,
        flight: Flight,
        outbox: Outbox,
        counters: Counters,
        clock: Callable[[], float],
        *,
        overlap: bool,
        waits: bool = False,
        yields: bool = False,
    ) -> None:
        """`overlap`: launches a step before it reads the one before. `waits`: the device waits for each launch, so that
        what can be done after it is. `yields`: computes on what cores others leave."""
        self._device = device
        self._scheduler = scheduler
        self._works = works
        self._flight = flight
        self._outbox = outbox
        self._counters = counters
        self._clock = clock
        self._overlap = overlap
        self._waits = waits
        self._yields = yields
        self.inbox = Inbox()
        self.heartbeat = clock()
        self.fault: str | None = None  # what ended it
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._since_sweep = 0

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the engine was started twice")
        garbage_collection.hold()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Fails what is left and ends. RuntimeError if it does not end in time."""
        if self._thread is None:
            return
        self._stopping = True
        self.inbox.post(lambda: None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the step thread did not end within {timeout_s} s")
        self._thread = None
        garbage_collection.release()

    @property
    def healthy(self) -> bool:
        """False for good after a device error or a fault of its own."""
        return self.fault is None and self._thread is not None and self._thread.is_alive()

    async def passed(self) -> None:
        """Until it has taken all that was posted before, or has ended."""
        done = threading.Event()
        self.inbox.post(done.set)
        while not done.is_set() and self.healthy:
            await asyncio.sleep(0.001)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if self._yields:
                yield_cores()
            with torch.no_grad():  # the mode belongs to the thread
                while not self._stopping:
                    self._turn()
        except Exception as error:
            log.exception("The step loop failed.")
            self.fault = type(error).__name__
        finally:
            self._last_words()

    def _last_words(self) -> None:
        """Everyone is answered, whatever state the thread ends in."""
        try:
            for call in self.inbox.take():
                call()
            if not self._stopping:
                self.fault = self.fault or "ended"  # by what no handler may keep, as SystemExit
            elif self.fault is None:
                self.abandon_all(EngineError(ErrorCode.NOT_READY, "The engine has stopped."))
        finally:
            self._works.give_up()
            self._outbox.flush()

    def _turn(self) -> None:
        """One round: calls, one launch, one read."""
        self.heartbeat = self._clock()
        for call in self.inbox.take():
            call()
        now = self._clock()
        self._works.expire(now)
        step = None if self.fault else self._plan(now)
        for work, error in self._scheduler.refused:
            self._works.fail(work, error)
        self._scheduler.refused.clear()
        if step is not None:
            self._flight.launch(step)
        if self._waits:  # the results of the step before, whose readers would compete for the interpreter
            self._hand_over()
        if self._flight and (step is None or len(self._flight) > int(self._overlap)):
            self._flight.read()
        if not self._waits:
            self._hand_over()
        if step is None and not self._flight:
            self._idle()
        else:
            self._since_sweep += 1
            if self._since_sweep >= STEPS_PER_SWEEP:
                garbage_collection.sweep(idle=False)
                self._since_sweep = 1

    def _plan(self, now: float) -> Step | None:
        step = self._scheduler.plan(now)
        if step is not None:
            self._counters.planned(self._clock() - now)
        return step

    def _idle(self) -> None:
        if not self._works.alive:
            self._counters.throughput.idle()
            if self._since_sweep:
                garbage_collection.sweep(idle=True)
                self._since_sweep = 0
            self.inbox.wait(IDLE_WAIT_S)
        else:
            self.inbox.wait(BLOCKED_WAIT_S)

    def abandon_all(self, error: EngineError) -> list[GenerateRequest]:
        """Fails every job; generations are returned as jobs that another engine continues exactly."""
        self._flight.land()
        jobs = self._works.abandon(error)
        self._hand_over()
        return jobs

    def _hand_over(self) -> None:
        self._flight.count()
        self._outbox.flush()
