"""Lists every file that one request crosses, from its HTTP body to the model's step and back.

    python -m tools.trace_request [score|continuations|rerank|decision|completion|stream|chat]
        [--functions] [--json FILE] [--max-files N] [--max-classes N]

The service runs in one process, with the built-in model and the configuration `deployments/configs/cpu.yaml`. Nothing
is left out between the HTTP layer and the model but Ray itself: our request router chooses the replica, and a local
handle takes the call there. A first request with other words warms the service up. The second one is traced.

The tool counts:

- A file, if the body of one of its functions runs between the arrival of the request and the moment at which the
  service is quiet again. Imports and class bodies do not count.
- A function, if it has a name: comprehensions, generator expressions and lambdas do not.
- A thread, from its first call that it does not make as well while the service has nothing to do.
- A value class: a dataclass, a NamedTuple or a pydantic model of ours, if an instance is made for the request and holds
  a part of it or of its answer: a text of the body, bytes, a NumPy array or a tensor; by itself, in a container, or in
  another value class. Exceptions do not count, nor what metrics read (`METRICS`), nor names with an underscore, which
  one file keeps for itself, nor what was made at start-up.

The exit status is 1 if the walk is longer than `--max-files` or `--max-classes` allow, and 2 if the request fails.
"""

import argparse
import ast
import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
import yaml
from fastapi import FastAPI
from pydantic import BaseModel
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import PendingRequest, ReplicaID

from deployments.api.app import build_api
from deployments.config.app_args import AppArgs
from deployments.config.settings import SamplingDefaults
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.replica.replica import ReplicaServer
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.handle_transport import HandleTransport
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import load_tracker_of
from deployments.routing.replica_selection import TokenRouter
from engine.tokenizer.tokenizer import load_tokenizer
from tests.deployments.fleets import LocalCall, LocalStream, canaries_passed_by

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "deployments" / "configs" / "cpu.yaml"
PACKAGES = ("deployments", "scoring", "engine", "gpu_sampler")
METRICS = re.compile(r"\.(observability|metrics)\b")
QUIET_S = 0.1
IDLE_S = 0.6  # the step thread looks around four times a second
SETTLE_S = 10.0
WIDTH = 120
DEPLOYMENT = DeploymentID("Replica", "assay")


class Sent(NamedTuple):
    """Holds a request that can be traced."""

    path: str
    body: Mapping[str, Any]

    def warm_up(self) -> dict[str, Any]:
        """Returns a body of the same shape with other words, so that the prefix cache does not know the traced one."""
        other: dict[str, Any] = json.loads(json.dumps(self.body).replace("red", "blue"))
        return other


RED = "A pine chair for reading, sturdy and red, made in Lisbon."
LAMP = "A brass lamp, red and light, made in Dublin."
REQUESTS = {
    "score": Sent(
        "/generative_scoring",
        {
            "query": "Query: red chair\nDocument:",
            "items": [f" {RED}\nRelevant:", f" {LAMP}\nRelevant:"],
            "labels": [" yes", " no"],
        },
    ),
    "continuations": Sent(
        "/generative_scoring",
        {"query": "A sturdy red", "items": [" chair", " lamp"], "continuations": [" for reading", " for baking"]},
    ),
    "rerank": Sent("/v1/rerank", {"query": "red chair", "documents": [RED, LAMP]}),
    "decision": Sent(
        "/v1/decisions",
        {"input": RED, "questions": [{"type": "predicate", "name": "red", "instructions": "Is it red?"}]},
    ),
    "completion": Sent("/v1/completions", {"prompt": "This sturdy red", "max_tokens": 12, "seed": 7}),
    "stream": Sent("/v1/completions", {"prompt": "This sturdy red", "max_tokens": 12, "seed": 7, "stream": True}),
    "chat": Sent(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "A red chair"}], "max_tokens": 12, "seed": 7}
    ),
}


class RequestFailed(RuntimeError):
    """Says what the service answered instead of 200."""


# Recording


@dataclass(kw_only=True)
class FileVisit:
    """Holds one file of the walk. `functions` are in order of their first call."""

    path: str
    says: str
    functions: list[str] = field(default_factory=list)

    @property
    def room(self) -> str:
        return self.path.rpartition("/")[0]


@dataclass(kw_only=True)
class ValueClass:
    """Holds one class whose instances carry the request's data."""

    name: str
    path: str
    says: str
    made: int = 0


