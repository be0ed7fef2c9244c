"""A link over a socket: who may open it, what becomes of calls when it ends, and who waits for whom."""

import asyncio
import contextlib
import gc
import hmac
import socket
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from deployments.link import client, frames, messages, server
from deployments.link.client import Link, LinkLost
from deployments.link.frames import HEADER, MAGIC, VERSION, FrameKind, FrameReader
from deployments.link.handshake import NONCE_BYTES, Hello, LinkAddress, Proof, Welcome, link_key, proof_of
from deployments.link.server import LinkServer
from deployments.observability.link_figures import LinkFigures
from deployments.protocol import Failure, GenerateReply, PromptChunk
from engine.requests import (
    ErrorCode,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    LikelihoodRequest,
    Load,
    PoolingRequest,
    PoolingResult,
    PoolingTask,
    ScoreRequest,
    ScoreResult,
)
from gpu_sampler.sampling_params import SamplingParams
from tests.deployments.links import begun, replied

LOAD = Load(5, 100.0, 1000)
Start = Callable[..., Awaitable[LinkServer]]


def score(number: int = 0) -> ScoreRequest:
    ids, starts = np.array([number], np.int32), np.array([0, 1], np.int32)
    return ScoreRequest(request_id=f"s{number}", prefix=ids[:0], ids=ids, starts=starts, labels=ids)


def pooling(one: ScoreRequest) -> PoolingRequest:
    return PoolingRequest(request_id="p", prefix=one.prefix, ids=one.ids, starts=one.starts, task=PoolingTask.CLASSIFY)


def generation(tokens: int = 3) -> tuple[GenerateRequest, ...]:
    params = SamplingParams(max_tokens=tokens)
    return (GenerateRequest(request_id="g", prompt=np.array([1], np.int32), params=params, seed=1),)


