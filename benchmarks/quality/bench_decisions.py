"""Measures the accuracy and calibration of /v1/decisions on held-out choices and predicates, over HTTP.

    assay serve deployments/configs/cpu.yaml
    python -m benchmarks.quality.bench_decisions http://127.0.0.1:8000 --out benchmarks/results --plot docs/img

The documents are not in the training data, and every false predicate is wrong in exactly one word. A row of the
calibration holds the predicates whose probability lies in a bin: their mean probability, and the share of them that are
true with its 95 % interval (Wilson). The expected calibration error is the mean distance of the two over all
predicates. `--plain` names a server with `decisions: {layout: plain}`, which shows a bad calibration: the model has
never seen predicates in that form.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.support.plot_ops import COLOURS, FAINT, INK, STYLE, text
from benchmarks.support.report import Row, publish
from tools.builtin_model import evaluate, grammar

AT_ONCE = 8
PREDICATES_EACH = 8  # about one document
EDGES = (0.0, 0.001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.999, 1.0)
Z = 1.959964  # of a 95 % interval
SIDE, LEFT, TOP, BOTTOM = 380, 64, 60, 60


class AskedPredicate(NamedTuple):
    body: dict[str, Any]
    right: list[Any]  # by question


class Bin(NamedTuple):
    size: int
    predicted: float
    share: float
    low: float
    high: float


def choices(count: int, seed: int) -> Iterator[AskedPredicate]:
    """Sends one choice question a request, with two to six options."""
    for asked in evaluate.questions("choice", count, seed):
        document, rest = asked.prompt.removeprefix("Document: ").split("\nQuestion: ")
        instructions, *lines = rest.removesuffix("\nAnswer:").split("\n")
        words = dict(line.split(") ") for line in lines)
        options = [{"value": word} for word in words.values()]
        question = {"type": "choice", "instructions": instructions, "choices": options}
        yield AskedPredicate({"input": document, "questions": [question]}, [words[asked.answer]])


def predicates(documents: int, seed: int) -> Iterator[AskedPredicate]:
    """Sends several predicates about one document a request, half of them true."""
    rng = random.Random(seed)
    for _ in range(documents):
        texts, asks = zip(*(grammar.predicate_text(rng, number) for number in range(PREDICATES_EACH)), strict=True)
        lines = [f"{text}|{{y{number}}}" for number, text in enumerate(texts)]
        form = grammar.Form(family="questions", text="\n".join([grammar.document_text(rng), *lines]), asks=asks)
        document, *rest = grammar.render(form, grammar.draw_slots(form, rng, kept=True, hard=1.0)).split("\n")
        pairs = [line.removeprefix("Question: ").split("|") for line in rest]
        questions = [{"type": "predicate", "instructions": instructions} for instructions, _ in pairs]
        yield AskedPredicate({"input": document, "questions": questions}, [right == "yes" for _, right in pairs])


async def answers(url: str, asked: Sequence[AskedPredicate]) -> list[list[dict[str, Any]]]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), raise_for_status=True) as http:

        async def one(body: dict[str, Any]) -> list[dict[str, Any]]:
            async with gate, http.post(url + "/v1/decisions", json=body) as answer:
                given: list[dict[str, Any]] = (await answer.json())["answers"]
            return given

        return list(await asyncio.gather(*(one(each.body) for each in asked)))


def bins(predicted: Sequence[float], true: Sequence[bool]) -> list[Bin]:
    """Groups predicates by probability; empty bins are left out."""
    found = []
    for low, high in pairwise(EDGES):
        inside = [(p, y) for p, y in zip(predicted, true, strict=True) if low <= p < high or p == high == 1]
        if inside:
            share = sum(y for _, y in inside) / len(inside)
            found.append(Bin(len(inside), sum(p for p, _ in inside) / len(inside), share, *wilson(share, len(inside))))
    return found


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share, given the share among `count` (Wilson, 1927)."""
    centre = share + Z * Z / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def calibration_error(found: Sequence[Bin]) -> float:
    total = sum(one.size for one in found)
    return sum(one.size * abs(one.predicted - one.share) for one in found) / total


class Series(NamedTuple):
    name: str
    colour: str
    bins: list[Bin]


def svg(title: str, series: Sequence[Series]) -> str:
    """Plots the share of true predicates against their mean probability; a dot's area shows their number."""
    width, height = LEFT + SIDE + 40, TOP + SIDE + BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + SIDE * x, TOP + SIDE * (1 - y)

    ends = (*at(0, 0), *at(1, 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" style="{STYLE}">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 22, title, INK, weight="600"),
        text(LEFT + SIDE / 2, height - 14, "probability answered", INK, "middle"),
        text(LEFT, TOP - 14, "share of them that are true, 95 % interval", INK),
        *_grid(at),
        '<path d="M{:.0f} {:.0f}L{:.0f} {:.0f}" stroke="#777777" stroke-dasharray="5 4"/>'.format(*ends),
    ]
    for number, (name, colour, found) in enumerate(series):
        parts.append(text(LEFT + 20, TOP + 24 + 18 * number, name, colour, weight="600"))
        for one in found:
            (x, y), (_, low), (_, high) = at(one.predicted, one.share), at(0, one.low), at(0, one.high)
            radius = 2.5 * math.sqrt(1 + math.log10(one.size))
            parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(at: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    for tick in range(0, 11, 2):
        (x, low), (left, y) = at(tick / 10, 0), at(0, tick / 10)
        yield f'<path d="M{x:.1f} {TOP}V{low}M{left} {y:.1f}H{LEFT + SIDE}" stroke="{FAINT}"/>'
        yield text(x, low + 18, f"{tick / 10:g}", INK, "middle")
        yield text(left - 8, y + 4, f"{tick / 10:g}", INK, "end")


def choice_row(url: str, asked: Sequence[AskedPredicate]) -> Row:
    given = asyncio.run(answers(url, asked))
    right = [one[0]["choice"] == each.right[0] for one, each in zip(given, asked, strict=True)]
    return {"case": "choice", "size": len(right), "share_right": sum(right) / len(right)}


def predicate_rows(name: str, url: str, asked: Sequence[AskedPredicate]) -> tuple[list[Row], list[Bin]]:
    given = asyncio.run(answers(url, asked))
    predicted = [one["probability"] for own in given for one in own]
    true = [word for each in asked for word in each.right]
    found = bins(predicted, true)
    right = sum((p > 0.5) == y for p, y in zip(predicted, true, strict=True)) / len(true)
    head: Row = {"case": name, "size": len(true), "share_right": right, "calibration_error": calibration_error(found)}
    return [head, *({"case": f"{name}, bin {i}", **one._asdict()} for i, one in enumerate(found))], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--plain", metavar="URL")
    parser.add_argument("--choices", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    rows = [choice_row(args.url, list(choices(args.choices, args.seed)))]
    asked = list(predicates(args.documents, args.seed))
    more, found = predicate_rows("predicate", args.url, asked)
    rows += more
    series = [Series("the form it was trained on", COLOURS[0], found)]
    if args.plain:
        more, found = predicate_rows("predicate, plain layout", args.plain, asked)
        rows += more
        series.append(Series("plain layout, a form unknown to it", COLOURS[1], found))
    publish("decisions-builtin", rows, args.out)
    if args.plot is not None:
        args.plot.mkdir(parents=True, exist_ok=True)
        title = f"The built-in model on {PREDICATES_EACH * len(asked):,} held-out predicates"
        (args.plot / "decisions-calibration.svg").write_text(svg(title, series), encoding="utf-8")


if __name__ == "__main__":
    main()
