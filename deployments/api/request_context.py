"""Holds the state of one HTTP request from its first byte to its answer, watches its client, and makes seeds."""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from starlette.types import Receive

from deployments.auth.api_keys import ANONYMOUS, ApiKey
from deployments.errors import ApiError, invalid
from deployments.limits import PRIORITIES
from deployments.proxy_middleware import new_id as new_id  # ids are the server's own, never taken from a client

SEED_BITS = 53  # so that every JSON client can send a seed back unchanged


def new_seed() -> int:
    """Returns a random seed."""
    return secrets.randbits(SEED_BITS)


SCOPE_KEY = "assay.request_context"
RERANK_ROUTES = frozenset(("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking", "/v1/rerankings"))


class ClientGone(Exception):
    """Reports that the client closed the connection: nothing is sent, and the work is cancelled."""


class ClientWatch:
    """Cancels the task that runs a `with` block when the client leaves, and raises ClientGone at the block's end.

    The work runs in the task of the request itself: the watch costs one task, and none for the work.
    """

    def __init__(self, receive: Receive) -> None:
        """Takes the `receive` of the request, whose body has been read."""
        self._receive = receive
        self._over = False
        self._left = False

    def __enter__(self) -> "ClientWatch":
        """Begins to watch. Raises RuntimeError outside of a task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A client is watched for a task.")
        self._task = task
        self._watcher = task.get_loop().create_task(self._watch())
        return self

    def stop(self) -> None:
        """Ends the block as if the client had left. Does nothing once it has ended."""
        if not self._over and not self._left:
            self._left = True
            self._task.cancel()

    async def _watch(self) -> None:
        with contextlib.suppress(Exception):  # a connection that cannot be read has no client either
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._watcher.cancel()
        del self._watcher  # its frame leads here: a cycle would wait for the garbage collector
        if self._left and (not self._task.uncancel() or kind is not asyncio.CancelledError):
            raise ClientGone from None


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """Holds one request's state. The middleware makes it, the ASGI scope carries it, and the route completes it."""

    request_id: str
    route: str = "other"
    path_params: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    client_limit_s: float | None = None  # the client's own time limit
    strict: bool = False
    key: ApiKey = ANONYMOUS
    tenant: str = ""  # the key's name
    body: bytes = b""  # until it is parsed
    body_bytes: int = 0  # the body's length, so far while it is read
    counted_bytes: int = 0  # those that the connection limit counts
    body_read: Callable[["RequestContext"], None] | None = None  # called once the body is parsed: it is counted no more
    gone: bool = False  # the client left, or reads too slowly
    code: str = ""  # of the error that was answered
    pinecone: bool = False  # the client speaks Pinecone's dialect
    cohere: bool = False  # the client is Cohere's own
    headers: dict[str, str] = field(default_factory=dict)  # of the answer

    def elapsed_s(self) -> float:
        """Returns the seconds since the first byte."""
        return time.perf_counter() - self.started

    def limit_s(self, default_s: float) -> float:
        """Returns the deadline in seconds from the first byte: the route's default, or the client's if shorter."""
        return default_s if self.client_limit_s is None else min(default_s, self.client_limit_s)

    def timeout_s(self, default_s: float) -> float:
        """Returns the seconds left of the route's deadline. Raises ApiError if there are none."""
        limit = self.limit_s(default_s)
        left = limit - self.elapsed_s()
        if left <= 0:
            raise deadline_exceeded(limit)
        return left

    def salt(self, given: str | None = None) -> str:
        """Returns the engine's cache salt for a request whose body says `given`.

        The key's domain comes first and has a fixed length, so that no salt leads into another key's domain.
        """
        return f"{self.key.domain}{given or ''}"

    def priority(self, given: int | None) -> int:
        """Returns the request's priority. Absent means 0, or the best that the key allows.

        Raises:
            ApiError: The key does not allow this priority.
        """
        minimum = self.key.limits.min_priority
        if given is not None and given < minimum:
            raise invalid("priority", f"in [{minimum}, {PRIORITIES[1]}] for this API key", str(given))
        return max(0, minimum) if given is None else given

    def timings(self, queue_s: float, compute_s: float) -> None:
        """Puts the times of a replica into the answer's headers."""
        self.headers["x-assay-queue-ms"] = f"{1000 * queue_s:.3f}"
        self.headers["x-assay-compute-ms"] = f"{1000 * compute_s:.3f}"

    def fail(self, error: ApiError) -> ApiError:
        """Notes the error that is answered, and returns it."""
        self.code = error.code
        error.flat = self.route in RERANK_ROUTES
        return error


def deadline_exceeded(limit_s: float) -> ApiError:
    """Returns the error for a deadline of `limit_s` seconds that passed."""
    return ApiError("deadline_exceeded", f"The deadline of {limit_s:g} s passed. Ask for less work in one request.")


def context_of(scope: Any) -> RequestContext:
    """Returns the context in an ASGI scope. Raises TypeError if the scope holds something else."""
    found = scope[SCOPE_KEY]
    if not isinstance(found, RequestContext):
        raise TypeError(f"The scope holds a {type(found).__name__} where the middleware puts a RequestContext.")
    return found


def parse_timeout(value: bytes) -> float | None:
    """Parses a client's time limit. Zero, negative and malformed values are ignored."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
