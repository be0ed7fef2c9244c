"""Runs a generation from its plan to the plain answer or the stream. The route's ChoiceFormat writes the choices."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response

from deployments.api.generation.choices import ChoiceState, Delta
from deployments.api.generation.request_builder import TOKEN_BYTES, GenerationPlan, repeats
from deployments.api.handler import RequestHandler, answer_too_large
from deployments.api.request_context import RequestContext
from deployments.api.schemas.generation import GenerationRequest
from deployments.api.sse import DONE, EventStream, Write, event, json_bytes
from deployments.errors import from_failure
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Failure, GenerateReply, PromptChunk, PromptScores
from engine.requests import GenerateChunk
from engine.tokenizer.tokenizer import Tokenizer

CHOICE_COST = 64  # making a choice, or decoding a token that it resumes, costs about what parsing this many bytes does
MARK = "\0"  # stands for the text of an event while its other bytes are written


class TokenTiming:
    """Measures when one request's tokens arrived. Branches and prompts run in parallel: the longest time counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: dict[tuple[int, int], _Arrivals] = {}  # by prompt and branch
        self._last = 0.0
        self._queue_s = self._prefill_s = self._compute_s = 0.0

    def record(self, chunks: Sequence[PromptChunk]) -> None:
        """Notes the chunks of one message."""
        now = self._clock()
        for prompt, chunk in chunks:
            if not isinstance(chunk, GenerateChunk):
                continue
            if chunk.queue_s > self._queue_s:
                self._queue_s = chunk.queue_s
            if chunk.prefill_s > self._prefill_s:
                self._prefill_s = chunk.prefill_s
            if chunk.compute_s > self._compute_s:
                self._compute_s = chunk.compute_s
            arrivals = self._began.get((prompt, chunk.branch))
            if arrivals is None:
                self._began[prompt, chunk.branch] = _Arrivals(now)
            else:
                arrivals.tokens += len(chunk.tokens)
            self._last = now

    def report(self, observer: IngressMetrics, route: str, *, streamed: bool) -> None:
        """Reports the stages as the replica measured them, and for a stream the time between arrivals."""
        if not self._began:
            return
        observer.stage("queue", self._queue_s)
        observer.stage("prefill", self._prefill_s)
        observer.stage("decode", max(0.0, self._compute_s - self._prefill_s))
        longest = max(self._began.values(), key=lambda arrivals: arrivals.tokens)
        if streamed and longest.tokens:
            observer.token_gap(route, (self._last - longest.first) / longest.tokens)


@dataclass(slots=True)
class _Arrivals:
    """Says when a branch's first chunk arrived, and how many tokens have arrived since."""

    first: float
    tokens: int = 0


