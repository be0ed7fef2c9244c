"""The replica's end of its links: takes calls from ingresses and sends their results, many in one frame.

A link has one frame for all results of its calls that there are when the event loop has run what a step woke. A call
costs no message of Ray's and no task on Serve's side. The tokens of a step for all streams of a link come as columns
and leave as columns: no stream and no scoring request has a task, and no token an object.
"""

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
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
from deployments.link.handshake import (
    SECRET_BYTES,
    Hello,
    LinkAddress,
    Welcome,
    is_proof,
    link_key,
    new_nonce,
    proof_of,
)
from deployments.link.keep_alive import keep_alive
from deployments.observability.link_figures import LinkFigures
from deployments.protocol import (
    FAULT,
    Failure,
    LikelihoodReply,
    PromptChunk,
    PromptScores,
    ReplicaService,
    RowsReply,
    RunningCall,
)
from engine.channels import TokenSink
from engine.requests import ErrorCode, Load, PoolingResult, ScoreResult, StepTokens

log = logging.getLogger("ray.serve")
HANDSHAKE_S = 5.0
MAX_STRANGERS = 64  # connections of a listener whose handshake has not ended
MAX_CALLS = 4096  # of one link that have not ended
MAX_UNSENT_BYTES = 32 << 20  # that an ingress has not read: its link is closed, and it continues its calls elsewhere
DRAIN_POLL_S = 0.05
Listener = Literal["unix", "tcp"]
Result = messages.ScoredPrompt | messages.NumberedChunk | StepTokens | messages.Answer
TOO_LARGE = Failure(
    ErrorCode.REQUEST_TOO_LARGE, f"A replica's answer must be at most {MAX_FRAME_BYTES} bytes. Ask for less.", None
)


