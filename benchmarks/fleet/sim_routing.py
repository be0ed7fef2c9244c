"""Simulates routing over 8 to 512 replicas: events in virtual time, around the service's own routing code.

    python -m benchmarks.fleet.sim_routing --out benchmarks/results --plots docs/img

Each ingress has a `LoadTracker`, `Admission`, `ReplicaSelector` and `RetryPolicy` of its own, on the simulation's
clock. Simulated are the clients, the way to a replica and back, and the replicas: a queue served in order of arrival at
a fixed speed, its account of tenants (`TenantQueues`, the replica's own), its bound, and a prefix cache of whole
prefixes, least recently used first out. Each request is a step of its own, or with `step_tokens` steps hold as many as
fit, two are under way, and none is shorter than `least_step_s`. Not simulated: generations, sharding and micro-batches.

Policies differ in the order of replicas alone:

    service     `ReplicaSelector`
    two choices the less loaded of two random replicas, by the ingress's own view
    affinity    the prefix's own replica
    central     sees every queue and every cache as they are now; chooses the replica where the request ends first, a
                prefix to compute counted twice, because it also delays those that come after

A scenario is one fault, or none, or another number of ingresses. `load` is the share of all replicas' time that the
requests would take if no prefix were cached.
"""

import argparse
import heapq
import itertools
import math
import random
import re
import statistics
import sys
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from benchmarks.support import plot_ops
from benchmarks.support.report import Row, publish
from deployments.config.sections import AdmissionArgs, RetryArgs, RouterArgs
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import AnyCall
from deployments.quarantine import Quarantine
from deployments.routing.admission import Admission
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.replica_call import RetryableError, no_replica, replica_lost
from deployments.routing.replica_selection import RendezvousHash, ReplicaSelector
from deployments.routing.retry import RetryPolicy, RetryState
from engine.config import Costs
from engine.request_cost import TenantQueues
from engine.requests import Load, ScoreRequest, TenantTokens
from engine.scheduler.request_tracker import MAX_QUEUE_S, REPORTED_QUEUES

TOKENS_PER_S = 40_000.0  # of a replica, if a scenario says no other
HOP_S = 0.0005  # from an ingress to a replica, and back
PREFIX_TOKENS, ITEM_TOKENS = (256, 3072), (256, 2048)  # smallest and largest, equally likely on a logarithmic scale
CACHE_TOKENS = 200_000  # of a replica, likewise
CATALOGUE = 2.0  # prefixes of all requests, times those that all caches hold together
ZIPF = 0.9
TENANTS = 50
TIMEOUT_S = 30.0
BURST_PERIOD_S, BURST_S, BURST = 5.0, 1.0, 2.5  # every so often, for so long, times the mean rate
SLOW, SLOW_PART = 0.4, 16  # speed of one replica in so many
DEATHS_PER_S, RESTART_S = 1 / 128, 5.0  # of each replica; until another takes its place
STALE_S = 0.5  # that a report is old when it comes, beside what its reply took
POLICIES = ("service", "two choices", "affinity", "central")
FEWER_INGRESSES = {"four ingresses": 4, "one ingress": 1}
SCENARIOS = ("steady", "bursts", "slow", "dying", "stale", *FEWER_INGRESSES)
STEPS = 2  # under way at a replica
WARM = 0.4  # part of the time before anything is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Says what is simulated."""

    replicas: int
    ingresses: int
    load: float
    seconds: float
    fault: str = "steady"
    policy: str = "service"
    seed: int = 1
    router: RouterArgs = field(default_factory=RouterArgs)
    tokens_per_s: float = TOKENS_PER_S
    cache_tokens: int = CACHE_TOKENS
    prefix_tokens: tuple[int, int] = PREFIX_TOKENS
    item_tokens: tuple[int, int] = ITEM_TOKENS
    step_tokens: int = 0  # of a step, which holds at least one request; 0: one and no more
    least_step_s: float = 0.0


