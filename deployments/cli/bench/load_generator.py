"""Sending: each request at its time, whatever became of those before it.

When requests are due, fixed before the first is sent: an open loop, as the world is.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp

from deployments.cli.bench.results import BROKEN, OK, Sample
from deployments.cli.bench.workloads import Model, Request, Workload


def poisson(rate_per_s: float, seconds: float, draw: random.Random) -> list[float]:
    """Seconds after the start, in order: a Poisson process of `rate_per_s`. There is one arrival at least: a short
    run at a low rate measures something."""
    due, at = list[float](), draw.expovariate(rate_per_s)
    while at < seconds:
        due.append(at)
        at += draw.expovariate(rate_per_s)
    return due or [draw.uniform(0, seconds)]


Told = Callable[[Sample], None]
TROUBLE = (aiohttp.ClientError, OSError, TimeoutError)


class Target(NamedTuple):
    """Where to, with what key, and how long to wait for one answer."""

    url: str
    api_key: str | None = None
    timeout_s: float = 60.0

    def session(self, connections: int) -> aiohttp.ClientSession:
        """`connections`: 0 for as many as are needed."""
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
    target: Target, due: Sequence[float], requests: Sequence[Request], told: Told, *, connections: int = 0
) -> list[Sample]:
    """Sends request i when `due[i]` seconds have passed, and waits for all answers. With at most `connections`, if not
    0, a request may have to wait for one: that counts as its latency."""
    room = asyncio.Semaphore(connections or len(due))
    async with target.session(connections) as session:
        start = time.perf_counter()

        async def at(due_s: float, request: Request) -> Sample:
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            async with room:
                sample = await _ask(session, target, request, start, due_s)
            told(sample)
            return sample

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(at(*pair)) for pair in zip(due, requests, strict=True)]
    return [task.result() for task in tasks]


async def closed_loop(
    target: Target, model: Model, workload: Workload, concurrency: int, seconds: float, seed: str, told: Told
) -> list[Sample]:
    """`concurrency` callers who ask again as soon as they are answered. It tells what the service can do, not how long
    callers wait: they wait for it before they ask."""
    samples: list[Sample] = []
    async with target.session(concurrency) as session:
        start = time.perf_counter()

        async def caller(number: int) -> None:
            draw = random.Random(f"{seed}/{number}")
            while (now := time.perf_counter() - start) < seconds:
                sample = await _ask(session, target, workload(model, draw), start, now)
                samples.append(sample)
                told(sample)

        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(caller(number))
    return samples


async def _ask(session: aiohttp.ClientSession, target: Target, request: Request, start: float, due_s: float) -> Sample:
    sent = time.perf_counter() - start
    first, tokens, status = None, 0, BROKEN
    try:
        async with session.post(target.url + request.path, data=request.data) as answer:
            if request.stream and answer.status == OK:
                first, tokens = await _stream(answer, start)
            else:
                await answer.read()
            status = answer.status
    except TROUBLE:
        status = BROKEN
    done = time.perf_counter() - start
    return Sample(
        due_s=due_s, sent_s=sent, first_s=first, done_s=done, status=status, items=request.items, tokens=tokens
    )


async def _stream(answer: aiohttp.ClientResponse, start: float) -> tuple[float | None, int]:
    """When the first event came, and how many tokens the last one tells of. A stream that does not say it is done has
    broken: raises ClientPayloadError."""
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
