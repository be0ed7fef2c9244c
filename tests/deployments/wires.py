"""Raw requests to an app: a test watches a stream while it runs, leaves, or reads slowly."""

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI


class Wire:
    """One raw ASGI request: a test feeds messages and sees what was sent while the app still runs."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
        more: bool = False,
        **in_scope: Any,
    ) -> None:
        """`more`: more of the body follows. `in_scope`: what Serve's proxy has put there."""
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.feed(body, more)
        self.sent: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.blocked = asyncio.Event()
        self.changed = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": headers if headers is not None else [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("api", 80),
            **in_scope,
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        if not self.reading.is_set():
            self.blocked.set()
        await self.reading.wait()
        self.sent.append(message)
        self.changed.set()

    async def until(self, done: Callable[["Wire"], bool]) -> None:
        async with asyncio.timeout(10):
            while not done(self):
                self.changed.clear()
                await self.changed.wait()

    def feed(self, body: bytes, more: bool = False) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
def wire_to() -> Callable[..., Wire]:
    """A raw request to an app: path, body, and perhaps headers."""

    def make(app: FastAPI, path: str, body: object, **options: Any) -> Wire:
        return Wire(app, path, body if isinstance(body, bytes) else json.dumps(body).encode(), **options)

    return make


@pytest.fixture
def wire(app: FastAPI, wire_to: Callable[..., Wire]) -> Callable[..., Wire]:
    return functools.partial(wire_to, app)