class ChoiceFormat(Protocol):
    """Writes a route's choices."""

    whole: str  # `object` of a plain answer
    part: str  # and of an event
    choice: type[ChoiceState]

    def merged(self, plan: GenerationPlan, choice: ChoiceState, deltas: list[Delta]) -> dict[str, Any]:
        """Returns the choice of a plain answer."""
        ...

    def parts(self, plan: GenerationPlan, choice: ChoiceState, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """Returns the choice's entry of each event that this delta makes: none if all of it is held back."""
        ...


class GenerationRun:
    """Holds a running generation: its choices, and what the usage block counts. `begin` makes it."""

    def __init__(
        self,
        handler: RequestHandler,
        plan: GenerationPlan,
        format: ChoiceFormat,
        model: str,
        context: RequestContext,
        choices: list[ChoiceState],
    ) -> None:
        self.handler = handler
        self.plan = plan
        self.format = format
        self.context = context
        self.created = int(time.time())
        self.model = model
        self.choices = choices
        self._branches = plan.call[0].params.n
        self._open = len(self.choices)
        self._cached = [0] * len(plan.prompts)
        self._drafted = self._accepted = 0
        self._first = True
        self._timing = TokenTiming()
        self._event_head = b""
        self.streamed = False  # the client gets tokens as they come

    def push(self, item: PromptChunk) -> list[tuple[ChoiceState, Delta]]:
        """Adds a chunk. Returns nothing for one after its choice's end. Raises ApiError for a failed prompt."""
        if isinstance(item.chunk, Failure):
            raise from_failure(item.chunk)
        first = item.prompt * self._branches
        if isinstance(item.chunk, PromptScores):
            return self._scored(self.choices[first : first + self._branches], item.chunk)
        choice = self.choices[first + item.chunk.branch]
        if choice.ended:
            return []
        self._count(choice, item.chunk)
        delta = choice.push(item.chunk)
        self._open -= choice.ended
        return [(choice, delta)]

    def push_text(self, item: PromptChunk) -> tuple[ChoiceState, str] | None:
        """Adds a chunk that gives its choice nothing but text, which may be empty.

        Returns:
            The choice and its new text; None if nothing was added, because the chunk takes `push`.
        """
        chunk = item.chunk
        if not isinstance(chunk, GenerateChunk) or chunk.finish is not None:
            return None
        choice = self.choices[item.prompt * self._branches + chunk.branch]
        if not choice.only_text or not choice.started or choice.ended:
            return None
        self._count(choice, chunk)
        return choice, choice.push_text(chunk)

    def _count(self, choice: ChoiceState, chunk: GenerateChunk) -> None:
        if choice.prompt_scores is None and chunk.cached > self._cached[choice.prompt]:
            self._cached[choice.prompt] = chunk.cached  # else this request itself put the prompt into the cache
        self._drafted += chunk.drafted
        self._accepted += chunk.accepted

    def _scored(self, choices: list[ChoiceState], scores: PromptScores) -> list[tuple[ChoiceState, Delta]]:
        for choice in choices:
            choice.prompt_scores = scores
        if not self.plan.call[0].prompt_only:
            return []
        self._open -= len(choices)
        return [(choice, choice.close()) for choice in choices]

    def record_arrival(self, chunks: tuple[PromptChunk, ...]) -> None:
        """Notes the arrival of chunks, and reports a stream's first ones. Call it on the event loop, unlike `push`."""
        if not chunks or isinstance(chunks[0].chunk, Failure):
            return
        self._timing.record(chunks)
        if self._first:
            self._first = False
            self.context.timings(chunks[0].chunk.queue_s, chunks[0].chunk.compute_s)
            if self.streamed:
                self.handler.observer.first_token(self.context.route, self.context.elapsed_s())

    def ended(self) -> None:
        """Reports the times. Call it on the event loop, once every choice has ended."""
        self._timing.report(self.handler.observer, self.context.route, streamed=self.streamed)

    @property
    def finished(self) -> bool:
        return not self._open

    def size(self) -> int:
        """Returns the rough size of the answer in bytes."""
        params = self.plan.call[0].params
        cells = 1 if params.logprobs is None else 8 + params.logprobs + len(params.logprob_token_ids or ())
        cells += bool(self.plan.body.return_token_ids)
        return TOKEN_BYTES * len(self.choices) * params.max_tokens * cells + self.prompt_size()

    def prompt_size(self) -> int:
        """Returns the rough size of the answer's part about the prompts, in bytes."""
        params, top = self.plan.call[0].params, self.plan.call[0].prompt_logprobs
        cells = repeats(self.plan.body, self.plan.prompt_options)
        if top is not None:
            cells += 8 + top + len(params.logprob_token_ids or ())
        return TOKEN_BYTES * sum(map(len, self.plan.prompts)) * params.n * cells

    def usage(self) -> dict[str, Any]:
        """Returns the usage block as of now."""
        prompt_tokens = sum(map(len, self.plan.prompts))
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        if self.plan.truncated is not None:
            usage["truncated_tokens"] = self.plan.truncated
        if self._drafted:
            usage["speculation"] = {"drafted": self._drafted, "accepted": self._accepted}
        return usage

    def event(self, part: dict[str, Any], more: dict[str, Any] | None) -> bytes:
        """Returns the event of one choice's part, with more fields after it. Its beginning is written once a stream."""
        if not self._event_head:
            self._event_head = event({**self.head(self.format.part), "choices": []}).removesuffix(b"]}\n\n")
        tail = b"]" if more is None else b"]," + json_bytes(more)[1:-1]
        return b"".join((self._event_head, json_bytes(part), tail, b"}\n\n"))

    def text_event(self, choice: ChoiceState, text: str, more: dict[str, Any] | None) -> bytes:
        """Returns the event of a delta that is nothing but text, as `event` writes it.

        All but the text is the same in each such event, and is written once a choice. `more` must be the same, too.
        """
        if choice.around_text is None:
            [part] = self.format.parts(self.plan, choice, Delta(MARK, [], None, None, None), False)
            before, _, after = self.event(part, more).rpartition(json_bytes(MARK))
            choice.around_text = before, after
        before, after = choice.around_text
        return b"".join((before, json_bytes(text), after))

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the fields that begin an answer or an event. `kind`: its `object`."""
        return {"id": self.plan.id, "object": kind, "created": self.created, "model": self.model}


async def begin(
    handler: RequestHandler, plan: GenerationPlan, format: ChoiceFormat, model: str, context: RequestContext
) -> GenerationRun:
    """Returns the run of a plan, whose choices are made off the event loop if they are many or resume many tokens.

    Raises:
        ApiError: The tokens that a choice resumes complete a stop string.
    """
    count = len(plan.prompts) * plan.call[0].params.n + len(plan.body.resume_token_ids or ())
    choices = await handler.off_loop(CHOICE_COST * count, _choices, plan, format.choice, handler.tokenizer)
    return GenerationRun(handler, plan, format, model, context, choices)


def _choices(plan: GenerationPlan, kind: type[ChoiceState], tokenizer: Tokenizer) -> list[ChoiceState]:
    """Makes the choices of each prompt, behind which a decoder is put once."""
    found: list[ChoiceState] = []
    for prompt in plan.prompts:
        decoder = tokenizer.decoder(skip_special_tokens=plan.body.skip_special_tokens is not False)
        decoder.follow(prompt)
        for _ in range(plan.call[0].params.n):
            found.append(kind(plan, len(found), tokenizer, decoder.copy()))
    return found


async def answer(run: GenerationRun, body: GenerationRequest) -> Response:
    """Runs the generation and returns its answer, plain or streamed as the body says.

    Raises:
        ApiError: A prompt failed, the deadline passed, or no replica takes the request.
    """
    handler, context = run.handler, run.context
    if handler.settings.synthetic:
        context.headers["x-assay-synthetic-acceptance"] = "true"
    if body.stream:
        options = body.stream_options
        usage = bool(options and options.include_usage)
        run.streamed = True
        produce = partial(_stream, run, usage, bool(options and options.continuous_usage_stats))
        return EventStream(produce, context=context, settings=handler.settings.stream, observer=handler.observer)
    with handler.deadline(context, handler.settings.deadlines.generation_s):
        merged = await _collect(run)
    run.ended()
    return await handler.sized_json(context, run.size(), partial(_whole, run, merged))


async def _collect(run: GenerationRun) -> list[list[Delta]]:
    """Returns every choice's deltas. Stop strings need a stream, so that work ends as soon as every choice has."""
    merged: list[list[Delta]] = [[] for _ in run.choices]

    def take(chunks: tuple[PromptChunk, ...]) -> None:
        for item in chunks:
            for choice, delta in run.push(item):
                merged[choice.index].append(delta)

    if not run.plan.body.stop or run.plan.prompt_options.only:
        reply = await run.handler.backend.generate(run.plan.call)
        run.record_arrival(reply.chunks)
        await run.handler.off_loop(run.size(), take, reply.chunks)
    else:
        async with _replies(run) as replies:
            async for reply in replies:
                run.record_arrival(reply.chunks)
                take(reply.chunks)
                if run.finished:
                    break
    if not run.finished:
        raise RuntimeError("The backend ended before every choice had a finish reason.")
    return merged


@contextlib.asynccontextmanager
async def _replies(run: GenerationRun) -> AsyncIterator[AsyncIterator[GenerateReply]]:
    """Yields the backend's replies. Leaving the block closes them, which cancels the work."""
    source = run.handler.backend.stream(run.plan.call)
    try:
        yield source
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def _whole(run: GenerationRun, merged: list[list[Delta]]) -> dict[str, Any]:
    choices = [run.format.merged(run.plan, choice, merged[choice.index]) for choice in run.choices]
    return {**run.head(run.format.whole), "choices": choices, "usage": run.usage()}


async def _stream(run: GenerationRun, usage: bool, continuous: bool, write: Write) -> None:
    """Writes the events of each reply as one piece, then the usage if requested, then `[DONE]`."""
    handler, context = run.handler, run.context
    repeated = repeats(run.plan.body, run.plan.prompt_options)
    with handler.deadline(context, handler.settings.deadlines.generation_s):
        async with _replies(run) as replies:
            async for reply in replies:
                run.record_arrival(reply.chunks)
                if repeated and not all(choice.started for choice in run.choices):
                    size = run.prompt_size()
                    data = await handler.off_loop(size, _opening, run, reply.chunks, usage, continuous)
                else:
                    data = _events(run, reply.chunks, usage, continuous)
                if data:
                    write(data)
                if run.finished:
                    break
            if not run.finished:
                raise RuntimeError("The backend ended before every choice had a finish reason.")
    run.ended()
    if usage:
        write(event({**run.head(run.format.part), "choices": [], "usage": run.usage()}))
    write(DONE)


def _opening(run: GenerationRun, chunks: tuple[PromptChunk, ...], usage: bool, continuous: bool) -> bytes:
    """Returns the events of one reply, which may repeat prompts.

    Raises:
        ApiError: They have more than `limits.max_answer_bytes`.
    """
    events: list[bytes] = []
    maximum = left = run.handler.limits["max_answer_bytes"]
    for one in _parts(run, chunks, usage, continuous):
        left -= len(one)
        if left < 0:
            raise answer_too_large(maximum)
        events.append(one)
    return b"".join(events)


def _events(run: GenerationRun, chunks: tuple[PromptChunk, ...], usage: bool, continuous: bool) -> bytes:
    """Returns the events of the chunks of one reply."""
    if len(chunks) == 1 and not continuous and (added := run.push_text(chunks[0])) is not None:
        choice, text = added
        return run.text_event(choice, text, {"usage": None} if usage else None) if text else b""
    return b"".join(_parts(run, chunks, usage, continuous))


def _parts(run: GenerationRun, chunks: tuple[PromptChunk, ...], usage: bool, continuous: bool) -> Iterator[bytes]:
    """Makes the events of chunks one after another."""
    found = [pair for item in chunks for pair in run.push(item)]
    more = {"usage": run.usage() if continuous else None} if usage or continuous else None
    for choice, delta in found:
        first, choice.started = not choice.started, True
        for part in run.format.parts(run.plan, choice, delta, first):
            yield run.event(part, more)
