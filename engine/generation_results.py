"""GenerationResults: what a finished step means for generation jobs: rows have new tokens, and some of them end."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.chunks import At, Chunks, columns_for
from engine.jobs import EngineError, ErrorCode, FinishReason
from engine.requests import Generation, Phase, Request, RequestTable
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.step import Step
from gpu_sampler.output import FAILED, SampleOutput, VerifyOutput

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

    def _is_new(self, request: Request) -> bool:
        """Whether the branch has fewer than `solo_tokens` tokens that it did not come with."""
        job = request.parent.job
        known = int(self._table.known[request.slot]) - len(job.prompt) if request.slot else len(request.output)
        return known - (len(job.emitted[request.branch]) if job.emitted else 0) < job.solo_tokens
