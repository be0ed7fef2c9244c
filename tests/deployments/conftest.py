"""A scripted backend and an ASGI client that can watch a stream while it runs, leave, or read slowly."""

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import httpx2
import numpy as np
import openai
import pytest
from fastapi import FastAPI

from deployments.canary import CanaryReply
from deployments.config import AppArgs
from deployments.fleet.board import Board
from deployments.fleet.dispatch import Dispatch
from deployments.fleet.loads import Loads
from deployments.ingress import build_api
from deployments.messages import (
    Failure,
    GenerateReply,
    GenerateTask,
    LikelihoodReply,
    LikelihoodTask,
    Load,
    ModelCard,
    PromptChunk,
    ScoreReply,
    ScoreTask,
)
from deployments.replica import ReplicaServer
from deployments.settings import ApiSettings, SamplingDefaults
from deployments.telemetry.metrics import IngressMetrics
from deployments.wire.errors import ApiError, of_failure
from engine.builtin.toy import ToyModel
from engine.jobs import FinishReason, GenerateChunk
from engine.stats import EngineStats
from engine.tokenizer import ByteTokenizer, load_tokenizer

V = 300
LOAD = Load(0, 1000.0)
OF_INGRESS = {"templates", "rerank", "decisions", "chat", "truncation"}  # sections that a replica does not read
R = TypeVar("R", ScoreReply, LikelihoodReply, GenerateReply)


def label_logprob(row: bytes, label: int) -> float:
    """A pure function of a row and a label, in float32."""
    return -float(np.float32(0.1 + (sum(row) * 31 + label * 17) % 97 / 10))


@dataclass
class ScriptedBackend:
    """Continues every prompt with `script`; log-probabilities are fixed functions of position and id."""

    script: bytes | list[int] = b" world"
    pieces: int = 1  # tokens a streamed reply
    eos: tuple[int, ...] = (257,)
    name: str = "toy"
    max_model_len: int = 4096
    fail: ApiError | None = None
    fail_after: int | None = None  # streamed replies before `fail`
    chunk_failure: Any = None
    gate: asyncio.Event | None = None  # generation waits for it
    nonfinite: frozenset[int] = frozenset()  # score rows
    tasks: list[GenerateTask] = field(default_factory=list)
    score_tasks: list[ScoreTask] = field(default_factory=list)
    cancelled: int = 0
    sent: int = 0  # streamed replies
    status: str = "ready"

    async def card(self) -> ModelCard:
        versions = {"torch": "2"}
        return ModelCard(self.name, "toy", None, V, self.max_model_len, 256, self.eos, "raw_logprobs", versions)

    def check_open(self, remaining_s: float) -> None: ...

    def readiness(self) -> dict[str, object]:
        return {"status": self.status, "replicas_ready": 1, "replicas_total": 1, "canary_age_s": 0.5}

    async def metrics(self) -> bytes:
        return b"assay_requests_total 1\n"

    async def score(self, task: ScoreTask) -> ScoreReply:
        self.score_tasks.append(task)
        await self._wait()
        count = len(task.starts) - 1
        rows = [
            bytes(x % 251 for x in (*task.prefix, *task.ids[task.starts[i] : task.starts[i + 1]])) for i in range(count)
        ]
        found = np.array([[label_logprob(row, label) for label in task.labels] for row in rows], np.float32)
        if not task.full:
            found -= np.log(np.exp(found).sum(1, keepdims=True))
        status = np.array([i in self.nonfinite for i in range(count)], np.uint8)
        cached = np.full(count, len(task.prefix), np.int32)
        cached[0] = 0
        return ScoreReply(found, status, cached, 0.001, 0.002, LOAD)

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply:
        raise AssertionError("likelihoods are tested over a real engine: see `replica_client`")

    async def generate(self, task: GenerateTask) -> GenerateReply:
        self.tasks.append(task)
        await self._wait()
        if self.chunk_failure is not None:
            return GenerateReply((PromptChunk(0, self.chunk_failure),), 0, LOAD)
        return GenerateReply(tuple(self._chunks(task, 10**9)[0]), 0, LOAD)

    async def stream(self, task: GenerateTask) -> AsyncIterator[GenerateReply]:
        self.tasks.append(task)
        try:
            await self._wait(self.fail_after is None)
            for number, chunks in enumerate(self._chunks(task, self.pieces)):
                if self.fail is not None and number == self.fail_after:
                    raise self.fail
                self.sent += 1
                yield GenerateReply(tuple(chunks), 0, LOAD)
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def _wait(self, may_fail: bool = True) -> None:
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.fail is not None and may_fail:
            raise self.fail

    def _chunks(self, task: GenerateTask, size: int) -> list[list[PromptChunk]]:
        """By reply: the next `size` tokens of every branch."""
        params = task.params
        done = len(task.emitted[0][0]) if task.emitted else 0
        script = list(self.script)[done : params.max_tokens]
        stop = next((i for i, token in enumerate(script) if token in params.stop_token_ids), None)
        if stop is not None:
            script = script[: stop + 1]
        replies = []
        for start in range(0, len(script), size):
            tokens = script[start : start + size]
            last = start + size >= len(script)
            ended = stop is not None and last
            finish = (FinishReason.STOP if ended else FinishReason.LENGTH) if last else None
            chunk = self._chunk(task, done + start, tokens, finish, tokens[-1] if ended else None)
            count = len(task.starts) - 1
            replies.append([PromptChunk(q, chunk._replace(branch=b)) for q in range(count) for b in range(params.n)])
        return replies

    @staticmethod
    def _chunk(
        task: GenerateTask, at: int, tokens: list[int], finish: FinishReason | None, stop: int | None
    ) -> GenerateChunk:
        params, k = task.params, len(tokens)
        own = top_ids = top = chosen = ranks = None
        if params.logprobs is not None:
            own = np.array([-0.1 * (at + i + 1) for i in range(k)], np.float32)
            ranks = np.ones(k, np.int32)
            ids = [[(token + j) % 256 for j in range(params.logprobs)] for token in tokens]
            top_ids = np.array(ids, np.int32).reshape(k, params.logprobs)
            top = (own[:, None] - np.arange(params.logprobs, dtype=np.float32)[None]).astype(np.float32)
        if params.logprob_token_ids is not None:
            chosen = np.tile(-np.arange(1, 1 + len(params.logprob_token_ids), dtype=np.float32), (k, 1))
            chosen[:, -1] = -np.inf
        return GenerateChunk(
            0, np.array(tokens, np.int32), own, ranks, top_ids, top, chosen, finish, stop, 3, 0.001, 0.002
        )


