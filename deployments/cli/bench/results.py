"""What came of requests, and what that says of a run and of several.

The live table: a line for each run as it ends, and on a terminal one that moves while a run goes on.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

OK = 200
REJECTED = (429, 503)  # told to come again: no fault
BROKEN = 0  # the status of a connection that broke, or an answer that did not come in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, in seconds after the run's start. It is late from the moment it was due, not from when it was sent:
    else a service that holds up its callers is never asked in its bad moments (coordinated omission)."""

    due_s: float
    sent_s: float
    first_s: float | None = None  # event of a stream
    done_s: float
    status: int
    items: int = 0
    tokens: int = 0

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.done_s - self.due_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one load. Latencies are of requests answered with 200."""

    offered_per_s: float
    answered_per_s: float
    good_per_s: float  # answered in time
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
    sent_late_p99_ms: float  # this program's own delay: large where it is what is slow


def run_of(samples: Sequence[Sample], seconds: float, objective_ms: float) -> Run:
    """`seconds` is how long requests were due; answers are counted until the last."""
    answered = [one for one in samples if one.status == OK]
    length = max([seconds, *(one.done_s for one in samples)])
    latencies = sorted(one.latency_ms for one in answered)
    first = sorted(1e3 * (one.first_s - one.due_s) for one in answered if one.first_s is not None)
    good = sum(latency <= objective_ms for latency in latencies)
    rejected = sum(one.status in REJECTED for one in samples)
    return Run(
        offered_per_s=len(samples) / seconds,
        answered_per_s=len(answered) / length,
        good_per_s=good / length,
        p50_ms=quantile(latencies, 0.5),
        p90_ms=quantile(latencies, 0.9),
        p99_ms=quantile(latencies, 0.99),
        first_p50_ms=quantile(first, 0.5) if first else None,
        first_p99_ms=quantile(first, 0.99) if first else None,
        items_per_s=sum(one.items for one in answered) / length,
        tokens_per_s=sum(one.tokens for one in answered) / length,
        requests=len(samples),
        rejected=rejected,
        failed=len(samples) - len(answered) - rejected,
        sent_late_p99_ms=quantile(sorted(1e3 * (one.sent_s - one.due_s) for one in samples), 0.99),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    median: float
    low: float  # quartiles
    high: float

    def __str__(self) -> str:
        return f"{self.median:,.4g} [{self.low:,.4g}, {self.high:,.4g}]"


def spreads(runs: Sequence[Run]) -> dict[str, Spread]:
    """Median and quartiles of each number over the runs; without those that a run has not."""
    found: dict[str, Spread] = {}
    for name in asdict(runs[0]):
        values = sorted(value for run in runs if (value := getattr(run, name)) is not None and math.isfinite(value))
        if values:
            low, high = (quantile(values, part) for part in (0.25, 0.75))
            found[name] = Spread(median=statistics.median(values), low=low, high=high)
    return found


def quantile(ordered: Sequence[float], part: float) -> float:
    """Between the two nearest, in proportion; NaN of nothing."""
    if not ordered:
        return math.nan
    at = part * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


COLUMNS = ("load", "run", "sent", "p50 ms", "p90 ms", "p99 ms", "first p50", "ok/s", "good/s", "rejected", "failed")
SHOWN = ("p50_ms", "p90_ms", "p99_ms", "first_p50_ms", "answered_per_s", "good_per_s", "rejected", "failed")
WIDTH = 9
MOVES_S = 0.2


class Table:
    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        """None says nothing."""
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

    def told(self, sample: Sample) -> None:
        """Counts an answer of the run that goes on."""
        self._answered += sample.status == OK
        self._rejected += sample.status in REJECTED
        self._failed += sample.status != OK and sample.status not in REJECTED
        now = self._clock()
        if self._stream is not None and self._moving and now - self._shown >= MOVES_S:
            self._shown = now
            ended = self._answered + self._rejected + self._failed
            self._stream.write(
                f"\r\x1b[K{self._load:>{WIDTH}} {self._run:>{WIDTH}}  {ended:,} ended: {self._answered:,} answered, "
                f"{self._rejected:,} rejected, {self._failed:,} failed"
            )
            self._stream.flush()

    def end(self, run: Run) -> None:
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
