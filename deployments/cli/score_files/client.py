"""Service: questions over HTTP, with patience. Safe from several threads.

Workers: a call for each of many jobs in threads, results in order, never more than a window in memory.
"""

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
AHEAD = 4  # jobs a thread: one slow answer does not idle the others


def in_order(call: Callable[[J], R], jobs: Iterable[J], threads: int) -> Iterator[R]:
    """Results in the order of their jobs; the first exception is raised in its place. Closing it, or an exception,
    leaves what is running to end by itself: the threads do not keep the process alive."""
    todo: queue.SimpleQueue[tuple[Future[R], J] | None] = queue.SimpleQueue()
    for number in range(threads):
        threading.Thread(target=_work, args=(call, todo), name=f"ask-{number}", daemon=True).start()
    waiting: deque[Future[R]] = deque()
    try:
        for job in jobs:
            waiting.append(Future())
            todo.put((waiting[-1], job))
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
        future, job = entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call(job))
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)


FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_OBEYED_S = 120.0  # a server that asks for more is asked again after this
FAULT_ATTEMPTS = 3  # of a request that the server fails on: it may be the request
AGAIN = frozenset((429, 502, 503, 504))  # whatever is asked, later may go well
# At a write or before the first byte of the answer: scoring is pure, so asking again is safe.
BROKEN = (OSError, http.client.HTTPException)


class Refusal(NamedTuple):
    """The service has understood and will not."""

    status: int
    code: str
    message: str
    param: str | None


class GaveUp(Exception):
    """The service could not be reached, or was busy, for longer than we wait."""


class Service:
    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        patience_s: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`patience_s`: how long one question may go without an answer. ValueError for a URL that is none."""
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

    def ask(self, path: str, body: object) -> dict[str, Any] | Refusal:
        """The answer's object, or why there is none. GaveUp when patience is over."""
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
                faults += status not in AGAIN
                refused = _refusal(status, answer)
                ours = refused.code != _bare_code(status)
                if not self._worth_asking_again(status, headers, ours, faults):
                    return refused
                trouble = f"{status} {refused.code}"
                wait = _retry_after(headers)
            if wait is None:
                wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > until:
                raise GaveUp(f"Gave up after {attempt} attempts ({trouble}).")
            self.retries += 1
            self._sleep(wait)

    @staticmethod
    def _worth_asking_again(status: int, headers: http.client.HTTPMessage, ours: bool, faults: int) -> bool:
        """`ours`: whether the answer is the service's and not that of something in front of it."""
        if headers.get("x-should-retry") == "false":
            return False
        if status in AGAIN or (status >= 500 and not ours):
            return True
        return (status in (408, 409) or status >= 500) and faults < FAULT_ATTEMPTS

    def close(self) -> None:
        """What is being asked meanwhile closes its connection itself."""
        idle, self._idle = self._idle, None
        for connection in idle or ():
            connection.close()

    def _once(self, path: str, data: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        idle = self._idle
        if idle:
            with contextlib.suppress(IndexError, ConnectionError, http.client.RemoteDisconnected):
                return self._exchange(idle.pop(), path, data)  # it may have grown old and been closed over there
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
    """From the error body; what is none of ours has the status for a code."""
    try:
        error = json.loads(answer)["error"]
        return Refusal(status, str(error["code"]), str(error["message"]), error.get("param"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Refusal(
            status, _bare_code(status), "Whoever answered is no service of ours: is this the right URL?", None
        )


def _bare_code(status: int) -> str:
    return f"http_{status}"


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    """Seconds that the server asks us to wait; a date, or nonsense, is no answer."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, LONGEST_OBEYED_S) if seconds >= 0 else None
