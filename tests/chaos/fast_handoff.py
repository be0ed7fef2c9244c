"""A fleet in fast mode that shrinks from two replicas to one under streams and plain answers, or from two ingresses.
Run by test_fast_handoff.py in a process of its own; prints one line of JSON."""

import asyncio
import itertools
import json
import os
import signal
import sys
from typing import Any

import httpx

from benchmarks.fleet.service import INGRESS, Fleet
from tests.conftest import TOY_ARGS

STREAMS = 8
SCORE = {"query": "q" * 40, "items": ["a" * 20, "b" * 21, "c" * 22], "labels": ["y", "n"]}


async def stream(http: httpx.AsyncClient, url: str, number: int, begun: asyncio.Event | None = None) -> list[int]:
    """The tokens of a seeded stream; nothing that ended with an error or was cut."""
    body = {"prompt": [5, 6, number], "max_tokens": 400, "seed": number, "stream": True, "ignore_eos": True}
    ids: list[int] = []
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return []
                    ids += event["choices"][0]["token_ids"]
                    if begun is not None:
                        begun.set()
    except httpx.HTTPError:
        return []
    return ids


async def scores(http: httpx.AsyncClient, urls: Any, ended: asyncio.Event) -> list[int]:
    """Statuses of a client that asks again and again, at each ingress in turn."""
    found = []
    while not ended.is_set():
        found.append((await http.post(f"{next(urls)}/generative_scoring", json=SCORE)).status_code)
    return found


async def shrunk(fleet: Fleet) -> dict[str, Any]:
    urls = itertools.cycle(fleet.urls)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=64)) as http:
        peace = await asyncio.gather(*(stream(http, next(urls), number) for number in range(STREAMS)))
        begun, ended = [asyncio.Event() for _ in peace], asyncio.Event()
        streams = [asyncio.create_task(stream(http, next(urls), n, begun[n])) for n in range(STREAMS)]
        client = asyncio.create_task(scores(http, urls, ended))
        await asyncio.gather(*(event.wait() for event in begun))
        before = fleet.pids()
        await asyncio.to_thread(fleet.deploy, 1, 120.0)
        told = await asyncio.gather(*streams)
        while len(fleet.pids()) > 1:
            await asyncio.sleep(0.1)
        ended.set()
        statuses = await client
    return {
        "replicas": [len(before), len(fleet.pids())],
        "streams": len(told),
        "wrong": sum(one != other for one, other in zip(told, peace, strict=True)),
        "handed_off": fleet.total("assay_resumes_total"),
        "answered": statuses.count(200),
        "failed": len(statuses) - statuses.count(200),
    }


async def without_an_ingress(fleet: Fleet, *, killed: bool) -> dict[str, Any]:
    """Streams at two ingresses, which ask the application past Serve's code, while one of them is taken away, or
    killed."""
    urls = itertools.cycle(fleet.urls)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        peace = await asyncio.gather(*(stream(http, next(urls), number) for number in range(STREAMS)))
        begun, before = [asyncio.Event() for _ in peace], len(fleet.urls)
        streams = [asyncio.create_task(stream(http, next(urls), n, begun[n])) for n in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        if killed:
            os.kill(fleet.pids(INGRESS)[0], signal.SIGKILL)
        fleet.ingresses = 1
        await asyncio.to_thread(fleet.deploy, 1, 120.0)
        told = await asyncio.gather(*streams)
    wrong = sum(one != other for one, other in zip(told, peace, strict=True))
    return {"ingresses": [before, len(fleet.urls)], "streams": len(told), "wrong": wrong}


def main() -> None:
    os.environ |= {"ASSAY_TEST_FAULTS": "1", "ASSAY_TEST_DELAY_STEP": "0.02"}  # a stream takes eight seconds
    args = TOY_ARGS | {
        "ingress": {"count": 2, "num_cpus": 0.1},
        "replica": {"count": 2, "num_cpus": 0.1},
        "drain": {"handoff_s": float(sys.argv[1]), "grace_s": 9},
    }
    taken = sys.argv[2]
    with Fleet.started(args, gpus=0, ingresses=2, fast=True, direct=True) as fleet:
        fleet.deploy(2 if taken == "replica" else 1, 240.0)
        found = shrunk(fleet) if taken == "replica" else without_an_ingress(fleet, killed=taken == "killed ingress")
        print(json.dumps(asyncio.run(found)), flush=True)


if __name__ == "__main__":
    main()
