"""Meters the usage of each name, charges it, limits requests in flight and tokens a minute, and shares room out.

Each ingress counts for itself and enforces its share.
"""

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.auth.api_keys import KeyLimits
from deployments.errors import ApiError
from deployments.protocol import (
    AnyCall,
    Backend,
    GenerateCall,
    GenerateReply,
    LikelihoodReply,
    ModelCard,
    PromptScores,
    RowsCall,
    common,
)
from engine.config import Costs
from engine.request_cost import request_cost
from engine.requests import (
    GenerateChunk,
    LikelihoodRequest,
    PoolingRequest,
    PoolingResult,
    ScoreRequest,
    ScoreResult,
)

MINUTE_S = 60.0
TOKENS = Costs(decode_token_cost=1)  # quotas count tokens: a generated one is one
HELD_TO_FREE = 3  # a tenant gets more room while it holds less than so many times what is free
REFUSED = frozenset((429, 503))  # nothing was computed
UNLIMITED = contextlib.nullcontext()


@dataclass(slots=True)
class _Usage:
    """Counts the usage of one name.

    A request is admitted while the balance is above zero. Its cost is known only at its end, so the balance may go
    below zero; the mean rate is the limit's for requests of every size.
    """

    balance: float  # tokens
    at: float  # when the balance was last computed
    requests: int = 0  # in flight


