"""Plots a sampler benchmark: one SVG a case, time against rows on logarithmic axes, with floor and other libraries.

    python -m benchmarks.support.plot_ops benchmarks/results/sampler.json --out docs/img

It writes SVG itself, so that the documentation needs no plotting library.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 225, 44, 52  # margins; the right one holds the names
NAME_GAP = 15  # smallest distance of two names, in pixels
COLOURS = ("#0b6e4f", "#c2571a", "#5b4b9a", "#8a1c4a", "#2a6f97")  # ours first; told apart by colour-blind readers too
INK, FAINT, FLOOR = "#222222", "#e3e3e3", "#777777"
STYLE = "font-family:system-ui,sans-serif;font-size:12px"

Point = tuple[float, float]


class PlotLine(NamedTuple):
    name: str
    colour: str
    points: list[Point]  # (rows, us), by rows
    dashed: bool = False


class LogAxis(NamedTuple):
    """Maps values from `low` to `high` to pixels from `start` to `end`, logarithmically."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def lines_of(rows: Sequence[dict[str, Any]]) -> list[PlotLine]:
    """Returns the implementations of one case in the order of the file, and the floor."""
    by_impl: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        by_impl[row["impl"]].append((row["rows"], row["us"]))
    floor = sorted({(row["rows"], row["floor_us"]) for row in rows if row["floor_us"]})
    lines = [PlotLine(name, COLOURS[i % len(COLOURS)], sorted(at)) for i, (name, at) in enumerate(by_impl.items())]
    return [*lines, PlotLine("one read of the logits", FLOOR, floor, dashed=True)] if floor else lines


def svg(title: str, lines: Sequence[PlotLine]) -> str:
    rows = sorted({x for line in lines for x, _ in line.points})
    times = [y for line in lines for _, y in line.points]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times) * 1.01))
    x_axis = LogAxis(rows[0] / 1.15, rows[-1] * 1.15, LEFT, WIDTH - RIGHT)
    y_axis = LogAxis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" style="{STYLE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, INK, weight="600"),
        *_grid(x_axis, y_axis, rows),
        *(_line(line, x_axis, y_axis) for line in lines),
        *_names(lines, y_axis, WIDTH - RIGHT + 8),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, words: str, colour: str, anchor: str = "start", weight: str = "400") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-weight="{weight}">{escape(words)}</text>'


def _grid(x_axis: LogAxis, y_axis: LogAxis, rows: Iterable[float]) -> Iterable[str]:
    """Draws a line and a number for each power of ten of time and for each number of rows."""
    value = y_axis.low
    while value <= y_axis.high * 1.001:
        y = y_axis.at(value)
        yield f'<path d="M{x_axis.start} {y:.1f}H{x_axis.end}" stroke="{FAINT}"/>'
        yield text(x_axis.start - 8, y + 4, f"{value:,g}", INK, "end")
        value *= 10
    for count in rows:
        x = x_axis.at(count)
        yield f'<path d="M{x:.1f} {y_axis.start}V{y_axis.end}" stroke="{FAINT}"/>'
        yield text(x, y_axis.start + 18, f"{count:,g}", INK, "middle")
    yield text((x_axis.start + x_axis.end) / 2, HEIGHT - 12, "rows", INK, "middle")
    yield text(x_axis.start - 8, TOP - 14, "µs", INK, "end")


def _line(line: PlotLine, x_axis: LogAxis, y_axis: LogAxis) -> str:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    drawn = f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>'
    dots = "" if line.dashed else "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
    return f'{drawn}<g fill="{line.colour}">{dots}</g>'


def _names(lines: Sequence[PlotLine], y_axis: LogAxis, x: float) -> Iterable[str]:
    """Draws each name at the end of its line, moved up where it would cover the one below."""
    lowest = math.inf
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        lowest = min(y_axis.at(line.points[-1][1]) + 4, lowest - NAME_GAP)
        yield text(x, lowest, f"{line.name}: {line.points[-1][1]:,.0f}", line.colour, weight="600")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    record = json.loads(args.results.read_text(encoding="utf-8"))
    cases: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in record["rows"]:
        cases[row["case"], row["logits"]].append(row)
    args.out.mkdir(parents=True, exist_ok=True)
    for (case, shape), rows in cases.items():
        title = f"{case}, {shape} logits; {record['machine'].split(';')[0]}"
        stem = re.sub(r"[^a-z0-9]+", "-", f"{record['name']}-{case}-{shape}")
        (args.out / f"{stem}.svg").write_text(svg(title, lines_of(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
