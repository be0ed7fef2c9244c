"""Measures ragged scores and streams against a running service: each alone, and both together.

    make serve CONFIG=... ; python -m benchmarks.service.bench_mixed http://127.0.0.1:8000 --out benchmarks/results

Callers score in a closed loop: queries of 64 to 1,900 tokens that come again with Zipf's frequencies, and 1 to 64 items
of 8 to 600 tokens each. Streams are greedy generations of 128 tokens behind 128; one that ends is followed by another.
Client processes of their own read raw sockets. A token is counted where its event comes: events that the service joins
because a reader is behind count once, so that the rate of tokens is a lower bound.
"""

import argparse
import json
import math
import multiprocessing
import random
import selectors
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.service.bench_service import served
from benchmarks.support import workloads
from benchmarks.support.report import Row, publish

QUERY_TOKENS, ITEM_TOKENS, ITEMS = (64, 1900), (8, 600), (1, 64)
QUERIES = 200
PROMPT, NEW = 128, 128
PROCESSES = 6  # of each kind of client
DISTINCT = 200  # requests that a process makes before the clock starts, and sends in turn
SELECT_S = 0.2
READ_BYTES = 1 << 18


class Target(NamedTuple):
    """Names the service and its model."""

    address: tuple[str, int]
    model: str
    vocab: int


class Figures(NamedTuple):
    """Holds what one client process saw within the time."""

    items: int
    tokens: int
    errors: int
    times: list[float]  # of answered scoring requests, seconds


def log_uniform(draw: random.Random, bounds: tuple[int, int]) -> int:
    """Draws an integer whose logarithm is uniform between the bounds."""
    low, high = bounds
    return min(high, int(low * (1 + (high - low + 1) / low) ** draw.random()))


def zipf(count: int) -> list[float]:
    """Returns Zipf's frequencies with exponent 1."""
    return [1 / (rank + 1) for rank in range(count)]


def post(path: str, body: dict[str, Any]) -> bytes:
    """Returns a request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def scoring_requests(target: Target, seed: int) -> Iterator[tuple[int, bytes]]:
    """Yields the number of items and the bytes of scoring requests, without end."""
    shared = random.Random(0)
    queries = [_ids(shared, target.vocab, log_uniform(shared, QUERY_TOKENS)) for _ in range(QUERIES)]
    draw = random.Random(seed)
    while True:
        (query,) = draw.choices(queries, zipf(QUERIES))
        items = [_ids(draw, target.vocab, log_uniform(draw, ITEM_TOKENS)) for _ in range(log_uniform(draw, ITEMS))]
        body = {"model": target.model, "query": query, "items": items, "label_token_ids": workloads.LABELS}
        yield len(items), post("/generative_scoring", body)


def stream_requests(target: Target, seed: int) -> Iterator[bytes]:
    """Yields streamed completions, without end."""
    draw = random.Random(seed)
    while True:
        body = {"model": target.model, "prompt": _ids(draw, target.vocab, PROMPT), "max_tokens": NEW, "stream": True}
        yield post("/v1/completions", body | {"temperature": 0, "ignore_eos": True})


def answer_length(data: bytes) -> int | None:
    """Returns how many bytes the answer that `data` begins with has; None if its head is not complete."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    for line in data[:end].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return end + 4 + int(line.split(b":")[1])
    raise ValueError("An answer has no length.")


def score(target: Target, callers: int, seconds: float, seed: int, go: Any) -> Figures:
    """Scores in a closed loop on keep-alive connections."""
    made = scoring_requests(target, seed)
    requests = [next(made) for _ in range(DISTINCT)]
    go.wait()
    end, number = time.perf_counter() + seconds, 0
    figures, waiting = Figures(0, 0, 0, []), dict[socket.socket, tuple[int, float, bytes]]()
    with selectors.DefaultSelector() as ready:

        def send(connection: socket.socket) -> None:
            nonlocal number
            count, data = requests[number % DISTINCT]
            number += 1
            connection.settimeout(None)
            connection.sendall(data)
            connection.setblocking(False)
            waiting[connection] = count, time.perf_counter(), b""

        for _ in range(callers):
            connection = socket.create_connection(target.address)
            ready.register(connection, selectors.EVENT_READ)
            send(connection)
        while time.perf_counter() < end:
            for key, _ in ready.select(SELECT_S):
                connection = key.fileobj  # type: ignore[assignment]
                count, since, before = waiting[connection]
                data = before + connection.recv(READ_BYTES)
                length = answer_length(data)
                if length is None or len(data) < length:
                    waiting[connection] = count, since, data
                    continue
                answered = b" 200 " in data[:20]
                figures.times.append(time.perf_counter() - since)
                figures = figures._replace(
                    items=figures.items + count * answered, errors=figures.errors + (not answered)
                )
                send(connection)
    return figures


