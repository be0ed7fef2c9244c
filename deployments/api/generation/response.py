"""A running generation: from its plan to the plain answer or the stream, whatever shape its route gives to choices.

Pace: when a generation's tokens came, and where its time went.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.responses import Response

from deployments.api.generation.choices import Choice, Delta
from deployments.api.generation.request_builder import Plan
from deployments.api.handler import Api
from deployments.api.request_context import Exchange
from deployments.api.schemas.generation import GenerationRequest
from deployments.api.sse import DONE, EventStream, event
from deployments.errors import of_failure
from deployments.observability.observer import Observer
from deployments.protocol import Failure, PromptChunk, PromptScores
from engine.requests import GenerateChunk


class Pace:
    """Of one request. Branches and prompts run side by side: the longest of each span counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: dict[tuple[int, int], tuple[float, int]] = {}  # by prompt and branch: first arrival, tokens since
        self._last = 0.0
        self._queue_s = self._prefill_s = self._compute_s = 0.0

    def came(self, chunks: Sequence[PromptChunk]) -> None:
        """What one message brought."""
        now = self._clock()
        for prompt, chunk in chunks:
            if not isinstance(chunk, GenerateChunk):
                continue
            self._queue_s = max(self._queue_s, chunk.queue_s)
            self._prefill_s = max(self._prefill_s, chunk.prefill_s)
            self._compute_s = max(self._compute_s, chunk.compute_s)
            key = prompt, chunk.branch
            began, tokens = self._began.get(key, (now, -len(chunk.tokens)))
            self._began[key] = began, tokens + len(chunk.tokens)
            self._last = now

    def tell(self, observer: Observer, route: str, *, streamed: bool) -> None:
        """Stages as the replica measured them; the time between tokens as they came here, which only a stream shows."""
        if not self._began:
            return
        observer.stage("queue", self._queue_s)
        observer.stage("prefill", self._prefill_s)
        observer.stage("decode", max(0.0, self._compute_s - self._prefill_s))
        began, tokens = max(self._began.values(), key=lambda one: one[1])
        if streamed and tokens:
            observer.token_gap(route, (self._last - began) / tokens)