@dataclass(kw_only=True)
class Walk:
    """Holds what a request crossed, in order of first entry."""

    files: list[FileVisit]
    value_classes: list[ValueClass]

    @property
    def functions(self) -> int:
        return sum(len(visit.functions) for visit in self.files)


class Tracer:
    """Records which functions of our packages run, and which values they make, while `recording` is on.

    It sees the thread that enters `recording`, and those that start inside `watching_new_threads`. `learn_idle` finds
    what these call while they have nothing to do. A thread that calls only that is not part of a walk.
    """

    def __init__(self, root: Path = ROOT, packages: Iterable[str] = PACKAGES, settle_s: float = SETTLE_S) -> None:
        """`packages`: names of folders below `root`. `settle_s`: how long `until_quiet` waits."""
        self._root = root
        self._packages = frozenset(packages)
        self._settle_s = settle_s
        self._on = False
        self._last = 0.0
        self._texts: frozenset[str] = frozenset()
        self._paths: dict[CodeType, str | None] = {}
        self._codes: set[CodeType] = set()
        self._idle: frozenset[CodeType] = frozenset()
        self._awake: set[int] = set()
        self._called: dict[str, dict[str, None]] = {}
        self._made: dict[int, object] = {}  # kept until the next recording, so that no id is given twice
        self._carriers: set[int] = set()

    @contextlib.contextmanager
    def watching_new_threads(self) -> Iterator[None]:
        """Sees the threads that start inside the block, until they end."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextlib.contextmanager
    def recording(self, body: object = None) -> Iterator[None]:
        """Records what runs inside the block, and forgets what was recorded before.

        Args:
            body: The request's body, as JSON values. Its texts are parts of the request.
        """
        self._called, self._made, self._carriers, self._codes = {}, {}, set(), set()
        self._awake = {threading.get_ident()}
        self._texts = frozenset(texts_of(body))
        self._on, self._last = True, time.monotonic()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._on = False

    async def learn_idle(self) -> None:
        """Notes what threads call while there is no request."""
        self._idle = frozenset()
        with self.recording():
            await asyncio.sleep(IDLE_S)
        self._idle = frozenset(self._codes)

    async def until_quiet(self) -> None:
        """Waits until no function of ours has run for `QUIET_S`. Call it while recording.

        Raises:
            TimeoutError: After `settle_s`.
        """
        async with asyncio.timeout(self._settle_s):
            while time.monotonic() - self._last < QUIET_S:
                await asyncio.sleep(QUIET_S / 4)

    def walk(self) -> Walk:
        """Returns what was recorded."""
        files = [
            FileVisit(path=path, says=summary(self._root / path), functions=list(functions))
            for path, functions in self._called.items()
        ]
        classes: dict[type, ValueClass] = {}
        for value in self._made.values():
            if id(value) in self._carriers or self._carries(value, set()):
                kind = type(value)
                path = Path(inspect.getfile(kind)).relative_to(self._root).as_posix()
                found = classes.setdefault(kind, ValueClass(name=kind.__name__, path=path, says=_says(kind)))
                found.made += 1
        return Walk(files=files, value_classes=list(classes.values()))

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._on:
            return
        code = frame.f_code
        if event == "call":
            if code not in self._paths:
                self._paths[code] = self._path_of(code)
            path = self._paths[code]
            if path is not None:
                self._codes.add(code)
                if threading.get_ident() not in self._awake:
                    if code in self._idle:
                        return
                    self._awake.add(threading.get_ident())
                self._last = time.monotonic()
                functions = self._called.setdefault(path, {})
                name = code.co_qualname.replace("<locals>.", "")
                if "<" not in name:
                    functions[name] = None
        elif event == "return":
            if code.co_name == "__init__":
                self._see(frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None)
            elif "pydantic" in code.co_filename or code.co_name in ("<lambda>", "_make"):
                self._see(argument)

    def _path_of(self, code: CodeType) -> str | None:
        """The path of a function of ours below the root. None for others, for class bodies and for module bodies."""
        path = Path(code.co_filename)
        if not code.co_flags & inspect.CO_OPTIMIZED or not path.is_relative_to(self._root):
            return None
        path = path.relative_to(self._root)
        return path.as_posix() if path.parts[0] in self._packages else None

    def _see(self, value: object) -> None:
        """Notes a value that a constructor has made. Models inside a pydantic model are made outside Python."""
        if isinstance(value, list | dict):
            for inner in value.values() if isinstance(value, dict) else value:
                self._see(inner)
        kind = type(value)
        if kind.__module__.partition(".")[0] not in self._packages or id(value) in self._made:
            return
        if not is_value_class(kind) or kind.__name__.startswith("_") or METRICS.search(kind.__module__):
            return
        self._made[id(value)] = value
        if self._carries(value, set()):  # looked at again at the end: it may be filled or emptied until then
            self._carriers.add(id(value))
        if isinstance(value, BaseModel):
            self._see(vars(value))

    def _carries(self, value: object, seen: set[int]) -> bool:
        """Whether a value holds a part of the request or of its answer."""
        if isinstance(value, str):
            return value in self._texts
        if isinstance(value, bytes | np.ndarray | torch.Tensor):
            return len(value.shape) > 0 if isinstance(value, np.ndarray | torch.Tensor) else len(value) > 0
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._carries(inner, seen) for inner in parts_of(value))


def parts_of(value: object) -> Iterable[object]:
    """Returns the items of a container or the fields of a value class; nothing for any other object."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, BaseModel):
        return list(vars(value).values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def texts_of(body: object) -> Iterator[str]:
    """Yields the texts of JSON values, keys excluded."""
    if isinstance(body, str):
        yield body
    for inner in parts_of(body):
        yield from texts_of(inner)


def is_value_class(kind: type) -> bool:
    """Returns whether instances of a class hold values: a dataclass, a NamedTuple or a pydantic model."""
    if issubclass(kind, BaseException):
        return False
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return named_tuple or dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)


