"""Charges the tokens of requests to the names of their keys."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import numpy as np

from deployments.auth.rate_limiter import RateLimiter
from deployments.errors import ApiError
from deployments.protocol import (
    AnyTask,
    Backend,
    GenerateReply,
    GenerateTask,
    LikelihoodReply,
    LikelihoodTask,
    ModelCard,
    ScoreReply,
    ScoreTask,
)
from engine.config import Costs
from engine.requests import GenerateChunk

EXPECTED_TOKENS = Costs().expected_tokens
REFUSED = frozenset((429, 503))  # nothing was computed


class MeteredBackend:
    """Charges each request's expected tokens before it passes it on, and settles with the computed tokens at its end.

    A refused request costs nothing. One that failed or was cancelled costs what was charged, because how much of it was
    computed is unknown.
    """

    def __init__(self, backend: Backend, limiter: RateLimiter) -> None:
        self._backend = backend
        self._limiter = limiter

    async def score(self, task: ScoreTask) -> ScoreReply:
        with self._charged(task.tenant, expected(task)) as bill:
            reply = await self._backend.score(task)
            bill.used = _computed(task, reply)
            return reply

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply:
        with self._charged(task.tenant, expected(task)) as bill:
            reply = await self._backend.likelihood(task)
            bill.used = _computed(task, reply)
            return reply

    async def generate(self, task: GenerateTask) -> GenerateReply:
        with self._charged(task.tenant, expected(task)) as bill:
            reply = await self._backend.generate(task)
            counted = _Counted(task)
            counted.take(reply)
            bill.used = counted.tokens
            return reply

    def stream(self, task: GenerateTask) -> AsyncIterator[GenerateReply]:
        replies = self._backend.stream(task)
        return self._metered(task, replies) if self._limiter.counts_tokens(task.tenant) else replies

    async def _metered(self, task: GenerateTask, replies: AsyncIterator[GenerateReply]) -> AsyncIterator[GenerateReply]:
        counted = _Counted(task)
        with self._charged(task.tenant, expected(task)) as bill:
            try:
                async for reply in replies:
                    counted.take(reply)
                    bill.used = counted.tokens
                    yield reply
            finally:
                close = getattr(replies, "aclose", None)
                if close is not None:
                    await close()

    async def card(self) -> ModelCard:
        return await self._backend.card()

    def check_open(self, remaining_s: float) -> None:
        self._backend.check_open(remaining_s)

    def readiness(self) -> dict[str, object]:
        return self._backend.readiness()

    async def metrics(self) -> bytes:
        return await self._backend.metrics()

    @contextlib.contextmanager
    def _charged(self, name: str, tokens: int) -> Iterator["_Bill"]:
        self._limiter.charge(name, tokens)
        bill = _Bill(tokens)
        try:
            yield bill
        except ApiError as error:
            if error.status in REFUSED and bill.used == tokens:
                bill.used = 0
            raise
        finally:
            self._limiter.settle(name, tokens - bill.used)


class _Bill:
    """Holds the tokens that a request costs in the end."""

    __slots__ = ("used",)

    def __init__(self, used: int) -> None:
        self.used = used


class _Counted:
    """Counts the tokens of a generation: prompt tokens that were not cached, and generated tokens."""

    def __init__(self, task: GenerateTask) -> None:
        self._seen: set[int] = set()
        self.tokens = len(task.prompts)

    def take(self, reply: GenerateReply) -> None:
        for item in reply.chunks:
            if isinstance(item.chunk, GenerateChunk):
                self.tokens += len(item.chunk.tokens)
                if item.prompt not in self._seen:
                    self._seen.add(item.prompt)
                    self.tokens -= item.chunk.cached


def expected(task: AnyTask) -> int:
    """Returns the tokens that a request is expected to cost; many generations end before `max_tokens`."""
    if not isinstance(task, GenerateTask):
        return len(task.prefix) + len(task.ids)
    new = 0 if task.prompt_only else min(task.params.max_tokens, EXPECTED_TOKENS)
    return len(task.prompts) + len(task.seeds) * task.params.n * new


def _computed(task: ScoreTask | LikelihoodTask, reply: ScoreReply | LikelihoodReply) -> int:
    """Returns the tokens of all sequences, with prefix and what each shares with the one before, less cached ones."""
    shared = int(task.shared.sum(dtype=np.int64)) if isinstance(task, LikelihoodTask) else 0
    tokens = (len(task.starts) - 1) * len(task.prefix) + shared + len(task.ids)
    return max(0, tokens - int(reply.cached.sum(dtype=np.int64)))
