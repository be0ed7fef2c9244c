"""The trace of shared prefixes: a fleet and a simulation get the same one, and the row shows what their caches hold."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from benchmarks.fleet import prefix_trace
from benchmarks.fleet.prefix_trace import Scored, rows, scenario, summary
from benchmarks.fleet.sim_routing import WARM, PrefixStore, Simulation, trace

SLOTS = 20_000
TOKENS_PER_S = 100_000.0
SMALL = replace(scenario(1, 1, 4.0, gpus=False), cache_tokens=SLOTS, tokens_per_s=TOKENS_PER_S)
ServeStub = Callable[[bool], str]


def test_a_trace_repeats_itself_and_a_simulation_of_it_has_all_its_requests() -> None:
    arrivals = trace(SMALL)
    assert arrivals == trace(SMALL) != trace(replace(SMALL, seed=2))
    simulation = Simulation(SMALL, arrivals)
    row = simulation.run()
    late = [arrival for arrival in arrivals if arrival.when_s >= WARM * SMALL.seconds]
    assert row["requests"] == len(late) == len(simulation.latencies)


def test_a_row_counts_answers_behind_the_start_and_tokens_of_prefixes() -> None:
    def scored(due_s: float, status: int = 200, prefix: int = 100, cached: int = 0) -> Scored:
        return Scored(due_s, 0.001, 0.02, status, 150, prefix, cached)

    begun = WARM * SMALL.seconds
    answers = [scored(begun / 2, cached=100), scored(begun), scored(begun, prefix=300, cached=300)]
    answers += [scored(begun, 429), scored(begun, 500), scored(begun, 0)]
    row = summary(answers, SMALL)
    assert (row["requests"], row["hit_rate"], row["failed"], row["refused_1000"]) == (5, 0.75, 2, 200)
    assert row["p50_ms"] == 20 and row["late_ms"] == 1


@pytest.fixture
def serve_stub() -> Iterator[ServeStub]:
    """`serve_stub(keeps_items)` serves scores as one replica with an LRU cache of `SLOTS` tokens; returns its URL."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = []
    threads: list[threading.Thread] = []

    def serve(keeps_items: bool) -> str:
        cache, turn, items = PrefixStore(SLOTS), asyncio.Lock(), set[tuple[int, ...]]()

        async def score(request: web.Request) -> web.Response:
            body = await request.json()
            query, item = body["query"], body["items"][0]
            assert tuple(item) not in items
            items.add(tuple(item))
            async with turn:
                cached = len(query) if cache.use(hash(tuple(query)), len(query)) else 0
                if keeps_items:
                    cache.use(id(body), len(item))
                await asyncio.sleep((len(query) + len(item) - cached) / TOKENS_PER_S)
            return web.json_response({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}})

        ready = threading.Event()

        async def run() -> None:
            app = web.Application()
            app.router.add_post("/generative_scoring", score)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ended = asyncio.Event()
            running.append((asyncio.get_running_loop(), ended, "http://{}:{}".format(*runner.addresses[0][:2])))
            ready.set()
            await ended.wait()
            await runner.cleanup()

        threads.append(threading.Thread(target=asyncio.run, args=(run(),)))
        threads[-1].start()
        assert ready.wait(10)
        return running[-1][2]

    yield serve
    for loop, ended, _ in running:
        loop.call_soon_threadsafe(ended.set)
    for thread in threads:
        thread.join(10)


@pytest.mark.full
@pytest.mark.parametrize("keeps_items", [False, True])
def test_a_cache_that_holds_more_than_prefixes_is_seen(
    serve_stub: ServeStub, monkeypatch: pytest.MonkeyPatch, keeps_items: bool
) -> None:
    """Without the planted fault a fleet of one replica has the hits of its simulation."""
    monkeypatch.setattr(prefix_trace, "SPEED_S", 1.0)
    monkeypatch.setattr(prefix_trace, "RISE_S", 0.2)
    fleet: Any = SimpleNamespace(urls=(serve_stub(keeps_items),), count=1, total=lambda metric: SLOTS)
    found = list(rows(fleet, SMALL, 1 << 30))
    by_policy = {row["policy"]: row for row in found}
    assert len(found) == len(by_policy) == 5
    fleet_row = by_policy["the fleet"]
    assert fleet_row["failed"] == fleet_row["refused_1000"] == 0
    assert fleet_row["requests"] == by_policy["service, simulated"]["requests"]
    share = float(fleet_row["hits_of_simulated"] or 0)
    assert share < 0.9 if keeps_items else 0.97 < share < 1.03