class Service:
    """Answers a score with its own token; streams count up, a token whenever the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.began: list[str] = []
        self.cancelled: list[str] = []
        self.padding = 0

    def begin_rows(self, request: Any, deliver: Any) -> Any:
        if isinstance(request, LikelihoodRequest):
            raise RuntimeError("a fault of ours")
        return replied(self._reply(request), deliver)

    async def _reply(self, request: ScoreRequest | PoolingRequest) -> ScoreResult | PoolingResult | Failure:
        if isinstance(request, PoolingRequest):
            values = np.full((1, 3), float(request.ids[0]), np.float32)
            return PoolingResult(values, np.zeros(1, np.uint8), np.zeros(1, np.int32), 0.0, 0.0)
        self.began.append(request.request_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        if request.ids[0] < 0:
            return Failure(ErrorCode.INVALID_TOKEN_ID, "`ids` must be in range.", "ids")
        values = np.full((1, 1 + self.padding), float(request.ids[0]), np.float32)
        return ScoreResult(values, np.zeros(1, np.uint8), np.zeros(1, np.int32), 0.0, 0.0)

    async def generate(self, requests: Any, epoch: int = 0, route: Any = None) -> GenerateReply:
        chunks = tuple(PromptChunk(0, self.chunk(b, 3, last=True)) for b in range(2))
        return GenerateReply(chunks, epoch, LOAD)

    def begin_stream(self, requests: Any, receiver: Any) -> Any:
        return begun(self._stream(requests), receiver)

    async def _stream(self, requests: Any) -> AsyncGenerator[GenerateReply, None]:
        (request,) = requests
        self.began.append(request.request_id)
        try:
            for token in range(request.params.max_tokens):
                await self.gate.wait()
                chunk = self.chunk(0, 1, first=token, last=token == request.params.max_tokens - 1)
                yield GenerateReply((PromptChunk(0, chunk),), 0, LOAD)
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise

    def load(self) -> Load:
        return LOAD

    @staticmethod
    def chunk(branch: int, count: int, first: int = 0, *, last: bool = False) -> GenerateChunk:
        tokens = np.arange(first, first + count, dtype=np.int32)
        finish = FinishReason.LENGTH if last else None
        return GenerateChunk(branch, tokens, None, None, None, None, None, finish, None, 0, 0.0, 0.0)


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def start(service: Service) -> AsyncIterator[Start]:
    made: list[LinkServer] = []

    async def make(host: str = "") -> LinkServer:
        made.append(LinkServer("r0", service, LinkFigures()))
        await made[-1].start(host)
        return made[-1]

    yield make
    for one in made:
        one.stop()
    await asyncio.sleep(0)


async def opened(address: LinkAddress | None) -> Link:
    assert address is not None
    link = await Link.connect(address, LinkFigures())
    link.lost = lambda lost: lost.fail("cut")
    return link


async def tokens_of(stream: client.LinkStream) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(StopAsyncIteration):
        while True:
            reply: Any = await stream.__anext__()
            found += [token for _, chunk in reply.chunks for token in chunk.tokens.tolist()]
    return found


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
async def test_calls_of_all_kinds_are_answered(start: Start, service: Service, host: str) -> None:
    address = (await start(host)).address
    assert address is not None
    link = await opened(address._replace(local="") if host else address)
    replies: list[Any] = await asyncio.gather(*(link.call(score(number), 0) for number in range(20)))
    assert [reply.label_logprobs[0, 0] for reply in replies] == list(range(20))
    pooled: Any = await link.call(pooling(score(4)), 0)
    assert pooled.values.tolist() == [[4.0] * 3]
    refused: Any = await link.call(score(-1), 0)
    assert (refused.code, refused.field) == (ErrorCode.INVALID_TOKEN_ID, "ids")
    whole: Any = await link.call(generation(), 4)
    assert whole.epoch == 4 and [chunk.branch for _, chunk in whole.chunks] == [0, 1]
    assert await asyncio.gather(*(tokens_of(link.stream(generation(9), 0)) for _ in range(5))) == [[*range(9)]] * 5
    assert link._calls == {}
    link.close()


async def test_both_ends_of_a_link_over_tcp_notice_a_host_that_is_gone(start: Start) -> None:
    found = await start("127.0.0.1")
    assert found.address is not None
    link = await opened(found.address._replace(local=""))
    [served] = found._links
    for transport in (link._transport, served._transport):
        own = transport.get_extra_info("socket")
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
    link.close()


async def test_what_is_sent_in_one_turn_travels_in_one_frame_back(start: Start, service: Service) -> None:
    found = await start()
    link = await opened(found.address)
    await asyncio.gather(*(link.call(score(number), 0) for number in range(50)))
    assert found.figures.frames_received == 50 + 1  # and the proof
    assert found.figures.frames_sent <= 3
    link.close()


async def test_results_that_do_not_fit_one_frame_take_several_and_one_that_fits_none_fails_alone(
    start: Start, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1 << 16)
    found = await start()
    link = await opened(found.address)
    service.gate.clear()
    service.padding = 1 << 12
    calls = [link.call(score(number), 0) for number in range(9)]
    stream = link.stream(generation(), 0)
    await until(lambda: len(service.began) == 10)
    service.gate.set()  # 9 answers of 16 KiB in one turn
    replies: list[Any] = await asyncio.gather(*calls)
    assert [reply.label_logprobs[0, -1] for reply in replies] == list(range(9))
    service.padding = 1 << 14
    large, pooled = link.call(score(), 0), link.call(pooling(score(4)), 0)
    refused: Any = await large
    assert refused.code is ErrorCode.REQUEST_TOO_LARGE
    assert isinstance(await pooled, PoolingResult)
    assert await tokens_of(stream) == [0, 1, 2]
    assert link.is_open and link._calls == {}
    link.close()


async def test_a_call_that_raises_fails_alone(start: Start) -> None:
    link = await opened((await start()).address)
    one, starts = np.array([1], np.int32), np.array([0, 1], np.int32)
    bad = LikelihoodRequest(request_id="l", prefix=one, ids=one, starts=starts, shared=one * 0, wanted=one)
    failed, answered = await asyncio.gather(link.call(bad, 0), link.call(score(3), 0))
    assert isinstance(failed, Failure) and failed.code is ErrorCode.STEP_FAILED
    assert isinstance(answered, ScoreResult)
    link.close()


async def test_cancelling_reaches_the_replica(start: Start, service: Service) -> None:
    service.gate.clear()
    link = await opened((await start()).address)
    call, stream = link.call(score(1), 0), link.stream(generation(), 0)
    await until(lambda: len(service.began) == 2)
    call.cancel()
    stream.cancel()
    await until(lambda: sorted(service.cancelled) == ["g", "s1"])
    assert link._calls == {}
    link.close()


async def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing(start: Start) -> None:
    link = await opened((await start()).address)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        link.call(generation(), 0).cancel()
        assert isinstance(await link.call(score(3), 0), ScoreResult)
        gc.collect()
    assert [str(one.message) for one in warned] == []
    link.close()


@pytest.mark.parametrize("end", ["ingress", "replica"])
async def test_a_link_that_ends_ends_its_calls_on_both_sides(start: Start, service: Service, end: str) -> None:
    found = await start()
    link = await opened(found.address)
    stream = link.stream(generation(5), 0)
    first: Any = await stream.__anext__()
    assert first.chunks[0].chunk.tokens.tolist()[0] == 0
    service.gate.clear()
    call = link.call(score(1), 0)
    await until(lambda: "s1" in service.began)
    link.close() if end == "ingress" else found.stop()
    with pytest.raises(LinkLost):
        await call
    with pytest.raises(LinkLost):
        while True:
            await stream.__anext__()
    await until(lambda: "s1" in service.cancelled)
    assert not link.has_room


async def test_a_replica_never_waits_for_an_ingress_that_does_not_read(
    start: Start, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UNSENT_BYTES", 1 << 20)
    service.padding = 1 << 16
    found = await start()
    link = await opened(found.address)
    other = await opened(found.address)
    link._transport.pause_reading()
    for number in range(40):
        link.call(score(number), 0)
        await until(lambda: len(service.began) > number or found.figures.losses["behind"] == 1)  # noqa: B023
    await until(lambda: found.figures.losses["behind"] == 1)
    assert isinstance(await other.call(score(1), 0), ScoreResult)
    assert found.figures.links == 1
    link._transport.resume_reading()
    await until(lambda: not link.is_open)
    other.close()


async def test_a_link_has_so_many_calls_at_most(
    start: Start, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    monkeypatch.setattr(client, "MAX_OPEN_CALLS", 4)
    service.gate.clear()
    link = await opened((await start()).address)
    calls = [link.call(score(number), 0) for number in range(4)]
    rooms = [link.has_room]
    refused: Any = await calls[3]
    assert refused.code is ErrorCode.OVERLOADED and refused.load == LOAD
    service.gate.set()
    assert all(isinstance(reply, ScoreResult) for reply in await asyncio.gather(*calls[:3]))
    assert [*rooms, link.has_room] == [False, True]
    link.close()


# The handshake.


class Stranger:
    """A raw connection to a link server."""

    def __init__(self, address: LinkAddress) -> None:
        self._address = address
        self._frames = FrameReader(1 << 20)

    async def __aenter__(self) -> "Stranger":
        local, host, port = self._address.local, self._address.host, self._address.port
        opening = asyncio.open_unix_connection("\0" + local) if local else asyncio.open_connection(host, port)
        self.reader, self.writer = await opening
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def frame(self) -> Any:
        while True:
            data = await asyncio.wait_for(self.reader.read(1 << 16), 10)
            if not data:
                return None
            for frame in self._frames.feed(data):
                return frame

    async def is_refused(self) -> bool:
        """Whether the server closes the connection without another word."""
        with contextlib.suppress(ConnectionResetError):
            return await self.frame() is None
        return True


@pytest.mark.risk("S11", figure="0 calls taken before both ends have proved the key")
@pytest.mark.parametrize("fault", ["key", "role", "nonce", "length", "call", "large", "none"])
async def test_only_who_holds_the_key_may_call(start: Start, service: Service, fault: str) -> None:
    address = (await start()).address
    assert address is not None
    async with Stranger(address) as stranger:
        hello = messages.HELLO.decode(await stranger.frame())
        nonce, key = bytes(NONCE_BYTES), link_key(address.secret)
        proof = proof_of("client", key, hello.instance, hello.nonce, nonce)
        match fault:
            case "key":
                proof = proof_of("client", link_key(b"another"), hello.instance, hello.nonce, nonce)
            case "role":
                proof = proof_of("server", key, hello.instance, hello.nonce, nonce)
            case "nonce":
                proof = proof_of("client", key, hello.instance, bytes(NONCE_BYTES), nonce)
            case "length":
                nonce = b""
        data = messages.PROOF.encode(Proof(nonce, proof))
        if fault == "call":
            data = messages.SCORE.encode(messages.ScoreCall(1, score()))
        elif fault == "large":
            data = HEADER.pack(MAGIC, VERSION, FrameKind.PROOF, 1 << 20, 0)
        stranger.writer.write(data)
        if fault == "none":
            assert (await stranger.frame()).kind is FrameKind.WELCOME
        else:
            assert await stranger.is_refused()
    assert service.began == []


async def test_a_recorded_proof_is_of_no_use(start: Start) -> None:
    address = (await start()).address
    assert address is not None
    recorded = b""
    for again in (False, True):
        async with Stranger(address) as stranger:
            hello = messages.HELLO.decode(await stranger.frame())
            if not again:
                nonce = bytes(NONCE_BYTES)
                proof = proof_of("client", link_key(address.secret), hello.instance, hello.nonce, nonce)
                recorded = messages.PROOF.encode(Proof(nonce, proof))
            stranger.writer.write(recorded)
            assert await stranger.is_refused() is again


@pytest.mark.risk("S11", planted=True)
async def test_a_server_that_compares_nothing_would_be_seen(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "is_proof", lambda given, expected: True)
    address = (await start()).address
    assert address is not None
    async with Stranger(address) as stranger:
        await stranger.frame()
        stranger.writer.write(messages.PROOF.encode(Proof(bytes(NONCE_BYTES), b"anything")))
        assert not await stranger.is_refused()


async def test_an_ingress_refuses_a_server_without_the_key(start: Start, service: Service) -> None:
    address = (await start()).address
    assert address is not None
    with pytest.raises(OSError):
        await Link.connect(address._replace(secret=b"another"), LinkFigures())
    with pytest.raises(OSError):
        await Link.connect(address._replace(instance="another"), LinkFigures())

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(messages.HELLO.encode(Hello(address.instance, bytes(NONCE_BYTES))))
        await reader.read(1)
        proof = hmac.digest(b"another", b"", "sha256")
        writer.write(messages.WELCOME.encode(Welcome(proof)))
        await reader.read()
        writer.close()
        over.set()

    over = asyncio.Event()
    own = socket.socket(socket.AF_UNIX)
    own.bind("\0assay-link-impostor-" + address.instance)
    async with await asyncio.start_unix_server(impostor, sock=own):
        with pytest.raises(OSError):
            await Link.connect(address._replace(local="assay-link-impostor-" + address.instance), LinkFigures())
        await over.wait()


async def test_the_key_depends_on_the_clusters_token(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    secret = b"s" * 32
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    keys = [link_key(secret)]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for token in ("one", "two"):
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        keys.append(link_key(secret))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    file = tmp_path / "token"
    file.write_text("two\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert link_key(secret) == keys[2]
    assert len(set(keys)) == 3 and link_key(secret[1:]) not in keys


async def test_strangers_are_few_and_wait_only_so_long(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
    address = (await start()).address
    assert address is not None
    async with Stranger(address) as one, Stranger(address) as two, Stranger(address) as three:
        assert await one.frame() is not None and await two.frame() is not None
        assert await three.is_refused()
        assert await one.is_refused() and await two.is_refused()


async def test_strangers_of_the_network_keep_no_ingress_of_this_host_away(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    address = (await start("127.0.0.1")).address
    assert address is not None and address.local
    network = address._replace(local="")
    async with Stranger(network) as one, Stranger(network) as two, Stranger(network) as three:
        assert await one.frame() is not None and await two.frame() is not None
        assert await three.is_refused()
        link = await opened(address)
        reply: Any = await link.call(score(7), 0)
        assert reply.label_logprobs[0, 0] == 7
        link.close()


async def test_a_link_to_a_process_that_has_gone_is_refused(start: Start) -> None:
    found = await start()
    address = found.address
    found.stop()
    assert address is not None
    with pytest.raises(ConnectionRefusedError):
        await Link.connect(address, LinkFigures())


async def test_the_number_of_a_call_fits_its_column_however_long_a_link_lives(start: Start) -> None:
    link = await opened((await start()).address)
    link._number = messages.MAX_NUMBER - 2
    assert await asyncio.gather(*(tokens_of(link.stream(generation(9), 0)) for _ in range(5))) == [[*range(9)]] * 5
    assert link._number == 3
    link.close()


@pytest.mark.parametrize("number", [-1, messages.MAX_NUMBER + 1, 1 << 63])
async def test_a_number_that_does_not_fit_closes_the_link(start: Start, number: int) -> None:
    found = await start()
    link = await opened(found.address)
    link._send(messages.GENERATE.encode(messages.GenerationCall(number, generation(), 0, streamed=True)))
    await until(lambda: not link.is_open)
    assert found.figures.losses["invalid"] == 1
