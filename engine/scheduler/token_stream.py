"""TokenStream: cuts the tokens of running sequences into the chunks that their callers receive."""

import numpy as np

from engine.channels import ResultDispatcher
from engine.requests import FinishReason, GenerateChunk, Int32s, Int64s
from engine.scheduler.request_state import GenerationState, LogprobColumns, RequestTable, SequenceState, columns_of
from gpu_sampler.output import SampleOutput, VerifyOutput

At = tuple[slice] | tuple[int, slice]  # where the new tokens of a row stand in the output of a step


class TokenStream:
    """Sends a chunk whenever a sequence has as many new tokens as its request wants in one chunk."""

    def __init__(self, table: RequestTable, results: ResultDispatcher) -> None:
        self._table = table
        self._results = results

    def add(
        self,
        sequence: SequenceState,
        out: SampleOutput | VerifyOutput,
        at: At,
        finish: FinishReason | None,
        now: float,
    ) -> None:
        """Takes the new tokens [k] of a sequence, which the request table holds already.

        Args:
            sequence: the sequence.
            out: the output of the step.
            at: where the new tokens stand in `out`.
            finish: why the sequence ends with them; None while it goes on.
            now: the engine's time, seconds.
        """
        if sequence.parent.stream_interval == 1:
            self._send(sequence, out.tokens[at], columns_for(sequence.parent, out, at), finish, now)
        else:
            self._send_if_due(sequence, finish, now)

    def add_tokens(self, slots: Int64s, out: SampleOutput, rows: Int64s, now: float) -> None:
        """Takes one new token of each of several streams whose every token is a chunk, as `StreamTable.tokens` does."""
        for sink, tokens in self._table.streams.tokens(slots, out, rows, now):
            self._results.add_tokens(sink, tokens)

    def finished_before(self, sequence: SequenceState, finish: FinishReason, now: float) -> None:
        """Sends an empty chunk for a resumed sequence that had all its tokens before."""
        self._send(sequence, np.empty(0, np.int32), None, finish, now, sequence.output[-1:])

    def _send_if_due(self, sequence: SequenceState, finish: FinishReason | None, now: float) -> None:
        table = self._table
        start, end = len(sequence.prompt) + sequence.sent, int(table.known[sequence.slot])
        if finish is None and end - start < sequence.parent.stream_interval:
            return
        columns = _joined(sequence.parent, sequence.unsent_logprobs + table.logprobs.take(sequence.slot))
        self._send(sequence, table.tokens[sequence.slot, start:end].copy(), columns, finish, now)
        sequence.sent = end - len(sequence.prompt)
        sequence.unsent_logprobs.clear()

    def _send(
        self,
        sequence: SequenceState,
        tokens: Int32s,
        columns: LogprobColumns | None,
        finish: FinishReason | None,
        now: float,
        last: Int32s | None = None,
    ) -> None:
        state = sequence.parent
        logprobs, ranks, top_ids, top_logprobs, chosen = columns or (None,) * 5
        chunk = GenerateChunk(
            branch=sequence.branch,
            tokens=tokens,
            logprobs=logprobs,
            ranks=ranks,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            chosen_logprobs=chosen,
            finish=finish,
            stop_token=int((tokens if last is None else last)[-1]) if finish is FinishReason.STOP else None,
            cached=state.cached,
            queue_s=state.queue_s(now),
            compute_s=state.compute_s(now),
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            prefill_s=state.prefill_s(),
        )
        sequence.drafted = sequence.accepted = 0
        self._results.add(state.results, chunk)


def columns_for(state: GenerationState, out: SampleOutput | VerifyOutput, at: At) -> LogprobColumns | None:
    """Returns the log-probability columns [k, *] of a row's new tokens, cut to what its own request wants."""
    if not state.wants_logprobs or out.logprobs is None:
        return None
    sampled, ranks, top_ids, top, chosen = (None if column is None else column[at] for column in columns_of(out))
    return _cut(state, (sampled, ranks, top_ids, top, chosen))


def _cut(state: GenerationState, columns: LogprobColumns) -> LogprobColumns:
    """Cuts columns to the width that the request wants."""
    n, ids = state.request.params.logprobs, state.request.params.logprob_token_ids
    logprobs, ranks, top_ids, top, chosen = columns
    return (
        logprobs,
        ranks,
        None if n is None or top_ids is None else top_ids[:, :n],
        None if n is None or top is None else top[:, :n],
        None if ids is None or chosen is None else chosen[:, : len(ids)],
    )


def _joined(state: GenerationState, blocks: list[LogprobColumns]) -> LogprobColumns | None:
    if not blocks:
        return None
    cut = zip(*(_cut(state, columns) for columns in blocks), strict=True)
    logprobs, ranks, ids, top, chosen = (None if parts[0] is None else np.concatenate(parts) for parts in cut)
    return logprobs, ranks, ids, top, chosen
