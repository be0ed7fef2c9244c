"""R2 over HTTP: one request of 4,000 items beside 200 small ones. A step takes 2 ms and 0.1 ms a token."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.scheduler.fair_queue import FairQueue

pytestmark = pytest.mark.slow
SMALL = 200
LABELS = {"label_token_ids": [65, 66]}
LARGE = {"query": list(range(100)), "items": [[n % 250, n // 250, *range(8)] for n in range(4_000)], **LABELS}
SECTIONS: dict[str, Any] = {
    "engine": {"kv_slots": 16_384, "token_budget": 2_048, "prefix_cache": False, "max_queued_tokens": 1_000_000},
    "admission": {"max_wait_s": 600.0},
    "limits": {"max_items": 4_096},
}


def forward(kind: Any, runs: Any) -> None:
    time.sleep(0.002 + 0.0001 * sum(len(run.write) for run in runs))


async def p99(fleet: Any) -> float:
    """Seconds of the small requests, sent together."""
    waits = list[float]()

    async def one(number: int) -> None:
        since = time.perf_counter()
        body = {"query": [number % 250, 1, 2], "items": [list(range(20))], **LABELS}
        answer = await fleet.client.post("/generative_scoring", body)
        assert answer.status_code == 200, answer.text
        waits.append(time.perf_counter() - since)

    await asyncio.gather(*(one(number) for number in range(SMALL)))
    return float(np.quantile(waits, 0.99))


async def ratio(make: Callable[..., Any]) -> tuple[float, bool]:
    """p99 of the small requests beside the large one, over that without it, and whether it outlasted them."""
    fleet = await make(1, **SECTIONS)
    (model,) = fleet.models
    model.on_forward = forward
    await p99(fleet)
    alone = await p99(fleet)
    steps = model.steps
    large = asyncio.create_task(fleet.client.post("/generative_scoring", LARGE))
    while model.steps < steps + 3:
        await asyncio.sleep(0.001)
    beside, outlasted = await p99(fleet), not large.done()
    assert (await large).status_code == 200
    print(f"fairness over HTTP: p99 {1e3 * alone:.0f} ms alone, {1e3 * beside:.0f} ms beside, {beside / alone:.2f}x")
    return beside / alone, outlasted


@pytest.mark.risk("R2")
async def test_small_requests_hardly_wait_for_a_large_one(make_fleet: Callable[..., Any]) -> None:
    found, outlasted = await ratio(make_fleet)
    assert outlasted and found <= 3


@pytest.mark.risk("R2", planted=True)
async def test_first_come_first_served_is_seen_to_be_unfair(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted counterpart: the first to come gets the whole step."""

    def first_come(self: FairQueue[Any], budget: int, give: Callable[[Any, int, int], int]) -> int:
        left = budget
        for job in sorted(self, key=lambda job: job.arrival):
            left -= give(job, left, left) if left > 0 else 0
        return budget - left

    monkeypatch.setattr(FairQueue, "serve", first_come)
    found, _ = await ratio(make_fleet)
    assert found > 3
