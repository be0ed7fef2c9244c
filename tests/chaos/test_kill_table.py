"""The kill table: twelve clients over two ingresses and two engine replicas while a part of the service is killed,
replaced or taken away. Every answer is held against the one that was given in peace."""

import asyncio
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
REPETITIONS = int(os.environ.get("CHAOS_REPETITIONS", "5"))
TOKENS = 300
SECTIONS = {
    "ingress": {"count": 2, "num_cpus": 0.1},
    "replica": {"count": 2, "num_cpus": 0.1},
    "health": {"period_s": 1.0, "min_replicas": 1},
    "drain": {"handoff_s": 5.0, "grace_s": 5.0},
    "deadlines": {"generation_s": 300.0, "scoring_s": 300.0},
    # Where few cores start four processes beside the replicas these become so slow that the next client has to come
    # again, at either gate: rightly, but no loss that this table is about.
    "admission": {"max_wait_s": 100.0},
    "engine": {"kv_slots": 8192, "max_running": 32, "max_queued_tokens": 1_000_000},
}


@dataclass
class Cell:
    """Holds what the clients of one repetition saw."""

    answered: int = 0
    streams: int = 0
    failed_unary: int = 0
    broken_streams: int = 0
    wrong: int = 0
    reconnects: int = 0
    in_flight: int = 0  # when it happened
    resumes: float = 0
    dark_s: float = 0.0
    whole_again_s: float = 0.0
    words: Counter[str] = field(default_factory=Counter)


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Six streams, three plain generations and three scorings."""
    rng = np.random.default_rng(5)

    def generation(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
        prompt = rng.integers(0, 250, 20 + number).tolist()
        body = {"prompt": prompt, "max_tokens": TOKENS, "seed": number, "return_token_ids": True, "ignore_eos": True}
        return "/v1/completions", body | fields

    found = [generation(number, stream=True, temperature=0.9) for number in range(5)]
    found.append(generation(5, stream=True, n=2, logprobs=2, repetition_penalty=1.2))
    found += [generation(number) for number in range(6, 9)]
    for _ in range(3):
        items = rng.integers(0, 250, (400, 40)).tolist()
        query = rng.integers(0, 250, 50).tolist()
        body = {"query": query, "items": items, "label_token_ids": [65, 66], "layout": "columns"}
        found.append(("/generative_scoring", body))
    return found


class Broken(Exception):
    """A stream that did not end as one does."""


@dataclass
class Heard:
    """Returns what must be equal in a stream, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise Broken(event["error"]["code"])
        for choice in event["choices"]:
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice["token_ids"])
            self.text[index] = self.text.get(index, "") + choice["text"]
            self.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("token_logprobs") or [])
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]


