"""Makes every figure move: clients of every route, of two applications, and faults. `assay` is the built-in pair of
models behind keys; `toy` is the fault-test model with a pool so small that rows lose their place."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import httpx
import psutil

from deployments.auth.api_keys import digest_of
from tests.support import toy_model

Json = dict[str, Any]
KEY, SCRAPER, PLAIN = ("assay-key-of-a-test-" + name * 24 for name in "abc")
NOTES = [
    {"name": "client", "sha256": digest_of(KEY.encode()).hex(), "scopes": ["inference"]},
    {"name": "prometheus", "sha256": digest_of(SCRAPER.encode()).hex(), "scopes": ["metrics"]},
]
ASSAY: Json = {
    "model": {"path": "builtin", "device": "cpu"},
    "engine": {"max_running": 64, "kv_slots": 32768, "token_budget": 4096},
    "speculation": {"method": "draft_model", "draft": "builtin", "num_speculative_tokens": 4},
    "fanout": {"shard_tokens": 256, "min_items": 4},
    "replica": {"count": 2, "num_cpus": 0.1},
    "auth": {"mode": "keys", "keys": NOTES},
}
TOY: Json = {
    "engine": {"kv_slots": 320, "max_running": 16, "admission_tokens": 1},
    "health": {"period_s": 1.0, "timeout_s": 1.5},
    "admission": {"max_inflight_requests": 24},
    "replica": {"count": 2, "num_cpus": 0.1},
    "limits": {"max_body_bytes": 65536},
}
RED = "A pine chair for reading, sturdy and red, made in Lisbon."
LAMPS = [f"A pine lamp number {number} for reading, sturdy and red, made in Oslo." for number in range(40)]
SCORE = {
    "query": "Query: a red chair\nDocument: ",
    "items": [f"{text}\nRelevant:" for text in (RED, *LAMPS)],
    "labels": [" yes", " no"],
}
STREAM = {"stream": True, "max_tokens": 24, "temperature": 0.8, "seed": 7}
TALK = [{"role": "user", "content": "Which colour is the pine chair for reading, sturdy and red?"}]
QUESTIONS = [
    {"type": "predicate", "instructions": "is it a red chair?"},
    {"type": "choice", "instructions": "which city?", "choices": [{"value": "Oslo"}, {"value": "Lisbon"}]},
]
OF_ASSAY: list[tuple[str, Json]] = [
    ("/generative_scoring", SCORE),
    ("/generative_scoring", SCORE | {"truncate": "item", "max_item_tokens": 9, "items": [RED, *LAMPS[:9]]}),
    ("/v1/score", {"query": [5, 6, 7], "items": [[8, 9], [10]], "label_token_ids": [5, 9], "apply_softmax": False}),
    ("/rerank", {"query": "a red chair", "documents": [RED, *LAMPS[:5]]}),
    ("/v1/rerank", {"query": "a red chair", "documents": [RED, *LAMPS[:5]]}),
    ("/v1/decisions", {"input": RED, "questions": QUESTIONS}),
    ("/v1/completions", {"prompt": "Query: a red chair", "max_tokens": 12, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": "Query: a red chair", "max_tokens": 12, "top_p": 0.9, "top_k": 20, "n": 3}),
    ("/v1/completions", {"prompt": "Document: a pine", **STREAM}),
    ("/v1/chat/completions", {"messages": TALK, **STREAM}),
    ("/v1/completions", {"prompt": "a", "temperature": 1}),
    ("/tokenize", {"prompt": RED}),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "a", "model": "another"}),
]
FAULTS: list[Json] = [{"prompt": [5, token], "max_tokens": 3} for token in (toy_model.NAN, toy_model.RAISE)]
OF_TOY: list[tuple[str, Json]] = [
    *(("/v1/completions", fault) for fault in FAULTS),
    ("/v1/completions", {"prompt": list(range(30, 50)), "max_tokens": 90, "ignore_eos": True, "n": 8}),
    ("/v1/completions", {"prompt": list(range(60, 80)), "max_tokens": 40, "stream": True}),
    ("/generative_scoring", {"query": [5, 6], "items": [[7, 8], [toy_model.NAN]], "label_token_ids": [5, 9]}),
    ("/v1/completions", {"prompt": "x" * 70_000}),
]


class Drive:
    """Clients that go round until `seconds` have passed, and twice at least; whatever a service answers is no error."""

    def __init__(self, assay: str, toys: str, seconds: float) -> None:
        self._assay, self._toys = assay, toys
        self._end = time.monotonic() + seconds
        self.answers: dict[int, int] = {}

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=128)
        async with httpx.AsyncClient(timeout=20, limits=limits, trust_env=False) as http:
            one, other = self._posting(http, self._assay, KEY), self._posting(http, self._toys, None)
            await asyncio.gather(
                *(self._round(one, OF_ASSAY[at:] + OF_ASSAY[:at]) for at in (0, 7)),
                self._round(other, OF_TOY),
                self._burst(other),
                self._leaving(http),
                self._strangers(http),
                self._holding(),
                self._uploading(http),
            )

    async def _round(self, post: Callable[[str, Json], Awaitable[None]], bodies: Iterable[tuple[str, Json]]) -> None:
        bodies, rounds = list(bodies), 0
        while time.monotonic() < self._end or rounds < 2:
            for path, body in bodies:
                await post(path, body)
            rounds += 1

    def _posting(self, http: httpx.AsyncClient, url: str, key: str | None) -> Callable[[str, Json], Awaitable[None]]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}

        async def post(path: str, body: Json) -> None:
            with contextlib.suppress(httpx.TransportError):
                status = (await http.post(url + path, json=body, headers=headers)).status_code
                self.answers[status] = self.answers.get(status, 0) + 1

        return post

    async def _burst(self, post: Callable[[str, Json], Awaitable[None]]) -> None:
        """More requests than the connection limit lets in."""
        while time.monotonic() < self._end:
            body = {"prompt": list(range(30, 40)), "max_tokens": 30, "ignore_eos": True}
            await asyncio.gather(*(post("/v1/completions", body) for _ in range(40)))
            await asyncio.sleep(1)

    async def _leaving(self, http: httpx.AsyncClient) -> None:
        """Clients that go after a stream's first bytes."""
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"prompt": "Document:", "stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 1}
        while time.monotonic() < self._end:
            with contextlib.suppress(httpx.TransportError):
                async with http.stream("POST", f"{self._assay}/v1/completions", json=body, headers=headers) as answer:
                    async for _ in answer.aiter_bytes():
                        break
            await asyncio.sleep(0.5)

    async def _strangers(self, http: httpx.AsyncClient) -> None:
        """No key, one that no client has, and one that may not do this."""
        keys = (None, PLAIN, SCRAPER)
        while time.monotonic() < self._end:
            for key in keys:
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                with contextlib.suppress(httpx.TransportError):
                    await http.post(f"{self._assay}/v1/completions", json={"prompt": "a"}, headers=headers)
            await asyncio.sleep(1)

    async def _uploading(self, http: httpx.AsyncClient) -> None:
        """Bodies that come slowly: a body is in flight until it is read."""

        async def parts() -> AsyncIterator[bytes]:
            yield b'{"prompt": [5, 6], "max_tokens": 2'
            await asyncio.sleep(2)
            yield b"}"

        headers = {"content-type": "application/json"}
        while time.monotonic() < self._end:
            with contextlib.suppress(httpx.TransportError):
                await http.post(f"{self._toys}/v1/completions", content=parts(), headers=headers)

    async def _holding(self) -> None:
        """A replica that stands still for a while: it misses scrapes and canaries."""
        await asyncio.sleep(5)
        held = replicas("toys")[0]
        held.suspend()
        try:
            await asyncio.sleep(5)
        finally:
            held.resume()


def replicas(application: str) -> list[psutil.Process]:
    """Processes of an application's replicas, all descendants of this one."""
    names = (f"{application}#Replica#", f":{application}:Replica")  # as Ray calls them while idle and at work
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(name in " ".join(process.cmdline()) for name in names):
                found.append(process)
    return found


async def poison(url: str) -> int:
    """A request that ends the replicas that take it, and is refused by then; the status of its answer."""
    body = {"prompt": [5, toy_model.KILL], "max_tokens": 3}
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        status = (await http.post(f"{url}/v1/completions", json=body)).status_code
    with contextlib.suppress(TimeoutError):  # unless they came back before anybody asked
        await ready(url, 0, within_s=10)
    return status


async def ready(url: str, replicas: int, within_s: float = 180) -> None:
    """Waits until so many replicas pass their canaries, as /readyz tells."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http, asyncio.timeout(within_s):
        while (await http.get(f"{url}/readyz")).json().get("replicas_ready") != replicas:
            await asyncio.sleep(0.1)
