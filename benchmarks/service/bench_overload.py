"""Measures goodput under overload: scoring requests at 1, 2 and 4 times a service's throughput, in an open loop.

    make serve
    python -m benchmarks.service.bench_overload http://127.0.0.1:8000 --out benchmarks/results --img docs/img

A service without admission control collapses under such a load: it accepts more than it can finish, and finishes
requests whose clients have left. The generator shares the machine with the service; `generator_late_p99_ms` is its own
delay. A model on the CPU competes with the service for cores; the toy model, whose steps wait as those of a GPU do,
shows the service alone (model: {path: toy}, engine: {token_budget: 1024}):

    ASSAY_TEST_FAULTS=1 ASSAY_TEST_DELAY_STEP=0.08 assay serve CONFIG
    python -m benchmarks.service.bench_overload http://127.0.0.1:8000 --ids 250 --out benchmarks/results
"""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import aiohttp
import numpy as np

from benchmarks.service.bench_service import served
from benchmarks.support.open_loop import Post, Reply, capacity, fire, summary
from benchmarks.support.plot_ops import COLOURS, FAINT, INK, STYLE, text
from benchmarks.support.report import Row, publish

QUERY, ITEMS, ITEM = 32, (30, 90), 16  # tokens; items from, to; tokens
BODIES = 256
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 620, 380, 56, 170, 44, 52


def bodies_of(vocab: int) -> tuple[list[bytes], list[int]]:
    """Returns request bodies and the cost of each in tokens."""
    rng = np.random.default_rng(5)
    bodies, costs = [], []
    for _ in range(BODIES):
        items = int(rng.integers(*ITEMS))
        body = {
            "query": rng.integers(0, vocab, QUERY).tolist(),
            "items": rng.integers(0, vocab, (items, ITEM)).tolist(),
            "label_token_ids": [5, 6],
            "layout": "columns",
        }
        bodies.append(json.dumps(body).encode())
        costs.append(QUERY + items * ITEM)
    return bodies, costs


def is_sound(status: int, headers: Any, body: bytes) -> bool:
    """Says whether a refusal has the documented form."""
    try:
        code, wait = json.loads(body)["error"]["code"], int(headers["retry-after"])
    except (KeyError, TypeError, ValueError):
        return False
    return status == 429 and code == "overloaded" and 1 <= wait <= 60


def poster(session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes]) -> Post:
    async def post(number: int) -> Reply:
        try:
            async with session.post(url, data=bodies[number], headers={"content-type": "application/json"}) as answer:
                body = await answer.read()
                return Reply(answer.status, is_sound(answer.status, answer.headers, body))
        except (aiohttp.ClientError, TimeoutError):
            return Reply(0, False)

    return post


async def run(url: str, seconds: float, factors: Sequence[float], ids: int | None) -> list[Row]:
    _, vocab = served(url)
    bodies, costs = bodies_of(ids or vocab)
    limits, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=limits, timeout=patience) as session:
        post = poster(session, url + "/generative_scoring", bodies)
        await capacity(post, costs, 8, min(5.0, seconds))
        peak = await capacity(post, costs, 16, seconds)
        rows: list[Row] = [{"case": "closed loop, 16 at once", "goodput_per_s": peak}]
        for factor in factors:
            shots = await fire(post, costs, factor * peak, seconds, seed=int(10 * factor))
            rows.append({**summary(f"{factor:g}x", shots, seconds), "load": factor})
    return rows


def svg(rows: Sequence[Row], title: str) -> str:
    """Plots answered and refused load against offered load, as fractions of the capacity."""
    peak = float(rows[0]["goodput_per_s"] or 1)
    points = [(float(row["load"] or 0), row) for row in rows[1:]]
    top = max(load for load, _ in points)

    def x(load: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * load / top

    def y(part: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part / top

    answered = [(load, float(row["goodput_per_s"] or 0) / peak) for load, row in points]
    refused = [
        (load, float(row["offered_per_s"] or 0) * float(row["refused_percent"] or 0) / 100 / peak)
        for load, row in points
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" style="{STYLE}">',
        f'<title>{escape(title)}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, INK, weight="600"),
    ]
    for tick in range(int(top) + 1):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick}x", INK, "end"))
        parts.append(text(x(tick), HEIGHT - BOTTOM + 18, f"{tick}x", INK, "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "offered load, in parts of the capacity", INK, "middle"))
    for name, colour, line in (("answered", COLOURS[0], answered), ("refused with 429", COLOURS[1], refused)):
        path = "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line)
        dots = "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in line)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/><g fill="{colour}">{dots}</g>')
        end = line[-1]
        parts.append(text(x(end[0]) + 10, y(end[1]) + 4, f"{name}: {end[1]:.2f}x", colour, weight="600"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ids", type=int, help="draw token ids below this (250 for the fault-test model)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--img", type=Path)
    args = parser.parse_args()
    name, _ = served(args.url)
    before = os.getloadavg()[0]
    rows = asyncio.run(run(args.url, args.seconds, args.factors, args.ids))
    notes = f"load average of the machine before the run: {before:.1f}; the generator shares its cores with the service"
    publish(f"overload-{name}", rows, args.out, notes=notes)
    if args.img is not None:
        title = f"Overload: {name}, {args.seconds:g} s a point"
        (args.img / "overload.svg").write_text(svg(rows, title), encoding="utf-8")


if __name__ == "__main__":
    main()
