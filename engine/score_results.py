"""ScoreResults: what a finished step means for score jobs: scores and likelihoods fill their tables."""

from collections.abc import Callable

import numpy as np

from engine.jobs import Float32s, LikelihoodResult, RowStatus, ScoreResult
from engine.mailbox import Outbox
from engine.requests import LabelScoring, Likelihood, Scoring
from engine.score_steps import ScoreSteps
from engine.stats import Counters
from engine.step import Step
from engine.targets import TargetRows


class ScoreResults:
    """Reads score steps for the loop. `end(work)` is the loop's."""

    def __init__(
        self, score_steps: ScoreSteps, outbox: Outbox, counters: Counters, end: Callable[[Scoring], None]
    ) -> None:
        self._score_steps = score_steps
        self._outbox = outbox
        self._counters = counters
        self._end = end

    def scored(self, step: Step, logprobs: Float32s, now: float) -> None:
        """Rows of all parts of the step, f32 [R, L], L the most labels of a part; NaN where logits were not finite."""
        suspect = bool(np.isnan(logprobs).any())
        for part in step.parts:
            work, rows = part.work, slice(part.first, part.first + part.size)
            if not isinstance(work, LabelScoring):
                raise TypeError(f"a {type(work).__name__} stands in a step of labels")
            values = logprobs[part.row : part.row + part.size, : len(work.job.labels)]
            if work.closed:
                self._counters.wasted_tokens += part.size
                continue
            work.label_logprobs[rows] = values
            bad = 0
            if suspect:
                unsound = np.isnan(values).any(axis=1)
                work.status[rows] = np.where(unsound, RowStatus.NONFINITE, RowStatus.OK)
                bad = int(np.count_nonzero(unsound))
            self._counters.nonfinite_rows += bad
            if part.size == 0 or bad < part.size:
                self._score_steps.share_prefix(work)
            work.pending -= part.size
            if work.launched and work.pending == 0:
                result = ScoreResult(
                    work.label_logprobs, work.status, work.cached, work.queue_s(now), work.compute_s(now), work.head_s
                )
                self._counters.cached_tokens += int(work.cached.sum())
                self._outbox.add(work.receiver, result)
                self._end(work)

    def likelihoods(self, step: Step, found: TargetRows, now: float) -> None:
        """Wanted tokens of all parts of the step; rows with a flag are NaN."""
        for part in step.parts:
            work = part.work
            if work.closed or not isinstance(work, Likelihood):
                self._counters.wasted_tokens += part.size
                continue
            bad = _fill(work.found, part.first, found, part.row, part.size)
            self._counters.nonfinite_rows += bad
            if part.size == 0 or bad < part.size:
                self._score_steps.share_prefix(work)
            work.pending -= part.size
            if work.launched and work.pending == 0:
                self._answer(work, now)

    def _answer(self, work: Likelihood, now: float) -> None:
        bad = np.logical_or.reduceat(work.found.flags != 0, work.offsets[:-1])
        work.status[:] = np.where(bad, RowStatus.NONFINITE, RowStatus.OK)
        if work.job.keep and not bad.any():
            self._score_steps.keep_row(work)
        values = work.found
        result = LikelihoodResult(
            values.logprobs,
            values.ranks,
            values.greedy,
            values.top_ids,
            values.top_logprobs,
            values.chosen,
            work.status,
            work.cached,
            work.queue_s(now),
            work.compute_s(now),
            work.head_s,
        )
        self._counters.cached_tokens += int(work.cached.sum())
        self._outbox.add(work.receiver, result)
        self._end(work)


def _fill(into: TargetRows, first: int, found: TargetRows, row: int, size: int) -> int:
    """Copies `size` rows, cut to the columns that the job asked for; returns how many have a flag."""
    for column, values in zip(into, found, strict=True):
        part = values[row : row + size]
        column[first : first + size] = part[:, : column.shape[1]] if column.ndim == 2 else part
    bad = into.flags[first : first + size] != 0
    into.logprobs[first : first + size][bad] = np.nan
    return int(np.count_nonzero(bad))
