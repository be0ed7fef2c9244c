"""Runs one workload against a fleet for some seconds, and summarises it as a row."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.client import OK, Order
from benchmarks.fleet.client_pool import ClientPool, LoadAnswers
from benchmarks.fleet.service import Fleet
from benchmarks.support import workloads
from benchmarks.support.cpu_time import cpu_s
from benchmarks.support.report import Row

SETTLE = 0.2  # part of a load at either end that does not count: queues have their length, and no end is near
REFUSED = 429
SINGLES = 8  # as many requests of one item are under way as this many times those of many


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Defines a load: the processes of `clients` keep `at_once` requests in flight for each replica."""

    clients: ClientPool
    members: int
    path: str  # "http" or "handle"
    at_once: int
    seconds: float
    vocab: int

    def orders(self, fleet: Fleet, workload: str, number: int) -> list[Order]:
        """Makes an order for each process. `number` is that of the load, so that no two loads have the same tokens."""
        query, items, item = next((q, n, i) for name, _, q, n, i in workloads.SCORING if name == workload)
        callers = self.at_once * fleet.count * (SINGLES if items == 1 else 1)
        reached: dict[str, Any] = {"urls": fleet.urls}
        if self.path == "handle":
            reached = {"gcs": fleet.gcs, "args": json.dumps(fleet.args)}
        return [
            Order(
                query=query, items=items, item=item, vocab=self.vocab, seed=1000 * number + member,
                at_once=(callers + member) // self.members, **reached,
            )
            for member in range(self.members)
        ]  # fmt: skip

    def row(self, fleet: Fleet, workload: str, number: int) -> Row:
        used = cpu_s(os.getpid())
        loaded = self.clients.load(self.orders(fleet, workload, number), lambda: time.sleep(self.seconds))
        cores = cpu_s(os.getpid())
        cores.subtract(used)
        items = next(n for name, _, _, n, _ in workloads.SCORING if name == workload)
        row: Row = {"case": workload, "path": self.path, "replicas": fleet.count, **rates(loaded, items)}
        row["client_cores"] = loaded.cpu_s / self.seconds
        return row | {f"{part}_cores": seconds / self.seconds for part, seconds in sorted(cores.items())}


def rates(loaded: LoadAnswers, items: int) -> Row:
    """Returns rates over the middle of a load. A request counts for the part of its time that lies in it, because many
    requests end together and a count of ends would depend on where the middle is cut."""
    rest = SETTLE * (loaded.end_s - loaded.start_s)
    since, until = loaded.start_s + rest, loaded.end_s - rest
    middle = [one for one in loaded.answers if one.done_s > since and one.done_s - one.took_s < until]
    good = [one for one in middle if one.status == OK]
    parts = sum((min(one.done_s, until) - max(one.done_s - one.took_s, since)) / one.took_s for one in good)
    took = sorted(1e3 * one.took_s for one in good)
    return {
        "items_s": parts * items / (until - since),
        "p50_ms": took[len(took) // 2] if took else None,
        "p99_ms": took[int(len(took) * 0.99)] if took else None,
        "refused": sum(one.status == REFUSED for one in middle),
        "failed": sum(one.status not in (OK, REFUSED) for one in middle),
    }


def with_ratio(row: Row, rows: Sequence[Row]) -> Row:
    """Adds `ratio`: the rate over that of the same load with the fewest replicas."""
    base = next((one for one in rows if all(one.get(key) == row[key] for key in ("case", "path"))), row)
    rate, first = row["items_s"], base["items_s"]
    return row | {"ratio": float(rate) / float(first) if rate and first else None}