class Client:
    """Asks the same again and again. `excused`: a connection that breaks is taken up again, as a client of a killed
    proxy must."""

    def __init__(self, url: str, request: tuple[str, dict[str, Any]], cell: Cell, *, excused: bool) -> None:
        self.path, self.body = request
        self.url = url + self.path
        self.cell = cell
        self.excused = excused
        self.begun = asyncio.Event()  # of a stream: some of it has come
        self.busy = False

    async def ask(self, http: httpx.AsyncClient) -> Any:
        self.busy = True
        try:
            return await (self._stream(http) if self.body.get("stream") else self._plain(http))
        finally:
            self.busy = False

    async def _plain(self, http: httpx.AsyncClient) -> Any:
        self.begun.set()
        while True:
            try:
                answer = await http.post(self.url, json=self.body)
            except httpx.TransportError as error:
                await self._again(error)
                continue
            if answer.status_code != 200:
                if self.excused and not answer.headers.get("x-assay-request-id"):
                    await self._again(Broken(str(answer.status_code)))
                    continue
                raise Broken(f"{answer.status_code} {answer.text[:80]}")
            body = answer.json()
            return body["columns"]["logprobs"] if "columns" in body else [c["token_ids"] for c in body["choices"]]

    async def _stream(self, http: httpx.AsyncClient) -> Any:
        heard, body = Heard(), self.body
        while True:
            try:
                await self._listen(http, body, heard)
                return heard
            except httpx.TransportError as error:
                await self._again(error)
            except Broken as error:
                if not self.excused or "connection" not in str(error):
                    raise
                await self._again(error)
            if self.body.get("n", 1) == 1 and heard.tokens.get(0):
                body = self.body | {"resume_token_ids": heard.tokens[0]}
            else:
                heard = Heard()

    async def _listen(self, http: httpx.AsyncClient, body: dict[str, Any], heard: Heard) -> None:
        async with http.stream("POST", self.url, json=body) as answer:
            if answer.status_code != 200:
                words = (await answer.aread()).decode()[:80]
                ours = answer.headers.get("x-assay-request-id")
                raise Broken(f"{answer.status_code} {words}" if ours else f"connection: {answer.status_code}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    heard.add(json.loads(line.removeprefix("data: ")))
                    if len(heard.tokens.get(0, ())) >= 10:
                        self.begun.set()
            raise Broken("connection: no end")

    async def _again(self, error: Exception) -> None:
        if not self.excused:
            raise error
        self.cell.reconnects += 1
        await asyncio.sleep(0.05)

    async def loop(self, http: httpx.AsyncClient, expected: Any, over: asyncio.Event) -> None:
        streams = bool(self.body.get("stream"))
        while not over.is_set():
            try:
                found = await self.ask(http)
            except (Broken, httpx.TransportError) as error:
                self.cell.words[f"{type(error).__name__}: {error}"] += 1
                if streams:
                    self.cell.broken_streams += 1
                else:
                    self.cell.failed_unary += 1
                await asyncio.sleep(0.1)
                continue
            if (
                isinstance(found, Heard) and self.excused
            ):  # the pieces of bytes that are no text depend on where it broke
                found.text = expected.text
            if found != expected:
                self.cell.wrong += 1
                self.cell.words[difference(found, expected)] += 1
            self.cell.streams += streams
            self.cell.answered += not streams


def difference(found: Any, expected: Any) -> str:
    if not isinstance(found, Heard):
        return "another answer"
    return "others: " + ", ".join(name for name in vars(found) if getattr(found, name) != getattr(expected, name))


async def kill_replica(cluster: Any) -> None:
    cluster.kill("ServeReplica:chaos:Replica")


async def kill_controller(cluster: Any) -> None:
    cluster.kill("ServeController")


async def kill_proxy(cluster: Any) -> None:
    cluster.kill("ProxyActor")


async def roll(cluster: Any) -> None:
    await asyncio.to_thread(cluster.deploy, release=cluster.release + 1)


async def scale_down(cluster: Any) -> None:
    await asyncio.to_thread(cluster.deploy, count=1)


CELLS: dict[str, Callable[[Any], Awaitable[None]]] = {
    "kill -9 of an engine replica": kill_replica,
    "kill -9 of the controller": kill_controller,
    "kill -9 of a proxy": kill_proxy,
    "rolling update": roll,
    "scale-down": scale_down,
}


async def dark(cluster: Any, cell: Cell, over: asyncio.Event) -> None:
    """The longest time without an answer of any ingress."""
    async with httpx.AsyncClient(timeout=2, trust_env=False) as http:
        last = time.monotonic()
        while not over.is_set():
            try:
                if (await http.get(cluster.url + "/healthz")).status_code == 200:
                    last = time.monotonic()
            except httpx.TransportError:
                pass
            cell.dark_s = max(cell.dark_s, time.monotonic() - last)
            await asyncio.sleep(0.05)


async def run_cell(name: str, cluster: Any, expected: list[Any]) -> Cell:
    cell, over = Cell(), asyncio.Event()
    proxy = name == "kill -9 of a proxy"
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0 if proxy else 32)
    async with httpx.AsyncClient(timeout=httpx.Timeout(200, connect=5), limits=limits, trust_env=False) as http:
        clients = [Client(cluster.url, request, cell, excused=proxy) for request in requests()]
        async with asyncio.TaskGroup() as group:
            for client, answer in zip(clients, expected, strict=True):
                group.create_task(client.loop(http, answer, over))
            watch = group.create_task(dark(cluster, cell, over))
            await asyncio.gather(*(client.begun.wait() for client in clients))
            before = await cluster.total("assay_resumes_total")
            cell.in_flight = sum(client.busy for client in clients)
            started = time.monotonic()
            await CELLS[name](cluster)
            await asyncio.sleep(1.0)  # what was killed is missed by then, and no longer called running
            await cluster.whole()
            cell.whole_again_s = round(time.monotonic() - started, 1)
            if name != "rolling update":  # its ingresses are new ones, and count from nothing
                cell.resumes = await cluster.total("assay_resumes_total") - before
            over.set()
            await watch
    cell.dark_s = round(cell.dark_s, 2)
    return cell


@pytest.mark.risk("R7")
@pytest.mark.risk("R8")
def test_kill_table(breakable: Any, record: Any) -> None:
    cluster = breakable(**SECTIONS)
    table: dict[str, list[Cell]] = {name: [] for name in CELLS}

    async def peace() -> list[Any]:
        async with httpx.AsyncClient(timeout=200, trust_env=False) as http:
            clients = [Client(cluster.url, request, Cell(), excused=False) for request in requests()]
            return [await client.ask(http) for client in clients]

    expected = asyncio.run(peace())
    for repetition in range(REPETITIONS):
        for name in CELLS:
            cell = asyncio.run(run_cell(name, cluster, expected))
            table[name].append(cell)
            print(f"{repetition + 1}. {name}: {cell}", flush=True)
            if cluster.count == 1:
                cluster.deploy(count=2)
                asyncio.run(cluster.whole())
    record("kill-table", _results(table))
    for name, cells in table.items():
        lost = [(cell.failed_unary, cell.broken_streams, cell.wrong) for cell in cells]
        assert lost == [(0, 0, 0)] * REPETITIONS, (name, [cell.words for cell in cells])
        assert all(cell.in_flight >= 11 for cell in cells)
    for name in ("kill -9 of an engine replica", "scale-down"):
        assert sum(cell.resumes for cell in table[name]) > 0, name
    assert max(cell.dark_s for cell in table["kill -9 of a proxy"]) < 5.0


def _results(table: dict[str, list[Cell]]) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "what": "12 clients (6 streams, 3 plain generations, 3 scorings), 2 ingresses, 2 engine replicas, toy model",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, shared",
        "commit": commit.stdout.strip(),
        "repetitions": REPETITIONS,
        "cells": {
            name: [asdict(cell) | {"words": dict(cell.words)} for cell in cells] for name, cells in table.items()
        },
    }
