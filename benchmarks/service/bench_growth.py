"""Measures how the cost of one operation grows with what a process holds: requests, tenants, replicas, keys, processes.

    python -m benchmarks.service.bench_growth --out benchmarks/results

It needs no device and no service. Each row is one operation at one size, with the median processor time of several
runs, and the growth from the size before: the exponent p of time = size^p, 1 for a cost in proportion. Rows that have
a bound name it; the exit status is 1 where one is exceeded.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.support.report import Row, publish
from deployments.auth.api_keys import ApiKey, digest_of
from deployments.auth.authenticator import Authenticator, AuthSettings
from deployments.config.sections import AdmissionArgs, HealthArgs, MetricsArgs, RouterArgs
from deployments.errors import ApiError
from deployments.health_probe import CanaryReply
from deployments.link.client import Link
from deployments.link.server import LinkServer
from deployments.observability.exposition import Snapshot, snapshot
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.observability.link_figures import LinkFigures
from deployments.observability.scrape import MetricsScraper
from deployments.protocol import ReplicaService
from deployments.routing.admission import Admission
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.replica_selection import ReplicaSelector
from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.channels import ResultQueue
from engine.config import Costs, EngineConfig
from engine.engine import Engine
from engine.kv_cache.manager import KVCacheManager, PrefixCache
from engine.request_cost import TenantQueues
from engine.requests import GenerateRequest, Int32s, Load, ScoreRequest, ScoreResult, TenantTokens
from engine.scheduler.request_state import GenerationState, LabelScoreState, RequestTable, Submission, item_ends
from engine.scheduler.scheduler import Scheduler
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from tests.support.toy_model import ToyModel

VOCAB = 1024
RUNS = 7
BUDGET = 8192  # tokens of a step
PLAN_MS, SCRAPE_MS, RANK_US, KEY_US = 5.0, 10.0, 40.0, 10.0


def median_us(run: Callable[[], object], calls: int = 1, runs: int = RUNS) -> float:
    """Returns the median processor time of a call, in microseconds, over `runs` groups of `calls`."""
    times = []
    for _ in range(runs):
        began = time.thread_time_ns()
        for _ in range(calls):
            run()
        times.append((time.thread_time_ns() - began) / calls / 1e3)
    return statistics.median(times)


def with_growth(rows: Sequence[Row]) -> list[Row]:
    """Adds to each row the exponent of its growth since the row before of the same case."""
    last: dict[str, tuple[float, float]] = {}
    found: list[Row] = []
    for row in rows:
        case, size, us = str(row["case"]), float(cast(int, row["size"])), float(cast(float, row["us"]))
        before = last.get(case)
        last[case] = size, us
        exponent = math.log(us / before[1]) / math.log(size / before[0]) if before and us and before[1] else None
        found.append({**row, "growth": exponent})
    return found


# The scheduler.


class Planner:
    """A scheduler without a model. `occupied`: pool slots that requests cannot have."""

    def __init__(self, num_slots: int, occupied: int = 0, max_running: int = 256, budget: int = BUDGET) -> None:
        config = EngineConfig(max_running=max_running, token_budget=budget)
        self.kv_cache = KVCacheManager(num_slots)
        table = RequestTable(max_running, 1024, VOCAB, torch.device("cpu"))
        sampler = Sampler(num_slots=max_running + 1, vocab_size=VOCAB, device=torch.device("cpu"))
        self.scheduler = Scheduler(config, self.kv_cache, table, sampler, None)
        if occupied:
            self.kv_cache.allocate(occupied)
        self._arrivals = itertools.count(1)

    def _submission(self) -> Submission:
        arrival, results = next(self._arrivals), ResultQueue(cast(Any, None))  # a plan hands no result over
        return Submission(results=results, arrival=arrival, submitted=0.0, deadline=math.inf, domain="", queued=80)

    def score(self, tenant: str, prefix: Sequence[int], labels: Sequence[int] = (1, 2)) -> None:
        ids = np.arange(16, dtype=np.int32)
        request = ScoreRequest(
            request_id="s",
            tenant=tenant,
            prefix=np.array(prefix, np.int32),
            ids=ids,
            starts=np.array([0, 16], np.int32),
            labels=np.array(labels, np.int32),
            full=False,
        )
        ends = item_ends(np.diff(request.starts).astype(np.int64))
        self.scheduler.add(LabelScoreState(request=request, ends=ends, **self._submission()))

    def generation(self, tenant: str, prompt: Sequence[int]) -> None:
        params = SamplingParams(max_tokens=64)
        request = GenerateRequest(
            request_id="g", tenant=tenant, prompt=np.array(prompt, np.int32), params=params, seed=1
        )
        self.scheduler.add(GenerationState(request=request, **self._submission()))

    def plan(self) -> None:
        """Plans a step and ends it."""
        step = self.scheduler.plan(time.monotonic())
        if step is not None:
            self.kv_cache.launch()
            self.kv_cache.finish()
            if step.scratch:
                self.kv_cache.free(np.concatenate(step.scratch))
            for state, done in step.prefixes.items():
                self.scheduler.score_batcher.share_prefix(state, done)
                if state.launched:
                    self.scheduler.score_batcher.release(state)


def _prefix(number: int) -> list[int]:
    return [(number * 7 + place * (number % 13 + 1)) % VOCAB for place in range(64)]


def _full_pool(jobs: int) -> Planner:
    """All prefixes fit into no pool: each request takes what others hold."""
    planner = Planner(20_000, occupied=19_900)
    for job in range(jobs):
        planner.score(f"t{job % (jobs // 4)}", _prefix(job))
    return planner


def _roomy(jobs: int) -> Planner:
    planner = Planner(1_000_000)
    for job in range(jobs):
        planner.score(f"t{job % (jobs // 4)}", _prefix(job))
    return planner


def _own_labels(jobs: int) -> Planner:
    """No two requests may share a step."""
    planner = Planner(1_000_000)
    for job in range(jobs):
        planner.score(f"t{job % (jobs // 4)}", _prefix(job), (job % 500, 500 + job % 499))
    return planner


def _waiting_generations(jobs: int) -> Planner:
    """A few sequences are in the middle of their prompts, and no other finds room."""
    planner = Planner(20_000, occupied=16_000, budget=512)
    for job in range(jobs):
        planner.generation(f"t{job % (jobs // 4)}", [job % VOCAB] * 1000)
    return planner


def _one_tenant(jobs: int) -> Planner:
    planner = Planner(1_000_000)
    for job in range(jobs):
        planner.score("one", _prefix(job))
    return planner


def _overdrawn(jobs: int) -> Planner:
    """Every tenant owes the queue 64 turns, as after long answers."""
    planner = _roomy(jobs)
    for state in list(planner.scheduler.scores):
        planner.scheduler.scores.charge(state, 16 * BUDGET // 8)
    return planner


PLANS = {
    "plan, full pool": _full_pool,
    "plan, room for all": _roomy,
    "plan, labels of their own": _own_labels,
    "plan, generations wait for room": _waiting_generations,
    "plan, one tenant": _one_tenant,
    "plan, all tenants overdrawn": _overdrawn,
}


def bench_plan(sizes: Sequence[int]) -> Iterator[Row]:
    """Times one plan, the longest of the first ones, beside `size` waiting requests of a quarter as many tenants."""
    for case, make in PLANS.items():
        make(40).plan()  # the first one of a process initialises libraries
        for jobs in sizes:
            planner = make(jobs)
            us = max(median_us(planner.plan, 1, 1) for _ in range(5))
            yield {"case": case, "size": jobs, "of": "requests", "us": us, "bound_us": PLAN_MS * 1e3}


def bench_tenants(sizes: Sequence[int]) -> Iterator[Row]:
    """Times what one request costs a replica's account: admission, report and end."""
    for tenants in sizes:
        queues = TenantQueues()
        for number in range(tenants):
            queues.add(f"t{number}", 0, 100 + number % 97)

        def request(queues: TenantQueues = queues) -> None:
            queues.before("new", 0, 80)
            queues.add("new", 0, 80)
            queues.largest(8)
            queues.add("new", 0, -80)

        yield {"case": "account of a replica", "size": tenants, "of": "tenants", "us": median_us(request, 20)}


