"""An ingress and its replicas in process, and the handle between them: all of the service but Ray."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.api.app import build_api
from deployments.broadcast import Broadcast
from deployments.config.app_args import AppArgs
from deployments.config.settings import SamplingDefaults
from deployments.health_probe import CanaryReply
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import ReplicaTransport, Route
from deployments.replica.replica import ReplicaServer
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.handle_transport import HandleTransport
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from tests.deployments.clients import Client
from tests.deployments.links import PATHS, Links
from tests.deployments.replicas import assert_left_empty
from tests.support.toy_model import ByteTokenizer, ToyModel


class LocalCall:
    """One call of a replica in process: awaiting it does not own it, as with Ray, and `cancel` ends it."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return asyncio.shield(self._task).__await__()

    def cancel(self) -> None:
        self._task.cancel()


class LocalStream:
    """One streamed call: a task of its own drives the replica's generator, as Ray's does."""

    def __init__(self, replies: AsyncGenerator[Any, None]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._drive(replies))

    async def _drive(self, replies: AsyncGenerator[Any, None]) -> None:
        async with contextlib.aclosing(replies):
            async for reply in replies:
                self._queue.put_nowait(reply)
        self._queue.put_nowait(StopAsyncIteration)

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> Any:
        reply = await self._queue.get()
        if reply is StopAsyncIteration:
            raise StopAsyncIteration
        return reply

    def cancel(self) -> None:
        self._task.cancel()


class LocalHandle:
    """A Serve handle over replicas in process, which goes where the call's route says."""

    def __init__(self, servers: dict[str, ReplicaServer], loads: LoadTracker, method: str = "") -> None:
        self._servers, self._loads, self._method = servers, loads, method
        self.calls = 0

    def options(self, *, stream: bool) -> "LocalHandle":
        return self

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any, route: Route | None = None) -> Any:
            self.calls += 1
            name = next(iter(self._servers))
            if route is not None:
                name = next((known for known in route.replicas if known in self._servers), name)
                self._loads.moved(route.ticket, name)
            called = getattr(self._servers[name], method)(*arguments)
            return LocalStream(called) if method == "stream" else LocalCall(called)

        return SimpleNamespace(remote=remote)


def canaries_passed_by(names: Collection[str]) -> Broadcast:
    """A broadcast of the canary: all replicas that there are by then pass it."""

    async def broadcast(method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        answers = [CanaryReply(name, None, 0.1) for name in names]
        for answer in answers if on_answer is not None else ():
            on_answer(answer)
        return answers

    return broadcast


@dataclass
class Fleet:
    """An ingress and its replicas in process: all of the service but Ray."""

    handle: LocalHandle
    servers: list[ReplicaServer]
    models: list[ToyModel]
    dispatch: Dispatcher
    board: HealthMonitor
    metrics: IngressMetrics
    client: Client
    loads: LoadTracker
    over: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture(params=PATHS)
def path(request: Any) -> str:
    """How calls reach the replicas: over Serve's handle or over links."""
    return str(request.param)


@pytest.fixture
async def make_fleet(toy_args: dict[str, Any], path: str) -> AsyncIterator[Callable[..., Any]]:
    """`await make_fleet(replicas, **sections of AppArgs)`. After the test nothing may be left in any of them."""
    made: list[Fleet] = []
    opened: list[Links] = []

    async def make(count: int, **sections: Any) -> Fleet:
        args = AppArgs.model_validate(toy_args | sections)
        servers: dict[str, Any] = {f"r{number}": ReplicaServer(args, f"r{number}") for number in range(count)}
        models = [ToyModel(num_slots=args.engine.kv_slots or 2048) for _ in servers]
        for server, model in zip(servers.values(), models, strict=True):
            await server.start(model)
        loads, metrics = LoadTracker(), IngressMetrics()
        loads.publish(servers)
        board = HealthMonitor(canaries_passed_by(servers), args.health, metrics)
        await board.look()
        handle = LocalHandle(servers, loads)
        transport: ReplicaTransport = HandleTransport(handle)
        if path == "link":
            opened.append(Links(servers, transport, loads, metrics))
            await opened[-1].start()
            transport = opened[-1].transport
        dispatch = Dispatcher(transport, args, board, metrics, scrape=None, loads=loads)  # type: ignore[arg-type]
        app = build_api(dispatch, ByteTokenizer(), args.api_settings(SamplingDefaults(), {}), metrics)
        made.append(Fleet(handle, list(servers.values()), models, dispatch, board, metrics, Client(app), loads))
        return made[-1]

    yield make
    for links in opened:
        await links.stop()
    for fleet in made:
        await fleet.client.http.aclose()
        for server, model in zip(fleet.servers, fleet.models, strict=True):
            model.on_forward = None
            model.released.set()
            await assert_left_empty(server)
            server.stop()
            server.engine.check()
