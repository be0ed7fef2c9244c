"""GenerationResults: what a finished step means for generation jobs: rows have new tokens, and some of them end.

ScoreResults: what a finished step means for score jobs: scores and likelihoods fill their tables.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.channels import Outbox
from engine.metrics import Counters
from engine.model.lm_head import TargetRows
from engine.requests import EngineError, ErrorCode, FinishReason, Float32s, LikelihoodResult, RowStatus, ScoreResult
from engine.scheduler.request_state import Generation, LabelScoring, Likelihood, Phase, Request, RequestTable, Scoring
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.score_batcher import ScoreSteps
from engine.scheduler.step import Step
from engine.scheduler.token_stream import At, Chunks, columns_for
from gpu_sampler.output import FAILED, SampleOutput, VerifyOutput


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
        """RequestOverlay tokens of all parts of the step; rows with a flag are NaN."""
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


NONFINITE = EngineError(ErrorCode.NONFINITE_LOGITS, "The model's output for this request was not finite.")


class GenerationResults:
    """Reads steps of rows for the loop. `fail(work, error)` and `end(work)` are the loop's."""

    def __init__(
        self,
        table: RequestTable,
        scheduler: Scheduler,
        chunks: Chunks,
        counters: Counters,
        fail: Callable[[Generation, EngineError], None],
        end: Callable[[Generation], None],
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._chunks = chunks
        self._counters = counters
        self._fail = fail
        self._end = end

    def completed(self, step: Step, bad: npt.NDArray[np.bool_]) -> None:
        """Prefills that this step ended: their prompts go into the tree, unless their logits were bad [R]."""
        if not step.completed:
            return
        suspects = {id(request) for request, wrong in zip(step.requests, bad.tolist(), strict=True) if wrong}
        for request in step.completed:
            if request.phase is Phase.CLOSED or id(request) in suspects:
                continue
            self._scheduler.rows.share(request)
            request.parent.prompt_done = True

    def sampled(self, step: Step, out: SampleOutput, now: float) -> None:
        """New tokens of the step's rows."""
        table, slots, positions = self._table, step.slots, step.positions
        bad = (out.flags & int(FAILED)) != 0
        self.completed(step, bad)
        known = positions + 1
        table.tokens[slots, positions] = np.maximum(out.tokens, 0)
        table.known[slots] = known
        keeps = table.keeps[slots]
        if keeps.any():
            rows = np.flatnonzero(keeps)
            table.kept.add(slots[rows], out, rows)
        stops = table.is_stop(slots, out.tokens)
        ends = stops | (known >= table.limit[slots])
        # A row that goes on and owes nobody a chunk is done. One that fails takes others of the step with it.
        open_rows = table.open[slots]
        asking = np.flatnonzero(open_rows & (ends | (known >= table.due[slots]) | bad.any()))
        running = int(np.count_nonzero(open_rows))
        self._counters.wasted_tokens += len(slots) - running
        self._counters.generated_tokens += running - len(asking)
        if not len(asking):
            return
        # Chunks keep views of these arrays for as long as a reader likes; the sampler may use its own again.
        out = SampleOutput(*(None if column is None else np.array(column) for column in out))
        facts = (fact[asking].tolist() for fact in (bad, ends, stops))
        for row, wrong, ended, stopped in zip(asking.tolist(), *facts, strict=True):
            at = (slice(row, row + 1),)
            self._row(step.requests[row], out, at, bad=wrong, stopped=stopped if ended else None, now=now)

    def verified(self, step: Step, out: VerifyOutput, now: float) -> None:
        """Runs of new tokens. What stands behind a stop is dropped."""
        table, slots, before = self._table, step.slots, step.positions
        out = VerifyOutput(*(None if column is None else np.array(column) for column in out))
        accepted = np.minimum(out.counts - 1, step.drafts)
        place = np.arange(out.tokens.shape[1])
        stops = table.is_stop(slots[:, None], out.tokens) & (place < out.counts[:, None])
        stopped = stops.any(axis=1)
        used = np.where(stopped, stops.argmax(axis=1) + 1, out.counts)
        bad = (((out.flags & int(FAILED)) != 0) & (place < used[:, None])).any(axis=1)
        known = before + used
        table.known[slots] = table.length[slots] = known
        if table.seen is not None:
            table.seen[slots] = np.minimum(table.seen[slots], known - 1)
        ends = stopped | (known >= table.limit[slots])
        tokens, keeps = np.maximum(out.tokens, 0), table.keeps[slots].tolist()
        numbers = (one.tolist() for one in (before, used, step.drafts, np.minimum(accepted, used)))
        for row, (request, start, n, drafted, stood) in enumerate(zip(step.requests, *numbers, strict=True)):
            table.tokens[request.slot, start : start + n] = tokens[row, :n]
            request.drafted += drafted
            request.accepted += stood
            if keeps[row] and (columns := columns_for(request.parent, out, (row, slice(0, n)))) is not None:
                table.kept.put(request.slot, columns)
        open_rows = table.open[slots]  # of which some owe nobody a chunk, as in `sampled`
        asks = open_rows & (ends | (known >= table.due[slots]) | bad.any())
        if not asks.all():
            self._counters.wasted_tokens += int(used[~open_rows].sum())
            self._counters.generated_tokens += int(used[open_rows & ~asks].sum())
        asking = np.flatnonzero(asks)
        facts = (fact[asking].tolist() for fact in (used, bad, ends, stopped))
        for row, n, wrong, ended, stop in zip(asking.tolist(), *facts, strict=True):
            how = stop if ended else None
            self._row(step.requests[row], out, (row, slice(0, n)), bad=wrong, stopped=how, now=now)

    def _row(
        self,
        request: Request,
        out: SampleOutput | VerifyOutput,
        at: At,
        *,
        bad: bool,
        stopped: bool | None,
        now: float,
    ) -> None:
        if request.phase is Phase.CLOSED:
            self._counters.wasted_tokens += len(out.tokens[at])
        elif bad:
            self._counters.nonfinite_rows += 1
            self._fail(request.parent, NONFINITE)
        else:
            self._emit(request, out, at, stopped, now)

    def _emit(
        self,
        request: Request,
        out: SampleOutput | VerifyOutput,
        at: At,
        stopped: bool | None,
        now: float,
    ) -> None:
        """Hands over the tokens [k] at `at`. `stopped`: None while the row goes on, else whether a stop id ended it."""
        work = request.parent
        if work.first is None:
            work.first = now
        self._counters.generated_tokens += len(out.tokens[at])
        finish = None if stopped is None else FinishReason.STOP if stopped else FinishReason.LENGTH
        self._chunks.add(request, out, at, finish, now)
        if work.isolated and work.job.isolated_tokens:
            work.isolated = any(self._is_new(branch) for branch in work.branches if branch.phase is not Phase.CLOSED)
        if finish is None:
            self._wait(request)
            return
        self._scheduler.forget(request)
        self._scheduler.rows.close(request, keep=True)
        work.open -= 1
        if work.open == 0:
            self._end(work)

    def _wait(self, request: Request) -> None:
        """Notes with how many tokens the row is to be looked at again."""
        work = request.parent
        if work.every > 1 and not (work.isolated and work.job.isolated_tokens):
            self._table.due[request.slot] = len(request.prompt) + request.new_from + work.every

    def _is_new(self, request: Request) -> bool:
        """Whether the branch has fewer than `isolated_tokens` tokens that it did not come with."""
        job = request.parent.job
        known = int(self._table.known[request.slot]) - len(job.prompt) if request.slot else len(request.output)
        return known - (len(job.emitted[request.branch]) if job.emitted else 0) < job.isolated_tokens
