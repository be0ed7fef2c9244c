"""Charges the tokens of requests to the names of their keys."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import numpy as np

from deployments.auth.rate_limiter import RateLimiter
from deployments.errors import ApiError
from deployments.protocol import (
    AnyCall,
    Backend,
    GenerateCall,
    GenerateReply,
    LikelihoodReply,
    ModelCard,
    RowsCall,
    ScoreReply,
    common,
)
from engine.config import Costs
from engine.request_cost import request_cost
from engine.requests import GenerateChunk, LikelihoodRequest, ScoreRequest

TOKENS = Costs(decode_token_cost=1)  # quotas count tokens: a generated one is one
REFUSED = frozenset((429, 503))  # nothing was computed


class MeteredBackend:
    """Charges each request's expected tokens before it passes it on, and settles with the computed tokens at its end.

    A refused request costs nothing. One that failed or was cancelled costs what was charged, because how much of it was
    computed is unknown.
    """

    def __init__(self, backend: Backend, limiter: RateLimiter) -> None:
        self._backend = backend
        self._limiter = limiter

    async def score(self, request: ScoreRequest, all_or_nothing: bool = False) -> ScoreReply:
        with self._charged(request) as bill:
            reply = await self._backend.score(request, all_or_nothing)
            bill.used = _computed(request, reply)
            return reply

    async def likelihood(self, request: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        with self._charged(request) as bill:
            reply = await self._backend.likelihood(request, all_or_nothing)
            bill.used = _computed(request, reply)
            return reply

    async def generate(self, call: GenerateCall) -> GenerateReply:
        with self._charged(call) as bill:
            reply = await self._backend.generate(call)
            counted = _Counted(call)
            counted.take(reply)
            bill.used = counted.tokens
            return reply

    def stream(self, call: GenerateCall) -> AsyncIterator[GenerateReply]:
        replies = self._backend.stream(call)
        return self._metered(call, replies) if self._limiter.counts_tokens(common(call).tenant) else replies

    async def _metered(self, call: GenerateCall, replies: AsyncIterator[GenerateReply]) -> AsyncIterator[GenerateReply]:
        counted = _Counted(call)
        with self._charged(call) as bill:
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

    def check_open(self, timeout_s: float) -> None:
        self._backend.check_open(timeout_s)

    def readiness(self) -> dict[str, object]:
        return self._backend.readiness()

    async def metrics(self) -> bytes:
        return await self._backend.metrics()

    @contextlib.contextmanager
    def _charged(self, call: AnyCall) -> Iterator["_Bill"]:
        """Charges the tenant with the expected tokens, and settles with those that were used."""
        name = common(call).tenant
        requests = call if isinstance(call, tuple) else (call,)
        tokens = sum(request_cost(request, TOKENS) for request in requests)
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

    def __init__(self, call: GenerateCall) -> None:
        self._seen: set[int] = set()
        self.tokens = sum(len(request.prompt) for request in call)

    def take(self, reply: GenerateReply) -> None:
        for item in reply.chunks:
            if isinstance(item.chunk, GenerateChunk):
                self.tokens += len(item.chunk.tokens)
                if item.prompt not in self._seen:
                    self._seen.add(item.prompt)
                    self.tokens -= item.chunk.cached


def _computed(request: RowsCall, reply: ScoreReply | LikelihoodReply) -> int:
    """Returns the tokens of all sequences, with prefix and what each shares with the one before, less cached ones."""
    shared = int(request.shared.sum(dtype=np.int64)) if isinstance(request, LikelihoodRequest) else 0
    tokens = (len(request.starts) - 1) * len(request.prefix) + shared + len(request.ids)
    return max(0, tokens - int(reply.cached.sum(dtype=np.int64)))
