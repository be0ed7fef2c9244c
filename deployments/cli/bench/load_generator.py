"""Sends requests in an open loop, at times that are fixed before the first one, or in a closed loop of clients."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp

from deployments.cli.bench.results import BROKEN, OK, RequestTiming
from deployments.cli.bench.workloads import BenchRequest, ServedModel, Workload


def poisson(rate_per_s: float, seconds: float, draw: random.Random) -> list[float]:
    """Draws arrival times from a Poisson process.

    Args:
        rate_per_s: mean arrivals a second.
        seconds: length of the run.
        draw: the source of randomness.

    Returns:
        Seconds after the start, ascending; at least one, so that a short run at a low rate measures something.
    """
    due, at = list[float](), draw.expovariate(rate_per_s)
    while at < seconds:
        due.append(at)
        at += draw.expovariate(rate_per_s)
    return due or [draw.uniform(0, seconds)]


Report = Callable[[RequestTiming], None]
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


class Target(NamedTuple):
    """Holds the service's URL, the API key and the timeout of one answer."""

    url: str
    api_key: str | None = None
    timeout_s: float = 60.0

    def session(self, connections: int) -> aiohttp.ClientSession:
        """Opens a session with at most `connections` connections; 0 is no limit."""
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            headers=headers,
            trust_env=False,
        )


async def open_loop(
    target: Target, due: Sequence[float], requests: Sequence[BenchRequest], report: Report, *, connections: int = 0
) -> list[RequestTiming]:
    """Sends each request when it is due, whether or not earlier ones are answered.

    Args:
        target: the service.
        due: seconds after the start.
        requests: one for each time.
        report: receives each timing.
        connections: most connections; a request's wait for one counts as its latency. 0: no limit.

    Returns:
        The timings, in the order of the requests.
    """
    room = asyncio.Semaphore(connections or len(due))
    async with target.session(connections) as session:
        start = time.perf_counter()

        async def at(due_s: float, request: BenchRequest) -> RequestTiming:
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            async with room:
                timing = await _send(session, target, request, start, due_s)
            report(timing)
            return timing

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(at(*pair)) for pair in zip(due, requests, strict=True)]
    return [task.result() for task in tasks]


async def closed_loop(
    target: Target, model: ServedModel, workload: Workload, concurrency: int, seconds: float, seed: str, report: Report
) -> list[RequestTiming]:
    """Runs clients that send a request as soon as the last one is answered.

    This measures throughput. It underestimates latency, because a slow service also slows down its clients.

    Args:
        target: the service.
        model: what it serves.
        workload: makes requests.
        concurrency: number of clients.
        seconds: until the last request is sent.
        seed: of the requests.
        report: receives each timing.

    Returns:
        The timings, in the order of the answers.
    """
    timings: list[RequestTiming] = []
    async with target.session(concurrency) as session:
        start = time.perf_counter()

        async def client(number: int) -> None:
            draw = random.Random(f"{seed}/{number}")
            while (now := time.perf_counter() - start) < seconds:
                timing = await _send(session, target, workload(model, draw), start, now)
                timings.append(timing)
                report(timing)

        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(client(number))
    return timings


async def _send(
    session: aiohttp.ClientSession, target: Target, request: BenchRequest, start: float, due_s: float
) -> RequestTiming:
    sent = time.perf_counter() - start
    first, tokens, status = None, 0, BROKEN
    try:
        async with session.post(target.url + request.path, data=request.data) as answer:
            if request.stream and answer.status == OK:
                first, tokens = await _stream(answer, start)
            else:
                await answer.read()
            status = answer.status
    except FAILURES:
        status = BROKEN
    done = time.perf_counter() - start
    return RequestTiming(
        due_s=due_s, sent_s=sent, first_s=first, done_s=done, status=status, items=request.items, tokens=tokens
    )


async def _stream(answer: aiohttp.ClientResponse, start: float) -> tuple[float | None, int]:
    """Returns time of the first event and number of tokens. Raises ClientPayloadError if the stream breaks off."""
    first, tokens, done = None, 0, False
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        first = time.perf_counter() - start if first is None else first
        done = line.startswith(b"data: [DONE]")
        if not done and b'"usage"' in line:
            tokens = _tokens(line) or tokens
    if not done:
        raise aiohttp.ClientPayloadError("The stream ended before its end.")
    return first, tokens


def _tokens(line: bytes) -> int:
    usage = json.loads(line.removeprefix(b"data: ")).get("usage") or {}
    return int(usage.get("completion_tokens", 0))
