"""The ingress's end of a link: sends calls to one replica, and gives each call its results."""

import asyncio
import logging
import socket
from collections.abc import Callable, Generator
from typing import Any, Literal

from deployments.link import messages
from deployments.link.frames import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    FrameError,
    FrameKind,
    FrameReader,
    LinkFrame,
    refuse,
)
from deployments.link.handshake import LinkAddress, Proof, is_proof, link_key, new_nonce, proof_of
from deployments.link.keep_alive import keep_alive
from deployments.observability.link_figures import LinkFigures
from deployments.protocol import AnyCall, GenerateReply, PromptChunk
from deployments.stream_buffer import PendingChunks
from engine.requests import Load, PoolingRequest, ScoreRequest

log = logging.getLogger("ray.serve")
CONNECT_S = 1.0
MAX_UNSENT_BYTES = 64 << 20  # that a replica has not read: later calls take the handle
MAX_OPEN_CALLS = 2048

Loss = Literal["cut", "died", "unreachable"]


class LinkLost(Exception):
    """Reports that the link ended before the call did.

    The cause is `cut` if the replica answers on a new link, `died` if its process is gone, and else `unreachable`.
    """

    def __init__(self, cause: Loss) -> None:
        super().__init__(cause)
        self.cause = cause


class LinkCall:
    """Represents a call with one reply: awaited for it, as a `PendingReply`."""

    def __init__(self, link: "Link", number: int, epoch: int) -> None:
        self._link = link
        self._number = number
        self._epoch = epoch
        self._chunks = PendingChunks()
        self._reply: asyncio.Future[object] = link.loop.create_future()

    def __await__(self) -> Generator[Any, None, object]:
        return self._reply.__await__()

    def cancel(self) -> None:
        """Ends the call. Does nothing once it has ended."""
        self._link.cancel(self._number)
        self._reply.cancel()

    def add(self, item: PromptChunk, load: Load) -> None:
        """Takes a part of the reply."""
        self._chunks.add(item)

    def end(self, reply: object, load: Load) -> None:
        """Takes the reply; None: it is made of the parts that have come."""
        if self._reply.done():
            return
        if reply is None:
            reply = GenerateReply(self._chunks.take_sorted(), self._epoch, load)
        self._reply.set_result(reply)

    def lose(self, cause: Loss) -> None:
        """Ends the call because its link has ended."""
        if not self._reply.done():
            self._reply.set_exception(LinkLost(cause))
            self._reply.exception()  # its caller may have gone