def stream(target: Target, count: int, seconds: float, seed: int, go: Any) -> Figures:
    """Keeps `count` streams open."""
    requests = stream_requests(target, seed)
    go.wait()
    end, tokens, errors = time.perf_counter() + seconds, 0, 0
    tails: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as ready:

        def start() -> None:
            connection = socket.create_connection(target.address)
            connection.sendall(next(requests).replace(b"Host: x", b"Host: x\r\nConnection: close"))
            connection.setblocking(False)
            ready.register(connection, selectors.EVENT_READ)
            tails[connection] = b""

        for _ in range(count):
            start()
        while time.perf_counter() < end:
            for key, _ in ready.select(SELECT_S):
                connection: socket.socket = key.fileobj  # type: ignore[assignment]
                data = connection.recv(READ_BYTES)
                if not data:
                    ready.unregister(connection)
                    connection.close()
                    del tails[connection]
                    start()
                    continue
                errors += data.startswith(b"HTTP/") and b" 200 " not in data[:20]
                data = tails[connection] + data
                tokens += data.count(b"data: {")
                tails[connection] = data[-6:]
    return Figures(0, tokens, errors, [])


Client = Callable[..., Figures]


def _run(pipe: Any, client: Client, *given: Any) -> None:
    pipe.send(client(*given))


def measured(target: Target, clients: dict[Client, int], seconds: float) -> Row:
    """Runs the clients, each kind with so many connections, and returns their figures together."""
    go, started, pipes = multiprocessing.Barrier(PROCESSES * len(clients)), [], []
    for client, count in clients.items():
        for number in range(PROCESSES):
            own = count // PROCESSES + (number < count % PROCESSES)
            here, there = multiprocessing.Pipe()
            given = (there, client, target, own, seconds, number, go)
            started.append(multiprocessing.Process(target=_run, args=given, daemon=True))
            started[-1].start()
            pipes.append(here)
    found: list[Figures] = [pipe.recv() for pipe in pipes]
    for process in started:
        process.join()
    times = sorted(one for figures in found for one in figures.times)
    row: Row = {"errors": sum(figures.errors for figures in found)}
    if score in clients:
        row["items_s"] = sum(figures.items for figures in found) / seconds
        row["p50_ms"], row["p99_ms"] = (1e3 * times[math.ceil(len(times) * q) - 1] for q in (0.5, 0.99))
    if stream in clients:
        row["tokens_s"] = sum(figures.tokens for figures in found) / seconds
    return row


def _ids(draw: random.Random, vocab: int, count: int) -> list[int]:
    return [draw.randrange(10, vocab) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--callers", type=int, default=24)
    parser.add_argument("--streams", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2, help="the best by items, or by tokens, counts")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    parts = urllib.parse.urlsplit(given.url)
    target = Target((parts.hostname or "", parts.port or 80), *served(given.url))
    cases: dict[str, dict[Client, int]] = {
        f"{given.callers} callers": {score: given.callers},
        f"{given.streams} streams": {stream: given.streams},
        f"{given.callers} callers beside {given.streams} streams": {score: given.callers, stream: given.streams},
    }
    rows: list[Row] = []
    for name, clients in cases.items():
        runs = [measured(target, clients, given.seconds) for _ in range(given.rounds)]
        rate = "items_s" if score in clients else "tokens_s"
        rows.append({"case": name, **max(runs, key=lambda row: float(row[rate] or 0))})
    publish(
        "mixed-" + target.model.rsplit("/", 1)[-1],
        rows,
        given.out,
        f"{given.seconds:g} s; {PROCESSES} processes a kind",
    )


if __name__ == "__main__":
    main()
