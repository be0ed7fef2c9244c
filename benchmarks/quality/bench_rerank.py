"""Measures the accuracy of /v1/rerank on held-out queries and documents of the built-in catalogue, over HTTP.

    assay serve deployments/configs/cpu.yaml
    python -m benchmarks.quality.bench_rerank http://127.0.0.1:8000 --out benchmarks/results

Every irrelevant document differs from a relevant one in exactly one attribute. AUC is the chance that a relevant pair
scores above an irrelevant one; accuracy is the share of pairs on the right side of even odds.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.support.report import Row, publish
from tools.builtin_model import evaluate

AT_ONCE = 8


async def log_odds(url: str, asked: Sequence[evaluate.HeldOutQuestion]) -> list[float]:
    """Returns the log-odds of each pair, from a request of its own."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), raise_for_status=True) as http:

        async def one(question: evaluate.HeldOutQuestion) -> float:
            query, document = question.prompt.removesuffix("\nRelevant:").removeprefix("Query: ").split("\nDocument: ")
            body = {"query": query, "documents": [document], "raw_scores": True}
            async with gate, http.post(url + "/v1/rerank", json=body) as answer:
                score: float = (await answer.json())["results"][0]["relevance_score"]
            return score

        return list(await asyncio.gather(*map(one, asked)))


def pairs_row(url: str, count: int, seed: int) -> Row:
    asked = evaluate.questions("relevance", count, seed)
    scores = np.array(asyncio.run(log_odds(url, asked)))
    relevant = np.array([question.answer == "yes" for question in asked])
    return {
        "case": "pairs that differ in one attribute",
        "count": count,
        "relevant": int(relevant.sum()),
        "auc": evaluate.area_under_curve(scores, relevant),
        "accuracy": float(((scores > 0) == relevant).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    publish("rerank-builtin", [pairs_row(args.url, args.pairs, args.seed)], args.out, notes=f"seed {args.seed}")


if __name__ == "__main__":
    main()
