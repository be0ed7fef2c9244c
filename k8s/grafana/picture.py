"""Draws dashboards as SVG for the documentation, from the answers to their queries over some time."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from k8s.grafana.panels import Dashboard, Panel, Unit

COLUMNS, WIDTH, HEIGHT, GAP, HEAD = 3, 420, 236, 12, 46
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 34, 76  # of a panel: numbers, nothing, title, times and legend
LEGEND_LINES, LEGEND_CHARS = 4, 66
COLOURS = ("#0b6e4f", "#c2571a", "#5b4b9a", "#8a1c4a", "#2a6f97", "#8a7a12", "#b0413e", "#3d5a3d", "#7a4b8c", "#4a4a4a")
INK, FAINT, FRAME, PAGE = "#222222", "#e3e3e3", "#c9c9c9", "#f6f6f4"
STYLE = "font-family:system-ui,sans-serif;font-size:11px"


class Series(NamedTuple):
    """Holds one series of an answer."""

    labels: dict[str, str]
    points: list[tuple[float, float]]  # (seconds, value)


class PanelLine(NamedTuple):
    """Holds one line of a panel."""

    name: str
    points: list[tuple[float, float]]


Ask = Callable[[str], Sequence[Series]]


def svg(dashboard: Dashboard, ask: Ask) -> str:
    """Draws a dashboard. `ask` answers a panel's query."""
    body: list[str] = []
    top = HEAD
    for row in dashboard.rows:
        body.append(_text(GAP, top + 15, row.title, weight="600", size=14))
        top += 24
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, COLUMNS)
            left = GAP + column * (WIDTH + GAP)
            body.append(_panel(panel, ask, left, top + line * (HEIGHT + GAP)))
        top += math.ceil(len(row.panels) / COLUMNS) * (HEIGHT + GAP)
    width = GAP + COLUMNS * (WIDTH + GAP)
    title = f"Assay / {dashboard.title}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" role="img" style="{STYLE}">'
    ground = f'<rect width="{width}" height="{top}" fill="{PAGE}"/>'
    front = [head, f"<title>{escape(title)}</title>", ground, _text(GAP, 28, title, weight="600", size=18)]
    return "\n".join([*front, *body, "</svg>"]) + "\n"


def _panel(panel: Panel, ask: Ask, left: float, top: float) -> str:
    parts = [
        f'<g transform="translate({left} {top})">',
        f"<title>{escape(panel.title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="4" fill="white" stroke="{FRAME}"/>',
        _text(10, 20, panel.title, weight="600", size=12),
    ]
    lines = list(_lines(panel, ask))
    match panel.kind:
        case "stat":
            parts += _numbers(panel, lines)
        case "table":
            parts += _table(panel, ask)
        case "timeseries":
            parts += _plot(panel, _stacked(lines) if panel.stacked else lines)
    return "\n".join([*parts, "</g>"])


def _lines(panel: Panel, ask: Ask) -> Iterator[PanelLine]:
    for legend, expr in panel.queries.items():
        for one in ask(expr):
            points = [(x, y) for x, y in one.points if math.isfinite(y)]
            if points:
                yield PanelLine(_name(legend, one.labels), points)


def _name(legend: str, labels: dict[str, str]) -> str:
    """Fills the labels' values into a legend; replicas are named by their last letters."""
    if not legend:
        return ", ".join(labels.values())
    short = {name: value[-4:] if name == "replica" else value for name, value in labels.items()}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: short.get(found[1], ""), legend).strip()


def _stacked(lines: Sequence[PanelLine]) -> list[PanelLine]:
    """Stacks lines on top of each other; a missing value adds nothing."""
    times = sorted({x for line in lines for x, _ in line.points})
    floor = dict.fromkeys(times, 0.0)
    found = []
    for line in lines:
        own = dict(line.points)
        floor = {x: floor[x] + own.get(x, 0.0) for x in times}
        found.append(PanelLine(line.name, list(floor.items())))
    return found


def _numbers(panel: Panel, lines: Sequence[PanelLine]) -> Iterator[str]:
    for index, line in enumerate(lines):
        x = WIDTH * (index + 0.5) / len(lines)
        yield _text(x, 118, shown(line.points[-1][1], panel.unit), anchor="middle", size=34, colour=COLOURS[0])
        yield _text(x, 146, line.name if len(lines) > 1 else "", anchor="middle")


def _table(panel: Panel, ask: Ask) -> Iterator[str]:
    rows = [one.labels for expr in panel.queries.values() for one in ask(expr)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    for column, name in enumerate(names):
        x = 10 + column * (WIDTH - 20) / len(names)
        yield _text(x, 48, name, weight="600")
        for line, row in enumerate(rows[:9]):
            yield _text(x, 68 + 18 * line, row.get(name, "-")[:12])


def _plot(panel: Panel, lines: Sequence[PanelLine]) -> Iterator[str]:
    if not lines:
        yield _text(WIDTH / 2, HEIGHT / 2, "no data", anchor="middle")
        return
    low, high = min(x for line in lines for x, _ in line.points), max(x for line in lines for x, _ in line.points)
    top = _round_up(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> str:
        across = LEFT + (x - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f} {HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM):.1f}"

    for part in range(5):
        y = HEIGHT - BOTTOM - part / 4 * (HEIGHT - TOP - BOTTOM)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>'
        yield _text(LEFT - 6, y + 4, shown(top * part / 4, panel.unit), anchor="end")
    for x, anchor in ((low, "start"), (high, "end")):
        across = LEFT if x == low else WIDTH - RIGHT
        yield _text(across, HEIGHT - BOTTOM + 15, f"{x:.0f} s", anchor=anchor)
    for index, line in reversed(list(enumerate(lines))):
        colour = COLOURS[index % len(COLOURS)]
        path = "L".join(place(x, y) for x, y in line.points)
        if panel.stacked:
            (first, _), (last, _) = line.points[0], line.points[-1]
            yield f'<path d="M{place(first, 0)}L{path}L{place(last, 0)}Z" fill="{_pale(colour)}"/>'
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linejoin="round"/>'
    yield from _legend([line.name for line in lines])


def _legend(names: Iterable[str]) -> Iterator[str]:
    line, used = 0, 0
    for index, name in enumerate(name[:30] for name in names):
        if not name:  # the title says it all
            continue
        if used and used + len(name) + 3 > LEGEND_CHARS:
            line, used = line + 1, 0
        if line == LEGEND_LINES:
            return
        x, y = 12 + used * 6.2, HEIGHT - BOTTOM + 31 + 13 * line
        yield f'<rect x="{x}" y="{y - 7}" width="8" height="3" fill="{COLOURS[index % len(COLOURS)]}"/>'
        yield _text(x + 11, y, name)
        used += len(name) + 3


def _pale(colour: str) -> str:
    """Mixes a colour with white, so that it covers what is below."""
    return "#" + "".join(f"{(int(colour[at : at + 2], 16) + 2 * 255) // 3:02x}" for at in (1, 3, 5))


def _round_up(value: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= value * 0.999)


def shown(value: float, unit: Unit) -> str:
    """Renders a value roughly as Grafana does."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for limit, size, name in ((1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms")):
            if 0 < abs(value) < limit:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} s"
    if unit == "bytes":
        for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} B"
    return f"{value / 1000:.3g} K" if abs(value) >= 10_000 else f"{value:.4g}"


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", weight: str = "400", size: int = 11, colour: str = INK
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}" font-weight="{weight}">{escape(words)}</text>'