@functools.cache
def summary(file: Path) -> str:
    """Returns the first sentence of a module's docstring, without importing it."""
    return _first_sentence(ast.get_docstring(ast.parse(file.read_text("utf-8"))) if file.is_file() else None)


def _says(kind: type) -> str:
    """The first sentence of a class's own docstring. Without one, Python puts its signature there."""
    doc = kind.__doc__ or ""
    return _first_sentence(None if doc.startswith(f"{kind.__name__}(") else inspect.cleandoc(doc))


def _first_sentence(doc: str | None) -> str:
    paragraph = " ".join((doc or "(no docstring)").partition("\n\n")[0].split())
    found = re.match(r".+?\.(?= |$)", paragraph)
    return found[0] if found else paragraph


# The service in one process


class LocalHandle:
    """Takes calls to one replica in this process, by way of our request router, as a Serve handle does."""

    def __init__(self, server: ReplicaServer, router: TokenRouter, replica: str) -> None:
        self._server, self._router = server, router
        self._candidates: Any = [SimpleNamespace(replica_id=ReplicaID(replica, DEPLOYMENT))]

    def options(self, *, stream: bool) -> "LocalHandle":
        return self

    def __getattr__(self, method: str) -> Any:
        called = getattr(self._server, method)
        if inspect.isasyncgenfunction(called):
            return SimpleNamespace(remote=lambda *args, **named: LocalStream(self._stream(called, args, named)))
        return SimpleNamespace(remote=lambda *args, **named: LocalCall(self._call(called, args, named)))

    async def _call(self, called: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        await self._route(args, named)
        return await called(*args, **named)

    async def _stream(self, called: Any, args: tuple[Any, ...], named: dict[str, Any]) -> AsyncGenerator[Any, None]:
        await self._route(args, named)
        async with contextlib.aclosing(called(*args, **named)) as replies:
            async for reply in replies:
                yield reply

    async def _route(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        pending = PendingRequest(args=list(args), kwargs=named, metadata=SimpleNamespace())
        ranks = await self._router.choose_replicas(self._candidates, pending)
        self._router.on_request_routed(pending, ranks[0][0].replica_id, None)


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[FastAPI]:
    """Starts an ingress and a replica as `CONFIG` has them, and stops them afterwards."""
    args = AppArgs.model_validate(yaml.safe_load(CONFIG.read_text("utf-8"))["applications"][0]["args"])
    replica = "replica-0"
    server = ReplicaServer(args, replica)
    await server.start()
    try:
        loads = load_tracker_of(DEPLOYMENT.app_name, DEPLOYMENT.name)
        loads.publish([replica])
        metrics = IngressMetrics()
        board = HealthMonitor(canaries_passed_by([replica]), args.health, metrics)
        await board.look()
        handle = LocalHandle(server, TokenRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA), replica)
        dispatch = Dispatcher(HandleTransport(handle), args, board, metrics, scrape=None, loads=loads)  # type: ignore[arg-type]
        settings = args.api_settings(SamplingDefaults(), {})
        yield build_api(dispatch, load_tokenizer(args.model.path), settings, metrics)
    finally:
        server.stop()


async def trace(names: Iterable[str]) -> dict[str, Walk]:
    """Sends requests to a service in this process and records what each one crosses.

    Args:
        names: Keys of `REQUESTS`.

    Returns:
        The walk of each request, by name.

    Raises:
        RequestFailed: If the service does not answer with 200.
    """
    tracer = Tracer()
    walks = {}
    with tracer.watching_new_threads():
        async with (
            service() as app,
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://a") as http,
        ):
            for name in names:
                path, body = REQUESTS[name]
                for sent in (REQUESTS[name].warm_up(), body):
                    with tracer.recording(sent):
                        await _send(http, path, sent)
                        await tracer.until_quiet()
                    if sent is not body:
                        await tracer.learn_idle()
                walks[name] = tracer.walk()
    return walks


async def _send(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> None:
    answer = await http.post(path, json=body)
    if answer.status_code != 200:
        raise RequestFailed(f"{path} answered {answer.status_code}: {answer.text}")


# The report


def report(name: str, walk: Walk, functions: bool = False) -> str:
    """Returns the walk as numbered lines in order of first entry, under the rooms they stand in.

    Args:
        name: Key of `REQUESTS`.
        walk: The result of `trace` for it.
        functions: Whether each file's functions follow it.
    """
    width = max((len(Path(visit.path).name) for visit in walk.files), default=0)
    lines = [f"{name}: POST {REQUESTS[name].path}"]
    room = ""
    for number, visit in enumerate(walk.files, 1):
        if visit.room != room:
            room = visit.room
            first_time = all(earlier.room != room for earlier in walk.files[: number - 1])
            lines += ["", f"{room}/" + (f"  {summary(ROOT / room / '__init__.py')}" if first_time else "")]
        lines += _hanging(f"{number:4}. {Path(visit.path).name:{width}}  ", visit.says)
        if functions and visit.functions:
            lines += _hanging(" " * (width + 8), ", ".join(visit.functions))
    lines += ["", "Value classes"]
    width = max((len(kind.name) for kind in walk.value_classes), default=0)
    for number, kind in enumerate(walk.value_classes, 1):
        lines += _hanging(f"{number:4}. {kind.name:{width}}  ", f"{kind.says} ({kind.path}, made {kind.made} times)")
    lines += [
        "",
        f"{name}: {len(walk.files)} files, {walk.functions} functions, {len(walk.value_classes)} value classes",
    ]
    return "\n".join(lines)


def _hanging(head: str, text: str) -> list[str]:
    """Lines of at most `WIDTH`: the text after its head, and what does not fit below itself."""
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def excess(walk: Walk, max_files: int | None, max_classes: int | None) -> list[str]:
    """Returns a sentence for each limit that a walk exceeds."""
    found = (("files", len(walk.files), max_files), ("value classes", len(walk.value_classes), max_classes))
    return [
        f"A walk may cross at most {limit} {things}. Given: {count}."
        for things, count, limit in found
        if limit is not None and count > limit
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="trace_request", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("request", nargs="?", choices=REQUESTS, default="score", help="which request (default: score)")
    parser.add_argument("--functions", action="store_true", help="list the functions of each file, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the walk as JSON, too")
    parser.add_argument("--max-files", type=int, metavar="N", help="exit with 1 if more files are crossed")
    parser.add_argument("--max-classes", type=int, metavar="N", help="exit with 1 if more value classes are made")
    options = parser.parse_args(arguments)
    try:
        walk = asyncio.run(trace([options.request]))[options.request]
    except RequestFailed as error:
        print(error, file=sys.stderr)
        return 2
    print(report(options.request, walk, options.functions))
    if options.json is not None:
        options.json.write_text(json.dumps({"request": options.request} | asdict(walk), indent=2) + "\n", "utf-8")
    exceeded = excess(walk, options.max_files, options.max_classes)
    for sentence in exceeded:
        print(sentence, file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of the libraries below us end the interpreter's shutdown with an abort now and then