class Catalogue:
    """Holds one request for each prefix, and draws them with Zipf's frequencies."""

    def __init__(self, scenario: Scenario) -> None:
        draw = np.random.default_rng(scenario.seed)
        least, most = scenario.prefix_tokens
        mean = (most - least) / math.log(most / least)
        count = int(CATALOGUE * scenario.replicas * scenario.cache_tokens / mean)
        tokens = draw.integers(0, 100_000, count + max(most, scenario.item_tokens[1]), dtype=np.int32)
        prefixes, items = (
            np.exp(draw.uniform(math.log(low), math.log(high), count)).astype(int)
            for low, high in (scenario.prefix_tokens, scenario.item_tokens)
        )
        labels = np.arange(2, dtype=np.int32)
        self.requests = [
            ScoreRequest(
                request_id="s",
                tenant=f"t{number % TENANTS}",
                timeout_s=TIMEOUT_S,
                prefix=tokens[number : number + prefix],
                ids=tokens[:item],
                starts=np.array([0, item], np.int32),
                labels=labels,
            )
            for number, (prefix, item) in enumerate(zip(prefixes.tolist(), items.tolist(), strict=True))
        ]
        weights = np.arange(1, count + 1) ** -ZIPF
        self._cumulative = np.cumsum(weights / weights.sum()).tolist()
        shares = weights / weights.sum()
        self.mean_cost = float((shares * (prefixes + items)).sum())

    def draw(self, draw: random.Random) -> int:
        return min(bisect_left(self._cumulative, draw.random()), len(self.requests) - 1)


class Arrival(NamedTuple):
    """Holds when a request arrives, and the number of its prefix."""

    when_s: float
    number: int


def trace(scenario: Scenario) -> list[Arrival]:
    """Draws the arrivals of a scenario without bursts, for a simulation and a fleet that are to have the same ones."""
    catalogue, draw = Catalogue(scenario), random.Random(scenario.seed)
    rate, now, found = _rate(scenario, catalogue), 0.0, list[Arrival]()
    while now < scenario.seconds:
        found.append(Arrival(now, catalogue.draw(draw)))
        now += draw.expovariate(rate)
    return found


def _rate(scenario: Scenario, catalogue: Catalogue) -> float:
    """Returns the requests of a second."""
    return scenario.load * scenario.replicas * scenario.tokens_per_s / catalogue.mean_cost


class PrefixStore:
    """A prefix cache of whole prefixes, least recently used first out."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def use(self, number: int, tokens: int) -> bool:
        """Tells whether a prefix was there, and keeps it."""
        if number in self._held:
            self._held.move_to_end(number)
            return True
        self._held[number] = tokens
        self._tokens += tokens
        while self._tokens > self._room:
            self._tokens -= self._held.popitem(last=False)[1]
        return False


class Attempt(NamedTuple):
    """Holds one call on its way."""

    ingress: "Ingress"
    number: int  # of the prefix
    arrived: float
    state: RetryState
    replica: str
    ticket: int


class Served(NamedTuple):
    """Holds one request of a step."""

    attempt: Attempt
    work: TenantTokens
    hit: bool


class SimulatedReplica:
    """A queue served in order at one speed, in steps."""

    def __init__(self, name: str, speed: float, scenario: Scenario) -> None:
        self.name = name
        self.speed = speed
        self.cache = PrefixStore(scenario.cache_tokens)
        self.free_at = 0.0
        self.busy_s = 0.0
        self.alive = True
        self.under_way = 0  # steps
        self.inside: dict[int, Attempt] = {}  # by its identity: all that it has not answered
        self.max_tokens = int(MAX_QUEUE_S * speed)
        self._scenario = scenario
        self._queues = TenantQueues()
        self._waiting: deque[tuple[Attempt, TenantTokens]] = deque()

    def takes(self, work: TenantTokens) -> bool:
        before = self._queues.before(*work)
        return not before or before + work.tokens <= self.max_tokens

    def enter(self, attempt: Attempt, work: TenantTokens) -> None:
        self._queues.add(*work)
        self._waiting.append((attempt, work))
        self.inside[id(attempt)] = attempt

    def ends(self, now: float, tokens: int) -> float:
        """Returns when a request that comes now ends, if it is computed behind all others."""
        return max(now, self.free_at) + tokens / self.speed

    def step(self, now: float, requests: Sequence[ScoreRequest]) -> tuple[float, list[Served]]:
        """Takes the next step's requests from the queue; returns when it ends, and them."""
        found, total = list[Served](), 0
        while self._waiting:
            attempt, work = self._waiting[0]
            request = requests[attempt.number]
            tokens = len(request.ids) + (0 if attempt.number in self.cache else len(request.prefix))
            if found and total + tokens > self._scenario.step_tokens:
                break
            self._waiting.popleft()
            found.append(Served(attempt, work, self.cache.use(attempt.number, len(request.prefix))))
            total += tokens
        seconds = max(self._scenario.least_step_s, total / self.speed)
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        self.under_way += 1
        return self.free_at, found

    @property
    def may_step(self) -> bool:
        """Two steps are under way where steps hold several requests; else the queue's order tells every end."""
        return bool(self._waiting) and (self.under_way < STEPS or not self._scenario.step_tokens)

    def leave(self, served: Served) -> None:
        self._queues.add(served.work.tenant, served.work.priority, -served.work.tokens)
        del self.inside[id(served.attempt)]

    def load(self) -> Load:
        largest = self._queues.largest(REPORTED_QUEUES)
        return Load(int(self._queues.total), self.speed, self.max_tokens, largest, len(self._queues) - len(largest))


