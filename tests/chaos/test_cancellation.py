"""Clients that leave or switch Ray's watch off, over HTTP and Ray: a service of its own, whose steps take 50 ms."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEP_S = 0.05
DEADLINE_S = 15.0
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 1_000, "ignore_eos": True}  # 50 s of steps
SCORING = {"query": [1, 2], "items": [[n % 250, *[5] * 7] for n in range(4_000)], "label_token_ids": [65, 66]}
UNWATCHED = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1"}


@pytest.fixture(scope="module")
def url(toy_args: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    args = toy_args | {
        "engine": {"kv_slots": 8192, "max_running": 2, "token_budget": 64},
        "deadlines": {"generation_s": DEADLINE_S, "scoring_s": DEADLINE_S},
        "health": {"period_s": 60.0},  # a canary would be a request that is alive
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port, "request_timeout_s": 3610},
        "applications": [{"name": "a", "import_path": "deployments.app:build", "args": args}],
    }
    path = tmp_path_factory.mktemp("service") / "config.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"ASSAY_TEST_DELAY_STEP": str(STEP_S), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deployments.cli", "serve", str(path)]
    service = subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        service.send_signal(signal.SIGINT)
        service.wait(60)


@pytest.fixture
async def http(url: str) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        async with asyncio.timeout(180):
            while True:
                try:
                    if (await client.get("/readyz")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)
        yield client


async def alive(http: httpx.AsyncClient) -> dict[str, float]:
    """Returns what is alive in the replica, and its steps so far."""
    text = (await http.get("/metrics")).text
    names = (
        "assay_unfinished_requests",
        "assay_running_sequences",
        "assay_queued_requests",
        "assay_step_seconds_count",
    )
    found = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                found[sample.name] += sample.value
    return found


async def until(http: httpx.AsyncClient, name: str, value: float) -> float:
    """Seconds until the figure has this value."""
    started = time.perf_counter()
    async with asyncio.timeout(30):
        while (await alive(http))[name] != value:
            await asyncio.sleep(0.01)
    return time.perf_counter() - started


async def started(http: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> "asyncio.Task[Any]":
    """A request that is being worked on."""
    await until(http, "assay_unfinished_requests", 0)
    async with asyncio.timeout(60):
        while True:
            task = asyncio.create_task(http.post(path, json=body, headers=headers))
            while not task.done():
                if (await alive(http))["assay_unfinished_requests"] == 1:
                    return task
            # The ingress still counts work whose client has left: nothing told it of the queue since.
            assert task.result().status_code == 429, task.result().text
            await asyncio.sleep(float(task.result().headers["retry-after"]))


@pytest.mark.risk("R4")
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ENDLESS), ("/generative_scoring", SCORING)])
async def test_a_client_that_leaves_frees_what_it_held(http: httpx.AsyncClient, path: str, body: Any) -> None:
    task = await started(http, path, body)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    seconds = await until(http, "assay_unfinished_requests", 0)
    print(f"{path}: free after {seconds:.2f} s, the next look at the metrics included")
    assert seconds < DEADLINE_S / 2
    assert (await alive(http))["assay_running_sequences"] == 0


async def test_a_client_that_leaves_the_queue_is_forgotten(http: httpx.AsyncClient) -> None:
    running = await started(http, "/v1/completions", ENDLESS | {"n": 2})
    await until(http, "assay_running_sequences", 2)
    waiting = asyncio.create_task(http.post("/v1/completions", json=ENDLESS))
    await until(http, "assay_queued_requests", 1)
    waiting.cancel()
    assert await until(http, "assay_queued_requests", 0) < DEADLINE_S / 2
    assert (await alive(http))["assay_running_sequences"] == 2
    running.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)


@pytest.mark.risk("R5")
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ENDLESS), ("/generative_scoring", SCORING)])
async def test_headers_of_ray_switch_no_deadline_off(http: httpx.AsyncClient, path: str, body: Any) -> None:
    """Planted by the client: no time-out, no watch for its leaving. It stays, and is answered; or it leaves."""
    since = time.perf_counter()
    answer = await (await started(http, path, body, **UNWATCHED))
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert time.perf_counter() - since < 2 * DEADLINE_S
    task = await started(http, path, body, **UNWATCHED)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    seconds = await until(http, "assay_unfinished_requests", 0)
    print(f"{path}, unwatched: free after {seconds:.2f} s of a deadline of {DEADLINE_S:g} s")
    assert seconds < 2 * DEADLINE_S
