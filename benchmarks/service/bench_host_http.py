"""Measures the host path of the service over HTTP, without a GPU: a clock stands in for the device.

    python -m benchmarks.service.bench_host_http --out benchmarks/results
    git worktree add --detach ../before COMMIT
    python -m benchmarks.service.bench_host_http --before ../before --out benchmarks/results

It starts the service in fast mode with one ingress and one replica, whose steps take an H200's time and compute nothing
(`benchmarks.service.clock_service`), and loads it over keep-alive connections from processes of its own, in a closed
loop. A row gives the rate, the latency, the processor time of each process for each request and token, and how long
decode steps take beside the load, in times of the device's own time for them (`step_of_device`). `step_ratio` is that
of 256 streams to that of 256 plain completions, which are read at their ends alone. Client, service and clock share the
machine's cores. With `--before` the sources of another folder run first, each load in turn,
and every row has the ratio to them. Each load is run `--rounds` times; the row is the run of the median rate.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.support.h200 import DECODE_S, ROW_S
from benchmarks.support.report import Row, publish
from deployments.cli.launch.listening_ports import descendants

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
READY_S = 600.0
END_S = 60.0
LOAD_S = 300.0
PARTS = {"Ingress": "ingress", "Replica:": "replica", "ServeReplica": "replica", "haproxy": "proxy", "Proxy": "proxy"}
PROMPT, NEW, ITEM = 128, 128, 32  # tokens
ITEMS = 64  # of a score in a mixed load
LAST_CHUNK = b"\r\n0\r\n\r\n"
READ_BY_TOKEN, READ_AT_THE_END = "256 streams", "256 plain completions"
SCRAPE_S = 0.6  # after which an answer of /metrics is a new one
DECODE_SAMPLE = re.compile(r'^(assay_step_\w+)\{[^}]*kind="decode"[^}]*\} (\S+)$', re.MULTILINE)
VOCAB = 2048  # ids of the built-in tokenizer that a client may send


class LoadCase(NamedTuple):
    """Defines a closed loop of `callers` clients that send `each` requests one after the other."""

    name: str
    kind: str  # stream, plain, score, or mixed: every second request is a plain completion, the others score 64 items
    callers: int
    each: int
    body: dict[str, Any]


GENERATION = {"max_tokens": NEW, "ignore_eos": True, "temperature": 0}
STREAM, SCORE = GENERATION | {"stream": True}, {"detail": "probabilities"}
CASES = (
    *(LoadCase(f"{n} streams", "stream", n, each, STREAM) for n, each in ((256, 2), (64, 4), (16, 8), (1, 8))),
    LoadCase("256 streams, logprobs 5", "stream", 256, 2, STREAM | {"logprobs": 5}),
    *(LoadCase(f"{n} plain completions", "plain", n, each, GENERATION) for n, each in ((256, 3), (1, 16))),
    *(LoadCase(f"{n} one-item scores", "score", n, each, SCORE) for n, each in ((256, 12), (32, 60), (1, 300))),
    LoadCase("128 callers, 64-item scores and completions", "mixed", 128, 6, {}),
)


def request_of(case: LoadCase, draw: random.Random, number: int) -> bytes:
    """Returns the request of this number of the case, which no other one begins like."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, VOCAB) for _ in range(count)]

    path, body = b"/v1/completions", {"prompt": ids(PROMPT), **(case.body or GENERATION)}
    if case.kind == "score":
        path, body = b"/generative_scoring", {"query": [], "items": [ids(ITEM)], "label_token_ids": [11, 12], **SCORE}
    elif case.kind == "mixed" and number % 2:
        items = [ids(ITEM) for _ in range(ITEMS)]
        path, body = (
            b"/generative_scoring",
            {"query": ids(PROMPT), "items": items, "label_token_ids": [11, 12], **SCORE},
        )
    data = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path, len(data)) + data