class Client:
    """httpx over an app in process, with a short way to post JSON."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=True), base_url="http://api"
        )

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        return await self.http.post(path, content=data, headers=named)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def complete(self, **body: object) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"prompt": "hello", **body})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def score(self, **body: object) -> dict[str, Any]:
        response = await self.post("/generative_scoring", body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def events(self, **body: object) -> list[Any]:
        response = await self.post("/v1/completions", {"prompt": "hello", "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return [parse_event(part) for part in response.text.split("\n\n") if part.startswith("data: ")]


def parse_event(part: str) -> Any:
    data = part.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


class Wire:
    """One raw ASGI request: a test feeds messages and sees what was sent while the app still runs."""

    def __init__(self, app: FastAPI, path: str, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.blocked = asyncio.Event()
        self.changed = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": headers if headers is not None else [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("api", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        if not self.reading.is_set():
            self.blocked.set()
        await self.reading.wait()
        self.sent.append(message)
        self.changed.set()

    async def until(self, done: Callable[["Wire"], bool]) -> None:
        async with asyncio.timeout(10):
            while not done(self):
                self.changed.clear()
                await self.changed.wait()

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings()


@pytest.fixture
def app(backend: ScriptedBackend, settings: ApiSettings) -> FastAPI:
    return build_api(backend, ByteTokenizer(), settings)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[Client]:
    client = Client(app)
    yield client
    await client.http.aclose()


@pytest.fixture
async def client_of(backend: ScriptedBackend) -> AsyncIterator[Callable[[ApiSettings], Client]]:
    """Clients of the same backend under other settings."""
    made: list[Client] = []

    def make(settings: ApiSettings) -> Client:
        made.append(Client(build_api(backend, ByteTokenizer(), settings)))
        return made[-1]

    yield make
    for client in made:
        await client.http.aclose()


@pytest.fixture
def make_client() -> type[Client]:
    """A client of any app."""
    return Client


@pytest.fixture
def sdk_of() -> Callable[[FastAPI], openai.AsyncOpenAI]:
    """The official client of an app in process; an async context manager."""

    def make(app: FastAPI) -> openai.AsyncOpenAI:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))  # what the SDK itself uses
        return openai.AsyncOpenAI(base_url="http://api/v1", api_key="any", http_client=http, max_retries=0)

    return make


@pytest.fixture
def wire_to() -> Callable[..., Wire]:
    """A raw request to an app: path, body, and perhaps headers."""

    def make(app: FastAPI, path: str, body: object, **options: Any) -> Wire:
        return Wire(app, path, body if isinstance(body, bytes) else json.dumps(body).encode(), **options)

    return make


@pytest.fixture
def wire(app: FastAPI, wire_to: Callable[..., Wire]) -> Callable[..., Wire]:
    return functools.partial(wire_to, app)


@pytest.fixture(name="label_logprob")
def label_logprob_fixture() -> Callable[[bytes, int], float]:
    """What the scripted backend answers for a row and a label."""
    return label_logprob


class ReplicaBackend:
    """Backend over one replica in process: what dispatch does, without Ray."""

    def __init__(self, server: ReplicaServer) -> None:
        self.server = server
        self.tasks: list[ScoreTask] = []

    async def card(self) -> ModelCard:
        return await self.server.card()

    def check_open(self, remaining_s: float) -> None: ...

    def readiness(self) -> dict[str, object]:
        return {"status": "ready", "replicas_ready": 1, "replicas_total": 1, "canary_age_s": 0.0}

    async def metrics(self) -> bytes:
        return b""

    async def score(self, task: ScoreTask) -> ScoreReply:
        self.tasks.append(task)
        return _good(await self.server.score(task))

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply:
        return _good(await self.server.likelihood(task))

    async def generate(self, task: GenerateTask) -> GenerateReply:
        return _good(await self.server.generate(task))

    async def stream(self, task: GenerateTask) -> AsyncIterator[GenerateReply]:
        async with contextlib.aclosing(self.server.stream(task)) as replies:  # type: ignore[type-var]
            async for reply in replies:
                yield _good(reply)


def _good(reply: R | Failure) -> R:
    if isinstance(reply, Failure):
        raise of_failure(reply)
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
    task = ScoreTask(task_id="held", prefix=none, ids=ids, starts=starts, labels=labels)
    job = asyncio.create_task(server.score(task))
    try:
        assert await asyncio.to_thread(stands.wait, 10)
        yield
    finally:
        model.on_forward = None
        gate.set()
        assert isinstance(await job, ScoreReply)


@pytest.fixture(name="held", scope="session")
def held_fixture() -> Callable[[ReplicaServer, int], Any]:
    return held


async def idle(server: ReplicaServer) -> EngineStats:
    """The engine's numbers once nothing is alive."""
    async with asyncio.timeout(20):
        while (stats := server.engine.stats()).live_requests or stats.live_rows:
            await asyncio.sleep(0.001)
    return stats