class LinkStream:
    """Represents a streamed call, as a `ReplyStream`. Parts that wait for the reader are joined into one reply."""

    def __init__(self, link: "Link", number: int, epoch: int) -> None:
        self._link = link
        self._number = number
        self._epoch = epoch
        self._chunks = PendingChunks()
        self._load = messages.NO_LOAD
        self._last: object = None  # a Failure of the whole call
        self._lost: Loss | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    async def __anext__(self) -> object:
        while not self._chunks:
            if self._last is not None:
                last, self._last = self._last, None
                return last
            if self._lost is not None:
                raise LinkLost(self._lost)
            if self._ended:
                raise StopAsyncIteration
            self._waiter = self._link.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return GenerateReply(self._chunks.take(), self._epoch, self._load)

    def cancel(self) -> None:
        """Ends the call. Does nothing once it has ended."""
        self._link.cancel(self._number)

    def add(self, item: PromptChunk, load: Load) -> None:
        """Takes a part of the reply."""
        self._chunks.add(item)
        self._load = load
        self._wake()

    def end(self, reply: object, load: Load) -> None:
        """Takes the end of the stream, or the failure of the whole call."""
        self._last, self._ended = reply, True
        self._wake()

    def lose(self, cause: Loss) -> None:
        """Ends the stream because its link has ended, after what has come."""
        self._lost = cause
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Link(asyncio.Protocol):
    """Represents one connection to a replica. `connect` makes one; it belongs to the running event loop."""

    def __init__(self, address: LinkAddress, figures: LinkFigures) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.lost: Callable[[Link], None] = _ignore  # called when an open link ends; its owner then calls `fail`
        self._figures = figures
        self._transport: Any = None
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._nonce = new_nonce()
        self._server_nonce = b""
        self._opened: asyncio.Future[None] = self.loop.create_future()
        self._calls: dict[int, LinkCall | LinkStream] = {}
        self._number = 0
        self._unsent: list[bytes] = []
        self.is_open = False

    @classmethod
    async def connect(cls, address: LinkAddress, figures: LinkFigures, timeout_s: float = CONNECT_S) -> "Link":
        """Opens a link: over the Unix socket if this host has it, else over TCP.

        Raises:
            ConnectionRefusedError: no process listens there.
            OSError: the replica cannot be reached, or does not hold the link's key.
            TimeoutError: it does not answer in time.
        """
        link = cls(address, figures)
        async with asyncio.timeout(timeout_s):
            try:
                await link._connect()
                await link._opened
            except BaseException:
                link.close()
                raise
        return link

    async def _connect(self) -> None:
        address = self.address
        if address.local:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            own.setblocking(False)
            try:
                own.connect("\0" + address.local)  # never waits; uvloop takes no abstract name
                await self.loop.create_unix_connection(lambda: self, sock=own)
                return
            except OSError:
                own.close()
                if not address.host:
                    raise
        if not address.host:
            raise OSError("The replica has no socket that this host can reach.")
        await self.loop.create_connection(lambda: self, address.host, address.port)

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        keep_alive(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(ConnectionResetError("The replica closed the link."))
            self._opened.exception()
        if self.is_open:
            self.is_open = False
            self.lost(self)

    def close(self) -> None:
        """Closes the connection, whatever is unsent."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, cause: Loss) -> None:
        """Ends all calls of a link that was lost."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.lose(cause)

    def data_received(self, data: bytes) -> None:
        self._figures.bytes_received += len(data)
        try:
            for frame in self._reader.feed(data):
                self._figures.frames_received += 1
                if self.is_open:
                    self._take(frame)
                else:
                    self._authenticate(frame)
        except FrameError as error:
            log.error("A link was closed: %s", error)
            self.close()

    def _authenticate(self, frame: LinkFrame) -> None:
        key = link_key(self.address.secret)
        if frame.kind is FrameKind.HELLO and not self._server_nonce:
            hello = messages.HELLO.decode(frame)
            if hello.instance != self.address.instance:
                raise FrameError("The server must be the one that the address names.")
            self._server_nonce = hello.nonce
            proof = proof_of("client", key, hello.instance, hello.nonce, self._nonce)
            self._transport.write(messages.PROOF.encode(Proof(self._nonce, proof)))
        elif frame.kind is FrameKind.WELCOME and self._server_nonce:
            proof = proof_of("server", key, self.address.instance, self._server_nonce, self._nonce)
            if not is_proof(messages.WELCOME.decode(frame).proof, proof):
                raise FrameError("The proof of a server must be that of the link's key.")
            self._reader.max_bytes = MAX_FRAME_BYTES
            self.is_open = True
            if not self._opened.done():
                self._opened.set_result(None)
        else:
            refuse(frame)

    # Calls.

    @property
    def has_room(self) -> bool:
        """Whether it takes another call."""
        if not self.is_open or len(self._calls) >= MAX_OPEN_CALLS:
            return False
        return bool(self._transport.get_write_buffer_size() <= MAX_UNSENT_BYTES)

    def call(self, call: AnyCall, epoch: int) -> LinkCall:
        """Sends a call that has one reply.

        Raises:
            FrameError: the call does not fit a frame.
        """
        self._next_number()
        self._send(self._encoded(call, epoch, streamed=False))
        self._figures.calls += 1
        found = self._calls[self._number] = LinkCall(self, self._number, epoch)
        return found

    def stream(self, call: AnyCall, epoch: int) -> LinkStream:
        """Sends a generation whose results come as they are made.

        Raises:
            FrameError: the call does not fit a frame.
        """
        self._next_number()
        self._send(self._encoded(call, epoch, streamed=True))
        self._figures.calls += 1
        found = self._calls[self._number] = LinkStream(self, self._number, epoch)
        return found

    def cancel(self, number: int) -> None:
        """Ends a call. Does nothing for one that has ended."""
        if self._calls.pop(number, None) is not None and self.is_open:
            self._send(messages.CANCEL.encode(messages.CancelCall(number)))

    def _next_number(self) -> None:
        """Chooses a call's number, which fits 32 bits however long the link lives."""
        self._number = self._number % messages.MAX_NUMBER + 1
        while self._number in self._calls:
            self._number = self._number % messages.MAX_NUMBER + 1

    def _encoded(self, call: AnyCall, epoch: int, *, streamed: bool) -> bytes:
        if isinstance(call, tuple):
            return messages.GENERATE.encode(messages.GenerationCall(self._number, call, epoch, streamed))
        if isinstance(call, ScoreRequest):
            return messages.SCORE.encode(messages.ScoreCall(self._number, call))
        if isinstance(call, PoolingRequest):
            return messages.POOLING.encode(messages.PoolingCall(self._number, call))
        return messages.LIKELIHOOD.encode(messages.LikelihoodCall(self._number, call))

    def _send(self, frame: bytes) -> None:
        """Sends a frame with those that others send in the same turn of the event loop."""
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = self._unsent, []
        data = b"".join(frames)
        self._figures.frames_sent += len(frames)
        self._figures.bytes_sent += len(data)
        if self.is_open:
            self._transport.write(data)

    def _take(self, frame: LinkFrame) -> None:
        if frame.kind is not FrameKind.RESULTS:
            refuse(frame)
        results = messages.RESULTS.decode(frame)
        load = results.load
        for scored in results.prompts:
            if (call := self._calls.get(scored.number)) is not None:
                call.add(PromptChunk(scored.prompt, scored.scores), load)
        for number, item in messages.chunks_of(results.chunks):
            if (call := self._calls.get(number)) is not None:
                call.add(item, load)
        for answer in results.answers:
            self._finish(answer, load)

    def _finish(self, answer: messages.Answer, load: Load) -> None:
        if isinstance(answer, messages.CallFailure) and answer.prompt != messages.ABSENT:
            if (call := self._calls.get(answer.number)) is not None:
                call.add(PromptChunk(answer.prompt, answer.failure), load)
            return
        call = self._calls.pop(answer.number, None)
        if call is None:
            return
        reply: object = None
        if isinstance(answer, messages.LabelScoreAnswer | messages.PoolingAnswer):
            reply = answer.result._replace(load=load)
        elif isinstance(answer, messages.LikelihoodAnswer):
            reply = answer.reply._replace(load=load)
        elif isinstance(answer, messages.CallFailure):
            reply = answer.failure
        call.end(reply, load)


def _ignore(link: Link) -> None: ...
