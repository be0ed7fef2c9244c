"""The live table: a line for each run as it ends, and on a terminal one that moves while a run goes on."""

import math
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from deployments.bench.samples import OK, REJECTED, Run, Sample, Spread

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