@pytest.fixture(scope="session")
def backend_of() -> type[ReplicaBackend]:
    """A backend over one replica in process."""
    return ReplicaBackend


@pytest.fixture(scope="session")
def replica_servers() -> Iterator[dict[str, ReplicaServer]]:
    """Replicas that tests share: starting one takes a second."""
    servers: dict[str, ReplicaServer] = {}
    yield servers
    for server in servers.values():
        server.stop()
        server.engine.check()


@pytest.fixture
async def replica_backend(
    toy_args: dict[str, Any], replica_servers: dict[str, ReplicaServer]
) -> AsyncIterator[Callable[..., Any]]:
    """`await replica_backend(**sections of AppArgs)`: a Backend, over the toy model unless `model` says otherwise. The
    replica may have answered other tests; after this one it must hold nothing but its cache."""
    made: list[ReplicaServer] = []

    async def make(**sections: Any) -> ReplicaBackend:
        args = AppArgs.model_validate(toy_args | sections)
        key = args.model_dump_json(exclude=OF_INGRESS)
        if key not in replica_servers:
            replica_servers[key] = ReplicaServer(args, "r1")
            await replica_servers[key].start()
        made.append(replica_servers[key])
        return ReplicaBackend(made[-1])

    yield make
    for server in made:
        stats = await idle(server)
        assert (stats.kv_slots_used, stats.queued_tokens, stats.tree_locks) == (0, 0, 0)


