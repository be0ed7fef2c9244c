"""Limits requests in flight and tokens a minute of each name. Each ingress counts for itself and enforces its share."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from deployments.auth.api_keys import KeyLimits
from deployments.errors import ApiError

MINUTE_S = 60.0


class _Usage:
    """Counts the usage of one name.

    A request is admitted while the balance is above zero. Its cost is known only at its end, so the balance may go
    below zero; the mean rate is the limit's for requests of every size.
    """

    __slots__ = ("at", "balance", "requests")

    def __init__(self, balance: float, at: float) -> None:
        self.requests = 0  # in flight
        self.balance = balance  # tokens
        self.at = at  # when the balance was last computed


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

    @contextlib.contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Counts a request for a `with` block. Raises ApiError, 429, if the name has no request or token left."""
        limits = self._limits.get(name)
        if limits is None:
            yield
            return
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
