"""Summarises the timings of requests over runs, and prints a table while a load test goes on."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

import numpy as np

OK = 200
REJECTED = (429, 503)  # refused with a request to retry: not a failure
BROKEN = 0  # status of a broken connection or a timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Holds the times of one request, in seconds after the run's start.

    Latency counts from the time that the request was due, not from when it was sent: otherwise a service that delays
    its clients gets fewer requests in its slow moments (coordinated omission).
    """

    due_s: float
    sent_s: float
    first_s: float | None = None  # first event of a stream
    done_s: float
    status: int
    items: int = 0
    tokens: int = 0

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.done_s - self.due_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """Summarises one run at one load. Latencies are those of requests that were answered with 200."""

    offered_per_s: float
    answered_per_s: float
    good_per_s: float  # answered within the objective
    p50_ms: float
    p90_ms: float
    p99_ms: float
    first_p50_ms: float | None  # to the first event of streams
    first_p99_ms: float | None
    items_per_s: float
    tokens_per_s: float
    requests: int
    rejected: int
    failed: int
    sent_late_p99_ms: float  # delay of the load generator itself


def summarise(timings: Sequence[RequestTiming], seconds: float, objective_ms: float) -> LoadRun:
    """Summarises a run.

    Args:
        timings: of all requests.
        seconds: time in which requests were sent; answers count until the last one.
        objective_ms: an answer is good within this latency.
    """
    answered = [one for one in timings if one.status == OK]
    length = max([seconds, *(one.done_s for one in timings)])
    latencies = [one.latency_ms for one in answered]
    first = [1e3 * (one.first_s - one.due_s) for one in answered if one.first_s is not None]
    good = sum(latency <= objective_ms for latency in latencies)
    rejected = sum(one.status in REJECTED for one in timings)
    return LoadRun(
        offered_per_s=len(timings) / seconds,
        answered_per_s=len(answered) / length,
        good_per_s=good / length,
        p50_ms=quantile(latencies, 0.5),
        p90_ms=quantile(latencies, 0.9),
        p99_ms=quantile(latencies, 0.99),
        first_p50_ms=quantile(first, 0.5) if first else None,
        first_p99_ms=quantile(first, 0.99) if first else None,
        items_per_s=sum(one.items for one in answered) / length,
        tokens_per_s=sum(one.tokens for one in answered) / length,
        requests=len(timings),
        rejected=rejected,
        failed=len(timings) - len(answered) - rejected,
        sent_late_p99_ms=quantile([1e3 * (one.sent_s - one.due_s) for one in timings], 0.99),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Holds median and quartiles."""

    median: float
    low: float  # quartiles
    high: float

    def __str__(self) -> str:
        return f"{self.median:,.4g} [{self.low:,.4g}, {self.high:,.4g}]"


def spreads(runs: Sequence[LoadRun]) -> dict[str, Spread]:
    """Returns median and quartiles of each number over the runs, for the numbers that they have."""
    found: dict[str, Spread] = {}
    for name in asdict(runs[0]):
        values = [value for run in runs if (value := getattr(run, name)) is not None and math.isfinite(value)]
        if values:
            low, median, high = (quantile(values, part) for part in (0.25, 0.5, 0.75))
            found[name] = Spread(median=median, low=low, high=high)
    return found


def quantile(values: Sequence[float], part: float) -> float:
    """Interpolates a quantile linearly between the two nearest values; NaN without values."""
    return float(np.quantile(values, part)) if len(values) else math.nan


COLUMNS = ("load", "run", "sent", "p50 ms", "p90 ms", "p99 ms", "first p50", "ok/s", "good/s", "rejected", "failed")
SHOWN = ("p50_ms", "p90_ms", "p99_ms", "first_p50_ms", "answered_per_s", "good_per_s", "rejected", "failed")
WIDTH = 9
MOVES_S = 0.2


class Table:
    """Prints a line for each run, and on a terminal one that is redrawn during a run. Without a stream it is silent."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._moving = stream is not None and stream.isatty()
        self._clock = clock
        self._shown = -math.inf
        self._answered = self._rejected = self._failed = 0
        self._load = self._run = ""

    def head(self) -> None:
        self._write(_line(COLUMNS))

    def begin(self, load: str, run: str) -> None:
        self._answered = self._rejected = self._failed = 0
        self._load, self._run = load, run

    def add(self, timing: RequestTiming) -> None:
        """Counts a request of the current run."""
        self._answered += timing.status == OK
        self._rejected += timing.status in REJECTED
        self._failed += timing.status != OK and timing.status not in REJECTED
        now = self._clock()
        if self._stream is not None and self._moving and now - self._shown >= MOVES_S:
            self._shown = now
            ended = self._answered + self._rejected + self._failed
            self._stream.write(
                f"\r\x1b[K{self._load:>{WIDTH}} {self._run:>{WIDTH}}  {ended:,} ended: {self._answered:,} answered, "
                f"{self._rejected:,} rejected, {self._failed:,} failed"
            )
            self._stream.flush()

    def end(self, run: LoadRun) -> None:
        values = [getattr(run, name) for name in SHOWN]
        self._write(_line((self._load, self._run, f"{run.requests:,}", *map(number, values))))

    def median(self, load: str, spreads: Mapping[str, Spread]) -> None:
        values = [spreads[name].median if name in spreads else None for name in SHOWN]
        self._write(_line((load, "median", "", *map(number, values))))

    def _write(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write(f"\r\x1b[K{line}\n" if self._moving else f"{line}\n")
            self._stream.flush()


def number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.3g}"


def _line(cells: tuple[str, ...]) -> str:
    return " ".join(cell.rjust(WIDTH) for cell in cells)
