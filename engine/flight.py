"""Flight: the steps that were launched and not yet read, oldest first."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from engine.batch import StepKind
from engine.callers import lost
from engine.causal_lm import CausalLM
from engine.device import is_lost
from engine.generation_results import GenerationResults
from engine.jobs import EngineError, ErrorCode, Int64s
from engine.launch import Launched, Launcher
from engine.pool import Pool
from engine.requests import Scoring
from engine.scheduler import Scheduler
from engine.score_results import ScoreResults
from engine.stats import Counters
from engine.step import Step
from engine.works import Works

log = logging.getLogger(__name__)


class Flight:
    """Launches and reads for the step thread. Whatever a step raises costs its own jobs and nobody else; only the loss
    of the device is raised on. `before_step` is called before each launch, `check` once a failed step has settled."""

    def __init__(
        self,
        model: CausalLM,
        launcher: Launcher,
        scheduler: Scheduler,
        pool: Pool,
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
        self._pool = pool
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
        self._pool.launch()
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
        counters.step(step.kind, len(step.runs), step.tokens, seconds)
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
        self._pool.finish()
        if step.scratch:
            self._pool.give(np.concatenate(step.scratch))

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
        if self._pool.settled:
            self._check()
