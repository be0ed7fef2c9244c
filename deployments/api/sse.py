"""Sends server-sent events, with a true HTTP status where possible, keep-alives, and a limit on unread bytes.

A stream costs no task but that of its request: events are written where they are made. A task writes only while the
client's connection is full, and takes together what has been made meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.request_context import ClientGone, ClientWatch, RequestContext
from deployments.config.sections import StreamArgs
from deployments.errors import ApiError, internal_error
from deployments.observability.ingress_metrics import IngressMetrics, Phase

log = logging.getLogger("assay.http")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


def json_bytes(body: object) -> bytes:
    """Returns JSON. NaN and infinity become null."""
    return to_json(body, inf_nan_mode="null")


def event(body: object) -> bytes:
    """Returns one event as bytes."""
    return b"data: " + json_bytes(body) + b"\n\n"


class _Buffer:
    """Holds the bytes that the client has not yet taken."""

    def __init__(self, maximum: int) -> None:
        self._most = maximum
        self._parts: list[bytes] = []
        self._size = 0
        self._sending = 0

    def put(self, data: bytes) -> bool:
        """Adds data. Returns False if the client is too far behind."""
        unread = self._size + self._sending
        self._parts.append(data)
        self._size += len(data)
        return not unread or unread + len(data) <= self._most  # one event alone may be larger

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self) -> bytes:
        """Returns all data that waits: pieces are joined only while the connection is full."""
        parts, self._parts = self._parts, []
        self._sending, self._size = self._size, 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sent(self) -> None:
        """Notes that the connection took the data."""
        self._sending = 0


class _Rest:
    """Awaits the rest of work that has begun."""

    def __init__(self, work: Generator[Any, Any, None], waited: object) -> None:
        self._work = work
        self._waited = waited

    def __await__(self) -> Generator[Any, Any, None]:
        waited = self._waited
        while True:
            try:
                yield waited
            except BaseException as error:
                advance, given = self._work.throw, error
            else:
                advance, given = self._work.send, None  # type: ignore[assignment]
            try:
                waited = advance(given)
            except StopIteration:
                return


class _Writer:
    """Writes a stream: in its caller's turn while the connection takes all, and in a task of its own while it is full.

    The status line waits for the first data, at most `header_after_s`; afterwards a comment follows each
    `keep_alive_s` without data.
    """

    def __init__(self, send: Send, settings: StreamArgs, give_up: Callable[[], None]) -> None:
        """Keeps what it needs. `give_up` is called once the client has taken nothing for `read_timeout_s`."""
        self._send = send
        self._settings = settings
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._buffer = _Buffer(settings.max_buffer_bytes)
        self._task: asyncio.Task[None] | None = None
        self._alarm: asyncio.Timeout | None = None  # of the task
        self._wrote = self._loop.time()
        self._timer = self._loop.call_later(settings.header_after_s, self._tick)
        self.started = False  # the status line was sent

    def put(self, data: bytes) -> bool:
        """Writes data. Returns False if the client is too far behind."""
        kept = self._buffer.put(data)
        if self._task is not None:
            return kept
        self._wrote = self._loop.time()
        begun = _begun(self._send_next() if self.started else self._drain())
        if begun is None:
            self._buffer.sent()
        else:
            self._task = self._loop.create_task(self._write_rest(begun))
        return kept

    async def finish(self, last: bytes) -> None:
        """Waits until all data is written, and ends the answer with `last`.

        Raises:
            ClientGone: the client takes nothing.
        """
        self._timer.cancel()
        if self._task is not None:
            await asyncio.wait((self._task,))
        await self._wait(self._send({"type": "http.response.body", "body": last, "more_body": False}))

    async def refuse(self, answer: Awaitable[None]) -> None:
        """Waits for an answer that is written in place of the stream, which must not begin meanwhile.

        Raises:
            ClientGone: the client takes nothing.
        """
        self.close()
        await self._wait(answer)

    def close(self) -> None:
        """Stops writing."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _send_next(self) -> Awaitable[None]:
        """Returns the write of all data that waits."""
        return self._send({"type": "http.response.body", "body": self._buffer.take(), "more_body": True})

    async def _drain(self, begun: _Rest | None = None) -> None:
        """Writes until no data waits. `begun`: a write that comes first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if begun is not None:
            await begun
            self._note_sent()
        while self._buffer:
            await self._send_next()
            self._note_sent()

    def _note_sent(self) -> None:
        self._buffer.sent()
        if self._alarm is not None:
            self._alarm.reschedule(self._loop.time() + self._settings.read_timeout_s)

    async def _wait(self, writing: Awaitable[None]) -> None:
        """Awaits a write. Raises ClientGone if the client takes nothing for too long, even of data that fits."""
        try:
            async with asyncio.timeout(self._settings.read_timeout_s) as self._alarm:
                await writing
        except TimeoutError:
            raise ClientGone from None
        finally:
            self._alarm = None

    async def _write_rest(self, begun: _Rest) -> None:
        """Writes the rest of a write, and all that comes until the connection takes everything."""
        try:
            await self._wait(self._drain(begun))
        except Exception as error:
            if not isinstance(error, ClientGone):
                log.exception("A stream could not be written.")
            self._give_up()
        finally:
            self._task = None  # in the turn that found no more data: what is put in the next one has no other writer

    def _tick(self) -> None:
        """Sends the status line, or a comment, if nothing was written for long. A full connection needs neither."""
        now, due = self._loop.time(), self._wrote + self._settings.keep_alive_s
        if not self.started or now >= due:
            if self._task is None:
                self.put(KEEP_ALIVE)  # the first one too: some proxies hold the headers back until a body begins
            due = now + self._settings.keep_alive_s
        self._timer = self._loop.call_at(due, self._tick)


def _begun(work: Awaitable[None]) -> _Rest | None:
    """Runs work until it waits for the first time. Returns what is left of it; None if it has ended."""
    steps = work.__await__()
    try:
        return _Rest(steps, steps.send(None))
    except StopIteration:
        return None


Write = Callable[[bytes], None]


class EventStream(Response):
    """Sends what `produce` writes. An error has its own status before the first event, and is an event after it.

    `produce` calls its argument with each piece of the stream, which raises ClientGone if the client is too far behind.
    """

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        *,
        context: RequestContext,
        settings: StreamArgs,
        observer: IngressMetrics,
    ) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        self._produce_events = produce
        self._exchange = context
        self._settings = settings
        self._observer = observer
        self._phase: Phase = "prefill"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._observer.streams(1)
        try:
            with ClientWatch(receive) as watch:
                writer = _Writer(send, self._settings, watch.stop)
                try:
                    error = await self._produce(writer)
                    if error is None:
                        await writer.finish(b"")
                    elif writer.started:
                        await writer.finish(event(error.event(self._exchange.request_id)))
                    else:
                        await writer.refuse(error.response(self._exchange.request_id)(scope, receive, send))
                finally:
                    writer.close()
        except ClientGone:
            self._note_gone()
        except asyncio.CancelledError:  # Serve cancels too if the client leaves, sometimes before the message arrives
            self._note_gone()
            raise
        finally:
            self._observer.streams(-1)

    def _note_gone(self) -> None:
        if not self._exchange.gone:
            self._exchange.gone = True
            self._observer.disconnected(self._phase)

    async def _produce(self, writer: _Writer) -> ApiError | None:
        """Writes the events. Returns the error that ended them; None if they are complete.

        Raises:
            ClientGone: the client fell too far behind.
        """

        def write(data: bytes) -> None:
            self._phase = "stream"
            if not writer.put(data):
                raise ClientGone

        try:
            await self._produce_events(write)
        except ApiError as error:
            return self._exchange.fail(error)
        except ClientGone:
            raise
        except Exception:
            log.exception("Unhandled in the stream of request %s", self._exchange.request_id)
            return self._exchange.fail(internal_error())
        self._phase = "last"  # everything is made, but perhaps not yet sent
        return None
