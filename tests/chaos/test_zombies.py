"""R9 over the whole service, at the default periods: one of two replicas is lost in each of four ways, under load.

/readyz asks for both, so it tells when the loss is noticed and when the replacement answers.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.protocol import GenerateCall, Route
from deployments.routing.load_tracker import load_tracker_of
from engine.requests import GenerateRequest
from gpu_sampler.sampling_params import SamplingParams
from tests.support import toy_model

pytestmark = pytest.mark.slow
APP = "zombies"
HEALTH = {"period_s": 5.0, "timeout_s": 5.0, "step_timeout_s": 10.0, "check_period_s": 2.0, "check_timeout_s": 4.0}
PERIODS = 2 * HEALTH["period_s"]
WHOLE_S = 35.0
ANSWER_S = 5.0  # of a request that has moved
DROPPED_S = 20.0  # a stall of 10 s and three bad answers, with some room: 10 s of the 30 s are left for a start
FAULTS = {"hang": (toy_model.HANG,), "device": toy_model.LOSE_DEVICE, "thread": toy_model.END_THREAD, "frozen": ()}


@dataclass
class Load:
    """Small requests, one after another in each of four lanes: when each began, how long it took, its status."""

    url: str
    http: httpx.AsyncClient
    told: list[tuple[float, float, int]] = field(default_factory=list)
    over: bool = False

    async def lane(self, number: int) -> None:
        while not self.over:
            began = time.monotonic()
            body = {"prompt": [number, len(self.told) % 250], "max_tokens": 3}
            answer = await self.http.post(self.url + "/v1/completions", json=body)
            self.told.append((began, time.monotonic() - began, answer.status_code))
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def url(cluster: Callable[..., str], toy_args: dict[str, Any]) -> str:
    more = {"replica": {"count": 2, "num_cpus": 0.1}, "health": HEALTH | {"min_replicas": 2}}
    return cluster(APP, toy_args | more)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=90, trust_env=False) as client:
        yield client


async def replicas_of(url: str, http: httpx.AsyncClient) -> set[str]:
    text = (await http.get(url + "/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.labels["replica"] for s in samples if s.labels.get("deployment") == "Replica"}


async def until(url: str, http: httpx.AsyncClient, status: int, limit_s: float) -> float:
    """When /readyz answered so."""
    async with asyncio.timeout(limit_s):
        while (await http.get(url + "/readyz")).status_code != status:
            await asyncio.sleep(0.05)
    return time.monotonic()


async def until_dropped(before: set[str]) -> float:
    """When one of them is no longer among those that Serve tells every caller of."""
    loads = load_tracker_of(APP, "Replica")
    async with asyncio.timeout(60):
        while before <= set(loads.replicas):
            await asyncio.sleep(0.05)
    return time.monotonic()


def poison(fault: tuple[int, ...]) -> GenerateCall:
    prompt = np.array([5, *fault], np.int32)
    return (GenerateRequest(request_id="poison", prompt=prompt, params=SamplingParams(max_tokens=2), seed=1),)


def freeze() -> int:
    """Stops the process of one replica of this test's own cluster."""
    ours = psutil.Process().children(recursive=True)
    found = [process for process in ours if any(f"ServeReplica:{APP}:Replica" in part for part in process.cmdline())]
    os.kill(found[0].pid, signal.SIGSTOP)
    return int(found[0].pid)


@pytest.mark.risk("R9")
@pytest.mark.timeout(500)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_lost_replica_leaves_the_routing_and_is_replaced(url: str, http: httpx.AsyncClient, fault: str) -> None:
    from ray import serve

    await until(url, http, 200, 240)
    before = await replicas_of(url, http)
    handle = serve.get_deployment_handle("Replica", APP)
    await asyncio.to_thread(handle.card.remote().result, timeout_s=30)  # from now on Serve tells us of replicas, too
    load = Load(url, http)
    lanes = [asyncio.create_task(load.lane(number)) for number in range(4)]
    while len(load.told) < 20:
        await asyncio.sleep(0.01)

    struck = time.monotonic()
    if fault == "frozen":
        pid = freeze()
    else:
        handle.generate.remote(poison(FAULTS[fault]), route=Route((min(before),), 0))
    noticed = await until(url, http, 503, PERIODS + 10)
    dropped = await until_dropped(before)
    replaced = await until(url, http, 200, 240)
    load.over = True
    await asyncio.gather(*lanes)
    if fault == "frozen" and psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)

    after = await replicas_of(url, http)
    failed = [status for _, _, status in load.told if status != 200]
    longest = max(seconds for _, seconds, _ in load.told)
    print(
        f"R9 {fault}: out of /readyz and routing after {noticed - struck:.1f} s, dropped by Serve after "
        f"{dropped - struck:.1f} s, replaced after {replaced - struck:.1f} s, {replaced - dropped:.1f} s of them "
        f"the start of another; {len(failed)} of {len(load.told)} requests failed, longest {longest:.1f} s"
    )
    assert noticed - struck < PERIODS + 1
    assert dropped - struck < DROPPED_S
    assert not failed
    assert len(after) == 2 and len(after & before) == 1
    if fault == "frozen":  # nothing of it answers: only the canaries tell
        assert replaced - struck < WHOLE_S and longest < PERIODS + ANSWER_S