def bench_prefix_tree(sizes: Sequence[int]) -> Iterator[Row]:
    """Times match, insert and eviction of one leaf in a tree of `size` nodes, 64 tokens each."""
    draw = np.random.default_rng(5)
    for nodes in sizes:
        tree = PrefixCache()
        for number in range(nodes):
            ids = np.array([number & 1023, number >> 10, *range(6)], np.int32)
            tree.insert("", ids, np.arange(8, dtype=np.int32) + 8 * number)
        numbers = iter(draw.integers(0, nodes, 40_000).tolist())

        def operate(tree: PrefixCache = tree, numbers: Iterator[int] = numbers) -> None:
            number = next(numbers)
            ids = np.array([number & 1023, number >> 10, *range(6)], np.int32)
            tree.match("", ids)
            slots = tree.evict(8)
            ids = np.array([1023 - (number & 1023), 2_000_000 + number, *range(6)], np.int32)
            tree.insert("", ids, slots)

        us = median_us(operate, 200)
        yield {"case": "prefix tree: match, evict, insert", "size": nodes, "of": "nodes", "us": us}


STREAM_TOKENS = 48


class NoModel(ToyModel):
    """Answers zeros: what is left is the engine's own time."""

    def forward(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor
    ) -> torch.Tensor:
        rows = len(sequences) if kind is StepKind.DECODE else sum(len(one.rows) for one in sequences)
        return torch.zeros((rows, self.vocab_size))

    def forget(self, slots: Int32s) -> None: ...