class LinkServer:
    """Listens for ingresses. It belongs to the event loop that starts it."""

    def __init__(self, replica: str, service: ReplicaService, figures: LinkFigures) -> None:
        self.figures = figures
        self._service = service
        self._listeners: list[asyncio.Server] = []
        self._links: set[_ServerLink] = set()
        self._address = LinkAddress(replica, secrets.token_hex(8), secrets.token_bytes(SECRET_BYTES), local="")

    @property
    def address(self) -> LinkAddress | None:
        """Where it listens; None while it does not."""
        return self._address if self._listeners else None

    async def start(self, host: str = "") -> None:
        """Listens on a Unix socket, and with `host` on a TCP port of that address too."""
        loop = asyncio.get_running_loop()
        if sys.platform == "linux":  # abstract: no file to protect, to name within 108 bytes, or to leave behind
            name = f"assay-link-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind("\0" + name)
            connect = partial(self._connect, "unix")
            self._listeners.append(await loop.create_unix_server(connect, sock=local, start_serving=False))
            self._address = self._address._replace(local=name)
        if host:  # an address of this host and never all of them: other networks have no business here
            server = await loop.create_server(partial(self._connect, "tcp"), host, 0, start_serving=False)
            self._listeners.append(server)
            self._address = self._address._replace(host=host, port=server.sockets[0].getsockname()[1])
        for listener in self._listeners:
            await listener.start_serving()

    async def drain(self, timeout_s: float) -> None:
        """Waits until no call is left, at most `timeout_s`."""
        end = asyncio.get_running_loop().time() + timeout_s
        while any(link.calls for link in self._links) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_POLL_S)

    def stop(self) -> None:
        """Closes the sockets. Calls that are left are cancelled, and their ingresses see that this end has gone."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for link in list(self._links):
            link.close()

    def _connect(self, listener: Listener) -> asyncio.Protocol:
        return _ServerLink(self, self._service, self._address, listener)

    def opened(self, link: "_ServerLink") -> bool:
        """Notes a connection. Returns False if its listener has too many that have not proved who they are.

        Strangers of the network keep no ingress of this host away: it comes over the Unix socket.
        """
        self._links.add(link)
        self.count()
        strangers = sum(not other.is_open and other.listener == link.listener for other in self._links)
        return strangers <= MAX_STRANGERS

    def closed(self, link: "_ServerLink") -> None:
        self._links.discard(link)
        self.count()

    def count(self) -> None:
        """Notes how many links are open."""
        self.figures.links = sum(link.is_open for link in self._links)


class _ServerLink(asyncio.Protocol):
    """Represents one connection of an ingress."""

    def __init__(self, server: LinkServer, service: ReplicaService, address: LinkAddress, listener: Listener) -> None:
        self._server = server
        self.listener = listener
        self._figures = server.figures
        self._service = service
        self._address = address
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._nonce = new_nonce()
        self.loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._prompts: list[messages.ScoredPrompt] = []
        self._chunks: list[messages.NumberedChunk | StepTokens] = []  # in order
        self._answers: list[messages.Answer] = []
        self._flushing = False
        self.calls: dict[int, RunningCall] = {}
        self.is_open = False  # the handshake has ended

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        keep_alive(transport)
        self._timer = self.loop.call_later(HANDSHAKE_S, self.close)
        if not self._server.opened(self):
            self.close()
            return
        self._transport.write(messages.HELLO.encode(Hello(self._address.instance, self._nonce)))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._server.closed(self)
        if self._timer is not None:
            self._timer.cancel()
        for call in list(self.calls.values()):
            call.cancel()

    def close(self) -> None:
        """Closes the connection, whatever is unsent."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._figures.bytes_received += len(data)
        try:
            for frame in self._reader.feed(data):
                self._figures.frames_received += 1
                self._take(frame)
        except FrameError as error:
            self._figures.losses["invalid"] += 1
            log.warning("A link was closed: %s", error)
            self.close()

    # Frames.

    def _take(self, frame: LinkFrame) -> None:
        if not self.is_open:
            self._authenticate(frame)
            return
        match frame.kind:
            case FrameKind.SCORE:
                self._begin_rows(messages.SCORE.decode(frame))
            case FrameKind.LIKELIHOOD:
                self._begin_rows(messages.LIKELIHOOD.decode(frame))
            case FrameKind.POOLING:
                self._begin_rows(messages.POOLING.decode(frame))
            case FrameKind.GENERATE:
                generation = messages.GENERATE.decode(frame)
                if generation.streamed:
                    self._stream(generation)
                else:
                    self._begin(generation.number, lambda: self._generate(generation))
            case FrameKind.CANCEL:
                call = self.calls.pop(messages.CANCEL.decode(frame).number, None)
                if call is not None:
                    call.cancel()
            case _:
                refuse(frame)

    def _authenticate(self, frame: LinkFrame) -> None:
        if frame.kind is not FrameKind.PROOF:
            refuse(frame)
        given, key = messages.PROOF.decode(frame), link_key(self._address.secret)
        about = (key, self._address.instance, self._nonce, given.nonce)
        if not is_proof(given.proof, proof_of("client", *about)):
            raise FrameError("The proof of a client must be that of the link's key.")
        self._transport.write(messages.WELCOME.encode(Welcome(proof_of("server", *about))))
        self._reader.max_bytes = MAX_FRAME_BYTES
        self.is_open = True
        self._server.count()
        if self._timer is not None:
            self._timer.cancel()

    # Calls.

    def _takes(self, number: int) -> bool:
        """Counts a call. Returns False for one that is refused."""
        if number in self.calls or not 0 <= number <= messages.MAX_NUMBER:
            raise FrameError(f"The number of a call must be new and in [0, {messages.MAX_NUMBER}]. Given: {number}.")
        if len(self.calls) >= MAX_CALLS:
            full = Failure(ErrorCode.OVERLOADED, "The link has too many calls.", None, self._service.load())
            self._fail(number, full)
            return False
        self._figures.calls += 1
        return True

    def _begin(self, number: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._takes(number):
            task = self.calls[number] = self.loop.create_task(self._run(number, work))
            task.add_done_callback(partial(self._forget, number))

    def _forget(self, number: int, task: "asyncio.Task[None]") -> None:
        if self.calls.get(number) is task:
            del self.calls[number]

    async def _run(self, number: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()  # made here: a call that is cancelled before it begins leaves none behind
        except Exception:
            self._fault(number)

    def _fault(self, number: int) -> None:
        """Answers a call that raised, in an `except` block."""
        log.exception("A call of a link raised.")
        self._fail(number, FAULT)

    def _stream(self, call: messages.GenerationCall) -> None:
        if not self._takes(call.number):
            return
        receiver = _LinkReceiver(self, call.number)
        try:
            running = self._service.begin_stream(call.requests, receiver)
        except Exception:
            self._fault(call.number)
            return
        if isinstance(running, Failure):
            self._fail(call.number, running)
        elif not receiver.ended:  # else the engine refused all prompts
            self.calls[call.number] = running

    def _begin_rows(self, call: messages.ScoreCall | messages.LikelihoodCall | messages.PoolingCall) -> None:
        if not self._takes(call.number):
            return
        try:
            running = self._service.begin_rows(call.request, partial(self._replied, call.number))
        except Exception:
            self._fault(call.number)
            return
        if isinstance(running, Failure):
            self._fail(call.number, running)
        else:
            self.calls[call.number] = running

    def _replied(self, number: int, reply: RowsReply) -> None:
        """Ends a scoring call with its reply."""
        self.calls.pop(number, None)
        match reply:
            case Failure():
                self._fail(number, reply)
            case ScoreResult():
                self._answer(messages.LabelScoreAnswer(number, reply))
            case LikelihoodReply():
                self._answer(messages.LikelihoodAnswer(number, reply))
            case PoolingResult():
                self._answer(messages.PoolingAnswer(number, reply))

    def put_tokens(self, tokens: StepTokens) -> None:
        """Takes what one step brought for the streams of this link."""
        self._chunks.append(tokens)
        self._flush_soon()

    def ended(self, number: int) -> None:
        """Ends a stream."""
        self.calls.pop(number, None)
        self._answer(messages.CallEnd(number))

    async def _generate(self, call: messages.GenerationCall) -> None:
        reply = await self._service.generate(call.requests, call.epoch)
        if isinstance(reply, Failure):
            self._fail(call.number, reply)
            return
        for item in reply.chunks:
            self.add(call.number, item)
        self._answer(messages.CallEnd(call.number))

    def add(self, number: int, item: PromptChunk) -> None:
        """Queues a part of a generation."""
        prompt, chunk = item
        if isinstance(chunk, Failure):
            self._answers.append(messages.CallFailure(number, chunk, prompt))
        elif isinstance(chunk, PromptScores):
            self._prompts.append(messages.ScoredPrompt(number, prompt, chunk))
        else:
            self._chunks.append(messages.NumberedChunk(number, prompt, chunk))
        self._flush_soon()

    def _fail(self, number: int, failure: Failure) -> None:
        """Ends a whole call with its failure."""
        self._answer(messages.CallFailure(number, failure, messages.ABSENT))

    def _answer(self, answer: messages.Answer) -> None:
        self._answers.append(answer)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends all results that there are as one frame, or as several where they do not fit one."""
        self._flushing = False
        prompts, chunks, answers = self._prompts, self._chunks, self._answers
        self._prompts, self._chunks, self._answers = [], [], []
        if not self.is_open:
            return
        try:
            frames = self._frames(self._service.load(), prompts, chunks, answers)
        except FrameError as error:
            log.error("A link was closed: %s", error)
            self.close()
            return
        size = sum(map(len, frames))
        if self._transport.get_write_buffer_size() + size > max(MAX_UNSENT_BYTES, size):
            self._figures.losses["behind"] += 1
            log.warning("A link was closed: its ingress does not read.")
            self.close()
            return
        self._figures.frames_sent += len(frames)
        self._figures.bytes_sent += size
        for frame in frames:
            self._transport.write(frame)

    def _frames(
        self,
        load: Load,
        prompts: Sequence[messages.ScoredPrompt],
        chunks: Sequence[messages.NumberedChunk | StepTokens],
        answers: Sequence[messages.Answer],
    ) -> list[bytes]:
        """Returns the results as frames, in the order in which a single one applies them.

        A result that fits no frame by itself ends its call.

        Raises:
            FrameError: the tokens of one step, or a failure alone, fit no frame.
        """
        parts = messages.parts_of(chunks)
        try:
            return [messages.RESULTS.encode(messages.Results(load, list(prompts), parts, list(answers)))]
        except FrameError as error:
            results: list[Result] = [*prompts, *chunks, *answers]
            if len(results) == 1:
                result = results[0]
                if isinstance(result, StepTokens):
                    raise
                log.error("A result was too large for a link: %s", error)
                failure = self._too_large(result.number)
                return [messages.RESULTS.encode(messages.Results(load, [], [], [failure]))]
        first = len(results) // 2
        after_prompts = max(0, first - len(prompts))
        after_chunks = max(0, after_prompts - len(chunks))
        return [
            *self._frames(load, prompts[:first], chunks[:after_prompts], answers[:after_chunks]),
            *self._frames(load, prompts[first:], chunks[after_prompts:], answers[after_chunks:]),
        ]

    def _too_large(self, number: int) -> messages.CallFailure:
        call = self.calls.pop(number, None)
        if call is not None:
            call.cancel()
        return messages.CallFailure(number, TOO_LARGE, messages.ABSENT)


class _LinkReceiver:
    """Implements `StreamReceiver` for a streamed call of a link."""

    def __init__(self, link: _ServerLink, number: int) -> None:
        self.token_sink: TokenSink = link
        self.number = number
        self.ended = False
        self._link = link

    def add(self, item: PromptChunk) -> None:
        self._link.add(self.number, item)

    def end(self) -> None:
        self.ended = True
        self._link.ended(self.number)
