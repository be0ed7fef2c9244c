"""Measures a running service over HTTP, in a closed loop at a given concurrency.

    make serve CONFIG=... ; python -m benchmarks.service.bench_service http://127.0.0.1:8000 --out benchmarks/results

The load generator shares the machine with the server. The result is the best of `--repeat` runs for scoring, and
one run for decoding.
"""

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.support import workloads
from benchmarks.support.report import Row, publish

SAMPLING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0}),
    ("t.8k50p.9", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    ("t.8k50p.9seed", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}),
)


class ServiceLoad(NamedTuple):
    seconds: float
    p50_ms: float
    p99_ms: float
    errors: int


async def load(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> ServiceLoad:
    """Posts every body, with `concurrency` requests in flight."""
    payloads = [json.dumps(body).encode() for body in bodies]
    gate, times, errors = asyncio.Semaphore(concurrency), list[float](), 0
    limits, patience = aiohttp.TCPConnector(limit=concurrency), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=limits, timeout=patience) as session:

        async def post(payload: bytes) -> None:
            nonlocal errors
            async with gate:
                start = time.perf_counter()
                headers = {"content-type": "application/json"}
                async with session.post(url, data=payload, headers=headers) as answer:
                    await answer.read()
                    errors += answer.status != 200
                times.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(post(payload) for payload in payloads))
        seconds = time.perf_counter() - start
    times.sort()
    return ServiceLoad(seconds, 1e3 * times[len(times) // 2], 1e3 * times[int(len(times) * 0.99)], errors)


async def scoring_rows(url: str, vocab: int, repeat: int, detail: str) -> list[Row]:
    rows: list[Row] = []
    labels = [label % vocab for label in workloads.LABELS]
    for name, requests, query, items, item in workloads.SCORING:
        for concurrency in (8, 32) if items > 1 else (32, 256):
            runs = []
            for run in range(repeat):
                # A workload without a query still needs a row's first token to be one. New tokens for every run: a
                # query that an earlier run left in the prefix cache would flatter this one.
                seed = 100 + 7 * run + concurrency + (1000 if detail == "full" else 0)
                work = workloads.scoring(requests, query or 1, items, item if query else item - 1, seed)
                bodies = [
                    {
                        "query": (q % vocab).tolist(),
                        "items": [(i % vocab).tolist() for i in own],
                        "label_token_ids": labels,
                        "detail": detail,
                    }
                    for q, own in work
                ]
                runs.append(await load(url + "/generative_scoring", bodies, concurrency))
            best = min(runs)
            rows.append(
                _row(f"{name} ({detail}), {concurrency} at once", best, items_s=requests * items / best.seconds)
            )
    return rows


async def decode_rows(url: str, vocab: int) -> list[Row]:
    rows: list[Row] = []
    for name, prompts, length, new in workloads.DECODE:
        ids = [(x % vocab).tolist() for x in workloads.token_lists(prompts, length, seed=7)]
        for case, options in SAMPLING:
            bodies = [{"prompt": x, "max_tokens": new, "ignore_eos": True, **options} for x in ids]
            await load(url + "/v1/completions", bodies[:32], 32)
            found = await load(url + "/v1/completions", bodies, prompts)
            rows.append(_row(f"{name} {case}", found, out_tok_s=prompts * new / found.seconds))
    return rows


def _row(case: str, found: ServiceLoad, **rates: float) -> Row:
    return {"case": case, **rates, "p50_ms": found.p50_ms, "p99_ms": found.p99_ms, "errors": found.errors}


def served(url: str) -> tuple[str, int]:
    """Returns the served name and the size of the vocabulary."""
    with urllib.request.urlopen(url + "/v1/models") as answer:
        model = json.load(answer)["data"][0]
    return str(model["id"]), int(model["assay"]["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name, vocab = served(args.url)

    async def all_rows() -> list[Row]:
        rows = await scoring_rows(args.url, vocab, args.repeat, "full")
        rows += await scoring_rows(args.url, vocab, args.repeat, "probabilities")
        return rows + await decode_rows(args.url, vocab)

    publish(f"service-{name}", asyncio.run(all_rows()), args.out, notes="one ingress, one replica, Serve's defaults")


if __name__ == "__main__":
    main()