class Ranking(Protocol):
    def rank_call(self, call: AnyCall, exclude: Collection[str] = ()) -> tuple[str, ...]: ...


class TwoChoices:
    """Ranks the less loaded of two random replicas first."""

    def __init__(self, loads: LoadTracker, draw: random.Random) -> None:
        self._loads, self._draw = loads, draw

    def rank_call(self, call: AnyCall, exclude: Collection[str] = ()) -> tuple[str, ...]:
        names = [name for name in self._loads.replicas if name not in exclude]
        two = self._draw.sample(names, min(2, len(names)))
        return tuple(sorted(two, key=self._loads.load))


class Affinity:
    """Ranks a key's replicas by their hashes alone."""

    def __init__(self, loads: LoadTracker, key_of: Callable[[AnyCall], int | None]) -> None:
        self._loads, self._key_of = loads, key_of
        self._names: tuple[str, ...] = ()

    def rank_call(self, call: AnyCall, exclude: Collection[str] = ()) -> tuple[str, ...]:
        if self._names is not self._loads.replicas:
            self._names = self._loads.replicas
            self._hash = RendezvousHash(self._names)
        order = (self._names[place] for place in self._hash.order(self._key_of(call) or 0).tolist())
        return tuple(itertools.islice((name for name in order if name not in exclude), 3))


class Ingress:
    """One ingress's own view, and the service's code that decides by it."""

    def __init__(self, scenario: Scenario, clock: Callable[[], float], draw: random.Random) -> None:
        self.loads = LoadTracker(clock)
        self.admission = Admission(AdmissionArgs(), Costs(), self.loads)
        self.selector = ReplicaSelector(self.loads, scenario.router)
        self.retries = RetryPolicy(RetryArgs(), Quarantine(), IngressMetrics(), clock)
        rankings: dict[str, Ranking] = {
            "service": self.selector,
            "two choices": TwoChoices(self.loads, draw),
            "affinity": Affinity(self.loads, self.selector.key_of),
        }
        self.ranking = rankings.get(scenario.policy)


