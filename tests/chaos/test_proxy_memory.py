"""S15: what strangers send in headers, paths and refused bodies leaves no memory behind, in proxy and ingress."""

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from deployments.cli.launch.ray_env import PROXY_CALLBACK
from tests.served import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LANES = 8
REQUESTS = 400  # a round: a leak of all they send would be 12 MB
ROUNDS = 4
BYTES = 30_000
LARGE, LARGE_BYTES = 100, 5_000_000
MAX_MB = 20.0
START_S = 600.0
SETTLED_S = 10.0  # what the last connections held may go a little later
CLOSED = 0  # before the answer could be read: a server may close once it has refused a body that still arrives
KEYS = {"mode": "keys", "keys": [{"name": "team", "sha256": "0" * 64, "scopes": ["inference"]}]}
OFF = dict.fromkeys(PROXY_CALLBACK, "")
Request = tuple[str, str, tuple[str, ...], bytes]
"""Method, path, lines of headers, body."""
Head = Callable[[str], tuple[str, tuple[str, ...]]]
"""From a value that no other request has to a path and lines of headers."""

HEADS: dict[str, Head] = {
    "model id": lambda value: ("/v1/models", (f"serve_multiplexed_model_id: {value}",)),
    "model id with hyphens": lambda value: ("/v1/models", (f"Serve-Multiplexed-Model-Id: {value}",)),
    "session id": lambda value: ("/v1/models", (f"x-session-id: {value}",)),
    "request id": lambda value: ("/v1/models", (f"x-request-id: {value}",)),
    "own id": lambda value: ("/v1/models", (f"x-client-request-id: {value}",)),
    "trace": lambda value: ("/v1/models", (f"traceparent: {value}", f"tracestate: {value}")),
    "key": lambda value: ("/v1/models", (f"authorization: Bearer {value}",)),
    "unknown name": lambda value: ("/v1/models", (f"x-{value[:60]}: {value}",)),
    "query": lambda value: (f"/v1/models?a={value}", ()),
    "path": lambda value: (f"/{value}", ()),
    "path below a route": lambda value: (f"/v1/models/{value}", ()),
}


def processes() -> dict[str, psutil.Process]:
    """The processes of the service that read what clients send; another service of this run may be up beside it."""
    [server] = [one for one in psutil.Process().children() if "deployments.cli" in one.cmdline()]
    found = {}
    for process in server.children(recursive=True):
        title = " ".join(process.cmdline())
        for name in ("ProxyActor", "ServeReplica:assay:Ingress"):
            if title.startswith(f"ray::{name}"):
                found[name] = process
    assert len(found) == 2, found
    return found


def resident() -> dict[str, float]:
    """MB of each of them."""
    return {name: process.memory_info().rss / 1e6 for name, process in processes().items()}


async def ask(url: str, method: str, path: str, lines: tuple[str, ...], body: bytes) -> int:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}", *lines, "", "")
    try:
        writer.write("\r\n".join(head).encode() + body)
        return int((await asyncio.wait_for(reader.readline(), 60)).split()[1])
    except ConnectionError:
        return CLOSED
    finally:
        writer.close()


async def refused(url: str, count: int, one: Callable[[], Request]) -> None:
    """Sends requests over a few lanes. Each must be refused by us."""

    async def lane() -> None:
        for _ in range(count // LANES):
            assert await ask(url, *one()) in (CLOSED, 400, 401, 404, 413, 414, 431)

    await asyncio.gather(*(lane() for _ in range(LANES)))


def grown(url: str, count: int, one: Callable[[], Request]) -> dict[str, float]:
    """MB that each process grew from the end of the first round, which fills what is used again, to the last."""
    sizes = []
    for _ in range(1 + ROUNDS):
        asyncio.run(refused(url, count, one))
        sizes.append(resident())
    print({name: [round(size[name]) for size in sizes] for name in sizes[0]})
    end = time.monotonic() + SETTLED_S
    while True:
        more = {name: size - sizes[0][name] for name, size in resident().items()}
        if max(more.values()) < MAX_MB or time.monotonic() > end:
            return more
        time.sleep(0.5)


def grown_by(url: str, head: Head) -> dict[str, float]:
    def one() -> Request:
        path, lines = head(secrets.token_hex(BYTES // 2))
        return "GET", path, lines, b""

    return grown(url, REQUESTS, one)


def large() -> Request:
    return "POST", "/v1/completions", ("x-session-id: \xff",), b" " * LARGE_BYTES


@pytest.mark.risk(
    "S15",
    figure="four rounds of 400 requests with 30 kB in any of 11 places: at most 4 MB more in proxy and ingress; of "
    "100 bodies of 5 MB none",
)
def test_strangers_leave_no_memory_behind(tmp_path: Path) -> None:
    with served("cpu.yaml", tmp_path, START_S, auth=KEYS) as url:
        for name, head in HEADS.items():
            print(name, end=": ")
            found = grown_by(url, head)
            assert max(found.values()) < MAX_MB, (name, found)
        print("bodies", end=": ")
        assert max(grown(url, LARGE, large).values()) < MAX_MB


@pytest.mark.risk("S15", planted=True)
def test_without_the_middleware_the_proxy_would_grow(tmp_path: Path) -> None:
    with served("cpu.yaml", tmp_path, START_S, environment=OFF, auth=KEYS) as url:
        found = grown_by(url, HEADS["model id"])
        assert found["ProxyActor"] > MAX_MB, found
