"""Replicas in process, and a handle whose streams end where a test says: their replica dies, or has to stop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from deployments.config.app_args import AppArgs
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Failure, GenerateCall, GenerateReply, PromptScores, ReplicaTransport, Route
from deployments.quarantine import Quarantine
from deployments.replica.replica import ReplicaServer
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.handle_transport import HandleTransport
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from engine.requests import ErrorCode, GenerateChunk, GenerateRequest, Load, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams
from tests.deployments.fleets import canaries_passed_by
from tests.deployments.links import Links, begun, replied
from tests.deployments.replicas import assert_left_empty

ERRORS: dict[str, BaseException] = {
    "died": ActorDiedError(),
    "unavailable": ActorUnavailableError("gone", None),
    "full": BackPressureError(1, 1),
}
NEVER = 1 << 30
TURNS = 20  # of an event loop, more than what a step brought takes from the step's thread to its reader


class Cut(NamedTuple):
    """Holds what befalls one call: after so many replies its replica has `died`, is `unavailable`, its queue in Ray
    is `full`, or it has to stop."""

    how: str
    after: int


class Fleet:
    """Replicas by name. It is also the handle; `cuts` are for its calls, one each, in the order in which they begin."""

    def __init__(self, servers: dict[str, ReplicaServer], args: AppArgs, cuts: Sequence[Cut], path: str) -> None:
        self.servers = servers
        self.cuts = list(cuts)
        self.loads = LoadTracker()
        self.metrics = IngressMetrics()
        self.sent: list[tuple[str, Any]] = []
        self.sent_epochs: list[int] = []
        self.drained: set[str] = set()
        self.tasks: list[asyncio.Task[None]] = []
        self.computing = 0
        self.loads.publish(servers)
        self.board = HealthMonitor(canaries_passed_by(servers), args.health, self.metrics)
        nothing: Any = None
        self.quarantine = Quarantine()
        transport: ReplicaTransport = HandleTransport(self)
        self.links: Links | None = None
        if path == "link":
            services: Any = {name: _Cut(self, name) for name in servers}
            self.links = Links(services, transport, self.loads, self.metrics)
            transport = self._noted(self.links.transport)
        self.dispatch = Dispatcher(transport, args, self.board, self.metrics, nothing, self.loads, self.quarantine)

    def count(self, name: str, **labels: str) -> float:
        return float(self.metrics.registry.get_sample_value(name, labels) or 0)

    @property
    def epochs(self) -> list[int]:
        return self.sent_epochs

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    # The handle.

    def options(self, *, stream: bool) -> Any:
        return _Streaming(self) if stream else self

    @property
    def stream(self) -> Any:
        return _Method(self._stream)

    @property
    def generate(self) -> Any:
        return _Method(
            lambda call, *epoch, route: _Call(self._plain(self._begin(call, route, *epoch), call, self._cut()))
        )

    score = likelihood = generate

    @property
    def card(self) -> Any:
        return _Method(lambda: _Call(next(iter(self.servers.values())).card()))

    def _cut(self) -> Cut:
        return self.cuts.pop(0) if self.cuts else Cut("never", NEVER)

    def _begin(self, task: Any, route: Route, epoch: int = 0) -> str:
        """Where the router would send it."""
        names: tuple[str, ...] = (*route.replicas, *self.servers)
        name = next(name for name in names if name not in self.drained)
        self.loads.moved(route.ticket, name)
        self.note(name, task, epoch)
        return name

    def _noted(self, transport: Any) -> Any:
        """Notes the epochs of a link's calls, which replicas do not see."""

        def noted(send: Any, call: Any, route: Route, epoch: int = 0) -> Any:
            self.sent_epochs.append(epoch)
            return send(call, route, epoch)

        transport.call, transport.stream = partial(noted, transport.call), partial(noted, transport.stream)
        return transport

    def note(self, name: str, task: Any, epoch: int | None = None) -> None:
        self.sent.append((name, task))
        if self.links is None and epoch is not None:
            self.sent_epochs.append(epoch)

    async def answer(self, name: str, task: Any) -> object:
        server = self.servers[name]
        self.computing += 1
        try:
            match task:
                case tuple():
                    return await server.generate(task)
                case ScoreRequest():
                    return await server.score(task)
            return await server.likelihood(task)
        finally:
            self.computing -= 1

    async def _plain(self, name: str, task: Any, cut: Cut) -> object:
        reply = await self.answer(name, task)
        if cut.how in ERRORS:
            raise ERRORS[cut.how]
        return reply

    def _stream(self, task: Any, epoch: int, route: Route) -> "_Responses":
        return _Responses(self, self._begin(task, route, epoch), task, epoch, self._cut())

    def stop(self, name: str) -> None:
        """Takes Serve's first step with a replica that is to stop."""
        self.drained.add(name)
        self.loads.publish(self.servers.keys() - self.drained)


