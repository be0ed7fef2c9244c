"""Sends requests in an open loop: at the times of a Poisson process, whether or not earlier ones are answered. Latency
counts from these times, so that it includes delays of the generator."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from benchmarks.support.report import Row

SETTLE_S = 0.15  # part of a run after which completions count: queues have their length by then


class Reply(NamedTuple):
    """Holds the status of an answer."""

    status: int  # 0 without an answer
    sound: bool  # a refusal has a JSON error body and an integer `retry-after` from 1 to 60


class TimedRequest(NamedTuple):
    """Holds the times of one request, in seconds from the start of the run."""

    due: float
    sent: float
    ended: float
    cost: int  # tokens
    answer: Reply


Post = Callable[[int], Awaitable[Reply]]


async def fire(post: Post, costs: Sequence[int], rate: float, seconds: float, seed: int) -> list[TimedRequest]:
    """Posts bodies in turn, by their index, at `rate` a second for `seconds`, and waits for every answer."""
    rng, start = random.Random(seed), time.perf_counter()
    shots: list[TimedRequest] = []

    async def one(number: int, due: float) -> None:
        sent = time.perf_counter() - start
        answer = await post(number % len(costs))
        shots.append(TimedRequest(due, sent, time.perf_counter() - start, costs[number % len(costs)], answer))

    async with asyncio.TaskGroup() as group:
        number, due = 0, rng.expovariate(rate)
        while due < seconds:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            group.create_task(one(number, due))
            number, due = number + 1, due + rng.expovariate(rate)
    return shots


async def capacity(post: Post, costs: Sequence[int], at_once: int, seconds: float) -> float:
    """Returns the requests a second of a closed loop."""
    start, done = time.perf_counter(), list[float]()

    async def lane(first: int) -> None:
        number = first
        while time.perf_counter() - start < seconds:
            if (await post(number % len(costs))).status == 200:
                done.append(time.perf_counter() - start)
            number += at_once

    await asyncio.gather(*(lane(first) for first in range(at_once)))
    return _within(done, seconds) / (seconds * (1 - SETTLE_S))


def summary(case: str, shots: Sequence[TimedRequest], seconds: float) -> Row:
    """Summarises a run: rates without its first part, times in milliseconds."""
    taken = [shot for shot in shots if shot.answer.status == 200]
    refused = [shot for shot in shots if shot.answer.status == 429]
    window = seconds * (1 - SETTLE_S)
    tokens = sum(shot.cost for shot in taken if SETTLE_S * seconds <= shot.ended <= seconds)
    return {
        "case": case,
        "offered_per_s": len(shots) / seconds,
        "goodput_per_s": _within([shot.ended for shot in taken], seconds) / window,
        "goodput_tok_s": tokens / window,
        "refused_percent": 100 * len(refused) / max(1, len(shots)),
        "refusal_p50_ms": quantile([1e3 * (shot.ended - shot.sent) for shot in refused], 0.5),
        "refusal_p99_ms": quantile([1e3 * (shot.ended - shot.sent) for shot in refused], 0.99),
        "unsound_refusals": sum(not shot.answer.sound for shot in refused),
        "answer_p50_ms": quantile([1e3 * (shot.ended - shot.due) for shot in taken], 0.5),
        "answer_p99_ms": quantile([1e3 * (shot.ended - shot.due) for shot in taken], 0.99),
        "timed_out": sum(shot.answer.status in (0, 408) for shot in shots),
        "other_errors": sum(shot.answer.status not in (0, 200, 408, 429) for shot in shots),
        "generator_late_p99_ms": quantile([1e3 * (shot.sent - shot.due) for shot in shots], 0.99),
    }


def quantile(values: Sequence[float], part: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else None


def _within(ended: Sequence[float], seconds: float) -> int:
    return sum(SETTLE_S * seconds <= one <= seconds for one in ended)
