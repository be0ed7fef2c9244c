"""S10: whatever methods, paths, models, users and headers strangers send, the number of metric series stays."""

import asyncio
import json
import random
import string
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.api.app import build_api
from deployments.config.settings import ApiSettings
from deployments.observability.ingress_metrics import IngressMetrics
from tests.support.toy_model import ByteTokenizer

STRANGERS = 5_000
PATHS = ("/v1/completions", "/generative_scoring", "/v1/rerank", "/v1/models/", "/metrics", "/")
LETTERS = string.ascii_letters + string.digits + "_-./%~é😀"


class Strangers:
    """Random requests, straight to the ASGI app."""

    def __init__(self, app: FastAPI, seed: int) -> None:
        self._app = app
        self._random = random.Random(seed)

    def word(self, most: int = 24) -> str:
        return "".join(self._random.choices(LETTERS, k=self._random.randint(1, most)))

    def scope(self) -> dict[str, Any]:
        dice = self._random
        path = dice.choice(PATHS) + dice.choice(("", self.word()))
        method = dice.choice(("GET", "POST", "POST", "OPTIONS", "HEAD", self.word(8).upper()))
        words = (self.word().encode() for _ in range(4))
        names = (b"user-agent", b"x-request-id", b"x-request-timeout-seconds", b"authorization")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": self.word().encode(),
            "headers": [(b"content-type", b"application/json"), *zip(names, words, strict=True)],
            "client": ("127.0.0.1", 1),
            "server": ("api", 80),
        }

    def body(self) -> bytes:
        word = self.word
        return json.dumps({"prompt": "a", "max_tokens": 1, "model": word(), "user": word(), word(): word()}).encode()

    async def one(self) -> int:
        sent: list[int] = []
        read = False

        async def receive() -> dict[str, Any]:
            nonlocal read
            if read:
                await asyncio.Event().wait()  # a client that stays
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])

        body = self.body()
        await self._app(self.scope(), receive, send)
        return sent[0]


async def growth(app: FastAPI, metrics: IngressMetrics, count: int) -> int:
    """Series that `count` strangers add once each route has met some of each kind."""
    await reported(Strangers(app, 1), 1000)
    before = series(metrics)
    statuses = await reported(Strangers(app, 2), count)
    assert max(statuses) < 500 and len(statuses) > 3
    return series(metrics) - before


async def reported(strangers: Strangers, count: int) -> set[int]:
    return {await strangers.one() for _ in range(count)}


def series(metrics: IngressMetrics) -> int:
    return sum(len(family.samples) for family in metrics.families())


@pytest.mark.risk("S10", figure="0 more series after 5,000 strangers, 284 in all")
async def test_strangers_add_no_series(backend: Any) -> None:
    metrics = IngressMetrics()
    app = build_api(backend, ByteTokenizer(), ApiSettings(), metrics)
    found = await growth(app, metrics, STRANGERS)
    print(f"S10: {found} series more after {STRANGERS} strangers, {series(metrics)} in all")
    assert found == 0


@pytest.mark.risk("S10", planted=True)
async def test_a_label_from_a_request_would_be_seen(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_set(value: object, allowed: Any) -> str:
        return str(value)

    metrics = IngressMetrics()
    app = build_api(backend, ByteTokenizer(), ApiSettings(), metrics)
    monkeypatch.setattr("deployments.observability.ingress_metrics.known", open_set)
    monkeypatch.setattr("deployments.api.middleware.RequestMiddleware._match", _raw_path)
    assert await growth(app, metrics, 200) > 0


def _raw_path(gate: Callable[..., Any], scope: Any) -> str:
    return str(scope["path"])
