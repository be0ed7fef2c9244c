"""Replicas in process: backends and clients over one, and what tests do to it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from fastapi import FastAPI

from deployments.api.app import build_api
from deployments.config.app_args import AppArgs
from deployments.config.settings import SamplingDefaults
from deployments.errors import from_failure
from deployments.protocol import Failure, GenerateCall, GenerateReply, LikelihoodReply, ModelCard
from deployments.replica.replica import ReplicaServer
from engine.metrics import EngineStats
from engine.requests import LikelihoodRequest, PoolingRequest, PoolingResult, ScoreRequest, ScoreResult
from engine.tokenizer.tokenizer import load_tokenizer
from tests.deployments.clients import Client

OF_INGRESS = {"templates", "rerank", "decisions", "chat", "truncation"}  # sections that a replica does not read
R = TypeVar("R", ScoreResult, PoolingResult, LikelihoodReply, GenerateReply)


class ReplicaBackend:
    """Backend over one replica in process: what dispatch does, without Ray."""

    def __init__(self, server: ReplicaServer) -> None:
        self.server = server
        self.tasks: list[ScoreRequest] = []

    async def card(self) -> ModelCard:
        return await self.server.card()

    def check_open(self, timeout_s: float, tenant: str) -> None: ...

    def readiness(self) -> dict[str, object]:
        return {"status": "ready", "replicas_ready": 1, "replicas_total": 1, "canary_age_s": 0.0}

    async def metrics(self) -> Sequence[bytes]:
        return []

    async def score(self, request: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        self.tasks.append(request)
        return _good(await self.server.score(request))

    async def pooling(self, request: PoolingRequest, all_or_nothing: bool = False) -> PoolingResult:
        return _good(await self.server.pooling(request))

    async def likelihood(self, request: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        return _good(await self.server.likelihood(request))

    async def generate(self, call: GenerateCall) -> GenerateReply:
        return _good(await self.server.generate(call))

    async def stream(self, call: GenerateCall) -> AsyncIterator[GenerateReply]:
        async with contextlib.aclosing(self.server.stream(call)) as replies:  # type: ignore[type-var]
            async for reply in replies:
                yield _good(reply)


def _good(reply: R | Failure) -> R:
    if isinstance(reply, Failure):
        raise from_failure(reply)
    return reply


class ReplicaClient(Client):
    """A client of an app over one replica in process, whose engine a test may look at."""

    def __init__(self, app: FastAPI, backend: ReplicaBackend) -> None:
        super().__init__(app)
        self.server = backend.server
        self.tasks = backend.tasks

    async def computed(self) -> int:
        """Tokens that steps were made of, once nothing is alive."""
        return (await idle(self.server)).computed_tokens


@contextlib.asynccontextmanager
async def held(server: ReplicaServer, size: int) -> AsyncIterator[None]:
    """Inside it the replica's step thread stands in a step, and `size` tokens are in its queue."""
    model: Any = server.engine.model
    stands, gate = threading.Event(), threading.Event()

    def wait(kind: Any, runs: Any) -> None:
        stands.set()
        gate.wait()

    model.on_forward = wait
    none, ids = np.empty(0, np.int32), np.ones(size, np.int32)
    starts, labels = np.array([0, size], np.int32), np.arange(2, dtype=np.int32)
    task = ScoreRequest(request_id="held", prefix=none, ids=ids, starts=starts, labels=labels)
    request = asyncio.create_task(server.score(task))
    try:
        assert await asyncio.to_thread(stands.wait, 10)
        yield
    finally:
        model.on_forward = None
        gate.set()
        assert isinstance(await request, ScoreResult)


@pytest.fixture(name="held", scope="session")
def held_fixture() -> Callable[[ReplicaServer, int], Any]:
    return held


async def idle(server: ReplicaServer) -> EngineStats:
    """The engine's numbers once nothing is alive."""
    async with asyncio.timeout(20):
        while (stats := server.engine.stats()).live_requests or stats.live_rows:
            await asyncio.sleep(0.001)
    return stats


async def settled(server: ReplicaServer) -> EngineStats:
    """The engine's numbers once nothing is alive and no slot is held."""
    async with asyncio.timeout(10):
        while any(_left(stats := server.engine.stats())):
            await asyncio.sleep(0.001)
    return stats


async def assert_left_empty(server: ReplicaServer) -> None:
    """A test may leave nothing in a replica but its cache. What was cancelled last may take the engine a moment."""
    left: tuple[int, ...] = ()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while any(left := _left(server.engine.stats())):
                await asyncio.sleep(0.001)
    assert not any(left), left


def _left(stats: EngineStats) -> tuple[int, ...]:
    return stats.live_requests, stats.live_rows, stats.kv_slots_used, stats.queued_tokens, stats.tree_locks


@pytest.fixture(scope="session")
def backend_of() -> type[ReplicaBackend]:
    """A backend over one replica in process."""
    return ReplicaBackend


SHARED = 4  # replicas that are kept for the next test: each has threads, which wake when there is nothing to do


def end(server: ReplicaServer) -> None:
    server.stop()
    server.engine.check()


@pytest.fixture(scope="session")
def replica_servers() -> Iterator[dict[str, ReplicaServer]]:
    """Replicas that tests share, those used last behind the others: starting one takes a second."""
    servers: dict[str, ReplicaServer] = {}
    yield servers
    for server in servers.values():
        end(server)


@pytest.fixture
async def replica_backend(
    toy_args: dict[str, Any], replica_servers: dict[str, ReplicaServer]
) -> AsyncIterator[Callable[..., Any]]:
    """`await replica_backend(**sections of AppArgs)`: a Backend, over the toy model unless `model` says otherwise. The
    replica may have answered other tests; after this one it must hold nothing but its cache."""
    made: list[ReplicaServer] = []

    async def make(**sections: Any) -> ReplicaBackend:
        args = AppArgs.model_validate({"router": {"link": "off"}} | toy_args | sections)  # they outlive this loop
        key = args.model_dump_json(exclude=OF_INGRESS)
        server = replica_servers.pop(key, None)
        if server is None:
            server = ReplicaServer(args, "r1")
            await server.start()
        replica_servers[key] = server
        made.append(server)
        return ReplicaBackend(server)

    yield make
    for server in made:
        await assert_left_empty(server)
    for key in [*replica_servers][:-SHARED]:
        end(replica_servers.pop(key))


@pytest.fixture
async def replica_client(
    toy_args: dict[str, Any], replica_backend: Callable[..., Any]
) -> AsyncIterator[Callable[..., Any]]:
    """`await replica_client(**sections of AppArgs)`: a client of an app over such a Backend."""
    made: list[ReplicaClient] = []

    async def make(**sections: Any) -> ReplicaClient:
        backend = await replica_backend(**sections)
        args = AppArgs.model_validate(toy_args | sections)
        path = Path(args.model.path)
        settings = args.api_settings(SamplingDefaults(), {}, path if path.is_dir() else None)
        made.append(ReplicaClient(build_api(backend, load_tokenizer(args.model.path), settings), backend))
        return made[-1]

    yield make
    for client in made:
        await client.http.aclose()
