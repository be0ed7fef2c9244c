"""Sends requests to the service with retries, from several threads, and returns the answers in order."""

import json
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import urllib3

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
MAX_IDLE = 64  # connections that are kept open


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
        self._host = _host_of(url)
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._sleep = sleep
        headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._connections = urllib3.PoolManager(maxsize=MAX_IDLE, headers=headers, timeout=timeout_s, retries=False)
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
                answer = self._connections.request("POST", self._url + path, body=data)
            except urllib3.exceptions.HTTPError as error:  # scoring has no side effects: a retry is safe
                trouble = f"no answer from {self._host}: {type(error).__name__}"
            else:
                if answer.status == 200:
                    return _object(answer.data)
                faults += answer.status not in RETRIED
                refused = _refusal(answer.status, answer.data)
                if not self._should_retry(refused, answer.headers, faults):
                    return refused
                trouble = f"{answer.status} {refused.code}"
                wait = _retry_after(answer.headers)
            if wait is None:
                wait = min(MAX_BACKOFF_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > until:
                raise GaveUp(f"Gave up after {attempt} attempts ({trouble}).")
            self.retries += 1
            self._sleep(wait)

    @staticmethod
    def _should_retry(refused: Refusal, headers: Mapping[str, str], faults: int) -> bool:
        """Decides on a retry. An answer of a proxy in front of the service says nothing about the request."""
        status, from_proxy = refused.status, refused.code == _bare_code(refused.status)
        if headers.get("x-should-retry") == "false":
            return False
        if status in RETRIED or (status >= 500 and from_proxy):
            return True
        return (status in (408, 409) or status >= 500) and faults < FAULT_ATTEMPTS

    def close(self) -> None:
        """Closes idle connections; a request in flight closes its own."""
        self._connections.clear()


def _host_of(url: str) -> str:
    """Reads a URL as the connections do. Raises ValueError if it is not that of a service."""
    with suppress(urllib3.exceptions.LocationParseError):
        parts = urllib3.util.parse_url(url)
        if parts.scheme in ("http", "https") and parts.host and not parts.query and not parts.fragment:
            return parts.host
    raise ValueError(f"`--url` must be http://HOST[:PORT][/PREFIX] or https. Given: {url}.")


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


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds of a `retry-after` header; None for a date or anything else."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
