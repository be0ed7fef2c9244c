"""OutputProcessor: turns the output of a step into results for callers.

Generations: sequences get new tokens, and some of them end. Scoring requests: scores and likelihoods fill their tables,
and a request whose table is full is answered.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.metrics import StepRecorder
from engine.model.lm_head import RowLogprobs
from engine.requests import EngineError, ErrorCode, FinishReason, Float32s, Int64s, LikelihoodResult, RowStatus
from engine.scheduler.request_state import (
    GenerationState,
    ItemState,
    LikelihoodState,
    Phase,
    ScoringState,
    SequenceState,
)
from engine.scheduler.request_tracker import RequestTracker
from engine.scheduler.scheduler import Scheduler, Step, StepOutput
from engine.scheduler.token_stream import At, TokenStream, columns_for
from gpu_sampler.output import FAILED, RowFlag, SampleOutput, VerifyOutput

NONFINITE = "The model's output for this request was not finite."
NONE_ALLOWED = (
    "`allowed_token_ids` must leave a token to draw at each position. Given: ids that `bad_words`, `min_tokens` or the "
    "model rule out."
)


class OutputProcessor:
    """Reads the outputs of steps in order. The step thread alone calls it."""

    def __init__(
        self, scheduler: Scheduler, tracker: RequestTracker, stream: TokenStream, recorder: StepRecorder
    ) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._tracker = tracker
        self._stream = stream
        self._recorder = recorder

    def process(self, step: Step, output: StepOutput, now: float) -> None:
        """Applies the output of a step that was read at `now`."""
        if isinstance(output, SampleOutput):
            self._sampled(step, output, now)
        elif isinstance(output, VerifyOutput):
            self._verified(step, output, now)
        elif isinstance(output, RowLogprobs):
            self._likelihoods(step, output, now)
        elif output is not None:
            self._item_values(step, output, now)
        else:
            self._prefill_completed(step, np.empty(0, np.bool_))

    # Scoring requests.

    def _item_values(self, step: Step, values: Float32s, now: float) -> None:
        """Takes the answers of all parts, f32 [R, K], K the widest of a part; NaN where they are not sound."""
        suspect = bool(np.isnan(values).any())
        end = 0
        for state, items in step.parts:
            answers, start, end = slice(items.start, items.stop), end, end + len(items)
            if not isinstance(state, ItemState):
                raise TypeError(f"a {type(state).__name__} stands in a step of items")
            if state.closed:
                self._recorder.wasted_tokens += len(items)
                continue
            own = values[start:end, : state.width]
            state.values[answers] = own
            bad = 0
            if suspect:
                unsound = np.flatnonzero(np.isnan(own).any(axis=1)) + items.start
                state.fail(unsound)
                bad = len(unsound)
            if self._part_done(step, state, len(items), bad):
                self._tracker.finish(state, state.result(now))

    def _likelihoods(self, step: Step, found: RowLogprobs, now: float) -> None:
        """Takes the wanted tokens of all parts; rows with a flag become NaN."""
        end = 0
        for state, tokens in step.parts:
            row, end = end, end + len(tokens)
            if state.closed or not isinstance(state, LikelihoodState):
                self._recorder.wasted_tokens += len(tokens)
                continue
            bad = _fill(state.found, tokens.start, found, row, len(tokens))
            if self._part_done(step, state, len(tokens), bad):
                self._finish_likelihood(state, now)

    def _part_done(self, step: Step, state: ScoringState, size: int, bad: int) -> bool:
        """Counts a part of `size` rows, `bad` of them not finite; tells whether it was the last of its request."""
        self._recorder.nonfinite_rows += bad
        if size == 0 or bad < size:
            self._scheduler.score_batcher.share_prefix(state, step.prefixes[state])
        state.pending -= size
        return state.launched and state.pending == 0

    def _finish_likelihood(self, state: LikelihoodState, now: float) -> None:
        bad = np.logical_or.reduceat(state.found.flags != 0, state.offsets[:-1])
        state.status[:] = np.where(bad, RowStatus.NONFINITE, RowStatus.OK)
        if state.request.keep and not bad.any():
            self._scheduler.score_batcher.keep_row(state)
        values = state.found
        result = LikelihoodResult(
            logprobs=values.logprobs,
            ranks=values.ranks,
            greedy=values.greedy,
            top_ids=values.top_ids,
            top_logprobs=values.top_logprobs,
            chosen_logprobs=values.chosen,
            status=state.status,
            cached=state.cached,
            queue_s=state.queue_s(now),
            compute_s=state.compute_s(now),
            head_s=state.head_s,
        )
        self._tracker.finish(state, result)

    # Generations.

    def _prefill_completed(self, step: Step, bad: npt.NDArray[np.bool_]) -> None:
        """Puts the prompts that this step completed into the tree, unless their logits were bad [R]."""
        if not step.completed:
            return
        suspects = {id(sequence) for sequence, wrong in zip(step.sampled, bad.tolist(), strict=True) if wrong}
        for sequence in step.completed:
            closed, suspect = sequence.phase is Phase.CLOSED, id(sequence) in suspects
            if closed and suspect:  # its caller left while the step ran, so that no failure follows
                self._scheduler.running.distrust(sequence)
            if closed or suspect:
                continue
            self._scheduler.running.share_prompt(sequence)
            sequence.parent.prompt_done = True

    def _sampled(self, step: Step, out: SampleOutput, now: float) -> None:
        """Takes one new token of each row."""
        table, slots, positions = self._table, step.slots, step.positions
        bad = (out.flags & int(FAILED)) != 0
        self._prefill_completed(step, bad)
        known = positions + 1
        table.tokens[slots, positions] = np.maximum(out.tokens, 0)
        table.known[slots] = known
        buffered = table.buffers_logprobs[slots]
        if buffered.any():
            rows = np.flatnonzero(buffered)
            table.logprobs.add(slots[rows], out, rows)
        stops = table.is_stop(slots, out.tokens)
        ends = stops | (known >= table.limit[slots])
        # A row that goes on and has no chunk due is done. One that fails takes others of the step with it.
        open_rows = table.open[slots]
        due = np.flatnonzero(open_rows & (ends | (known >= table.due[slots]) | bad.any()))
        running = int(np.count_nonzero(open_rows))
        self._recorder.wasted_tokens += len(slots) - running
        if not bad.any():
            due = self._streamed(slots, out, due, ends, now)
        self._recorder.generated_tokens += running - len(due)
        if not len(due):
            return
        # Chunks keep views of these arrays for as long as a reader likes; the sampler may use its own again.
        out = SampleOutput(*(None if column is None else np.array(column) for column in out))
        facts = (fact[due].tolist() for fact in (bad, ends, stops))
        for row, wrong, ended, stopped in zip(due.tolist(), *facts, strict=True):
            at = (slice(row, row + 1),)
            self._row(step.sampled[row], out, at, bad=wrong, stopped=stopped if ended else None, now=now)

    def _streamed(
        self, slots: Int64s, out: SampleOutput, due: Int64s, ends: npt.NDArray[np.bool_], now: float
    ) -> Int64s:
        """Hands over the tokens of all open streams that go on, together; returns the other rows of `due`."""
        streamed = self._table.streams.is_open[slots[due]] & ~ends[due]
        if not streamed.any():
            return due
        rows = due[streamed]
        self._stream.add_tokens(slots[rows], out, rows, now)
        return due[~streamed]

    def _verified(self, step: Step, out: VerifyOutput, now: float) -> None:
        """Takes a run of new tokens of each row. Tokens behind a stop are dropped."""
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
        tokens, buffered = np.maximum(out.tokens, 0), table.buffers_logprobs[slots].tolist()
        numbers = (one.tolist() for one in (before, used, step.drafts, np.minimum(accepted, used)))
        for row, (sequence, start, n, drafted, stood) in enumerate(zip(step.sampled, *numbers, strict=True)):
            table.tokens[sequence.slot, start : start + n] = tokens[row, :n]
            sequence.drafted += drafted
            sequence.accepted += stood
            if buffered[row] and (columns := columns_for(sequence.parent, out, (row, slice(0, n)))) is not None:
                table.logprobs.put(sequence.slot, columns)
        open_rows = table.open[slots]  # some of them have no chunk due, as in `_sampled`
        due_rows = open_rows & (ends | (known >= table.due[slots]) | bad.any())
        if not due_rows.all():
            self._recorder.wasted_tokens += int(used[~open_rows].sum())
            self._recorder.generated_tokens += int(used[open_rows & ~due_rows].sum())
        due = np.flatnonzero(due_rows)
        facts = (fact[due].tolist() for fact in (used, bad, ends, stopped))
        for row, n, wrong, ended, stop in zip(due.tolist(), *facts, strict=True):
            how = stop if ended else None
            self._row(step.sampled[row], out, (row, slice(0, n)), bad=wrong, stopped=how, now=now)

    def _row(
        self,
        sequence: SequenceState,
        out: SampleOutput | VerifyOutput,
        at: At,
        *,
        bad: bool,
        stopped: bool | None,
        now: float,
    ) -> None:
        """Hands over the tokens [k] at `at`. `stopped`: None while the row goes on, else whether a stop id ended it."""
        state = sequence.parent
        if sequence.phase is Phase.CLOSED:
            self._recorder.wasted_tokens += len(out.tokens[at])
            return
        if bad:
            self._tracker.fail(state, self._failure(state, out.flags[at]))
            return
        if state.first_token is None:
            state.first_token = now
        self._recorder.generated_tokens += len(out.tokens[at])
        finish = None if stopped is None else FinishReason.STOP if stopped else FinishReason.LENGTH
        self._stream.add(sequence, out, at, finish, now)
        if state.isolated and state.request.isolated_tokens:
            state.isolated = any(self._is_new(branch) for branch in state.branches if branch.phase is not Phase.CLOSED)
        if finish is None:
            self._set_due(sequence)
            return
        self._scheduler.running.close(sequence, keep=True)
        state.open -= 1
        if state.open == 0:
            self._tracker.end(state)

    def _failure(self, state: GenerationState, flags: npt.NDArray[Any]) -> EngineError:
        """Returns why a row with these flags [k] fails. A row may have no token left because of its own parameters."""
        if state.request.params.allowed_token_ids is not None and not (flags & int(RowFlag.BAD_VALUE)).any():
            return EngineError(ErrorCode.INVALID_VALUE, NONE_ALLOWED, "allowed_token_ids")
        self._recorder.nonfinite_rows += 1
        return EngineError(ErrorCode.NONFINITE_LOGITS, NONFINITE)

    def _set_due(self, sequence: SequenceState) -> None:
        """Notes with how many tokens the next chunk of the row is due, or that each token is one."""
        state = sequence.parent
        if state.isolated and state.request.isolated_tokens:
            return  # each token is looked at until the request is no longer isolated
        if state.stream_interval > 1:
            self._table.due[sequence.slot] = len(sequence.prompt) + sequence.sent + state.stream_interval
        elif not self._table.streams.is_open[sequence.slot]:
            self._table.streams.open(sequence)

    def _is_new(self, sequence: SequenceState) -> bool:
        """Tells whether a branch has fewer than `isolated_tokens` tokens that it did not come with."""
        request = sequence.parent.request
        known = int(self._table.known[sequence.slot]) - len(request.prompt) if sequence.slot else len(sequence.output)
        return known - (len(request.emitted[sequence.branch]) if request.emitted else 0) < request.isolated_tokens


def _fill(into: RowLogprobs, first: int, found: RowLogprobs, row: int, size: int) -> int:
    """Copies `size` rows, cut to the columns that the request wants; returns how many have a flag."""
    for column, values in zip(into, found, strict=True):
        part = values[row : row + size]
        column[first : first + size] = part[:, : column.shape[1]] if column.ndim == 2 else part
    bad = into.flags[first : first + size] != 0
    into.logprobs[first : first + size][bad] = np.nan
    return int(np.count_nonzero(bad))
