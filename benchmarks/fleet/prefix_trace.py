"""Sends one trace of shared prefixes to a fleet and to the simulation of routing, and compares what the caches held.

The trace is that of `benchmarks.fleet.sim_routing`: prefixes drawn with Zipf's frequencies, twice as many as all caches
hold, each before an item that no other request has. The fleet's caches, its speed and the time of a lone request, which
a step takes at least, are measured first, and the simulation takes them. Requests are sent when they are due, whatever
became of those before. The first `WARM` of the time does not count.
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import aiohttp

from benchmarks.fleet.client import OK, PATIENCE_S
from benchmarks.fleet.load import REFUSED
from benchmarks.fleet.service import Fleet
from benchmarks.fleet.sim_routing import POLICIES, WARM, Arrival, Catalogue, Scenario, Simulation, trace
from benchmarks.support import workloads
from benchmarks.support.report import Row
from engine.config import EngineConfig
from engine.requests import ScoreRequest

SLOTS = "assay_kv_slots"  # of every replica, whatever their state
SPEED_S, RISE_S = 5.0, 1.0  # of the load that measures a replica's speed, and its beginning that does not count
AT_ONCE = 16  # of that load, for each replica
LONE = 21  # requests whose median time is a step's least
LOAD = 0.85  # of the simulation's published rows
FRESH = 2  # ids at the beginning of an item that no other has
LEAD_S = 0.2  # from the start of a trace to its first request


class Scored(NamedTuple):
    """Holds one answer: when its request was due, how late it was sent, and the tokens that its prompt and its prefix
    have and that were cached."""

    due_s: float
    late_s: float
    took_s: float
    status: int
    prompt: int
    prefix: int
    cached: int


class Bodies:
    """Makes the JSON bodies of a catalogue's requests. Two requests with the same prefix have different items: the
    first ids of an item count the bodies."""

    def __init__(self, catalogue: Catalogue, vocab: int) -> None:
        self._requests = catalogue.requests
        self._vocab = vocab
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._requests)

    def request(self, number: int) -> ScoreRequest:
        return self._requests[number]

    def prepare(self, number: int) -> tuple[bytes, bytes]:
        """Returns what stands before and behind the two ids that differ; the first call for a request serialises it."""
        if number not in self._frames:
            request = self._requests[number]
            body = {
                "query": (request.prefix % self._vocab).tolist(),
                "items": [[-1, *(request.ids[FRESH:] % self._vocab).tolist()]],
                "label_token_ids": [label % self._vocab for label in workloads.LABELS],
                "detail": "probabilities",
            }
            before, _, behind = json.dumps(body).encode().partition(b"-1")
            self._frames[number] = before, behind
        return self._frames[number]

    def next(self, number: int) -> bytes:
        """Returns the next body of a request."""
        before, behind = self.prepare(number)
        self._made += 1
        return b"%b%d, %d%b" % (before, *divmod(self._made, self._vocab), behind)


def scenario(replicas: int, ingresses: int, seconds: float, *, gpus: bool) -> Scenario:
    """Returns the simulation's steady scenario; without GPUs its requests have a quarter of the tokens."""
    found = Scenario(
        replicas=replicas,
        ingresses=ingresses,
        load=LOAD,
        seconds=seconds,
        step_tokens=EngineConfig().token_budget,
    )
    if gpus:
        return found
    prefix, item = ((least // 4, most // 4) for least, most in (found.prefix_tokens, found.item_tokens))
    return replace(found, prefix_tokens=prefix, item_tokens=item)


def rows(fleet: Fleet, given: Scenario, vocab: int) -> Iterator[Row]:
    """Measures the fleet's speed and runs a trace over it, then the simulations of that trace.

    Args:
        fleet: Runs as many replicas and ingresses as `given` says.
        given: Its `tokens_per_s`, `cache_tokens` and `least_step_s` are replaced by what the fleet has.
        vocab: Ids of requests are below it.
    """
    found = replace(given, cache_tokens=int(fleet.total(SLOTS) / fleet.count))
    found = replace(found, tokens_per_s=asyncio.run(_speed(fleet.urls, found, vocab)) / fleet.count)
    found = replace(found, least_step_s=asyncio.run(_lone(fleet.urls, found, vocab)))
    arrivals = trace(found)
    bodies = Bodies(Catalogue(found), vocab)
    for number in {arrival.number for arrival in arrivals}:
        bodies.prepare(number)
    measured = summary(asyncio.run(_replay(fleet.urls, arrivals, bodies)), found)
    simulated = {
        policy: Simulation(replace(found, policy=policy), arrivals).run() | {"policy": f"{policy}, simulated"}
        for policy in POLICIES
    }
    share = float(measured["hit_rate"] or 0) / max(1e-9, float(simulated["service"]["hit_rate"] or 0))
    yield measured | {"hits_of_simulated": share}
    for row in simulated.values():
        yield {key: value for key, value in row.items() if key != "simulated_s"} | {"case": measured["case"]}


def summary(answers: Sequence[Scored], scenario: Scenario) -> Row:
    """Returns the fleet's row, with the names of the simulation's."""
    counted = [one for one in answers if one.due_s >= WARM * scenario.seconds]
    good = [one for one in counted if one.status == OK]
    times = sorted(one.took_s for one in good)
    refused = sum(one.status == REFUSED for one in counted)
    return {
        "case": "prefix trace",
        "policy": "the fleet",
        "replicas": scenario.replicas,
        "ingresses": scenario.ingresses,
        "load": scenario.load,
        "cache_tokens": scenario.cache_tokens,
        "replica_tokens_s": scenario.tokens_per_s,
        "least_step_ms": 1e3 * scenario.least_step_s,
        "requests": len(counted),
        "hit_rate": sum(one.cached for one in good) / max(1, sum(one.prefix for one in good)),
        "p50_ms": 1e3 * times[len(times) // 2] if times else None,
        "p99_ms": 1e3 * times[int(0.99 * len(times))] if times else None,
        "refused_1000": 1e3 * refused / max(1, len(counted)),
        "failed": len(counted) - len(good) - refused,
        "late_ms": 1e3 * max((one.late_s for one in counted), default=0.0),
    }


async def _speed(urls: Sequence[str], scenario: Scenario, vocab: int) -> float:
    """Returns the tokens a second that all replicas compute together of requests with prefixes of their own. Those that
    are cached, once all have been sent, do not count."""
    catalogue = Catalogue(replace(scenario, seed=scenario.seed + 1))
    bodies, numbers = Bodies(catalogue, vocab), itertools.cycle(range(len(catalogue.requests)))
    started, computed = time.monotonic(), 0

    async def caller(http: aiohttp.ClientSession) -> None:
        nonlocal computed
        while (passed := time.monotonic() - started) < SPEED_S:
            found = await _ask(http, urls, next(numbers), bodies, time.monotonic(), passed)
            if RISE_S <= time.monotonic() - started < SPEED_S:
                computed += found.prompt - found.cached

    async with _session() as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE * scenario.replicas):
            group.create_task(caller(http))
    return computed / (SPEED_S - RISE_S)


async def _lone(urls: Sequence[str], scenario: Scenario, vocab: int) -> float:
    """Returns the median time of short requests, one after the other."""
    bodies = Bodies(Catalogue(replace(scenario, seed=scenario.seed + 2)), vocab)
    short = sorted(range(len(bodies)), key=lambda number: len(bodies.request(number).ids))[:LONE]
    async with _session() as http:
        found = [await _ask(http, urls, number, bodies, time.monotonic(), 0.0) for number in short]
    return statistics.median(one.took_s for one in found)


async def _replay(urls: Sequence[str], arrivals: Sequence[Arrival], bodies: Bodies) -> list[Scored]:
    start = time.monotonic() + LEAD_S
    async with _session() as http, asyncio.TaskGroup() as group:
        tasks = []
        for due_s, number in arrivals:
            await asyncio.sleep(max(0.0, start + due_s - time.monotonic()))
            tasks.append(group.create_task(_ask(http, urls, number, bodies, start + due_s, due_s)))
    return [task.result() for task in tasks]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
        headers={"content-type": "application/json"},
        trust_env=False,
    )


async def _ask(
    http: aiohttp.ClientSession, urls: Sequence[str], number: int, bodies: Bodies, due: float, due_s: float
) -> Scored:
    request, sent = bodies.request(number), time.monotonic()
    prompt, prefix = len(request.prefix) + len(request.ids), len(request.prefix)
    status, cached = 0, 0
    try:
        async with http.post(urls[number % len(urls)] + "/generative_scoring", data=bodies.next(number)) as answer:
            status, body = answer.status, await answer.read()
            if status == OK:
                cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (aiohttp.ClientError, OSError, TimeoutError):
        pass
    done = time.monotonic()
    return Scored(due_s, sent - due, done - due, status, prompt, prefix, min(cached, prefix))