def bench_streams(sizes: Sequence[int]) -> Iterator[Row]:
    """Times a streamed token in the engine's process, with a model that computes nothing: both threads."""

    os.environ["ASSAY_TEST_FAULTS"] = "1"  # lets the toy model load

    async def run(streams: int) -> float:
        model = NoModel(num_slots=80 * streams + 64, max_model_len=72)
        engine = Engine(model, EngineConfig(max_running=streams, token_budget=BUDGET))
        engine.start()

        async def read(number: int) -> None:
            prompt = np.array([number % 250, number // 250, 1], np.int32)
            params = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS)
            request = GenerateRequest(request_id="g", prompt=prompt, params=params, seed=number)
            async for _ in engine.generate(request):
                pass

        try:
            await read(0)
            began = time.process_time()
            await asyncio.gather(*(read(number) for number in range(streams)))
            return (time.process_time() - began) / (streams * STREAM_TOKENS) * 1e6
        finally:
            engine.stop()

    for streams in sizes:
        us = statistics.median(asyncio.run(run(streams)) for _ in range(3))
        yield {"case": "a token of open streams", "size": streams, "of": "streams", "us": us}


# The ingress.


class Echo:
    """A replica's service that answers immediately. The benchmark scores alone."""

    def load(self) -> Load:
        return Load(0, 0.0)

    def begin_rows(self, request: ScoreRequest, deliver: Callable[[ScoreResult], None]) -> asyncio.Handle:
        zeros = np.zeros((1, 1), np.float32), np.zeros(1, np.uint8), np.zeros(1, np.int32)
        return asyncio.get_running_loop().call_soon(deliver, ScoreResult(*zeros, 0.0, 0.0))


LINK_CALLS = 2048


async def _link_call_us(servers: int, links: int) -> float:
    """Returns the processor time of a call, both ends of it, over `links` links to each of `servers` replicas."""
    made = [LinkServer(f"r{number}", cast(ReplicaService, Echo()), LinkFigures()) for number in range(servers)]
    opened: list[Link] = []
    ids = np.zeros(16, np.int32)
    request = ScoreRequest(request_id="s", prefix=ids, ids=ids, starts=np.array([0, 16], np.int32), labels=ids[:1])
    try:
        for server in made:
            await server.start()
            address = server.address
            if address is None:
                raise RuntimeError("a replica has no link")
            opened += [await Link.connect(address, LinkFigures()) for _ in range(links)]
        began = time.process_time()
        for _ in range(LINK_CALLS // 64):
            await asyncio.gather(*(_one_call(opened[number % len(opened)], request) for number in range(64)))
        return (time.process_time() - began) / LINK_CALLS * 1e6
    finally:
        for link in opened:
            link.lost = lambda lost: lost.fail("unreachable")
            link.close()
        for server in made:
            server.stop()


async def _one_call(link: Link, request: ScoreRequest) -> object:
    return await link.call(request, 0)


def bench_links(sizes: Sequence[int]) -> Iterator[Row]:
    """Times a call over Unix sockets in this process, 64 under way: an ingress of many replicas, and many of one."""
    for case, shape in (
        ("a call over a link, replicas", lambda count: (count, 1)),
        ("a call over a link, ingresses", lambda count: (1, count)),
    ):
        for count in sizes:
            us = statistics.median(asyncio.run(_link_call_us(*shape(count))) for _ in range(3))
            yield {"case": case, "size": count, "of": case.rsplit(" ", 1)[1], "us": us}


class Fleet:
    """Holds the view that one ingress has of `count` replicas."""

    def __init__(self, count: int, queued: Callable[[int], int], tenants: int = 8) -> None:
        self.names = [f"assay#Replica#{number:04x}" for number in range(count)]
        self.loads = LoadTracker()
        self.loads.publish(self.names)
        for number, name in enumerate(self.names):
            ticket = self.loads.send(name, 1)
            total = queued(number)
            largest = tuple(TenantTokens(f"t{at}", 0, total // (2 * tenants)) for at in range(tenants))
            self.loads.report(ticket, Load(total, 20_000.0, 160_000, largest, 100))
            self.loads.close(ticket)

        async def broadcast(method: str, timeout_s: float, *args: object, on_answer: Any = None) -> list[object]:
            answers: list[object] = [CanaryReply(name, None, 0.01) for name in self.names]
            for answer in answers:
                on_answer(answer)
            return answers

        health = HealthMonitor(broadcast, HealthArgs(), IngressMetrics())
        asyncio.run(health.look())
        self.selector = ReplicaSelector(self.loads, RouterArgs(), health.suspects)
        self.admission = Admission(AdmissionArgs(), Costs(), self.loads)


def bench_selection(sizes: Sequence[int]) -> Iterator[Row]:
    """Times the choice of a replica, and admission where there is room and where there is none."""
    draw = random.Random(5)
    for count in sizes:
        fleet = Fleet(count, lambda number: 1000 * (number % 16))

        def rank(fleet: Fleet = fleet) -> None:
            fleet.selector.rank(draw.getrandbits(64), (), 128)

        us = median_us(rank, 100)
        yield {"case": "choose a replica", "size": count, "of": "replicas", "us": us, "bound_us": RANK_US}
    for case, tokens in (("admit, room", 1000), ("admit, every queue full", 400_000)):
        for count in sizes:
            fleet = Fleet(count, lambda number, tokens=tokens: tokens + number)  # type: ignore[misc]

            def admit(fleet: Fleet = fleet) -> None:
                with contextlib.suppress(ApiError):
                    fleet.admission.check_open(60.0, "t0")
                fleet.admission.wait_s(TenantTokens("t0", 0, 200), 60.0)

            yield {"case": case, "size": count, "of": "replicas", "us": median_us(admit, 20)}


def bench_keys(sizes: Sequence[int]) -> Iterator[Row]:
    """Times the look-up of a key."""
    for count in sizes:
        keys = tuple(ApiKey(name=f"k{number}", digest=digest_of(b"assay-%d" % number)) for number in range(count))
        access = Authenticator(AuthSettings(mode="keys", keys=keys))
        headers = [(b"authorization", b"Bearer assay-%d" % (count // 2))]
        us = median_us(lambda access=access, headers=headers: access.identify(headers, "/v1/score"), 50)  # type: ignore[misc]
        yield {"case": "look up an API key", "size": count, "of": "keys", "us": us, "bound_us": KEY_US}


def scraped(count: int) -> list[Snapshot]:
    """Returns the metrics of `count` processes that have each been used."""
    metrics = IngressMetrics()
    for status in (200, 200, 429, 500):
        for route in ("/v1/score", "/v1/completions", "/generative_scoring"):
            metrics.request_started()
            metrics.request_ended(route, status, "", 0.1)
            metrics.first_token(route, 0.1)
            metrics.token_gap(route, 0.01)
            metrics.items(route, 8, 0)
    return [asyncio.run(snapshot("Ingress", f"i{number}", metrics.families())) for number in range(count)]


def longest_hold_ms(count: int) -> tuple[float, float]:
    """Returns the longest processor time, in ms, that a scrape of `count` processes holds the loop, and the whole."""
    snapshots, metrics = scraped(count), IngressMetrics()

    async def own() -> Snapshot:
        return await snapshot("Ingress", "i0", metrics.families())

    async def replicas(method: str, timeout_s: float, *args: object, on_answer: object = None) -> Sequence[object]:
        return snapshots

    async def none(method: str, timeout_s: float, *args: object, on_answer: object = None) -> Sequence[object]:
        return []

    async def run() -> tuple[float, float]:
        scraper = MetricsScraper(replicas, none, own, metrics, MetricsArgs(cache_s=0, timeout_s=60))
        longest, last, ended = 0.0, time.thread_time(), False

        async def watch() -> None:
            nonlocal longest, last
            while not ended:
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, last = max(longest, now - last), now

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        began = time.thread_time()
        await scraper.text()
        took = time.thread_time() - began
        ended = True
        await watcher
        return longest * 1e3, took * 1e3

    return asyncio.run(run())


def bench_scrape(sizes: Sequence[int]) -> Iterator[Row]:
    """Times a scrape: the longest hold of the event loop, and the whole."""
    for count in sizes:
        runs = [longest_hold_ms(count) for _ in range(3)]
        hold, whole = (statistics.median(run[part] for run in runs) for part in (0, 1))
        yield {
            "case": "scrape: longest hold of the loop",
            "size": count,
            "of": "processes",
            "us": hold * 1e3,
            "whole_ms": whole,
            "bound_us": SCRAPE_MS * 1e3,
        }


BENCHES: dict[str, tuple[Callable[[Sequence[int]], Iterator[Row]], Sequence[int]]] = {
    "plan": (bench_plan, (500, 2000, 8000)),
    "tenants": (bench_tenants, (10, 100, 1000, 10_000)),
    "tree": (bench_prefix_tree, (1000, 10_000, 100_000, 1_000_000)),
    "streams": (bench_streams, (1, 10, 100, 1000)),
    "links": (bench_links, (2, 8, 64)),
    "selection": (bench_selection, (2, 8, 64, 256)),
    "keys": (bench_keys, (10, 1000, 10_000)),
    "scrape": (bench_scrape, (8, 24, 100)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"some of {', '.join(BENCHES)}, with commas")
    parser.add_argument("--name", default="growth", help="of the file of results")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name] or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"`--only` must name some of {', '.join(BENCHES)}. Given: {', '.join(unknown)}.")
    rows: list[Row] = []
    for name in names:
        bench, sizes = BENCHES[name]
        rows += bench(sizes)
    publish(args.name, with_growth(rows), args.out)
    over = [row for row in rows if row.get("bound_us") and cast(float, row["us"]) > cast(float, row["bound_us"])]
    for row in over:
        sys.stderr.write(f"{row['case']}, {row['size']} {row['of']}: {row['us']:,.0f} µs > {row['bound_us']:,.0f} µs\n")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
