"""Replicas in process over the toy model, and a handle that sends each call where its route says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.config.app_args import AppArgs
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import ReplicaTransport, Route, RowsCall, RunningCall
from deployments.replica.replica import ReplicaServer
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.handle_transport import HandleTransport
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from engine.requests import LikelihoodRequest, Load, PoolingRequest
from tests.deployments.fleets import LocalCall, canaries_passed_by
from tests.deployments.links import Links, replied
from tests.support import toy_model

DIED = ActorDiedError()
SMALL: dict[str, Any] = {  # parts and steps, so that a task has many of both
    "engine": {"kv_slots": 8192, "max_running": 32, "token_budget": 64, "max_queued_tokens": 1_000_000},
    "fanout": {"shard_tokens": 100, "min_items": 3, "max_prefix_fraction": 1},
    "retry": {"max_backoff_s": 0, "max_attempts": 3},
}
Sent = RowsCall | tuple[RowsCall, ...]


class World:
    """Replicas by name. It is also the handle."""

    def __init__(
        self, names: Sequence[str], args: dict[str, Any], engine: dict[str, Any], fanout: dict[str, Any], path: str
    ) -> None:
        own = {"engine": SMALL["engine"] | engine, "fanout": SMALL["fanout"] | fanout}
        self.args = AppArgs.model_validate(args | SMALL | own)
        self.servers: dict[str, ReplicaServer] = {}
        self.path = path
        self.links: Links | None = None
        self.models = {name: toy_model.ToyModel(num_slots=8192) for name in names}
        self.lost: dict[str, asyncio.Event] = {name: asyncio.Event() for name in names}
        self.calls: list[tuple[str, Sent]] = []
        self.routes: list[Route | None] = []
        self.running = 0
        self.loads = LoadTracker()
        self.metrics = IngressMetrics()

    async def start(self) -> None:
        for name, model in self.models.items():
            self.servers[name] = ReplicaServer(self.args, name)
            await self.servers[name].start(model)
        self.loads.publish(self.servers)
        board = HealthMonitor(canaries_passed_by(self.servers), self.args.health, self.metrics)
        await board.look()
        nothing: Any = None
        transport: ReplicaTransport = HandleTransport(self)
        if self.path == "link":
            services: Any = {name: _Noted(self, name) for name in self.servers}
            self.links = Links(services, transport, self.loads, self.metrics)
            await self.links.start()
            transport = self.links.transport
        self.dispatch = Dispatcher(transport, self.args, board, self.metrics, nothing, self.loads)

    async def stop(self) -> None:
        if self.links is not None:
            await self.links.stop()
        for name, server in self.servers.items():
            self.models[name].on_forward = None
            self.models[name].released.set()
            server.stop()

    def kill(self, name: str) -> None:
        """Kills a replica: its callers hear that it died, and it is gone from the router's list."""
        self.lost[name].set()
        if self.links is not None and name in self.links.servers:
            self.links.kill(name)
        self.loads.publish(other for other in self.servers if not self.lost[other].is_set())

    # The handle.

    def options(self, *, stream: bool) -> "World":
        return self

    @property
    def score(self) -> "World":
        return self

    stream = generate = likelihood = pooling = score_batch = score

    def remote(self, call: Sent, route: Route | None = None) -> Any:
        return LocalCall(self._call(call, route))

    async def _call(self, call: Sent, route: Route | None) -> object:
        names = route.replicas if route is not None else ()
        name = next(name for name in (*names, *self.servers) if not self.lost[name].is_set())
        self.routes.append(route)
        return await self.run(name, call)

    async def run(self, name: str, call: Sent) -> object:
        """Answers a call that has reached a replica."""
        self.calls.append((name, call))
        self.running += 1
        work = asyncio.create_task(self._answer(self.servers[name], call))
        death = asyncio.create_task(self.lost[name].wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost[name].is_set():
                raise DIED
            return work.result()
        finally:
            self.running -= 1
            death.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    @staticmethod
    async def _answer(server: ReplicaServer, call: Sent) -> object:
        match call:
            case tuple():
                return await server.score_batch(call)
            case LikelihoodRequest():
                return await server.likelihood(call)
            case PoolingRequest():
                return await server.pooling(call)
        return await server.score(call)

    def asked(self) -> list[str]:
        return [name for name, _ in self.calls]


class _Noted:
    """A replica behind a link, whose calls the world notes."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def begin_rows(self, request: RowsCall, deliver: Callable[[Any], None]) -> RunningCall:
        return replied(self._world.run(self._name, request), deliver)

    def load(self) -> Load:
        return self._world.servers[self._name].load()


Make = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world(toy_args: dict[str, Any], path: str) -> AsyncIterator[Make]:
    made: list[World] = []

    async def make(count: int, fanout: dict[str, Any] | None = None, **engine: Any) -> World:
        made.append(World([f"r{number}" for number in range(count)], toy_args, engine, fanout or {}, path))
        await made[-1].start()
        return made[-1]

    yield make
    for world in made:
        await world.stop()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    async def wait(done: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not done():
                await asyncio.sleep(0.001)

    return wait
