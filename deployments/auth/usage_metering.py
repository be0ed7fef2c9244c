"""Metered: a backend whose work is charged to the names that ask for it. Around whatever `Backend` serves."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import numpy as np

from deployments.auth.rate_limiter import Quotas
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


class Metered:
    """A task is charged with what its lengths say before it is sent, and settled with what was computed when it has
    ended. A task that was refused costs nothing; one that failed or was cancelled on its way costs what was charged,
    since nobody knows how far it came."""

    def __init__(self, backend: Backend, quotas: Quotas) -> None:
        self._backend = backend
        self._quotas = quotas

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
        return self._metered(task, replies) if self._quotas.counts_tokens(task.tenant) else replies

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
    """Tokens that a task will cost at most, as its lengths tell; most generations end before `max_tokens`."""
    if not isinstance(task, GenerateTask):
        return len(task.prefix) + len(task.ids)
    new = 0 if task.prompt_only else min(task.params.max_tokens, EXPECTED_TOKENS)
    return len(task.prompts) + len(task.seeds) * task.params.n * new


def _computed(task: ScoreTask | LikelihoodTask, reply: ScoreReply | LikelihoodReply) -> int:
    """Of all rows' tokens, each with the prefix and what it shares with the row before, those that were not cached."""
    shared = int(task.shared.sum(dtype=np.int64)) if isinstance(task, LikelihoodTask) else 0
    tokens = (len(task.starts) - 1) * len(task.prefix) + shared + len(task.ids)
    return max(0, tokens - int(reply.cached.sum(dtype=np.int64)))
