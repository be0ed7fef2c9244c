"""Exchange: one HTTP request as our code sees it, from its first byte to its answer.

Ids of answers and requests: made here, never taken from a client.
"""

import base64
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from deployments.auth.api_keys import ANONYMOUS, ApiKey
from deployments.errors import ApiError, invalid
from deployments.limits import PRIORITIES

SEED_BITS = 53  # so that every JSON client can send a seed back unchanged


def new_id(prefix: str) -> str:
    """`prefix` and 26 base32 characters of 128 random bits."""
    return prefix + base64.b32encode(secrets.token_bytes(16)).decode("ascii").rstrip("=").lower()


def new_seed() -> int:
    return secrets.randbits(SEED_BITS)


SCOPE_KEY = "assay.exchange"
RERANK_ROUTES = frozenset(("/rerank", "/v1/rerank", "/v2/rerank"))


class ClientGone(Exception):
    """The client closed the connection: nothing is sent, everything is cancelled."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Made by the gate, carried in the ASGI scope, filled in by the route."""

    request_id: str
    route: str = "other"
    started: float = field(default_factory=time.perf_counter)
    wish_s: float | None = None  # the client's own time limit
    strict: bool = False
    key: ApiKey = ANONYMOUS
    tenant: str = ""  # whose work it is: the key's name
    body: bytes = b""
    gone: bool = False  # the client left, or reads so slowly that we gave it up
    code: str = ""  # of the error that was answered
    headers: dict[str, str] = field(default_factory=dict)  # of the answer

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def limit_s(self, default_s: float) -> float:
        """Seconds from the first byte: the route's default, or less if the client wishes so."""
        return default_s if self.wish_s is None else min(default_s, self.wish_s)

    def timeout_s(self, default_s: float) -> float:
        """Seconds left of the route's deadline. Raises ApiError if there are none."""
        limit = self.limit_s(default_s)
        left = limit - self.elapsed_s()
        if left <= 0:
            raise deadline_exceeded(limit)
        return left

    def salt(self, given: str | None = None) -> str:
        """The prefix cache's domain for a request that asks for `given`: never another key's."""
        return self.key.salt(given)

    def priority(self, given: int | None) -> int:
        """Raises ApiError where the key may not go so far ahead. Absent: 0, or the best that the key may have."""
        least = self.key.limits.min_priority
        if given is not None and given < least:
            raise invalid("priority", f"in [{least}, {PRIORITIES[1]}] for this API key", str(given))
        return max(0, least) if given is None else given

    def timings(self, queue_s: float, compute_s: float) -> None:
        self.headers["x-assay-queue-ms"] = f"{1000 * queue_s:.3f}"
        self.headers["x-assay-compute-ms"] = f"{1000 * compute_s:.3f}"

    def fail(self, error: ApiError) -> ApiError:
        self.code = error.code
        error.flat = self.route in RERANK_ROUTES
        return error


def deadline_exceeded(limit_s: float) -> ApiError:
    return ApiError("deadline_exceeded", f"The deadline of {limit_s:g} s passed. Ask for less work in one request.")


def exchange_of(scope: Any) -> Exchange:
    found = scope[SCOPE_KEY]
    if not isinstance(found, Exchange):
        raise TypeError(f"The scope holds a {type(found).__name__} where the gate puts an Exchange.")
    return found


def wished_seconds(value: bytes) -> float | None:
    """`x-request-timeout-seconds`; zero, negative and malformed wishes are ignored."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
