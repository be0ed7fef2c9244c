"""What a finished step means for its jobs: tokens become chunks, rows end, scores fill their tables."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.jobs import (
    EngineError,
    ErrorCode,
    FinishReason,
    Float32s,
    GenerateChunk,
    Int32s,
    LikelihoodResult,
    RowStatus,
    ScoreResult,
)
from engine.kept import Columns
from engine.mailbox import Outbox
from engine.requests import Generation, LabelScoring, Likelihood, Phase, Request, RequestTable, Scoring
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.step import Step
from engine.targets import TargetRows
from gpu_sampler.output import FAILED, SampleOutput, VerifyOutput

At = tuple[slice] | tuple[int, slice]  # where a row's new tokens stand in a step's output
NONFINITE = EngineError(ErrorCode.NONFINITE_LOGITS, "The model's output for this request was not finite.")


class Results:
    """Reads steps for the loop. `fail(work, error)` and `end(work)` are the loop's."""

    def __init__(
        self,
        table: RequestTable,
        scheduler: Scheduler,
        outbox: Outbox,
        counters: Counters,
        fail: Callable[[Generation, EngineError], None],
        end: Callable[[Generation | Scoring], None],
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._outbox = outbox
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
            if keeps[row] and (columns := _columns(request.parent, out, (row, slice(0, n)))) is not None:
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
        tokens = out.tokens[at]
        if work.first is None:
            work.first = now
        self._counters.generated_tokens += len(tokens)
        finish = None if stopped is None else FinishReason.STOP if stopped else FinishReason.LENGTH
        if work.every == 1:
            self._send(request, tokens, _columns(work, out, at), finish, now)
        else:
            self._keep(request, finish, now)
        if work.solo and work.job.solo_tokens:
            work.solo = any(self._is_new(branch) for branch in work.branches if branch.phase is not Phase.CLOSED)
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
        if work.every > 1 and not (work.solo and work.job.solo_tokens):
            self._table.due[request.slot] = len(request.prompt) + request.new_from + work.every

    def _keep(self, request: Request, finish: FinishReason | None, now: float) -> None:
        """Hands over what the caller has not, if that is a chunk."""
        start, end = len(request.prompt) + request.new_from, int(self._table.known[request.slot])
        if finish is None and end - start < request.parent.every:
            return
        columns = _joined(request.parent, request.kept + self._table.kept.take(request.slot))
        self._send(request, self._table.tokens[request.slot, start:end].copy(), columns, finish, now)
        request.new_from = end - len(request.prompt)
        request.kept.clear()

    def _is_new(self, request: Request) -> bool:
        """Whether the branch has fewer than `solo_tokens` tokens that it did not come with."""
        job = request.parent.job
        known = int(self._table.known[request.slot]) - len(job.prompt) if request.slot else len(request.output)
        return known - (len(job.emitted[request.branch]) if job.emitted else 0) < job.solo_tokens

    def finished_before(self, request: Request, finish: FinishReason, now: float) -> None:
        """A resumed branch that had ended already: an empty chunk says so."""
        self._send(request, np.empty(0, np.int32), None, finish, now, request.output[-1:])

    def _send(
        self,
        request: Request,
        tokens: Int32s,
        columns: Columns | None,
        finish: FinishReason | None,
        now: float,
        last: Int32s | None = None,
    ) -> None:
        work = request.parent
        logprobs, ranks, top_ids, top_logprobs, chosen = columns or (None,) * 5
        stop = int((tokens if last is None else last)[-1]) if finish is FinishReason.STOP else None
        chunk = GenerateChunk(
            request.branch,
            tokens,
            logprobs,
            ranks,
            top_ids,
            top_logprobs,
            chosen,
            finish,
            stop,
            work.cached,
            work.queue_s(now),
            work.compute_s(now),
            request.drafted,
            request.accepted,
            work.prefill_s(),
        )
        request.drafted = request.accepted = 0
        self._outbox.add(work.receiver, chunk)

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
                self._scheduler.score_steps.share_prefix(work)
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
                self._scheduler.score_steps.share_prefix(work)
            work.pending -= part.size
            if work.launched and work.pending == 0:
                self._answer(work, now)

    def _answer(self, work: Likelihood, now: float) -> None:
        bad = np.logical_or.reduceat(work.found.flags != 0, work.offsets[:-1])
        work.status[:] = np.where(bad, RowStatus.NONFINITE, RowStatus.OK)
        if work.job.keep and not bad.any():
            self._scheduler.score_steps.keep_row(work)
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


def _columns(work: Generation, out: SampleOutput | VerifyOutput, at: At) -> Columns | None:
    """Log-probability columns [k, *] of a row's new tokens, cut to what its own request asked for."""
    if not work.wants_logprobs or out.logprobs is None:
        return None
    n, ids = work.job.params.logprobs, work.job.params.logprob_token_ids
    top = (*at, slice(n))
    return (
        out.logprobs[at],
        None if out.ranks is None else out.ranks[at],
        None if n is None or out.top_ids is None else out.top_ids[top],
        None if n is None or out.top_logprobs is None else out.top_logprobs[top],
        None if ids is None or out.chosen_logprobs is None else out.chosen_logprobs[(*at, slice(len(ids)))],
    )


def _cut(work: Generation, columns: Columns) -> Columns:
    """As wide as the job asked for."""
    n, ids = work.job.params.logprobs, work.job.params.logprob_token_ids
    logprobs, ranks, top_ids, top, chosen = columns
    return (
        logprobs,
        ranks,
        None if n is None or top_ids is None else top_ids[:, :n],
        None if n is None or top is None else top[:, :n],
        None if ids is None or chosen is None else chosen[:, : len(ids)],
    )


def _joined(work: Generation, kept: list[Columns]) -> Columns | None:
    if not kept:
        return None
    cut = zip(*(_cut(work, columns) for columns in kept), strict=True)
    logprobs, ranks, ids, top, chosen = (None if parts[0] is None else np.concatenate(parts) for parts in cut)
    return logprobs, ranks, ids, top, chosen
