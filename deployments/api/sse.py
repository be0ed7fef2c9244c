"""Sends server-sent events, with a true HTTP status where possible, keep-alives, and a limit on unread bytes."""

import asyncio
import logging
from collections.abc import AsyncIterator

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deployments.api.handler import client_gone, end_tasks
from deployments.api.middleware import internal_error
from deployments.api.request_context import ClientGone, RequestContext
from deployments.config.sections import StreamArgs
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics, Phase

log = logging.getLogger("assay.http")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(body: object) -> bytes:
    """Returns one event as bytes. NaN and infinity become null."""
    return b"data: " + to_json(body, inf_nan_mode="null") + b"\n\n"


class _Buffer:
    """Holds the bytes that the client has not yet taken."""

    def __init__(self, maximum: int) -> None:
        self._most = maximum
        self._parts: list[bytes] = []
        self._size = 0
        self._sending = 0
        self.ended = False
        self.error: ApiError | None = None
        self.changed = asyncio.Event()

    def put(self, data: bytes) -> bool:
        """Adds data. Returns False if the client is too far behind."""
        unread = self._size + self._sending
        self._parts.append(data)
        self._size += len(data)
        self.changed.set()
        return not unread or unread + len(data) <= self._most  # one event alone may be larger

    def end(self, error: ApiError | None) -> None:
        """Notes that no more data follows, and why if it is an error."""
        self.ended, self.error = True, error
        self.changed.set()

    def take(self) -> bytes:
        """Returns all data that waits: pieces are joined only while the socket is busy."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._size, self._sending = 0, len(data)
        self.changed.clear()
        return data

    def sent(self) -> None:
        """Notes that the socket took the data."""
        self._sending = 0


class EventStream(Response):
    """Sends what `events` yields. An error has its own status before the first event, and is an event after it."""

    def __init__(
        self, events: AsyncIterator[bytes], *, context: RequestContext, settings: StreamArgs, observer: IngressMetrics
    ) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        self._events = events
        self._exchange = context
        self._settings = settings
        self._observer = observer
        self._phase: Phase = "prefill"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        buffer = _Buffer(self._settings.max_buffer_bytes)
        producer = asyncio.ensure_future(self._produce(buffer))
        writer = asyncio.ensure_future(self._write(buffer, scope, receive, send))
        watcher = asyncio.ensure_future(client_gone(receive))
        self._observer.streams(1)
        try:
            await self._supervise(producer, writer, watcher)
        except asyncio.CancelledError:  # Serve cancels too if the client leaves, sometimes before the message arrives
            self._note_gone()
            raise
        finally:
            try:
                await end_tasks(producer, writer, watcher)
            finally:  # Serve may cancel the request while this waits
                self._observer.streams(-1)

    async def _supervise(
        self, producer: asyncio.Task[bool], writer: asyncio.Task[None], watcher: asyncio.Task[None]
    ) -> None:
        waiting: set[asyncio.Task[bool] | asyncio.Task[None]] = {producer, writer, watcher}
        while not writer.done():
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            behind = (
                producer.done() and not producer.cancelled() and producer.exception() is None and not producer.result()
            )
            if not writer.done() and (watcher.done() or behind):
                self._note_gone()
                return
            if producer.done():
                waiting.discard(producer)
        try:
            writer.result()
        except ClientGone:
            self._note_gone()

    def _note_gone(self) -> None:
        if not self._exchange.gone:
            self._exchange.gone = True
            self._observer.disconnected(self._phase)

    async def _produce(self, buffer: _Buffer) -> bool:
        """Fills the buffer with events. Returns False if the client fell too far behind."""
        try:
            async for data in self._events:
                self._phase = "stream"
                if not buffer.put(data):
                    return False
        except ApiError as error:
            buffer.end(self._exchange.fail(error))
        except Exception:
            log.exception("Unhandled in the stream of request %s", self._exchange.request_id)
            buffer.end(self._exchange.fail(internal_error()))
        else:
            self._phase = "last"  # everything is made, but perhaps not yet sent
            buffer.end(None)
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        return True

    async def _write(self, buffer: _Buffer, scope: Scope, receive: Receive, send: Send) -> None:
        started = await self._wait(buffer, self._settings.header_after_s)
        data = buffer.take()
        if not data and buffer.error is not None:
            await buffer.error.response(self._exchange.request_id)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await self._sent(send, {"type": "http.response.start", "status": 200, "headers": headers})
        if not started:
            data = KEEP_ALIVE  # some proxies hold the headers back until a body begins
        while True:
            await self._send(buffer, data, send)
            if not buffer.changed.is_set() and buffer.ended:
                break
            data = b"" if await self._wait(buffer, self._settings.keep_alive_s) else KEEP_ALIVE
            data = buffer.take() or data
        last = b"" if buffer.error is None else event(buffer.error.event(self._exchange.request_id))
        await self._sent(send, {"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, buffer: _Buffer, data: bytes, send: Send) -> None:
        if data:
            await self._sent(send, {"type": "http.response.body", "body": data, "more_body": True})
        buffer.sent()

    async def _sent(self, send: Send, message: Message) -> None:
        """Sends a message. Raises ClientGone if the client takes nothing for too long, even of data that fits."""
        try:
            async with asyncio.timeout(self._settings.read_timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientGone from None

    async def _wait(self, buffer: _Buffer, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await buffer.changed.wait()
        except TimeoutError:
            return False
        return True
