"""The head of an answer and the first part of its body are one write of Uvicorn's, whose own protocols run here."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from deployments.errors import ErrorBody
from deployments.one_write import OneWrite
from deployments.proxy_middleware import IngressMiddleware, ProxyMiddleware

PROTOCOLS = pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class RecordingTransport(asyncio.Transport):
    """Keeps each write by itself."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "written after the end"
        if data:
            self.writes.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def served(app: ASGIApp, protocol: Callable[..., Any], request: bytes = REQUEST) -> RecordingTransport:
    """Answers one request."""

    async def run() -> RecordingTransport:
        transport, state = RecordingTransport(), ServerState()
        config = Config(app, log_config=None, lifespan="off", access_log=False, proxy_headers=False)
        config.load()
        connection = protocol(config=config, server_state=state, app_state={})
        connection.connection_made(transport)
        connection.data_received(request)
        await asyncio.gather(*state.tasks)
        connection.connection_lost(None)
        return transport

    return asyncio.run(run())


async def in_parts(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts() -> Any:
        for part in (b"one", b"two", b"three"):
            yield part

    await StreamingResponse(parts())(scope, receive, send)


async def fails_between(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    raise ConnectionError("the work behind the head ended")


ANSWERS: dict[str, ASGIApp] = {
    "json": JSONResponse({"score": 0.5}),
    "empty": Response(status_code=204),
    "stream": in_parts,
}


@PROTOCOLS
@pytest.mark.parametrize("name", ANSWERS)
def test_same_bytes(protocol: Callable[..., Any], name: str) -> None:
    """All parts of an answer come, in their order, and the first write holds the head with the body's first part."""
    app = ANSWERS[name]

    async def joined(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, OneWrite(send))

    plain, together = served(app, protocol).writes, served(joined, protocol).writes
    assert b"".join(plain) == b"".join(together)
    if name == "empty":
        return
    head, rest = together[0].split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200") and rest
    assert plain[0].endswith(b"\r\n\r\n"), "without it a head is a write of its own"
    assert len(together) == len(plain) - 1


@PROTOCOLS
def test_a_stream_goes_on_part_by_part(protocol: Callable[..., Any]) -> None:
    writes = served(ProxyMiddleware(in_parts), protocol).writes
    assert [part for write in writes for part in (b"one", b"two", b"three") if part in write] == [
        b"one",
        b"two",
        b"three",
    ]
    assert sum(b"one" in write or b"two" in write or b"three" in write for write in writes) == 3


@PROTOCOLS
def test_every_http_server_of_serve_joins_them(protocol: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(servable_object=None))
    for middleware in (ProxyMiddleware, IngressMiddleware):
        writes = served(middleware(ANSWERS["json"]), protocol).writes
        assert len(writes) == 1 and writes[0].endswith(b'{"score":0.5}')


@PROTOCOLS
def test_closed_behind_the_answer(protocol: Callable[..., Any]) -> None:
    closing = served(ProxyMiddleware(ANSWERS["json"]), protocol, b"GET / HTTP/1.0\r\nHost: here\r\n\r\n")
    assert closing.closed and len(closing.writes) == 1


@PROTOCOLS
@pytest.mark.parametrize("size", [100, 101])
def test_a_stream_for_http_1_0_is_kept_up_to_a_bound(
    protocol: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Beyond it the client gets an error, and the server says to the application that its client has left."""
    monkeypatch.setattr("deployments.proxy_middleware.MAX_WHOLE_BYTES", 100)
    left = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-assay-request-id", b"mine")]})
        await send({"type": "http.response.body", "body": b"a" * size, "more_body": True})
        if size > 100:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.append(True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    [written] = served(ProxyMiddleware(stream), protocol, b"GET / HTTP/1.0\r\nHost: here\r\n\r\n").writes
    head, body = written.split(b"\r\n\r\n", 1)
    assert b"content-length: %d" % len(body) in head.lower() and b"x-assay-request-id: mine" in head.lower()
    if size == 100:
        assert head.startswith(b"HTTP/1.1 200") and body == b"a" * 100
        return
    assert head.startswith(b"HTTP/1.1 413") and left
    found = ErrorBody.model_validate_json(body)
    assert found.error.code == "request_too_large" and found.request_id.startswith("req-")
    assert "at most 100 bytes" in found.error.message


@PROTOCOLS
def test_work_that_ends_behind_the_head_is_a_whole_500(protocol: Callable[..., Any]) -> None:
    """A head that nothing follows would be half an answer."""
    writes = served(ProxyMiddleware(fails_between), protocol).writes
    assert writes[0].startswith(b"HTTP/1.1 500") and not any(b"200" in write for write in writes)
    assert served(fails_between, protocol).writes[0].startswith(b"HTTP/1.1 200"), (
        "without it the client gets such a head"
    )


def test_another_send_gets_both_messages() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def run() -> None:
        await JSONResponse({})({"type": "http", "method": "GET"}, send, OneWrite(send))  # type: ignore[arg-type]

    asyncio.run(run())
    assert sent == ["http.response.start", "http.response.body"]