@pytest.fixture
async def replica_client(
    toy_args: dict[str, Any], replica_backend: Callable[..., Any]
) -> AsyncIterator[Callable[..., Any]]:
    """`await replica_client(**sections of AppArgs)`: a client of an app over such a Backend."""
    made: list[ReplicaClient] = []

    async def make(**sections: Any) -> ReplicaClient:
        backend = await replica_backend(**sections)
        args = AppArgs.model_validate(toy_args | sections)
        settings = args.api_settings(SamplingDefaults(), {})
        made.append(ReplicaClient(build_api(backend, load_tokenizer(args.model.path), settings), backend))
        return made[-1]

    yield make
    for client in made:
        await client.http.aclose()


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
    """A Serve handle over replicas in process, which goes where the task's route says."""

    def __init__(self, servers: dict[str, ReplicaServer], loads: Loads, method: str = "") -> None:
        self._servers, self._loads, self._method = servers, loads, method
        self.calls = 0

    def options(self, *, stream: bool) -> "LocalHandle":
        return self

    def __getattr__(self, method: str) -> Any:
        def remote(*task: Any) -> Any:
            self.calls += 1
            name = next(iter(self._servers))
            route = getattr(task[0], "route", None) if task else None
            if route is not None:
                name = next(name for name in route.replicas if name in self._servers)
                self._loads.moved(route.ticket, name)
            called = getattr(self._servers[name], method)(*task)
            return LocalStream(called) if method == "stream" else LocalCall(called)

        return SimpleNamespace(remote=remote)


@dataclass
class Fleet:
    """An ingress and its replicas in process: all of the service but Ray."""

    handle: LocalHandle
    servers: list[ReplicaServer]
    models: list[ToyModel]
    dispatch: Dispatch
    board: Board
    metrics: IngressMetrics
    client: Client
    loads: Loads
    over: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
async def make_fleet(toy_args: dict[str, Any]) -> AsyncIterator[Callable[..., Any]]:
    """`await make_fleet(replicas, **sections of AppArgs)`. After the test nothing may be left in any of them."""
    made: list[Fleet] = []

    async def make(count: int, **sections: Any) -> Fleet:
        args = AppArgs.model_validate(toy_args | sections)
        servers = {f"r{number}": ReplicaServer(args, f"r{number}") for number in range(count)}
        models = [ToyModel(num_slots=args.engine.kv_slots or 2048) for _ in servers]
        for server, model in zip(servers.values(), models, strict=True):
            await server.start(model)
        loads, metrics = Loads(), IngressMetrics()
        loads.publish(servers)

        async def broadcast(method: str, timeout_s: float, *args: object, heard: Any = None) -> Sequence[object]:
            answers = [CanaryReply(name, None, 0.01) for name in servers]
            for answer in answers:
                heard(answer)
            return answers

        board = Board(broadcast, args.health, metrics)
        await board.look()
        handle = LocalHandle(servers, loads)
        dispatch = Dispatch(handle, args, board, metrics, scrape=None, loads=loads)  # type: ignore[arg-type]
        app = build_api(dispatch, ByteTokenizer(), args.api_settings(SamplingDefaults(), {}), metrics)
        made.append(Fleet(handle, list(servers.values()), models, dispatch, board, metrics, Client(app), loads))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.client.http.aclose()
        for server, model in zip(fleet.servers, fleet.models, strict=True):
            model.on_forward = None
            model.released.set()
            stats = await idle(server)
            assert (stats.kv_slots_used, stats.queued_tokens, stats.tree_locks) == (0, 0, 0)
            server.stop()
            server.engine.check()
