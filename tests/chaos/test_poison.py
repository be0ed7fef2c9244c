"""A request that ends every process that reads it, or makes its steps hang: two replicas are lost to it, and nothing
else."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import toy_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SECTIONS = {
    "ingress": {"count": 2, "num_cpus": 0.1},
    "replica": {"count": 2, "num_cpus": 0.1},
    "health": {"period_s": 1.0, "min_replicas": 1, "step_timeout_s": 3.0},
    "drain": {"handoff_s": 5.0, "grace_s": 5.0},
    "deadlines": {"generation_s": 300.0, "scoring_s": 300.0},
}


async def stream(http: httpx.AsyncClient, url: str, number: int, begun: asyncio.Event) -> list[int]:
    body = {"prompt": [number, 5, 6], "max_tokens": 300, "seed": number, "stream": True, "ignore_eos": True}
    ids: list[int] = []
    async with http.stream("POST", url + "/v1/completions", json=body | {"return_token_ids": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                ids += event["choices"][0]["token_ids"]
                begun.set()
    return ids


async def score(http: httpx.AsyncClient, url: str, number: int) -> Any:
    items = np.random.default_rng(number).integers(0, 250, (200, 40)).tolist()
    body = {"query": [1, 2, number], "items": items, "label_token_ids": [65, 66], "layout": "columns"}
    answer = await http.post(url + "/generative_scoring", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["columns"]["logprobs"]


async def poisoned(cluster: Any, token: int) -> tuple[int, list[int], int]:
    """Status and repeated statuses of the poison, and how many replicas were lost. Ten neighbours are held against
    their own answers in peace."""
    async with httpx.AsyncClient(timeout=250, trust_env=False) as http:
        url = cluster.url
        peace = [await stream(http, url, number, asyncio.Event()) for number in range(6)]
        scores = [await score(http, url, number) for number in range(4)]
        before = set(cluster.pids("ServeReplica:chaos:Replica"))
        begun = [asyncio.Event() for _ in peace]
        neighbours = [asyncio.create_task(stream(http, url, number, begun[number])) for number in range(6)]
        others = [asyncio.create_task(score(http, url, number)) for number in range(4)]
        await asyncio.gather(*(event.wait() for event in begun))
        poison = {"prompt": [5, token], "max_tokens": 5}
        first = await http.post(url + "/v1/completions", json=poison)
        assert await asyncio.gather(*neighbours) == peace
        assert await asyncio.gather(*others) == scores
        await cluster.whole()
        lost = len(before - set(cluster.pids("ServeReplica:chaos:Replica")))
        survivors = cluster.pids("ServeReplica:chaos:Replica")
        again = [(await http.post(url + "/v1/completions", json=poison)).status_code for _ in range(8)]
        assert cluster.pids("ServeReplica:chaos:Replica") == survivors
        return first.status_code, again, lost


@pytest.mark.risk("R10")
@pytest.mark.parametrize("token", [pytest.param(toy_model.KILL, id="kill"), pytest.param(toy_model.HANG, id="hang")])
def test_a_poison_request_costs_two_replicas_and_no_neighbour(breakable: Any, token: int) -> None:
    cluster = breakable(**SECTIONS)
    status, again, lost = asyncio.run(poisoned(cluster, token))
    print(f"status {status}, asked again {again}, replicas lost {lost}, neighbours failed 0 of 10")
    assert status == 422
    assert set(again) == {422}
    assert lost == 2