class Simulation:
    """Runs one scenario, with arrivals of its own or those of `arrivals`."""

    def __init__(self, scenario: Scenario, arrivals: Sequence[Arrival] | None = None) -> None:
        self.scenario = scenario
        self._arrivals = arrivals
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.latencies: list[float] = []
        self._draw = random.Random(scenario.seed)
        self._catalogue = Catalogue(scenario)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._replicas: dict[str, SimulatedReplica] = {}
        self._gone: list[SimulatedReplica] = []
        for number in range(scenario.replicas):
            slow = scenario.fault == "slow" and number % SLOW_PART == 0
            self._start_replica(SLOW if slow else 1.0)
        self._ingresses = [Ingress(scenario, lambda: self.now, self._draw) for _ in range(scenario.ingresses)]
        self._publish()
        self._rate = _rate(scenario, self._catalogue)
        self._warm_s = WARM * scenario.seconds

    def run(self) -> Row:
        """Runs until every request has ended; returns the row of results."""
        began = time.perf_counter()
        if self._arrivals is None:
            self._at(0.0, self._arrive)
        for arrival in self._arrivals or ():
            self._at(arrival.when_s, self._ask, arrival.number)
        if self.scenario.fault == "dying":
            self._at(self._draw.expovariate(DEATHS_PER_S * self.scenario.replicas), self._kill)
        warmed = False
        while self._events:
            self.now, _, event, arguments = heapq.heappop(self._events)
            if not warmed and self.now >= self._warm_s:
                warmed = True
                for replica in self._replicas.values():
                    replica.busy_s = max(0.0, replica.free_at - self.now)
            event(*arguments)
        return self._row(time.perf_counter() - began)

    def _at(self, when: float, event: Callable[..., None], *arguments: Any) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (when, number, event, arguments))
        return number

    # Clients.

    def _arrive(self) -> None:
        if self.now < self.scenario.seconds:
            self._at(self.now + self._draw.expovariate(self._rate_now()), self._arrive)
        self._ask()

    def _ask(self, number: int | None = None) -> None:
        ingress = self._draw.choice(self._ingresses)
        number = self._catalogue.draw(self._draw) if number is None else number
        call = self._catalogue.requests[number]
        self._count("requests")
        try:
            ingress.admission.check_open(call.timeout_s, call.tenant)
            ingress.admission.admit(call)
            state = ingress.retries.begin(call)
        except ApiError:
            self._count("refused")
            return
        self._send(ingress, number, self.now, state)

    def _rate_now(self) -> float:
        if self.scenario.fault != "bursts":
            return self._rate
        if self.now % BURST_PERIOD_S < BURST_S:
            return self._rate * BURST
        return self._rate * (BURST_PERIOD_S - BURST_S * BURST) / (BURST_PERIOD_S - BURST_S)

    # An ingress.

    def _send(self, ingress: Ingress, number: int, arrived: float, state: RetryState) -> None:
        call = self._catalogue.requests[number]
        if ingress.ranking is None:
            ranked = self._central(number, state.tried)
        else:
            ranked = ingress.ranking.rank_call(call, state.tried)
        if not ranked:
            self._fail(Attempt(ingress, number, arrived, state, "", 0), RetryableError("unavailable", no_replica()))
            return
        work = ingress.admission.work(call)
        ticket = ingress.loads.send(ranked[0], work.tokens, work.tenant, work.priority)
        attempt = Attempt(ingress, number, arrived, state, ranked[0], ticket)
        self._at(self.now + HOP_S, self._reach, attempt, work)

    def _central(self, number: int, exclude: Collection[str]) -> tuple[str, ...]:
        request = self._catalogue.requests[number]

        def ends(replica: SimulatedReplica) -> float:
            prefix = 0 if number in replica.cache else 2 * len(request.prefix)
            return replica.ends(self.now, len(request.ids) + prefix)

        left = [replica for replica in self._replicas.values() if replica.name not in exclude]
        return (min(left, key=ends).name,) if left else ()

    def _answered(self, attempt: Attempt, load: Load) -> None:
        ingress = attempt.ingress
        if self.scenario.fault == "stale":
            self._at(self.now + STALE_S, self._late_report, ingress, attempt.replica, load)
        else:
            ingress.loads.report(attempt.ticket, load)
        ingress.loads.close(attempt.ticket)
        attempt.state.served()
        if attempt.arrived >= self._warm_s:
            self.latencies.append(self.now - attempt.arrived)

    def _late_report(self, ingress: Ingress, replica: str, load: Load) -> None:
        ticket = ingress.loads.send(replica, 0)
        ingress.loads.report(ticket, load)
        ingress.loads.close(ticket)

    def _failed(self, attempt: Attempt, error: RetryableError, load: Load | None = None) -> None:
        loads = attempt.ingress.loads
        if load is not None:
            loads.report(attempt.ticket, load)
        attempt.state.tried.add(loads.close(attempt.ticket))
        self._fail(attempt, error)

    def _fail(self, attempt: Attempt, error: RetryableError) -> None:
        call = self._catalogue.requests[attempt.number]
        try:
            wait_s = attempt.state.next_wait_s(error, call)
        except ApiError:
            self._count("failed")
            return
        self._count("retries")
        if attempt.state.tried.issuperset(self._replicas):
            attempt.state.tried.clear()
        self._at(self.now + wait_s, self._send, attempt.ingress, attempt.number, attempt.arrived, attempt.state)

    # Replicas.

    def _reach(self, attempt: Attempt, work: TenantTokens) -> None:
        replica = self._replicas.get(attempt.replica)
        if replica is None:
            self._at(self.now + HOP_S, self._failed, attempt, RetryableError("died", replica_lost(), isolated=True))
        elif not attempt.state.admitted and not replica.takes(work):
            error = RetryableError("busy", replica_lost(), refused=True)
            self._at(self.now + HOP_S, self._failed, attempt, error, replica.load())
        else:
            replica.enter(attempt, work)
            self._launch(replica)

    def _launch(self, replica: SimulatedReplica) -> None:
        while replica.may_step:
            end, step = replica.step(self.now, self._catalogue.requests)
            for served in step:
                if served.attempt.arrived >= self._warm_s:
                    tokens = len(self._catalogue.requests[served.attempt.number].prefix)
                    self.counts["prefix tokens"] += tokens
                    self.counts["cached tokens"] += tokens if served.hit else 0
            self._at(end, self._end, replica, step)

    def _end(self, replica: SimulatedReplica, step: Sequence[Served]) -> None:
        if not replica.alive:
            return
        replica.under_way -= 1
        for served in step:
            replica.leave(served)
        for served in step:
            self._at(self.now + HOP_S, self._answered, served.attempt, replica.load())
        self._launch(replica)

    def _start_replica(self, speed: float) -> None:
        name = f"r{next(self._names):05}"
        self._replicas[name] = SimulatedReplica(name, speed * self.scenario.tokens_per_s, self.scenario)

    def _kill(self) -> None:
        if self.now < self.scenario.seconds:
            self._at(self.now + self._draw.expovariate(DEATHS_PER_S * self.scenario.replicas), self._kill)
        if len(self._replicas) < 2:
            return
        name = self._draw.choice(list(self._replicas))
        replica = self._replicas.pop(name)
        replica.alive = False
        self._gone.append(replica)
        self._count("deaths")
        self._publish(dead=name)
        for attempt in replica.inside.values():
            self._at(self.now + HOP_S, self._failed, attempt, RetryableError("died", replica_lost(), isolated=True))
        self._at(self.now + RESTART_S, self._restart)

    def _restart(self) -> None:
        self._start_replica(1.0)
        self._publish()

    def _publish(self, dead: str | None = None) -> None:
        for ingress in self._ingresses:
            ingress.loads.publish(self._replicas, dead=dead)

    # Results.

    def _count(self, what: str) -> None:
        if self.now >= self._warm_s:
            self.counts[what] += 1

    def _row(self, took_s: float) -> Row:
        scenario, counts = self.scenario, self.counts
        alive = [replica.busy_s for replica in self._replicas.values()]
        latencies = sorted(self.latencies)
        requests = max(1, counts["requests"])
        return {
            "case": scenario.fault,
            "policy": scenario.policy,
            "replicas": scenario.replicas,
            "ingresses": scenario.ingresses,
            "load": scenario.load,
            "requests": counts["requests"],
            "hit_rate": counts["cached tokens"] / max(1, counts["prefix tokens"]),
            "p50_ms": 1e3 * latencies[len(latencies) // 2],
            "p99_ms": 1e3 * latencies[int(0.99 * len(latencies))],
            "imbalance": max(alive) / statistics.mean(alive),
            "retries_1000": 1e3 * counts["retries"] / requests,
            "refused_1000": 1e3 * counts["refused"] / requests,
            "failed": counts["failed"],
            "simulated_s": took_s,
        }


def compared(rows: Sequence[Row]) -> list[Row]:
    """Adds to each row its hit rate and p99 in parts of the central policy's in the same scenario."""
    shape = ("case", "replicas", "ingresses", "load")
    central = {tuple(row[key] for key in shape): row for row in rows if row["policy"] == "central"}
    found: list[Row] = []
    for row in rows:
        best = central.get(tuple(row[key] for key in shape))
        parts: Row = {}
        if best is not None:
            parts = {
                f"{name}_of_central": cast(float, row[key]) / cast(float, best[key])
                for name, key in (("hits", "hit_rate"), ("p99", "p99_ms"))
            }
        found.append({**row, **parts})
    return found


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """Draws p99 and misses against the number of replicas, a line a policy, by file name."""
    steady = [row for row in rows if row["case"] == "steady"]
    drawn = {}
    shown: tuple[tuple[str, str, str, Callable[[Row], float]], ...] = (
        ("p99", "p99 of a request", "ms", lambda row: cast(float, row["p99_ms"])),
        ("misses", "prefix tokens computed again", "%", lambda row: 100 * (1 - cast(float, row["hit_rate"]))),
    )
    for stem, title, unit, value in shown:
        lines = [
            plot_ops.PlotLine(
                policy,
                plot_ops.COLOURS[place],
                sorted((cast(int, row["replicas"]), value(row)) for row in steady if row["policy"] == policy),
                dashed=policy == "central",
            )
            for place, policy in enumerate(POLICIES)
        ]
        text = plot_ops.svg(f"{title}, simulated", lines)
        text = text.replace(">rows<", ">replicas<").replace(">µs<", f">{unit}<")
        drawn[f"sim-routing-{re.sub(r'[^a-z0-9]+', '-', stem)}.svg"] = text
    return drawn


FLEETS = ((8, 4), (32, 8), (64, 16), (128, 32), (512, 64))  # replicas, ingresses


def scenarios(load: float, requests: int, fleets: Sequence[tuple[int, int]] = FLEETS) -> list[Scenario]:
    """Returns the steady load on every fleet, and each fault on the third, by every policy.

    Args:
        load: share of the replicas' time that the requests would take without caches.
        requests: of one scenario, about.
        fleets: replicas and ingresses.
    """
    shapes = [("steady", fleet) for fleet in fleets]
    shapes += [(fault, fleets[min(2, len(fleets) - 1)]) for fault in SCENARIOS if fault != "steady"]
    return [
        Scenario(
            replicas=replicas,
            ingresses=FEWER_INGRESSES.get(fault, ingresses),
            load=load,
            seconds=max(12.0, requests / (load * replicas * TOKENS_PER_S / 1600)),
            fault=fault,
            policy=policy,
        )
        for fault, (replicas, ingresses) in shapes
        for policy in POLICIES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=0.85, help="share of the replicas' time without caches")
    parser.add_argument("--requests", type=int, default=30_000, help="of one scenario, about")
    parser.add_argument("--only", default="", help="policies, with commas")
    parser.add_argument("--faults", default="", help="scenarios, with commas")
    parser.add_argument("--max-replicas", type=int, default=512)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path, help="folder of the pictures")
    args = parser.parse_args()
    policies, faults = (
        args.only.split(",") if args.only else POLICIES,
        args.faults.split(",") if args.faults else SCENARIOS,
    )
    rows = []
    for scenario in scenarios(args.load, args.requests):
        if scenario.policy in policies and scenario.fault in faults and scenario.replicas <= args.max_replicas:
            rows.append(Simulation(scenario).run())
            sys.stderr.write(f"{rows[-1]}\n")
    rows = compared(rows)
    publish("sim-routing", rows, args.out)
    if args.plots is not None:
        for name, text in plots(rows).items():
            (args.plots / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
