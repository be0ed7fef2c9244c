"""Chunks: what a row has for its caller, handed over as often as the job asks for it."""

import numpy as np

from engine.channels import Outbox
from engine.requests import FinishReason, GenerateChunk, Int32s
from engine.scheduler.logprob_buffer import Columns
from engine.scheduler.request_state import Generation, Request, RequestTable
from gpu_sampler.output import SampleOutput, VerifyOutput

At = tuple[slice] | tuple[int, slice]  # where a row's new tokens stand in a step's output


class Chunks:
    def __init__(self, table: RequestTable, outbox: Outbox) -> None:
        self._table = table
        self._outbox = outbox

    def add(
        self, request: Request, out: SampleOutput | VerifyOutput, at: At, finish: FinishReason | None, now: float
    ) -> None:
        """The row has the tokens [k] at `at`, too; they are in the table. `finish`: None while it goes on."""
        if request.parent.every == 1:
            self._send(request, out.tokens[at], columns_for(request.parent, out, at), finish, now)
        else:
            self._keep(request, finish, now)

    def finished_before(self, request: Request, finish: FinishReason, now: float) -> None:
        """A resumed branch that had ended already: an empty chunk says so."""
        self._send(request, np.empty(0, np.int32), None, finish, now, request.output[-1:])

    def _keep(self, request: Request, finish: FinishReason | None, now: float) -> None:
        """Hands over what the caller has not, if that is a chunk."""
        start, end = len(request.prompt) + request.new_from, int(self._table.known[request.slot])
        if finish is None and end - start < request.parent.every:
            return
        columns = _joined(request.parent, request.kept + self._table.kept.take(request.slot))
        self._send(request, self._table.tokens[request.slot, start:end].copy(), columns, finish, now)
        request.new_from = end - len(request.prompt)
        request.kept.clear()

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


def columns_for(work: Generation, out: SampleOutput | VerifyOutput, at: At) -> Columns | None:
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