class Shape(Protocol):
    """How a route writes its choices."""

    whole: str  # `object` of a plain answer
    part: str  # and of an event
    choice: type[Choice]

    def merged(self, plan: Plan, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        """The choice of a plain answer."""
        ...

    def parts(self, plan: Plan, choice: Choice, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """The choice's entry of each event that this delta makes: no event if all of it is held back."""
        ...


class Run:
    """A running completion: its choices, and what the usage block counts."""

    def __init__(self, api: Api, plan: Plan, shape: Shape, model: str, exchange: Exchange) -> None:
        self.api = api
        self.plan = plan
        self.shape = shape
        self.exchange = exchange
        self.created = int(time.time())
        self.model = model
        self.choices = [shape.choice(plan, i, api.tokenizer) for i in range(len(plan.prompts) * plan.call[0].params.n)]
        self._open = len(self.choices)
        self._cached = [0] * len(plan.prompts)
        self._drafted = self._accepted = 0
        self._first = True
        self._pace = Pace()
        self.streamed = False  # the client gets tokens as they come

    def push(self, item: PromptChunk) -> list[tuple[Choice, Delta]]:
        """Nothing for what comes after a choice's end. Raises ApiError for a failed prompt."""
        if isinstance(item.chunk, Failure):
            raise of_failure(item.chunk)
        first = item.prompt * self.plan.call[0].params.n
        if isinstance(item.chunk, PromptScores):
            return self._scored(self.choices[first : first + self.plan.call[0].params.n], item.chunk)
        choice = self.choices[first + item.chunk.branch]
        if choice.ended:
            return []
        if choice.prompt_scores is None:  # else the prompt stands in the cache because of this very request
            self._cached[item.prompt] = max(self._cached[item.prompt], item.chunk.cached)
        self._drafted += item.chunk.drafted
        self._accepted += item.chunk.accepted
        delta = choice.push(item.chunk)
        self._open -= choice.ended
        return [(choice, delta)]

    def _scored(self, choices: list[Choice], scores: PromptScores) -> list[tuple[Choice, Delta]]:
        for choice in choices:
            choice.prompt_scores = scores
        if not self.plan.of_prompt.only:
            return []
        self._open -= len(choices)
        return [(choice, choice.close()) for choice in choices]

    def arrived(self, chunks: tuple[PromptChunk, ...]) -> None:
        """Notes when tokens came; tells the observer of a stream's first ones. On the event loop, unlike `push`."""
        if not chunks or isinstance(chunks[0].chunk, Failure):
            return
        self._pace.came(chunks)
        if self._first:
            self._first = False
            self.exchange.timings(chunks[0].chunk.queue_s, chunks[0].chunk.compute_s)
            if self.streamed:
                self.api.observer.first_token(self.exchange.route, self.exchange.elapsed_s())

    def ended(self) -> None:
        """Tells the observer where the time went. On the event loop, once every choice has ended."""
        self._pace.tell(self.api.observer, self.exchange.route, streamed=self.streamed)

    @property
    def over(self) -> bool:
        return not self._open

    def size(self) -> int:
        """Bytes that the answer may have, roughly."""
        params = self.plan.call[0].params
        cells = 1 if params.logprobs is None else 8 + params.logprobs + len(params.logprob_token_ids or ())
        return 8 * len(self.choices) * params.max_tokens * cells + self.prompt_size()

    def prompt_size(self) -> int:
        """Bytes of the answer that tell of the prompts, roughly."""
        top = self.plan.call[0].prompt_logprobs
        cells = (
            self.plan.of_prompt.echo if top is None else 8 + top + len(self.plan.call[0].params.logprob_token_ids or ())
        )
        return 8 * sum(map(len, self.plan.prompts)) * self.plan.call[0].params.n * cells

    def usage(self) -> dict[str, Any]:
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

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.plan.id, "object": kind, "created": self.created, "model": self.model}


async def answer(run: Run, body: GenerationRequest) -> Response:
    """The run's answer as the body wants it, plain or streamed."""
    api, exchange = run.api, run.exchange
    if api.settings.synthetic:
        exchange.headers["x-assay-synthetic-acceptance"] = "true"
    if body.stream:
        options = body.stream_options
        usage = bool(options and options.include_usage)
        run.streamed = True
        events = _stream(run, usage, bool(options and options.continuous_usage_stats))
        return EventStream(events, exchange=exchange, settings=api.settings.stream, observer=api.observer)
    async with api.deadline(exchange, api.settings.deadlines.generation_s):
        merged = await _collect(run)
    run.ended()
    return await api.off_loop(run.size(), _whole, run, merged)


async def _collect(run: Run) -> list[list[Delta]]:
    """Every choice's deltas. With stop strings the work is streamed, so that a choice ended by one stops costing."""
    merged: list[list[Delta]] = [[] for _ in run.choices]

    def take(chunks: tuple[PromptChunk, ...]) -> None:
        for item in chunks:
            for choice, delta in run.push(item):
                merged[choice.index].append(delta)

    if not run.plan.stops or run.plan.of_prompt.only:
        reply = await run.api.backend.generate(run.plan.call)
        run.arrived(reply.chunks)
        await run.api.off_loop(run.size(), take, reply.chunks)
    else:
        async with _replies(run) as replies:
            async for chunks in replies:
                run.arrived(chunks)
                take(chunks)
                if run.over:
                    break
    if not run.over:
        raise RuntimeError("The backend ended before every choice had a finish reason.")
    return merged


@contextlib.asynccontextmanager
async def _replies(run: Run) -> AsyncIterator[AsyncIterator[tuple[PromptChunk, ...]]]:
    """The backend's replies. Leaving the block closes them, which cancels what still runs."""
    source = run.api.backend.stream(run.plan.call)

    async def chunks() -> AsyncIterator[tuple[PromptChunk, ...]]:
        async for reply in source:
            yield reply.chunks

    try:
        yield chunks()
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def _whole(run: Run, merged: list[list[Delta]]) -> Response:
    choices = [run.shape.merged(run.plan, choice, merged[choice.index]) for choice in run.choices]
    return run.api.json(run.exchange, {**run.head(run.shape.whole), "choices": choices, "usage": run.usage()})


async def _stream(run: Run, usage: bool, continuous: bool) -> AsyncIterator[bytes]:
    """One event a choice and reply, joined into one piece a reply; then the usage if asked for; then `[DONE]`."""
    api, exchange = run.api, run.exchange
    async with api.deadline(exchange, api.settings.deadlines.generation_s), _replies(run) as replies:
        async for chunks in replies:
            run.arrived(chunks)
            opening = run.plan.of_prompt.echo and not all(choice.started for choice in run.choices)
            size = run.prompt_size() if opening else 0
            data = b"".join(await api.off_loop(size, _events, run, chunks, usage, continuous))
            if data:
                yield data
            if run.over:
                break
        if not run.over:
            raise RuntimeError("The backend ended before every choice had a finish reason.")
    run.ended()
    if usage:
        yield event({**run.head(run.shape.part), "choices": [], "usage": run.usage()})
    yield DONE


def _events(run: Run, chunks: tuple[PromptChunk, ...], usage: bool, continuous: bool) -> list[bytes]:
    found = [pair for item in chunks for pair in run.push(item)]
    events = []
    for choice, delta in found:
        first, choice.started = not choice.started, True
        for part in run.shape.parts(run.plan, choice, delta, first):
            body = {**run.head(run.shape.part), "choices": [part]}
            if usage or continuous:
                body["usage"] = run.usage() if continuous else None
            events.append(event(body))
    return events
