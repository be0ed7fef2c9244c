"""Runs a load test from its first request to its record."""

import argparse
import asyncio
import json
import math
import random
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from deployments.cli.api_key import remedy
from deployments.cli.bench import load_generator, plot, results
from deployments.cli.bench.results import Table
from deployments.cli.bench.workloads import WORKLOADS, ServedModel
from deployments.cli.launch import system_info

RATES = (0.25, 0.5, 0.75)  # of the measured throughput, where no rate is given
PROBE_S, PROBE_CLIENTS = 4.0, 16
WARM_UP_S = 1.0


class NoService(ValueError):
    """Says that there is no service that the test can use."""


@dataclass(slots=True, kw_only=True)
class LoadLevel:
    """Holds the runs at one load: requests/s in an open loop, clients in a closed one."""

    load: float
    runs: list[results.LoadRun] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        spread = results.spreads(self.runs) if self.runs else {}
        return {
            "load": self.load,
            "median": {name: _finite(one.median) for name, one in spread.items()},
            "quartiles": {name: [_finite(one.low), _finite(one.high)] for name, one in spread.items()},
            "runs": [{name: _finite(value) for name, value in asdict(run).items()} for run in self.runs],
        }


@dataclass(slots=True, kw_only=True)
class LoadTest:
    """Runs the loads that the options of `assay bench` name, and collects their results."""

    target: load_generator.Target
    model: ServedModel
    given: argparse.Namespace
    table: Table
    levels: list[LoadLevel] = field(default_factory=list)
    _measured: list[results.RequestTiming] = field(default_factory=list)  # of the current run

    @property
    def open(self) -> bool:
        return not self.given.concurrency

    @property
    def failed(self) -> bool:
        """Says whether all requests of a run failed."""
        return any(run.failed == run.requests for level in self.levels for run in level.runs)

    async def run(self) -> None:
        """Fills `levels`, one run after another. After an interruption its content is valid."""
        await self._closed(PROBE_CLIENTS if self.open else self.given.concurrency[0], WARM_UP_S, "warm-up")
        loads: list[float] = self.given.concurrency or self.given.rates or await self._rates()
        self.table.head()
        for one in loads:
            level = LoadLevel(load=one)
            self.levels.append(level)
            for number in range(self.given.runs):
                self.table.begin(f"{one:,.4g}", f"{number + 1}/{self.given.runs}")
                seed = f"{self.given.seed}/{one}/{number}"
                self._measured.clear()
                began = time.monotonic()
                seconds = self.given.seconds
                try:
                    await (self._offered(one, seed) if self.open else self._closed(int(one), None, seed))
                except asyncio.CancelledError:  # what has been answered by then counts, as a shorter run
                    seconds = min(seconds, time.monotonic() - began)
                    raise
                finally:
                    if self._measured:
                        level.runs.append(results.summarise(self._measured, seconds, self.given.objective_ms))
                        self.table.end(level.runs[-1])
            self.table.median(f"{one:,.4g}", results.spreads(level.runs))

    async def _offered(self, rate: float, seed: str) -> list[results.RequestTiming]:
        draw = random.Random(seed)
        due = load_generator.poisson(rate, self.given.seconds, draw)
        requests = [WORKLOADS[self.given.workload](self.model, draw) for _ in due]
        return await load_generator.open_loop(self.target, due, requests, self._add)

    def _add(self, timing: results.RequestTiming) -> None:
        self._measured.append(timing)
        self.table.add(timing)

    async def _closed(self, clients: int, seconds: float | None, seed: str) -> list[results.RequestTiming]:
        workload = WORKLOADS[self.given.workload]
        length = self.given.seconds if seconds is None else seconds
        return await load_generator.closed_loop(self.target, self.model, workload, clients, length, seed, self._add)

    async def _rates(self) -> list[float]:
        """Returns fractions of the throughput of a closed loop. Raises NoService if no request is answered."""
        found = results.summarise(await self._closed(PROBE_CLIENTS, PROBE_S, "probe"), PROBE_S, math.inf)
        if not found.answered_per_s:
            raise NoService(
                f"None of {found.requests} requests was answered: is the workload {self.given.workload} served?"
            )
        return [max(round(part * found.answered_per_s, 2), 0.01) for part in RATES]

    def record(self, server: dict[str, Any], before: tuple[float, ...], interrupted: bool) -> dict[str, Any]:
        given = self.given
        return {
            "workload": given.workload,
            "loop": "open" if self.open else "closed",
            "load": "requests/s" if self.open else "clients",
            "seconds_a_run": given.seconds,
            "runs_a_load": given.runs,
            "objective_ms": given.objective_ms,
            "seed": given.seed,
            "note": given.note,
            "interrupted": interrupted,
            "server": server,
            "environment": {**system_info.hardware(), "versions": system_info.versions(), "gpus": system_info.gpus()},
            "commit": system_info.commit(),
            "load_average": {"before": before, "after": system_info.load()},
            "levels": [level.record() for level in self.levels if level.runs],
        }


def served(target: load_generator.Target) -> tuple[ServedModel, dict[str, Any]]:
    """Returns the model and the service's versions. Raises NoService if it does not answer."""
    try:
        data = _get(target, "/v1/models")["data"][0]
        version = _get(target, "/version")
        return ServedModel(str(data["id"]), int(data["assay"]["vocab_size"])), {"model": data["id"], **version}
    except HTTPError as error:
        raise NoService(f"{target.url} answers {error.code} {error.reason}.{remedy(error.code)}") from None
    except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise NoService(f"{target.url} is not the URL of this service: {type(error).__name__} {error}") from None


def _get(target: load_generator.Target, path: str) -> Any:
    key = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(target.url + path, headers=key), timeout=target.timeout_s) as answer:
        return json.load(answer)


def write(record: dict[str, Any], given: argparse.Namespace) -> None:
    """Prints the record and writes it with its plot, as the options say."""
    if given.json:
        print(json.dumps(record, indent=1))
    if given.out is None or not record["levels"]:
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    points = [plot.LoadPoint(level["load"], _spreads(level)) for level in record["levels"]]
    title = f"{given.workload}, {record['server']['model']}{f'; {given.note}' if given.note else ''}"
    given.out.with_suffix(".svg").write_text(plot.svg(title, record["load"], points), "utf-8")
    if not given.no_table:
        print(f"{given.out} and {given.out.with_suffix('.svg').name} are written.", file=sys.stderr)


def _spreads(level: dict[str, Any]) -> dict[str, results.Spread]:
    pairs = ((name, median, *level["quartiles"][name]) for name, median in level["median"].items())
    return {name: results.Spread(median=median, low=low, high=high) for name, median, low, high in pairs}


def _finite(value: float | None) -> float | None:
    """Rounds to five digits; JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
