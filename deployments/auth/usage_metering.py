"""Metered: a backend whose work is charged to the names that ask for it. Around whatever `Backend` serves."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import numpy as np

from deployments.auth.rate_limiter import Quotas
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


class Metered:
    """A task is charged with what its lengths say before it is sent, and settled with what was computed when it has
    ended. A task that was refused costs nothing; one that failed or was cancelled on its way costs what was charged,
    since nobody knows how far it came."""

    def __init__(self, backend: Backend, quotas: Quotas) -> None:
        self._backend = backend
        self._quotas = quotas

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
        return self._metered(call, replies) if self._quotas.counts_tokens(common(call).tenant) else replies

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
        self._quotas.charge(name, tokens)
        bill = _Bill(tokens)
        try:
            yield bill
        except ApiError as error:
            if error.status in REFUSED and bill.used == tokens:
                bill.used = 0
            raise
        finally:
            self._quotas.settle(name, tokens - bill.used)


class _Bill:
    """Tokens to be paid in the end."""

    __slots__ = ("used",)

    def __init__(self, used: int) -> None:
        self.used = used


class _Counted:
    """Tokens of a generation: of its prompts, those that were not cached, and whatever was generated."""

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
    """Of all rows' tokens, each with the prefix and what it shares with the row before, those that were not cached."""
    shared = int(request.shared.sum(dtype=np.int64)) if isinstance(request, LikelihoodRequest) else 0
    tokens = (len(request.starts) - 1) * len(request.prefix) + shared + len(request.ids)
    return max(0, tokens - int(reply.cached.sum(dtype=np.int64)))
