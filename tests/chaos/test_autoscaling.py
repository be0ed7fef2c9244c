"""Replicas come and go with the work: 1 -> 2 -> 1 under load. No request fails, no stream is cut."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]
STEP_S = 0.1
CLIENTS = 12  # more than one replica does
FIELDS = {"query": "q" * 40, "items": ["a" * 20, "b" * 21, "c" * 22], "labels": ["y", "n"]}
SCALING = {
    "max_replicas": 2,
    "target_drain_s": 0.2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 15,
    "look_back_period_s": 10.5,
}


@dataclass
class ArrayHistogram:
    """Holds what the clients saw."""

    answered: int = 0
    streams: int = 0
    failed: list[str] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, url: str, tally: ArrayHistogram) -> None:
    try:
        answer = await http.post(f"{url}/generative_scoring", json=FIELDS)
    except httpx.HTTPError as error:
        tally.failed.append(repr(error))
        return
    if answer.status_code == 200:
        tally.answered += 1
    else:
        tally.failed.append(f"{answer.status_code} {answer.text[:200]}")


async def listen(http: httpx.AsyncClient, url: str, tally: ArrayHistogram) -> None:
    """A stream of 40 tokens, which must end as it promised to."""
    body = {"prompt": "hello", "max_tokens": 40, "stream": True, "ignore_eos": True}
    try:
        answer = await http.post(f"{url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        tally.failed.append(repr(error))
        return
    if answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text:
        tally.streams += 1
    else:
        tally.failed.append(f"stream: {answer.status_code} {answer.text[-200:]}")


@contextlib.asynccontextmanager
async def clients(count: int, pause_s: float, work: Callable[[], Any]) -> AsyncIterator[None]:
    """So many, each asking again once it has its answer and has paused; each may finish what it has begun."""
    ended = asyncio.Event()

    async def one() -> None:
        while not ended.is_set():
            await work()
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
        try:
            yield
        finally:
            ended.set()


async def until(name: str, replicas: int, tally: ArrayHistogram) -> float:
    """Seconds until so many replicas run, and no other is starting or stopping. Fails as soon as a request has."""
    from ray import serve

    started = time.monotonic()
    async with asyncio.timeout(240):
        while True:
            assert not tally.failed
            found = (await asyncio.to_thread(serve.status)).applications[name].deployments["Replica"].replica_states
            if {str(getattr(k, "value", k)): n for k, n in found.items() if n} == {"RUNNING": replicas}:
                return time.monotonic() - started
            await asyncio.sleep(0.25)


def test_replicas_follow_the_work(
    cluster: Callable[..., str], toy_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(follow(cluster, toy_args, monkeypatch))


async def follow(cluster: Callable[..., str], toy_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    from deployments import app

    made = app.build

    def slow(args: Any) -> Any:
        """The same application; each step of a replica takes as long as one of a large model."""
        found = made(args)
        replica = found._bound_deployment.init_args[1]._bound_deployment
        environment = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "ASSAY_TEST_DELAY_STEP": str(STEP_S)}
        options = replica.ray_actor_options | {"runtime_env": {"env_vars": environment}}
        replica._replica_config.update(ray_actor_options=options)
        return found

    monkeypatch.setattr(app, "build", slow)
    engine = toy_args["engine"] | {"token_budget": 128, "prefix_cache": False}
    args = toy_args | {"engine": engine, "drain": {}, "replica": {"num_cpus": 0.1}, "autoscaling": SCALING}
    args |= {"health": {"period_s": 2.0, "timeout_s": 60.0}}  # a loaded machine is no fault
    url = await asyncio.to_thread(cluster, "scaling", args)
    tally = ArrayHistogram()
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=64)) as http:
        await until("scaling", 1, tally)
        async with clients(CLIENTS, 0.0, lambda: ask(http, url, tally)):
            up_s = await until("scaling", 2, tally)
            await asyncio.sleep(3)
        heavy = tally.answered
        async with clients(1, 1.0, lambda: ask(http, url, tally)), clients(1, 4.0, lambda: listen(http, url, tally)):
            down_s = await until("scaling", 1, tally)
    await asyncio.to_thread(serve.delete, "scaling")
    print(
        f"\n1 -> 2 after {up_s:.0f} s, 2 -> 1 after {down_s:.0f} s; {heavy} requests under the large load, "
        f"{tally.answered - heavy} and {tally.streams} streams under the small one; failed: {len(tally.failed)}"
    )
    assert not tally.failed
    assert heavy > CLIENTS and tally.answered > heavy and tally.streams
