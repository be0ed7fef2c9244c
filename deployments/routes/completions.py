"""POST /v1/completions, plain and streamed."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.choices import Choice, Delta
from deployments.exchange import Exchange
from deployments.generation import Plan, plan_completion
from deployments.messages import Failure, PromptChunk
from deployments.routes.context import Api
from deployments.sse import DONE, EventStream, event
from deployments.wire.completions import CompletionRequest
from deployments.wire.errors import of_failure


class Run:
    """A running completion: its choices, and what the usage block counts."""

    def __init__(self, api: Api, plan: Plan, model: str, exchange: Exchange) -> None:
        self.api = api
        self.plan = plan
        self.exchange = exchange
        self.created = int(time.time())
        self.model = model
        self.choices = [Choice(plan, i, api.tokenizer) for i in range(len(plan.prompts) * plan.task.params.n)]
        self._open = len(self.choices)
        self._cached = [0] * len(plan.prompts)
        self._first = True

    def push(self, item: PromptChunk) -> tuple[Choice, Delta] | None:
        """None for what comes after a choice's end. Raises ApiError for a failed prompt."""
        if isinstance(item.chunk, Failure):
            raise of_failure(item.chunk)
        choice = self.choices[item.prompt * self.plan.task.params.n + item.chunk.branch]
        if choice.ended:
            return None
        self._cached[item.prompt] = max(self._cached[item.prompt], item.chunk.cached)
        delta = choice.push(item.chunk)
        self._open -= choice.ended
        return choice, delta

    def arrived(self, chunks: tuple[PromptChunk, ...]) -> None:
        """Tells the observer of the first tokens. On the event loop, unlike `push`."""
        if not self._first or not chunks or isinstance(chunks[0].chunk, Failure):
            return
        self._first = False
        queue_s, compute_s = chunks[0].chunk.queue_s, chunks[0].chunk.compute_s
        self.api.observer.first_token(self.exchange.route, self.exchange.elapsed_s())
        self.api.observer.stage("queue", queue_s)
        self.exchange.timings(queue_s, compute_s)

    @property
    def over(self) -> bool:
        return not self._open

    def size(self) -> int:
        """Bytes that the answer may have, roughly."""
        params = self.plan.task.params
        cells = 1 if params.logprobs is None else 8 + params.logprobs + len(params.logprob_token_ids or ())
        return 8 * len(self.choices) * params.max_tokens * cells

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
        return usage

    def head(self) -> dict[str, Any]:
        return {"id": self.plan.id, "object": "text_completion", "created": self.created, "model": self.model}


async def completions(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, CompletionRequest)
    card = await api.served(body.model)
    plan = await plan_completion(api, body, card, exchange)
    run = Run(api, plan, card.name, exchange)
    if body.stream:
        options = body.stream_options
        usage = bool(options and options.include_usage)
        events = stream_events(run, usage, bool(options and options.continuous_usage_stats))
        return EventStream(events, exchange=exchange, settings=api.settings.stream, observer=api.observer)
    async with api.deadline(exchange, api.settings.deadlines.generation_s):
        merged = await _collect(run)
    return await api.off_loop(run.size(), _answer, run, merged)


async def _collect(run: Run) -> list[list[Delta]]:
    """Every choice's deltas. With stop strings the work is streamed, so that a choice ended by one stops costing."""
    merged: list[list[Delta]] = [[] for _ in run.choices]

    def take(chunks: tuple[PromptChunk, ...]) -> None:
        for item in chunks:
            found = run.push(item)
            if found is not None:
                merged[found[0].index].append(found[1])

    if not run.plan.stops:
        reply = await run.api.backend.generate(run.plan.task)
        run.arrived(reply.chunks)
        await run.api.off_loop(run.size(), take, reply.chunks)
    else:
        async with streaming(run) as replies:
            async for chunks in replies:
                run.arrived(chunks)
                take(chunks)
                if run.over:
                    break
    if not run.over:
        raise RuntimeError("The backend ended before every choice had a finish reason.")
    return merged


@contextlib.asynccontextmanager
async def streaming(run: Run) -> AsyncIterator[AsyncIterator[tuple[PromptChunk, ...]]]:
    """The backend's replies. Leaving the block closes them, which cancels what still runs."""
    source = run.api.backend.stream(run.plan.task)

    async def chunks() -> AsyncIterator[tuple[PromptChunk, ...]]:
        async for reply in source:
            yield reply.chunks

    try:
        yield chunks()
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def _answer(run: Run, merged: list[list[Delta]]) -> Response:
    choices = [_merge(run, choice, merged[choice.index]) for choice in run.choices]
    return run.api.json(run.exchange, {**run.head(), "choices": choices, "usage": run.usage()})


def _merge(run: Run, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
    logprobs: dict[str, list[Any]] | None = None
    if run.plan.wants_logprobs:
        logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for delta in deltas:
            for name, values in (delta.logprobs or {}).items():
                logprobs.setdefault(name, []).extend(values)
    last = deltas[-1]
    found: dict[str, Any] = {
        "index": choice.index,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "seed": choice.seed,
    }
    if run.plan.return_ids:
        found["token_ids"] = [token for delta in deltas for token in delta.tokens]
        found["prompt_token_ids"] = run.plan.prompts[choice.prompt]
    return found


async def stream_events(run: Run, usage: bool, continuous: bool) -> AsyncIterator[bytes]:
    """One event a choice and reply, joined into one piece a reply; then the usage if asked for; then `[DONE]`."""
    api, exchange = run.api, run.exchange
    async with api.deadline(exchange, api.settings.deadlines.generation_s), streaming(run) as replies:
        async for chunks in replies:
            run.arrived(chunks)
            data = b"".join(_events(run, chunks, usage, continuous))
            if data:
                yield data
            if run.over:
                break
        if not run.over:
            raise RuntimeError("The backend ended before every choice had a finish reason.")
    if usage:
        yield event({**run.head(), "choices": [], "usage": run.usage()})
    yield DONE


def _events(run: Run, chunks: tuple[PromptChunk, ...], usage: bool, continuous: bool) -> list[bytes]:
    found = [run.push(item) for item in chunks]
    events = []
    for choice, delta in (pair for pair in found if pair is not None):
        first, choice.started = not choice.started, True
        if not (first or delta.text or delta.finish_reason or run.plan.return_ids or delta.logprobs):
            continue  # all of it is held back
        body = {**run.head(), "choices": [_chunk(run, choice, delta, first)]}
        if usage or continuous:
            body["usage"] = run.usage() if continuous else None
        events.append(event(body))
    return events


def _chunk(run: Run, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": choice.index,
        "text": delta.text,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if first:
        found["seed"] = choice.seed
    if run.plan.return_ids:
        found["token_ids"] = delta.tokens
        if first:
            found["prompt_token_ids"] = run.plan.prompts[choice.prompt]
    return found
