"""Quotas: what each name has in use, held against its limits. One ingress counts for itself and enforces its share."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from deployments.auth.api_keys import KeyLimits
from deployments.errors import ApiError

MINUTE_S = 60.0


class _Usage:
    """One name's. The balance may go below zero, since what a request costs is known for certain when it has ended:
    it is admitted while the balance is above zero, so the mean rate is the limit's, whatever the requests' sizes."""

    __slots__ = ("at", "balance", "requests")

    def __init__(self, balance: float, at: float) -> None:
        self.requests = 0  # in flight
        self.balance = balance  # tokens
        self.at = at  # when the balance was reckoned


class Quotas:
    """A name without limits is not counted at all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: dict[str, KeyLimits] = {}
        self._ingresses = 1
        self._usage: dict[str, _Usage] = {}

    def use(self, limits: Mapping[str, KeyLimits], ingresses: int) -> None:
        """New limits by name, and over how many ingresses they are shared out. Usage of a name that is gone is dropped
        with its last request."""
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
        """Around a request. Raises ApiError, 429, where the name has as many in flight as it may, or no tokens."""
        limits = self._limits.get(name)
        if limits is None:
            yield
            return
        usage = self._of(name)
        most = limits.max_inflight_requests
        if most is not None and usage.requests >= -(-most // self._ingresses):
            message = f"This API key may have {most} requests in flight. Wait until one of them has ended."
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
        """Takes what a request is expected to cost. Raises ApiError, 429, where nothing is left."""
        if self.counts_tokens(name):
            usage = self._of(name)
            self._check_tokens(name, usage)
            usage.balance -= tokens

    def settle(self, name: str, tokens: int) -> None:
        """Gives back so many tokens that were taken and not used, or takes what is missing where it is negative."""
        rate = self._per_minute(name)
        if rate is not None:
            usage = self._of(name)
            usage.balance = min(usage.balance + tokens, rate)

    def _check_tokens(self, name: str, usage: _Usage) -> None:
        self._refill(name, usage, self._clock())
        rate = self._per_minute(name)
        if rate is not None and usage.balance <= 0:
            most = self._limits[name].tokens_per_minute
            message = f"This API key may use {most} tokens a minute, and they are spent. Try again later."
            raise ApiError("quota_exceeded", message, retry_after_s=(1 - usage.balance) * MINUTE_S / rate)

    def _refill(self, name: str, usage: _Usage, now: float) -> None:
        rate = self._per_minute(name)
        if rate is not None:
            usage.balance = min(usage.balance + (now - usage.at) * rate / MINUTE_S, rate)
        usage.at = now

    def _per_minute(self, name: str) -> float | None:
        """Tokens a minute of this ingress's share, which is also the most that can be saved up."""
        limits = self._limits.get(name)
        if limits is None or limits.tokens_per_minute is None:
            return None
        return limits.tokens_per_minute / self._ingresses

    def _of(self, name: str) -> _Usage:
        found = self._usage.get(name)
        if found is None:
            found = self._usage[name] = _Usage(self._per_minute(name) or 0.0, self._clock())
        return found
