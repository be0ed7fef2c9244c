"""Draws a load test as SVG: latency and throughput against the load, medians with quartiles."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from deployments.cli.bench.results import Spread

WIDTH, HEIGHT = 860, 380
TOP, BOTTOM, SIDE, GAP = 56, 52, 62, 150  # the gap holds the names of a panel's lines
INK, FAINT = "#222222", "#e3e3e3"
COLOURS = ("#0b6e4f", "#c2571a", "#5b4b9a", "#2a6f97")
STYLE = "font-family:system-ui,sans-serif;font-size:12px"
LATENCIES = (("p50_ms", "p50"), ("p90_ms", "p90"), ("p99_ms", "p99"))
RATES = (("answered_per_s", "answered"), ("good_per_s", "in time"))
NAME_GAP = 15


class LoadPoint(NamedTuple):
    """Holds one load and the spreads over its runs."""

    load: float
    spreads: dict[str, Spread]


class Axis(NamedTuple):
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        value = math.log(max(value, self.low)) if self.logarithmic else value
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            return [10.0**power for power in range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)]
        step = 10 ** math.floor(math.log10(self.high)) / 2
        step *= 1 if self.high / step <= 8 else 4 if self.high / step > 16 else 2
        return [step * index for index in range(int(self.high / step) + 1)]


def svg(title: str, load: str, levels: Sequence[LoadPoint]) -> str:
    """Draws the picture. `load` is the unit of the loads."""
    levels = sorted(levels, key=lambda one: one.load)
    panel = (WIDTH - 2 * (SIDE + GAP)) / 2
    left, right = SIDE, SIDE + panel + GAP + SIDE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" style="{STYLE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(SIDE, 22, title, weight="600"),
        *_panel("latency, ms", load, levels, LATENCIES, left, left + panel, logarithmic=True),
        *_panel("requests/s", load, levels, RATES, right, right + panel, logarithmic=False),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(
    name: str,
    load: str,
    levels: Sequence[LoadPoint],
    shown: Sequence[tuple[str, str]],
    start: float,
    end: float,
    *,
    logarithmic: bool,
) -> Iterable[str]:
    drawn = [(label, [(one.load, one.spreads[key]) for one in levels if key in one.spreads]) for key, label in shown]
    values = [bound for _, line in drawn for _, spread in line for bound in (spread.low, spread.high, spread.median)]
    across = Axis(0, 1.05 * max(one.load for one in levels), start, end)
    up = _upward(values, logarithmic)
    yield _text(start - 8, TOP - 14, name, anchor="start")
    for value in up.ticks():
        yield f'<path d="M{start:.1f} {up.at(value):.1f}H{end:.1f}" stroke="{FAINT}"/>'
        yield _text(start - 8, up.at(value) + 4, f"{value:,g}", anchor="end")
    for value in across.ticks():
        yield _text(across.at(value), HEIGHT - BOTTOM + 18, f"{value:,g}", anchor="middle")
    yield _text((start + end) / 2, HEIGHT - 12, load, anchor="middle")
    lowest = math.inf
    for (label, line), colour in zip(drawn, COLOURS, strict=False):
        if line:
            yield from _line(line, across, up, colour)
            lowest = min(up.at(line[-1][1].median) + 4, lowest - NAME_GAP)
            yield _text(end + 8, lowest, f"{label}: {line[-1][1].median:,.3g}", colour, weight="600")


def _upward(values: Sequence[float], logarithmic: bool) -> Axis:
    low, high = min(values, default=1.0), max(values, default=1.0)
    if not logarithmic:
        return Axis(0, 1.1 * high or 1.0, HEIGHT - BOTTOM, TOP)
    low, high = max(low, 1e-3), max(high, 1e-2)
    return Axis(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.01)), HEIGHT - BOTTOM, TOP, True)


def _line(line: Sequence[tuple[float, Spread]], across: Axis, up: Axis, colour: str) -> Iterable[str]:
    places = [(across.at(load), up.at(spread.median)) for load, spread in line]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), (_, spread) in zip(places, line, strict=True):
        yield f'<path d="M{x:.1f} {up.at(spread.low):.1f}V{up.at(spread.high):.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _text(x: float, y: float, words: str, colour: str = INK, anchor: str = "start", weight: str = "400") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-weight="{weight}">{escape(words)}</text>'
