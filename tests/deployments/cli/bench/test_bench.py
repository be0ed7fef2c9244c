"""assay bench against a service in this process: what is sent when, what is written, and how it ends."""

import argparse
import asyncio
import http
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Awaitable, Callable, Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from deployments.cli.bench import load_generator, results, runner
from deployments.cli.bench.results import Table
from deployments.cli.bench.runner import LoadTest
from deployments.cli.bench.workloads import BenchRequest, ServedModel, score
from deployments.cli.main import main

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ASK = BenchRequest(workload="score", path="/x", data=b"{}", items=3)
STREAM = BenchRequest(workload="completions", path="/x", data=b"{}", stream=True)
SECRET = "assay-key"
INTERRUPTIBLE = """
import signal
import sys

from deployments.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
sys.exit(main(sys.argv[1:]))
"""


def reported(sample: results.RequestTiming) -> None: ...


async def run(
    handler: Handler, due: list[float], ask: BenchRequest = ASK, **options: int
) -> list[results.RequestTiming]:
    app = web.Application()
    app.router.add_post("/x", handler)
    async with TestServer(app) as server:
        target = load_generator.Target(str(server.make_url("")).rstrip("/"), timeout_s=5)
        return await load_generator.open_loop(target, due, [ask] * len(due), reported, **options)


async def ok(request: web.Request) -> web.Response:
    return web.json_response({})


async def test_requests_are_sent_when_due_whatever_became_of_those_before() -> None:
    """None is answered before all have been asked: a caller that waits would wait for ever."""
    everyone, waiting = asyncio.Event(), 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            everyone.set()
        await everyone.wait()
        return web.json_response({})

    found = await run(handler, [0.005 * number for number in range(20)])
    assert [one.status for one in found] == [200] * 20 and all(one.items == 3 for one in found)
    assert [one.due_s for one in found] == [0.005 * number for number in range(20)]


async def test_waiting_for_a_connection_counts_as_latency() -> None:
    """One connection, and the first answer is held for a second. Measured from the moment of sending, the planted
    fault, the others would have waited for nothing."""
    first = True

    async def handler(request: web.Request) -> web.Response:
        nonlocal first
        held, first = first, False
        await asyncio.sleep(1.0 if held else 0)
        return web.json_response({})

    found = await run(handler, [0.0] * 20, connections=1)
    from_due = statistics.median(one.latency_ms for one in found)
    from_sent = statistics.median(1e3 * (one.done_s - one.sent_s) for one in found)
    assert from_due >= 1000 and from_sent < from_due / 3


@pytest.mark.parametrize(
    ("status", "rejected", "failed"), [(200, 0, 0), (429, 1, 0), (503, 1, 0), (500, 0, 1), (422, 0, 1)]
)
async def test_refusals_are_no_failures(status: int, rejected: int, failed: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status)

    found = results.summarise(await run(handler, [0.0]), 1.0, 1e6)
    assert (found.rejected, found.failed) == (rejected, failed)


async def test_a_broken_connection_and_a_stream_without_an_end_are_failures() -> None:
    async def broken(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def cut(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'data: {"choices": []}\n\n', content_type="text/event-stream")

    assert [one.status for one in await run(broken, [0.0])] == [0]
    assert [one.status for one in await run(cut, [0.0], STREAM)] == [0]


async def test_a_stream_is_timed_to_its_first_event_and_counted_in_tokens() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices": [{}]}\n\n')
        await asyncio.sleep(0.2)
        await answer.write(b': keep-alive\n\ndata: {"usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n')
        return answer

    (found,) = await run(handler, [0.0], STREAM)
    assert found.tokens == 7 and found.first_s is not None and found.done_s - found.first_s > 0.1


async def test_closed_callers_ask_one_after_another() -> None:
    at_once = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.005)
        at_once -= 1
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generative_scoring", handler)
    async with TestServer(app) as server:
        target = load_generator.Target(str(server.make_url("")).rstrip("/"))
        found = await load_generator.closed_loop(target, ServedModel("m", 300), score, 3, 0.3, "1", reported)
    assert most == 3 and len(found) >= 3 and {one.status for one in found} == {200}