class ClientFigures(NamedTuple):
    """Holds what one client process saw."""

    start: float
    end: float
    latencies_s: list[float]  # of each request
    first_s: list[float]  # to the first event of each stream
    gaps_s: list[float]  # between the pieces of a stream


class _Caller:
    """Represents one keep-alive connection with at most one request under way."""

    def __init__(self, address: tuple[str, int], left: int) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.left = left  # requests still to be sent
        self.began = self.last = 0.0
        self._head = b""
        self._body = -1  # bytes that are still to come; -1: the header has not come, -2: the body is chunked
        self._tail = b""

    def send(self, request: bytes) -> None:
        self.left -= 1
        self._head, self._body, self._tail = b"", -1, b""
        self.began, self.last = time.perf_counter(), 0.0
        self.socket.sendall(request)

    def take(self, data: bytes) -> bool:
        """Returns whether the answer is complete. Raises RuntimeError for one that is no 200."""
        if self._body == -1:
            self._head, found, data = (self._head + data).partition(b"\r\n\r\n")
            if not found:
                return False
            if not self._head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"The service answered {self._head!r} {data[:400]!r}.")
            lines = self._head.lower().split(b"\r\n")
            self._body = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), -2)
        if self._body == -2:
            if len(data) < len(LAST_CHUNK):
                data = self._tail + data
            self._tail = data[-len(LAST_CHUNK) :]
            return self._tail == LAST_CHUNK
        self._body -= len(data)
        return self._body == 0


def _load(made: Sequence[_Caller], requests: Sequence[bytes], streamed: bool) -> ClientFigures:
    """Has every caller send its requests one after the other."""
    latencies, firsts, gaps = list[float](), list[float](), list[float]()
    clock = time.perf_counter
    begun = clock()
    numbers = itertools.cycle(range(len(requests)))
    callers = {caller.socket.fileno(): caller for caller in made}
    with select.epoll() as poll:  # not `selectors`: it would take a third of the client's time from the service's cores
        for descriptor, caller in callers.items():
            poll.register(descriptor, select.EPOLLIN)
            caller.send(requests[next(numbers)])
        while callers:
            for descriptor, _ in poll.poll(60):
                caller = callers[descriptor]
                data = caller.socket.recv(1 << 16)
                now = clock()
                if not data:
                    raise RuntimeError("The service closed a connection.")
                if streamed:
                    (gaps if caller.last else firsts).append(now - (caller.last or caller.began))
                    caller.last = now
                if caller.take(data):
                    latencies.append(now - caller.began)
                    if caller.left:
                        caller.send(requests[next(numbers)])
                    else:
                        poll.unregister(descriptor)
                        del callers[descriptor]
    return ClientFigures(begun, time.perf_counter(), latencies, firsts, gaps)


def _client(pipe: Any, address: tuple[str, int], case: LoadCase, callers: int, seed: int) -> None:
    """Runs one client process: one request of each caller to warm up, and the load when the pipe says so."""
    try:
        draw = random.Random(seed)
        requests = [request_of(case, draw, number) for number in range(callers * (1 + case.each))]
        made = [_Caller(address, 1) for _ in range(callers)]
        _load(made, requests[:callers], case.kind == "stream")
        pipe.send(None)
        pipe.recv()
        for caller in made:
            caller.left = case.each
        pipe.send(_load(made, requests[callers:], case.kind == "stream"))
    except Exception as error:
        pipe.send(error)


class DecodeSteps(NamedTuple):
    """Counts the decode steps of a replica since its start."""

    seconds: float
    steps: float
    rows: float

    def of_device(self, before: "DecodeSteps", device: float) -> float | None:
        """Returns the time of the steps since `before`, in times of what the device alone takes for them."""
        seconds, steps, rows = (now - then for now, then in zip(self, before, strict=True))
        return seconds * device / (DECODE_S * steps + ROW_S * rows) if steps > 0 else None


