"""Runs one workload against a fleet for some seconds, and summarises it as a row."""

import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.fleet.client import OK, Order, TimedAnswer
from benchmarks.fleet.client_pool import ClientPool, LoadAnswers
from benchmarks.fleet.service import Fleet
from benchmarks.support import workloads
from benchmarks.support.cpu_time import cpu_s
from benchmarks.support.report import Row

SETTLE = 0.2  # part of a load at either end that does not count: queues have their length, and no end is near
REFUSED = 429
SINGLES = 8  # as many requests of one item are under way as this many times those of many
GENERATIONS = re.compile(r"(plain|streams)-([1-9]\d{0,3})")
MIXED = re.compile(r"mixed(?:-([1-9]\d{0,3})-([1-9]\d{0,3}))?")
MIXED_SCORES, MIXED_STREAMS = 8, 64
RATIOS = {"items_s": "ratio", "tokens_s": "tokens_ratio"}


class Workload(NamedTuple):
    """Defines the requests under way for each replica: scores, generations or both."""

    name: str
    query: int = 0
    items: int = 0
    item: int = 0
    scores: int | None = None  # None: as many as the load's `at_once`
    generations: int = 0
    stream: bool = False

    @property
    def scored(self) -> bool:
        return self.items > 0


def workload_of(name: str) -> Workload:
    """Returns the workload of a name.

    Args:
        name: A scoring workload; `plain-N` or `streams-N`: N generations for each replica; `mixed-S-N`: S requests of
            the scoring workload `rerank` and N streams for each replica; `mixed`: `mixed-8-64`.

    Raises:
        ValueError: There is no such workload.
    """
    scoring = {found: Workload(found, query, items, item) for found, _, query, items, item in workloads.SCORING}
    if name in scoring:
        return scoring[name]
    if found := GENERATIONS.fullmatch(name):
        return Workload(name, scores=0, generations=int(found[2]), stream=found[1] == "streams")
    if found := MIXED.fullmatch(name):
        scores, streams = int(found[1] or MIXED_SCORES), int(found[2] or MIXED_STREAMS)
        return scoring["rerank"]._replace(name=name, scores=scores, generations=streams, stream=True)
    raise ValueError(f"workload must be one of {', '.join(scoring)}, plain-N, streams-N, mixed and mixed-S-N: {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Defines a load: the processes of `clients` keep `at_once` requests in flight for each replica."""

    clients: ClientPool
    members: int
    path: str  # "http" or "handle"
    at_once: int
    seconds: float
    vocab: int

    def orders(self, fleet: Fleet, workload: Workload, number: int) -> list[Order]:
        """Makes an order for each process. `number` is that of the load, so that no two loads have the same tokens."""
        scores = self.at_once * (SINGLES if workload.items == 1 else 1) if workload.scores is None else workload.scores
        reached: dict[str, Any] = {"urls": fleet.urls}
        if self.path == "handle":
            reached = {"gcs": fleet.gcs, "args": json.dumps(fleet.args)}
        return [
            Order(
                query=workload.query, items=workload.items, item=workload.item, vocab=self.vocab,
                seed=1000 * number + member, stream=workload.stream,
                at_once=(scores * fleet.count + member) // self.members,
                generations=(workload.generations * fleet.count + member) // self.members, **reached,
            )
            for member in range(self.members)
        ]  # fmt: skip

    def row(self, fleet: Fleet, workload: Workload, number: int) -> Row:
        used = cpu_s(os.getpid())
        loaded = self.clients.load(self.orders(fleet, workload, number), lambda: time.sleep(self.seconds))
        cores = cpu_s(os.getpid())
        cores.subtract(used)
        row: Row = {"case": workload.name, "path": self.path, "replicas": fleet.count, **summary(loaded, workload)}
        row["client_cores"] = loaded.cpu_s / self.seconds
        return row | {f"{part}_cores": seconds / self.seconds for part, seconds in sorted(cores.items())}


def summary(loaded: LoadAnswers, workload: Workload) -> Row:
    """Returns the rates of the workload's scores and generations. Beside scores, the times of whole streams have names
    of their own; `refused` and `failed` count both."""
    scores = rates(loaded._replace(answers=[one for one in loaded.answers if not one.generation]), workload.items)
    if not workload.generations:
        return scores
    generations = generation_rates(
        loaded._replace(answers=[one for one in loaded.answers if one.generation]), stream=workload.stream
    )
    if not workload.scored:
        return generations
    both = {key: int(scores[key] or 0) + int(generations.pop(key) or 0) for key in ("refused", "failed")}
    times = {f"stream_{key}": generations.pop(key) for key in ("p50_ms", "p99_ms")}
    return scores | generations | times | both


def middle(loaded: LoadAnswers) -> tuple[float, float]:
    """Returns the begin and the end of the part of a load that counts."""
    rest = SETTLE * (loaded.end_s - loaded.start_s)
    return loaded.start_s + rest, loaded.end_s - rest


def rates(loaded: LoadAnswers, items: int) -> Row:
    """Returns rates over the middle of a load."""
    since, until = middle(loaded)
    answers = _within(loaded.answers, since, until)
    return {"items_s": items_in(answers, items, since, until) / (until - since), **_counts(answers)}


def generation_rates(loaded: LoadAnswers, *, stream: bool) -> Row:
    """Returns rates of generations over the middle of a load. The time between two arrivals of a stream's tokens counts
    if the later one lies in it; tokens that are read together are one arrival."""
    since, until = middle(loaded)
    answers = _within(loaded.answers, since, until)
    row: Row = {"tokens_s": tokens_in(answers, since, until, stream=stream) / (until - since), **_counts(answers)}
    if stream:
        good = [one for one in answers if one.status == OK and one.arrived_s]
        first = sorted(1e3 * (one.arrived_s[0] - one.done_s + one.took_s) for one in good)
        pairs = itertools.chain.from_iterable(itertools.pairwise(one.arrived_s) for one in good)
        gaps = sorted(1e3 * (after - before) for before, after in pairs if since <= after < until)
        row |= {"ttft_p50_ms": _quantile(first, 0.5)}
        row |= {"gap_p50_ms": _quantile(gaps, 0.5), "gap_p99_ms": _quantile(gaps, 0.99)}
    return row


def items_in(answers: Sequence[TimedAnswer], items: int, since: float, until: float) -> float:
    """Returns the number of items that were scored in a window."""
    return items * sum(part for _, part in _parts(answers, since, until))


def tokens_in(answers: Sequence[TimedAnswer], since: float, until: float, *, stream: bool) -> float:
    """Returns the number of tokens that were generated in a window: those of a stream by their arrival."""
    if not stream:
        return sum(sum(one.tokens) * part for one, part in _parts(answers, since, until))
    good = [one for one in answers if one.status == OK]
    arrivals = itertools.chain.from_iterable(zip(one.arrived_s, one.tokens, strict=True) for one in good)
    return sum(count for at, count in arrivals if since <= at < until)


def lost_or_doubled_tokens(answers: Sequence[TimedAnswer]) -> int:
    """Returns by how many tokens generations that ended without an error are too short or too long."""
    return sum(abs(sum(one.tokens) - one.asked) for one in answers if one.generation and one.status == OK)


def with_ratio(row: Row, rows: Sequence[Row]) -> Row:
    """Adds the ratio of each rate to that of the same load with the fewest replicas. `ratio` is that of the items, or
    of the tokens where there are no items."""
    base = next((one for one in rows if all(one.get(key) == row[key] for key in ("case", "path"))), row)
    found = {name: ratio_of(row[rate], base.get(rate)) for rate, name in RATIOS.items() if rate in row}
    if "items_s" not in row:
        found = {"ratio": found.pop("tokens_ratio")}
    return row | found


def ratio_of(rate: str | float | None, base: str | float | None) -> float | None:
    """Returns the ratio of two rates; None without either."""
    return float(rate) / float(base) if rate and base else None


def _within(answers: Sequence[TimedAnswer], since: float, until: float) -> list[TimedAnswer]:
    return [one for one in answers if one.done_s > since and one.done_s - one.took_s < until]


def _parts(answers: Sequence[TimedAnswer], since: float, until: float) -> Iterator[tuple[TimedAnswer, float]]:
    """Yields each good answer with the part of its time that lies in a window, because many requests end together and a
    count of ends would depend on where the window is cut."""
    for one in _within(answers, since, until):
        if one.status == OK:
            yield one, (min(one.done_s, until) - max(one.done_s - one.took_s, since)) / one.took_s


def _counts(answers: Sequence[TimedAnswer]) -> Row:
    took = sorted(1e3 * one.took_s for one in answers if one.status == OK)
    return {
        "p50_ms": _quantile(took, 0.5),
        "p99_ms": _quantile(took, 0.99),
        "refused": sum(one.status == REFUSED for one in answers),
        "failed": sum(one.status not in (OK, REFUSED) for one in answers),
    }


def _quantile(values: Sequence[float], part: float) -> float | None:
    """Returns a quantile of sorted values."""
    return values[int(len(values) * part)] if values else None