class Service:
    """In a thread of its own, so that the command may run as it does for a user."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self.status = 200
        self.hold = threading.Event()  # set: answers wait
        self.held = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        self.url = str(self._server.make_url("")).rstrip("/")

    async def _start(self) -> TestServer:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/{path:.*}", self._answer)
        server = TestServer(app)
        await server.start_server()
        return server

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("authorization"))
        return web.json_response({"data": [{"id": "toy", "assay": {"vocab_size": 300}}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1"})

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.keys.add(request.headers.get("authorization"))
        if self.hold.is_set():
            self.held.set()
            await asyncio.sleep(600)
        if request.path == "/v1/completions":
            return web.Response(body=b"data: {}\n\ndata: [DONE]\n\n", status=self.status)
        return web.json_response({}, status=self.status)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def service() -> Iterator[Service]:
    found = Service()
    yield found
    found.close()


SHORT = ("--seconds", "0.1", "--runs", "3", "--workload", "mixed")


def bench(service: Service, *more: str) -> int:
    return main(["bench", "--url", service.url, *SHORT, *more])


def test_it_tells_and_writes_medians_quartiles_environment_and_commit(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_API_KEY", SECRET)
    file = tmp_path / "out" / "bench.json"
    assert bench(service, "--rates", "40,80", "--out", str(file), "--json", "--note", "a <note>") == 0
    record = json.loads(file.read_text("utf-8"))
    out, err = capsys.readouterr()
    assert json.loads(out) == record and SECRET not in out + err
    assert [level["load"] for level in record["levels"]] == [40, 80]
    for level in record["levels"]:
        assert len(level["runs"]) == 3
        low, high = level["quartiles"]["p99_ms"]
        assert low <= level["median"]["p99_ms"] <= high
        assert level["median"]["failed"] == 0 and level["median"]["answered_per_s"] > 0
    assert record["environment"]["versions"]["ray"] and record["commit"] and len(record["load_average"]["before"]) == 3
    assert (record["loop"], record["load"], record["interrupted"]) == ("open", "requests/s", False)
    assert service.keys == {f"Bearer {SECRET}"} and {"/generative_scoring", "/v1/rerank"} <= set(service.asked)
    assert err.count("median") == 2 and "good/s" in err
    picture = ElementTree.parse(file.with_suffix(".svg"))
    assert "a <note>" in "".join(picture.getroot().itertext())


def test_without_rates_it_finds_out_what_the_service_can_do(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.cli.bench import runner

    monkeypatch.setattr(runner, "PROBE_S", 0.2)
    monkeypatch.setattr(runner, "WARM_UP_S", 0.05)
    found = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", found)
        assert bench(service, "--runs", "1", "--seconds", "0.05", "--json", "--no-table") == 0
    loads = [level["load"] for level in json.loads(found.getvalue())["levels"]]
    assert len(loads) == 3 and loads[2] == pytest.approx(3 * loads[0], rel=0.01)


def test_concurrent_callers_in_place_of_rates(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(service, "--concurrency", "1,2", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["loop"], [level["load"] for level in record["levels"]]) == ("closed", [1, 2])


@pytest.mark.full
def test_a_run_without_an_answer_is_status_1_and_rejects_are_answers(service: Service) -> None:
    service.status = 500
    assert bench(service, "--rates", "40", "--no-table") == 1
    service.status = 429
    assert bench(service, "--rates", "40", "--no-table") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--rates", "1", "--concurrency", "1"), ("--runs", "0"), ("--url", "http://127.0.0.1:9"),
        ("--url", "http://127.0.0.1:80x"),
    ],
)  # fmt: skip
def test_what_cannot_be_tested_is_refused(
    service: Service, wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(service, *wrong) == 2
    assert capsys.readouterr().err.startswith("assay bench: ")
    with pytest.raises(SystemExit):
        bench(service, "--rates", "0")


def test_results_that_cannot_be_written_are_refused_before_the_test(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "bench.json"):
        assert bench(service, "--rates", "40", "--out", str(out)) == 2
        assert "`--out` must be a file that can be written. Given: " in capsys.readouterr().err


@pytest.mark.parametrize(("status", "words"), [(401, "Set ASSAY_API_KEY to a valid key."), (404, "404 Not Found.")])
def test_a_service_that_refuses_to_say_what_it_serves_is_refused(
    status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise urllib.error.HTTPError("", status, http.HTTPStatus(status).phrase, Message(), None)

    monkeypatch.setattr(runner, "_get", refuse)
    assert main(["bench", "--url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"assay bench: http://127.0.0.1:9 answers {status}") and said.endswith(f"{words}\n")


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_API_KEY", f"{SECRET}\n{SECRET}")
    assert bench(service) == 2
    said = capsys.readouterr().err
    assert "`ASSAY_API_KEY` must be printable ASCII" in said and SECRET not in said


@pytest.mark.full
def test_an_interrupt_ends_it_and_keeps_what_was_measured(service: Service, tmp_path: Path) -> None:
    """In a process of its own, as a user would: some load after the first is never answered."""
    file = tmp_path / "bench.json"
    loads = ",".join(str(40 + number) for number in range(200))
    arguments = [*SHORT, "--rates", loads, "--runs", "1", "--out", str(file)]
    command = [sys.executable, "-c", INTERRUPTIBLE, "bench", "--url", service.url, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "median" in line:
                service.hold.set()
                break
        assert service.held.wait(60)
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.stderr.read()
        assert process.wait(60) == 130
    record = json.loads(file.read_text("utf-8"))
    assert record["interrupted"] and record["levels"][0]["load"] == 40 and len(record["levels"]) < 200


@pytest.mark.full
async def test_an_interrupted_run_counts_what_was_answered_by_then(service: Service) -> None:
    from deployments.cli.bench import command, runner

    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    given = parser.parse_args(["bench", "--url", service.url, "--rates", "200", "--seconds", "60", "--runs", "1"])
    seen: list[results.RequestTiming] = []

    class Watched(Table):
        def add(self, timing: results.RequestTiming) -> None:
            super().add(timing)
            if self._load:  # not of the warm-up
                seen.append(timing)

    work = runner.LoadTest(
        target=load_generator.Target(service.url), model=ServedModel("toy", 300), given=given, table=Watched(None)
    )
    test = asyncio.create_task(work.run())
    while len(seen) < 20:
        await asyncio.sleep(0.01)
    test.cancel()
    with pytest.raises(asyncio.CancelledError):
        await test
    [level] = work.levels
    [run] = level.runs
    assert run.requests == len(seen) >= 20 and run.failed == 0
    assert run.answered_per_s > 2  # over the time that it ran: over 60 s it would be a third of a request


def test_nothing_listens_after_it() -> None:
    """A refused port is reported as such, immediately."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["bench", "--url", url, "--no-table"]) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_moves_on_a_terminal_and_is_plain_elsewhere() -> None:
    one = results.RequestTiming(due_s=0, sent_s=0, done_s=0.5, status=200)
    run = results.summarise([one], 1.0, 1000.0)
    said: dict[type[io.StringIO], Any] = {}
    for kind in (Terminal, io.StringIO):
        stream = kind()
        table = Table(stream, clock=lambda: 0.0)
        table.head()
        table.begin("10", "1/7")
        table.add(one)
        table.end(run)
        table.median("10", results.spreads([run]))
        said[kind] = stream.getvalue()
    assert "1 ended: 1 answered" in said[Terminal] and "\x1b" not in said[io.StringIO]
    assert [len(line.split()) > 8 for line in said[io.StringIO].splitlines()] == [True] * 3
    Table(None).end(run)


async def test_a_slow_service_has_no_rate_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(*_: Any) -> list[Any]:
        return []

    slow: Any = SimpleNamespace(answered_per_s=0.01, requests=1)
    monkeypatch.setattr(LoadTest, "_closed", answered)
    monkeypatch.setattr(results, "summarise", lambda *_: slow)
    given: Any = SimpleNamespace(workload="score")
    nothing: Any = None
    assert min(await LoadTest(target=nothing, model=nothing, given=given, table=nothing)._rates()) > 0
