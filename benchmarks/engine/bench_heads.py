"""Measures what a classification head costs against label scores of the same rows by the language-model head.

    python -m benchmarks.engine.bench_heads --model benchmarks/models/qwen3-0.6b --out benchmarks/results

Both sides score the same rows, in turn within a round, with engines in processes of their own: in one process the
layers of the second model are found behind those of the first at every call of compiled code. The first one of a round
finds a device that has rested, which may have a higher clock for it: each side is first in every other round. Requests
have one row or 64, without a shared prefix. Weights are random; those below the heads are the same.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.support import workloads
from benchmarks.support.report import Row, publish
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.model.loader import load_model
from engine.requests import EngineRequest, Int32s, PoolingRequest, PoolingTask, ScoreRequest

MODEL = "benchmarks/models/qwen3-0.6b"
ROUNDS = 6
ROWS = 128  # tokens of each
EMPTY = np.zeros(0, np.int32)
LABELS = np.array([5, 7], np.int32)


def _started(path: str, head: Literal["lm", "sequence"], slots: int) -> Engine:
    config = EngineConfig(max_queued_tokens=1 << 30, kv_slots=slots)
    model = load_model(ModelConfig(path=path, random_weights=True, head=head), config)
    engine = Engine(model, config)
    engine.warm_up(lambda stage, seconds: None, complete=True)
    engine.start()
    return engine


def requests(head: str, rows: list[Int32s], each: int, name: str) -> Sequence[EngineRequest]:
    """Returns requests of `each` rows without a prefix, for one head."""
    found: list[EngineRequest] = []
    for first in range(0, len(rows), each):
        own = rows[first : first + each]
        ids, starts = np.concatenate(own), np.cumsum([0, *map(len, own)]).astype(np.int32)
        request_id = f"{name}{first}"
        if head == "lm":
            found.append(
                ScoreRequest(request_id=request_id, prefix=EMPTY, ids=ids, starts=starts, labels=LABELS, full=False)
            )
        else:
            task = PoolingTask.CLASSIFY
            found.append(PoolingRequest(request_id=request_id, prefix=EMPTY, ids=ids, starts=starts, task=task))
    return found


async def _seconds(engine: Engine, asked: Sequence[EngineRequest]) -> float:
    start = time.perf_counter()
    await asyncio.gather(
        *(engine.score(one) if isinstance(one, ScoreRequest) else engine.pooling(one) for one in asked)  # type: ignore[arg-type]
    )
    return time.perf_counter() - start


def serve(path: str, head: Literal["lm", "sequence"], slots: int, asked: Connection) -> None:
    """Runs an engine. Answers its vocabulary, then each pair of rows and a number of rows of a request with the seconds
    that they took, until it is sent nothing more."""
    engine = _started(path, head, slots)
    asked.send(engine.model.vocab_size)
    try:
        with contextlib.suppress(EOFError):
            for turn in itertools.count():
                rows, each = asked.recv()
                asked.send(asyncio.run(_seconds(engine, requests(head, rows, each, f"{turn}."))))
    finally:
        engine.stop()


def measure(engines: Mapping[str, Connection], rows: int, rounds: int) -> list[Row]:
    """Returns a row for each number of rows in a request."""
    found: list[Row] = []
    vocab = {head: engine.recv() for head, engine in engines.items()}["lm"]
    for each in (1, 64):
        seconds: dict[str, list[float]] = {head: [] for head in engines}
        for turn in range(-1, rounds):  # the first does not count
            ids = [one % vocab for one in workloads.token_lists(rows, ROWS, seed=each + 100 * turn + 100)]
            for head in sorted(engines, reverse=turn % 2 == 1):
                engines[head].send((ids, each))
                seconds[head] += [engines[head].recv()] * (turn >= 0)
        rates = {head: rows / statistics.median(took) for head, took in seconds.items()}
        ratio = statistics.median(lm / own for lm, own in zip(seconds["lm"], seconds["sequence"], strict=True))
        found.append(
            {
                "case": f"{rows // each} requests of {each} x {ROWS} tokens",
                "labels_rows_s": rates["lm"],
                "head_rows_s": rates["sequence"],
                "head_over_labels": ratio,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="folder with the config.json of a causal model")
    parser.add_argument("--rows", type=int, default=4096, help="of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kv-slots", type=int, default=1 << 16, help="of either engine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    for head in ("lm", "sequence"):
        engines[head], other = spawn.Pipe()
        spawn.Process(target=serve, args=(args.model, head, args.kv_slots, other), daemon=True).start()
        other.close()
    rows = measure(engines, args.rows, args.rounds)
    publish(f"heads-{Path(args.model).name}", rows, args.out, f"medians of {args.rounds} rounds, in turn")


if __name__ == "__main__":
    main()