class RateLimiter:
    """Counts the usage of names that have limits, and refuses requests beyond them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: dict[str, KeyLimits] = {}
        self._ingresses = 1
        self._usage: dict[str, _Usage] = {}

    def use(self, limits: Mapping[str, KeyLimits], ingresses: int) -> None:
        """Puts limits in force. The usage of a name without limits is dropped with its last request.

        Args:
            limits: by name.
            ingresses: how many share them.
        """
        now = self._clock()
        counted = set()
        for name, usage in self._usage.items():
            self._refill(name, usage, now)
            if self.counts_tokens(name):
                counted.add(name)
        self._limits = {name: limit for name, limit in limits.items() if limit != KeyLimits()}
        self._ingresses = ingresses
        for name, usage in list(self._usage.items()):
            if name not in self._limits and not usage.requests:
                del self._usage[name]
            elif name not in counted:
                usage.balance = self._per_minute(name) or 0.0

    def request(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Counts a request for a `with` block. Raises ApiError, 429, if the name has no request or token left."""
        limits = self._limits.get(name)
        return UNLIMITED if limits is None else self._counted(name, limits)

    @contextlib.contextmanager
    def _counted(self, name: str, limits: KeyLimits) -> Iterator[None]:
        usage = self._of(name)
        allowed = limits.max_inflight_requests
        if allowed is not None and usage.requests >= -(-allowed // self._ingresses):
            message = f"This API key may have {allowed} requests in flight. Wait until one of them has ended."
            raise ApiError("quota_exceeded", message, retry_after_s=1)
        self._check_tokens(name, usage)
        usage.requests += 1
        try:
            yield
        finally:
            usage.requests -= 1
            if not usage.requests and name not in self._limits:
                self._usage.pop(name, None)

    def counts_tokens(self, name: str) -> bool:
        return self._per_minute(name) is not None

    def charge(self, name: str, tokens: int) -> None:
        """Charges the expected cost of a request. Raises ApiError, 429, if no token is left."""
        if self.counts_tokens(name):
            usage = self._of(name)
            self._check_tokens(name, usage)
            usage.balance -= tokens

    def settle(self, name: str, tokens: int) -> None:
        """Gives back tokens that were charged and not used; a negative number charges more."""
        rate = self._per_minute(name)
        if rate is not None:
            usage = self._of(name)
            usage.balance = min(usage.balance + tokens, rate)

    def _check_tokens(self, name: str, usage: _Usage) -> None:
        self._refill(name, usage, self._clock())
        rate = self._per_minute(name)
        if rate is not None and usage.balance <= 0:
            allowed = self._limits[name].tokens_per_minute
            message = f"This API key may use {allowed} tokens a minute, and they are spent. Try again later."
            raise ApiError("quota_exceeded", message, retry_after_s=(1 - usage.balance) * MINUTE_S / rate)

    def _refill(self, name: str, usage: _Usage, now: float) -> None:
        rate = self._per_minute(name)
        if rate is not None:
            usage.balance = min(usage.balance + (now - usage.at) * rate / MINUTE_S, rate)
        usage.at = now

    def _per_minute(self, name: str) -> float | None:
        """Returns this ingress's share of the tokens a minute, which is also the largest balance."""
        limits = self._limits.get(name)
        if limits is None or limits.tokens_per_minute is None:
            return None
        return limits.tokens_per_minute / self._ingresses

    def _of(self, name: str) -> _Usage:
        found = self._usage.get(name)
        if found is None:
            found = self._usage[name] = _Usage(self._per_minute(name) or 0.0, self._clock())
        return found


class SharedRoom:
    """Counts places, or bytes, by tenant. For one event loop.

    Where several tenants share the room, one of them alone fills three quarters of it, two of them three sevenths each,
    and so on: however many fill their parts, another one finds room. A tenant without others may fill it all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()
        self.held = 0  # by all

    def has(self, tenant: str, more: int, own: int = 0, *, shared: bool) -> bool:
        """Says whether a tenant may hold more.

        Args:
            tenant: Who asks.
            more: The amount that it wants.
            own: The amount that the same request holds already. A request that has begun may fill what is free.
            shared: Whether there are other tenants.
        """
        free = self._size - self.held
        if more > free:
            return False
        others = self._held[tenant] - own
        return not shared or not others or others < HELD_TO_FREE * (free + own)

    def take(self, tenant: str, amount: int) -> None:
        """Notes what a tenant holds from now on, after `has`."""
        self._held[tenant] += amount
        self.held += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Notes what a tenant no longer holds."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        self.held -= amount


class MeteredBackend:
    """Charges each request's expected tokens before it passes it on, and settles with the computed tokens at its end.

    A refused request costs nothing. One that failed or was cancelled costs what was charged, because how much of it was
    computed is unknown.
    """

    def __init__(self, backend: Backend, limiter: RateLimiter) -> None:
        self._backend = backend
        self._limiter = limiter

    async def score(self, request: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        if not self._limiter.counts_tokens(request.tenant):
            return await self._backend.score(request, all_or_nothing)
        with self._charged(request) as bill:
            reply = await self._backend.score(request, all_or_nothing)
            bill.used = _computed(request, reply)
            return reply

    async def pooling(self, request: PoolingRequest, all_or_nothing: bool = False) -> PoolingResult:
        if not self._limiter.counts_tokens(request.tenant):
            return await self._backend.pooling(request, all_or_nothing)
        with self._charged(request) as bill:
            reply = await self._backend.pooling(request, all_or_nothing)
            bill.used = _computed(request, reply)
            return reply

    async def likelihood(self, request: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        if not self._limiter.counts_tokens(request.tenant):
            return await self._backend.likelihood(request, all_or_nothing)
        with self._charged(request) as bill:
            reply = await self._backend.likelihood(request, all_or_nothing)
            bill.used = _computed(request, reply)
            return reply

    async def generate(self, call: GenerateCall) -> GenerateReply:
        if not self._limiter.counts_tokens(common(call).tenant):
            return await self._backend.generate(call)
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

    def check_open(self, timeout_s: float, tenant: str) -> None:
        self._backend.check_open(timeout_s, tenant)

    def readiness(self) -> dict[str, object]:
        return self._backend.readiness()

    async def metrics(self) -> Sequence[bytes]:
        return await self._backend.metrics()

    @contextlib.contextmanager
    def _charged(self, call: AnyCall) -> Iterator["_Bill"]:
        """Charges the tenant with the expected tokens, and settles with those that were used."""
        name = common(call).tenant
        requests = call if isinstance(call, tuple) else (call,)
        tokens = sum(request_cost(request, TOKENS) for request in requests)
        self._limiter.charge(name, tokens)
        bill = _Bill()
        try:
            yield bill
        except ApiError as error:
            if error.status in REFUSED and bill.used is None:
                bill.used = 0
            raise
        finally:
            self._limiter.settle(name, 0 if bill.used is None else tokens - bill.used)


@dataclass(slots=True)
class _Bill:
    """Holds the tokens that a request costs in the end."""

    used: int | None = None  # None: not known, and what was charged is the cost


class _Counted:
    """Counts the tokens of a generation: those of its prompts that were not cached, those that it resumes behind, which
    are computed again, and generated ones.

    A prompt with scores is computed whole: what its generation then finds cached is the request's own work.
    """

    def __init__(self, call: GenerateCall) -> None:
        self._seen: set[int] = set()
        self.tokens = sum(len(request.prompt) + sum(map(len, request.emitted)) for request in call)

    def take(self, reply: GenerateReply) -> None:
        for item in reply.chunks:
            if isinstance(item.chunk, GenerateChunk):
                self.tokens += len(item.chunk.tokens)
                if item.prompt not in self._seen:
                    self._seen.add(item.prompt)
                    self.tokens -= item.chunk.cached
            elif isinstance(item.chunk, PromptScores):
                self._seen.add(item.prompt)


def _computed(request: RowsCall, reply: ScoreResult | PoolingResult | LikelihoodReply) -> int:
    """Returns the tokens of all sequences, with prefix and what each shares with the one before, less cached ones."""
    shared = int(request.shared.sum(dtype=np.int64)) if isinstance(request, LikelihoodRequest) else 0
    tokens = (len(request.starts) - 1) * len(request.prefix) + shared + len(request.ids)
    return max(0, tokens - int(reply.cached.sum(dtype=np.int64)))
