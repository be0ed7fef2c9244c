"""Takes a replica from a fleet under load, and counts what its clients see of it."""

import time
from collections.abc import Sequence

from benchmarks.fleet.client import OK, TimedAnswer
from benchmarks.fleet.load import FleetLoad, Workload, items_in, lost_or_doubled_tokens, ratio_of, tokens_in
from benchmarks.fleet.service import Fleet
from benchmarks.support.report import Row

FAULTS = ("killed", "frozen", "drained")
BEFORE_S, AFTER_S = 3.0, 3.0  # of load around a replica's death and its replacement
POLL_S = 0.1


def until_replaced(fleet: Fleet, before: set[int], died: float, limit_s: float) -> Row:
    """Waits for a new replica in the place of a dead one. Returns the seconds from its death until there is a process,
    until Serve says that it runs, and until the fleet is whole; None for what has not come within `limit_s`."""
    found: Row = {"process_s": None, "running_s": None, "whole_again_s": None}
    while found["whole_again_s"] is None and (passed := time.monotonic() - died) < limit_s:
        if set(fleet.pids()) - before:  # so that Serve has given the other one up
            found["process_s"] = found["process_s"] or passed
            if fleet.runs():
                found["running_s"] = found["running_s"] or passed
                # The dead one's last canary counts for two periods.
                if passed > 2 * fleet.period_s and fleet.whole():
                    found["whole_again_s"] = passed
        time.sleep(POLL_S)
    return found


def strike(fleet: Fleet, fault: str, limit_s: float) -> Row:
    """Kills, freezes or drains one replica, waits until the fleet is whole, and returns what `until_replaced` does. A
    frozen process that is left at the limit is killed."""
    before, died, count = set(fleet.pids()), time.monotonic(), fleet.count
    if fault == "drained":
        for number in (count - 1, count):
            fleet.deploy(number, limit_s)
        return {"whole_again_s": time.monotonic() - died}
    pid = fleet.kill() if fault == "killed" else fleet.freeze()
    try:
        return until_replaced(fleet, before, died, limit_s)
    finally:
        if fault == "frozen":
            fleet.end_frozen(pid)


def struck(
    fleet: Fleet, load: FleetLoad, workload: Workload, number: int, fault: str, limit_s: float, rows: Sequence[Row]
) -> Row:
    """Strikes one replica under load, which goes on until the fleet is whole or `limit_s` have passed.

    `degraded_ratio` and `degraded_tokens_ratio` are the rates from then until the fleet is whole, over those that
    `rows` have for the same load in peace.
    """
    names = {"retried": "assay_retries_total", "resumed": "assay_resumes_total"}
    base = {name: fleet.total(metric) for name, metric in names.items()}
    died, left = 0.0, 0.0
    replaced: Row = {}

    def hold() -> None:
        nonlocal died, left, replaced
        time.sleep(BEFORE_S)
        died = time.monotonic()
        replaced = strike(fleet, fault, limit_s)
        left = time.monotonic()
        time.sleep(AFTER_S)

    loaded = load.clients.load(load.orders(fleet, workload, number), hold)
    since = [one for one in loaded.answers if one.done_s >= died]
    row: Row = {
        "case": f"{workload.name}, one replica {fault}", "path": load.path, "replicas": fleet.count,
        "sent": len(loaded.answers),
        "failed": sum(one.status != OK for one in loaded.answers),
        "in_flight": sum(one.done_s - one.took_s <= died for one in since),
        **{name: fleet.total(metric) - base[name] for name, metric in names.items()},
        "longest_ms": max((1e3 * one.took_s for one in loaded.answers), default=None),
        "longest_before_ms": max((1e3 * one.took_s for one in loaded.answers if one.done_s < died), default=None),
        **replaced,
    }  # fmt: skip
    if workload.generations:
        row["lost_or_doubled_tokens"] = lost_or_doubled_tokens(loaded.answers)
    key = {"case": workload.name, "path": load.path, "replicas": fleet.count}
    peace = next((one for one in rows if key.items() <= one.items()), Row())
    return row | degraded(loaded.answers, workload, peace, died, left)


def degraded(answers: Sequence[TimedAnswer], workload: Workload, peace: Row, since: float, until: float) -> Row:
    """Returns the rates of a window over those of `peace`."""
    scores, generations = ([one for one in answers if one.generation is kind] for kind in (False, True))
    found: Row = {}
    if workload.scored:
        rate = items_in(scores, workload.items, since, until) / (until - since)
        found["degraded_ratio"] = ratio_of(rate, peace.get("items_s"))
    if workload.generations:
        rate = tokens_in(generations, since, until, stream=workload.stream) / (until - since)
        found["degraded_tokens_ratio"] = ratio_of(rate, peace.get("tokens_s"))
    return found