class ClockService:
    """Represents the service of one folder of sources while it runs."""

    def __init__(self, name: str, sources: Path, port: int, process: "subprocess.Popen[bytes]", device: float) -> None:
        self.name, self.sources, self.port, self.process, self.device = name, sources, port, process, device

    def cpu_s(self) -> Counter[str]:
        """Returns the processor seconds of all processes of the service, by part."""
        found = Counter[str]()
        for pid in (self.process.pid, *descendants(self.process.pid)):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            part = next((part for word, part in PARTS.items() if word in command), "ray")
            found[part] += (int(fields[11]) + int(fields[12])) / TICKS  # type: ignore[assignment]
        return found

    def decode_steps(self) -> "DecodeSteps":
        """Returns what the replica's metrics say of its decode steps; zeros where they say nothing."""
        time.sleep(SCRAPE_S)
        with _opener().open(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode("utf-8")
        found = {name: float(value) for name, value in DECODE_SAMPLE.findall(text)}
        names = ("seconds_sum", "seconds_count", "sequences_sum")
        return DecodeSteps(*(found.get(f"assay_step_{name}", 0.0) for name in names))

    def measure(self, case: LoadCase, clients: int) -> Row:
        """Runs one load and returns its row."""
        clients = min(clients, case.callers)
        running = []
        for index in range(clients):
            share = case.callers // clients + (index < case.callers % clients)
            ours, theirs = multiprocessing.Pipe()
            arguments = (theirs, ("127.0.0.1", self.port), case, share, random.getrandbits(32))
            process = multiprocessing.get_context("fork").Process(target=_client, args=arguments)
            process.start()
            running.append((process, ours))
        try:
            for _, pipe in running:
                _received(pipe)
            steps, before = self.decode_steps(), self.cpu_s()
            for _, pipe in running:
                pipe.send(None)
            figures = [_received(pipe) for _, pipe in running]
            used = self.cpu_s()
        finally:
            for process, _ in running:
                process.kill()
                process.join()
        used.subtract(before)
        row = self._row(case, figures, used)
        if case.kind != "score":  # beside scores there are the canaries' decode steps alone
            row["step_of_device"] = self.decode_steps().of_device(steps, self.device)
        return row

    def _row(self, case: LoadCase, figures: Sequence[ClientFigures], used: Counter[str]) -> Row:
        seconds = max(one.end for one in figures) - min(one.start for one in figures)
        requests = case.callers * case.each
        tokens = {"score": 0, "mixed": NEW * requests // 2}.get(case.kind, NEW * requests)
        latencies = sorted(value for one in figures for value in one.latencies_s)
        gaps = sorted(value for one in figures for value in one.gaps_s)
        firsts = sorted(value for one in figures for value in one.first_s)
        row: Row = {"case": case.name, "sources": self.name, "requests_s": requests / seconds}
        units, unit = (tokens, "token") if case.kind in ("stream", "plain") else (requests, "request")
        if tokens:
            row["tokens_s"] = tokens / seconds
        row["p50_ms"] = 1e3 * latencies[len(latencies) // 2] if latencies else None
        row["first_p50_ms"] = 1e3 * firsts[len(firsts) // 2] if firsts else None
        row["gap_p50_ms"] = 1e3 * gaps[len(gaps) // 2] if gaps else None
        for part in ("ingress", "replica", "proxy", "ray"):
            row[f"{part}_us_{unit}"] = 1e6 * used[part] / units
        row[f"all_us_{unit}"] = 1e6 * sum(used.values()) / units
        return row


def _received(pipe: Any) -> Any:
    """Returns what a client process sent. Raises what it raised."""
    if not pipe.poll(LOAD_S):
        raise TimeoutError(f"A client process did not end within {LOAD_S:g} s.")
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


@contextlib.contextmanager
def started(
    name: str, sources: Path, sections: dict[str, Any], device: float = 1.0, mode: str = "fast"
) -> Iterator[ClockService]:
    """Starts the service of a folder of sources on a clock, and ends it. `device`: how many times as fast as an H200.

    Raises:
        RuntimeError: it is not ready in time; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="assay-host-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        free.close()
        config = yaml.safe_load((sources / "deployments/configs/cpu.yaml").read_text("utf-8"))
        config["http_options"]["port"] = port
        application = config["applications"][0]
        application["import_path"] = "benchmarks.service.clock_service:build"
        limits = {"max_queued_tokens": 1 << 24}  # a slow machine refuses nothing
        application["args"]["engine"] = {"max_running": 256, "kv_slots": 1 << 18, "token_budget": 16_384} | limits
        application["args"]["admission"] = {"max_wait_s": 600.0}
        application["args"] |= sections
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config), "utf-8")
        path = os.pathsep.join(map(str, dict.fromkeys((sources, ROOT))))
        environment = os.environ | {"PYTHONPATH": path, "ASSAY_CLOCK_VOCAB": str(VOCAB), "ASSAY_TEST_FAULTS": "1"}
        environment["ASSAY_CLOCK_SPEED"] = str(device)
        with (Path(folder) / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", "serve", *(["--fast"] * (mode == "fast")), str(file)],
                cwd=sources,
                env=environment | {"OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "300"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait_ready(port, process, Path(folder) / "log.txt")
            yield ClockService(name, sources, port, process, device)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(END_S)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _wait_ready(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    opener = _opener()
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), opener.open(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            if answer.status == 200:
                time.sleep(2.0)  # the canaries of the start are over
                return
        time.sleep(0.25)
    raise RuntimeError("The service did not become ready:\n" + log.read_text("utf-8")[-4000:])


def measured(services: Sequence[ClockService], given: argparse.Namespace) -> list[Row]:
    """Measures every case on every service in turn, and adds the ratios to the first service."""
    rows: list[Row] = []
    for case in CASES:
        if given.only and not any(word in case.name for word in given.only.split(",")):
            continue
        rate = "tokens_s" if case.kind in ("stream", "plain") else "requests_s"
        runs: dict[str, list[Row]] = {service.name: [] for service in services}
        for _ in range(given.rounds):
            for service in services:
                runs[service.name].append(service.measure(case, given.clients))
                print(json.dumps(runs[service.name][-1]), flush=True)
        medians = [sorted(found, key=lambda row: row[rate] or 0)[len(found) // 2] for found in runs.values()]
        for row in medians[1:]:
            row["rate_ratio"] = _ratio(row, medians[0], rate)
            row["p50_ratio"] = _ratio(row, medians[0], "p50_ms")
        rows += medians
    for row in rows:
        alone = [other for other in rows if other["case"] == READ_AT_THE_END and other["sources"] == row["sources"]]
        if row["case"] == READ_BY_TOKEN and alone:
            row["step_ratio"] = _ratio(row, alone[0], "step_of_device")
    return rows


def _ratio(row: Row, first: Row, column: str) -> float | None:
    ours, theirs = row[column], first[column]
    return ours / theirs if isinstance(ours, float) and isinstance(theirs, float) and theirs else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with the sources of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2, help="processes that send the load")
    parser.add_argument("--device", type=float, default=1.0, help="how many times as fast as an H200 the device is")
    parser.add_argument("--mode", choices=("fast", "default"), default="fast")
    parser.add_argument("--only", help="words of the cases to run, with commas")
    parser.add_argument("--args", type=json.loads, default={}, help="sections of the application's arguments, as JSON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folders = {"before": given.before.resolve()} if given.before else {}
    folders["now"] = ROOT
    with contextlib.ExitStack() as stack:
        services = [
            stack.enter_context(started(name, folder, given.args if name == "now" else {}, given.device, given.mode))
            for name, folder in folders.items()
        ]
        rows = measured(services, given)
    for row in rows:
        row["device"] = given.device
    notes = f"median of {given.rounds} runs; a clock in place of the device, clients on the same cores"
    publish("host-http" if given.device == 1.0 else "host-http-fast-device", rows, given.out, notes=notes)


if __name__ == "__main__":
    main()