class _Cut:
    """A replica behind a link that ends as the fleet's cuts say. A dead one is soon replaced."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def load(self) -> Load:
        return self._fleet.servers[self._name].load()

    def begin_stream(self, requests: Any, receiver: Any) -> Any:
        return begun(self._stream(requests), receiver)

    async def _stream(self, requests: Any) -> AsyncGenerator[Any, None]:
        self._fleet.note(self._name, requests)
        cut, count = self._fleet._cut(), 0
        source: Any = self._fleet.servers[self._name].stream(requests)
        async with contextlib.aclosing(source) as replies:
            while True:
                if count == cut.after and (refusal := await self._end(cut)) is not None:
                    yield refusal
                    return
                try:
                    reply = await anext(replies)
                except StopAsyncIteration:
                    return
                yield reply
                count += 1

    async def generate(self, requests: Any, epoch: int) -> Any:
        self._fleet.note(self._name, requests)
        return await self._one(requests)

    def begin_rows(self, request: Any, deliver: Any) -> Any:
        self._fleet.note(self._name, request)
        return replied(self._one(request), deliver)

    async def _one(self, call: Any) -> Any:
        cut = self._fleet._cut()
        reply = await self._fleet.answer(self._name, call)
        if cut.how not in ERRORS:
            return reply
        while self._fleet.computing:  # or this end would be that of another call, too
            await asyncio.sleep(0.001)
        return await self._end(cut)

    async def _end(self, cut: Cut) -> Failure | None:
        """Does what the cut says, and does not return unless it is a refusal."""
        links, name = self._fleet.links, self._name
        assert links is not None
        if cut.how == "full":
            return Failure(ErrorCode.OVERLOADED, "The queue is full.", None)
        for _ in range(TURNS):  # what was sent before has come
            await asyncio.sleep(0)
        if cut.how == "died":
            links.kill(name)
            self._fleet.later(self._replace(links))
        elif cut.how == "unavailable":
            links.cut(name)
        else:
            self._fleet.stop(name)
        await asyncio.Event().wait()
        return None

    async def _replace(self, links: Links) -> None:
        while self._name in self._fleet.loads.replicas:
            await asyncio.sleep(0.001)
        self._fleet.loads.publish(self._fleet.servers.keys() - self._fleet.drained)
        await links.start(self._name)


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class _Streaming(NamedTuple):
    fleet: Any

    @property
    def stream(self) -> Any:
        return self.fleet.stream


class _Call:
    def __init__(self, call: Any) -> None:
        self._task = asyncio.ensure_future(call)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class _Responses:
    """A stream of one replica, and its end."""

    def __init__(self, fleet: Fleet, name: str, task: GenerateCall, epoch: int, cut: Cut) -> None:
        self._fleet, self._name, self._cut = fleet, name, cut
        self._source: Any = fleet.servers[name].stream(task, epoch)
        self._count = 0

    def __aiter__(self) -> "_Responses":
        return self

    async def __anext__(self) -> Any:
        if self._count == self._cut.after:
            if self._cut.how in ERRORS:
                await self._source.aclose()
                raise ERRORS[self._cut.how]
            self._fleet.stop(self._name)
            await asyncio.Event().wait()  # whatever it still does is too late
        self._count += 1
        return await anext(self._source)

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._source.aclose())


class Told(NamedTuple):
    """Holds all that a client got of a generation: per branch columns that must not depend on who computed them."""

    tokens: dict[tuple[int, int], list[int]]
    columns: dict[tuple[int, int], list[bytes]]
    ends: dict[tuple[int, int], tuple[Any, Any]]
    scores: dict[int, bytes]
    repeated_scores: int


async def reported(replies: AsyncIterator[GenerateReply]) -> Told:
    found = Told({}, {}, {}, {}, 0)
    repeated = 0
    async for reply in replies:
        for prompt, chunk in reply.chunks:
            if isinstance(chunk, PromptScores):
                repeated += prompt in found.scores
                found.scores[prompt] = b"".join(column.tobytes() for column in chunk[:5])
            elif isinstance(chunk, GenerateChunk):
                _note(found, (prompt, chunk.branch), chunk)
    return found._replace(repeated_scores=repeated)


def _note(found: Told, place: tuple[int, int], chunk: GenerateChunk) -> None:
    assert place not in found.ends, "something came after a branch's end"
    found.tokens.setdefault(place, []).extend(chunk.tokens.tolist())
    columns = (chunk.logprobs, chunk.ranks, chunk.top_ids, chunk.top_logprobs, chunk.chosen_logprobs)
    parts = found.columns.setdefault(place, [b""] * len(columns))
    for index, column in enumerate(columns):
        if column is not None:
            parts[index] += column.tobytes()
    if chunk.finish is not None:
        found.ends[place] = (chunk.finish, chunk.stop_token)


@pytest.fixture(scope="session")
def told_of() -> Callable[[AsyncIterator[GenerateReply]], Awaitable[Told]]:
    return reported


@pytest.fixture(scope="session")
def cut() -> type[Cut]:
    return Cut


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[str, dict[str, ReplicaServer]]]:
    made: dict[str, dict[str, ReplicaServer]] = {}
    yield made
    for servers in made.values():
        for server in servers.values():
            server.stop()
            server.engine.check()


def a_step_a_reply(model: Any, loop: asyncio.AbstractEventLoop) -> None:
    """A step waits until what the step before it brought has been read. Otherwise a loop that comes late, as on a busy
    machine, reads a whole generation as one reply, and no cut between replies is ever reached."""

    async def turns() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def forward(kind: Any, runs: Any) -> None:
        asyncio.run_coroutine_threadsafe(turns(), loop).result(timeout=20)

    model.on_forward = forward


@pytest.fixture
async def fleet_of(
    toy_args: dict[str, Any], fleets: dict[str, dict[str, ReplicaServer]], path: str
) -> AsyncIterator[Callable[..., Awaitable[Fleet]]]:
    """`await fleet_of(*cuts, **sections)`: two replicas that answer a reply a step; after the test they must hold
    nothing but their caches."""
    made: list[Fleet] = []

    async def make(*cuts: Cut, **sections: Any) -> Fleet:
        sections = {"retry": {"max_backoff_s": 0}} | sections
        args = AppArgs.model_validate(toy_args | sections | {"router": {"link": "off"}})  # they outlive this loop
        key = repr((args.speculation, args.engine))
        if key not in fleets:
            fleets[key] = {name: ReplicaServer(args, name) for name in ("r0", "r1")}
            await asyncio.gather(*(server.start() for server in fleets[key].values()))
        for server in fleets[key].values():
            a_step_a_reply(server.engine.model, asyncio.get_running_loop())
        made.append(Fleet(fleets[key], args, cuts, path))
        await made[-1].board.look()
        if made[-1].links is not None:
            await made[-1].links.start()
        return made[-1]

    yield make
    for fleet in made:
        for task in fleet.tasks:
            task.cancel()
        if fleet.links is not None:
            await fleet.links.stop()
        for server in fleet.servers.values():
            model: Any = server.engine.model
            model.on_forward = None  # this loop ends
            await assert_left_empty(server)


@pytest.fixture(scope="session")
def generation() -> Callable[..., GenerateCall]:
    def make(*prompts: Sequence[int], seed: int = 7, **fields: Any) -> GenerateCall:
        own = {name: fields.pop(name) for name in ("prompt_logprobs", "prompt_only", "emitted") if name in fields}
        params = SamplingParams(**{"max_tokens": 60, "temperature": 0.9, "seed": seed} | fields)
        return tuple(
            GenerateRequest(
                request_id=f"g/{q}", prompt=np.array(row, np.int32), params=params, seed=seed + q, timeout_s=30.0, **own
            )
            for q, row in enumerate(prompts or (range(40, 57),))
        )

    return make


async def undisturbed(server: ReplicaServer, task: GenerateCall) -> Told:
    async def good() -> AsyncGenerator[GenerateReply, None]:
        source: Any = server.stream(task)
        async with contextlib.aclosing(source) as replies:
            async for reply in replies:
                assert not isinstance(reply, Failure)
                yield reply

    return await reported(good())


@pytest.fixture(scope="session")
def alone() -> Callable[[Fleet, GenerateCall], Awaitable[Told]]:
    """Returns what one replica tells of a task when nothing befalls it."""

    async def run(fleet: Fleet, task: GenerateCall) -> Told:
        return await undisturbed(fleet.servers["r0"], task)

    return run
