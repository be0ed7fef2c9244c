"""Writes the head of an answer and the first part of its body together.

Uvicorn writes each of the two by itself. A process that is killed in between leaves HAProxy a head without a body: the
answer has begun, so that HAProxy cannot ask another ingress for it. Together they are one write: of a small answer the
kernel then has all or nothing. It also spares each answer a call to the kernel, and HAProxy a second reading.

ASGI has no message for both. The `send` that Uvicorn gives an application is a method of the request's cycle, which
writes through its attribute `transport`; for as long as these two messages take, another object stands there.
"""

from collections.abc import Awaitable
from typing import Any

from starlette.types import Message, Send


class OneWrite:
    """Passes an answer on, with its head held back until the first part of its body."""

    __slots__ = ("_send", "_start")

    def __init__(self, send: Send) -> None:
        """`send`: Uvicorn's own. Any other one gets the two messages one after the other."""
        self._send = send
        self._start: Message | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            return self._hold(message)
        if self._start is not None:
            start, self._start = self._start, None
            return self._join(start, message)
        return self._send(message)

    async def _hold(self, start: Message) -> None:
        self._start = start

    async def _join(self, start: Message, body: Message) -> None:
        cycle: Any = getattr(self._send, "__self__", None)
        transport = getattr(cycle, "transport", None)
        if transport is None:
            await self._send(start)
            await self._send(body)
            return
        held = cycle.transport = _HeldHead(transport)
        try:
            await self._send(start)
            held.complete = True
            await self._send(body)
        finally:
            cycle.transport = transport
            held.flush()


class _HeldHead:
    """Stands in for a transport. A head is kept until it is complete, and then goes with the next write."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self.complete = False

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        if self.complete:
            self.flush()

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.writelines(parts)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        closing: bool = self._transport.is_closing()
        return closing
