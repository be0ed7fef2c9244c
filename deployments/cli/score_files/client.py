"""Sends requests to the service with retries, from several threads, and returns the answers in order."""

import contextlib
import http.client
import json
import queue
import random
import ssl
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

J = TypeVar("J")
R = TypeVar("R")
AHEAD = 4  # calls queued for each thread, so that one slow answer does not idle the others


def in_order(call: Callable[[J], R], values: Iterable[J], threads: int) -> Iterator[R]:
    """Calls a function with many values in threads, with a bounded number of results in memory.

    After an exception, or when the iterator is closed, running calls end by themselves; the threads do not keep the
    process alive.

    Args:
        call: safe to call from several threads.
        values: its arguments.
        threads: how many.

    Returns:
        The results in the order of the values; the first exception is raised in its place.
    """
    todo: queue.SimpleQueue[tuple[Future[R], J] | None] = queue.SimpleQueue()
    for number in range(threads):
        threading.Thread(target=_work, args=(call, todo), name=f"request-{number}", daemon=True).start()
    waiting: deque[Future[R]] = deque()
    try:
        for value in values:
            waiting.append(Future())
            todo.put((waiting[-1], value))
            while waiting and (len(waiting) >= AHEAD * threads or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(threads):
            todo.put(None)


def _work(call: Callable[[J], R], todo: "queue.SimpleQueue[tuple[Future[R], J] | None]") -> None:
    while (entry := todo.get()) is not None:
        future, value = entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call(value))
        except BaseException as error:  # raised again where the result is read
            future.set_exception(error)


FIRST_WAIT_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_RETRY_AFTER_S = 120.0  # bound of a server's `retry-after`
FAULT_ATTEMPTS = 3  # for a request that the server fails on, because the request may be the cause
RETRIED = frozenset((429, 502, 503, 504))  # may succeed later for every request
# Raised by a write or before the first byte of the answer. Scoring has no side effects, so a retry is safe.
BROKEN = (OSError, http.client.HTTPException)


class Refusal(NamedTuple):
    """Holds an error answer of the service."""

    status: int
    code: str
    message: str
    param: str | None


class GaveUp(Exception):
    """Says that the service was unreachable or busy for longer than `--patience`."""


class ServiceClient:
    """Sends requests over kept connections and retries them with exponential backoff. Safe to use from threads.

    Args:
        url: of the service.
        api_key: sent as a bearer token.
        timeout_s: for one answer.
        patience_s: for all attempts of one request.
        sleep: waits before a retry.

    Raises:
        ValueError: `url` is not the URL of a service.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        patience_s: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"`--url` must be http://HOST[:PORT][/PREFIX] or https. Given: {url}.")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._sleep = sleep
        self._idle: deque[http.client.HTTPConnection] | None = deque()  # None: closed
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.retries = 0

    def post(self, path: str, body: object) -> dict[str, Any] | Refusal:
        """Returns the answer's object or its error. Raises GaveUp after `patience_s` without an answer."""
        data = json.dumps(body).encode()
        until = time.monotonic() + self._patience_s
        attempt = faults = 0
        while True:
            attempt += 1
            wait: float | None = None
            try:
                status, headers, answer = self._once(path, data)
            except BROKEN as error:
                trouble = f"no answer from {self._host}: {type(error).__name__}"
            else:
                if status == 200:
                    return _object(answer)
                faults += status not in RETRIED
                refused = _refusal(status, answer)
                ours = refused.code != _bare_code(status)
                if not self._should_retry(status, headers, ours, faults):
                    return refused
                trouble = f"{status} {refused.code}"
                wait = _retry_after(headers)
            if wait is None:
                wait = min(MAX_BACKOFF_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > until:
                raise GaveUp(f"Gave up after {attempt} attempts ({trouble}).")
            self.retries += 1
            self._sleep(wait)

    @staticmethod
    def _should_retry(status: int, headers: http.client.HTTPMessage, ours: bool, faults: int) -> bool:
        """Decides on a retry. `ours`: the answer is from the service and not from a proxy in front of it."""
        if headers.get("x-should-retry") == "false":
            return False
        if status in RETRIED or (status >= 500 and not ours):
            return True
        return (status in (408, 409) or status >= 500) and faults < FAULT_ATTEMPTS

    def close(self) -> None:
        """Closes idle connections; a request in flight closes its own."""
        idle, self._idle = self._idle, None
        for connection in idle or ():
            connection.close()

    def _once(self, path: str, data: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        idle = self._idle
        if idle:
            with contextlib.suppress(IndexError, ConnectionError, http.client.RemoteDisconnected):
                return self._exchange(idle.pop(), path, data)  # the server may have closed an old connection
        return self._exchange(self._connect(), path, data)

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, data: bytes
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        try:
            connection.request("POST", self._prefix + path, data, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()
            raise
        if self._idle is None:
            connection.close()
        else:
            self._idle.append(connection)
        return response.status, response.headers, answer

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _object(answer: bytes) -> dict[str, Any] | Refusal:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return Refusal(200, "no_json", "The service must answer with a JSON object: is this the right URL?", None)


def _refusal(status: int, answer: bytes) -> Refusal:
    """Parses an error body; an answer of another server gets its status as the code."""
    try:
        error = json.loads(answer)["error"]
        return Refusal(status, str(error["code"]), str(error["message"]), error.get("param"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Refusal(status, _bare_code(status), "The answer is not from this service: is this the right URL?", None)


def _bare_code(status: int) -> str:
    return f"http_{status}"


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    """Returns the seconds of a `retry-after` header; None for a date or anything else."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
