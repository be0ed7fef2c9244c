"""Measures the engine's cost on the host: score requests of one item, with a model that computes nothing.

    python -m benchmarks.engine.bench_host --out benchmarks/results

It prints two kinds of rows. `host`: the CPU time of both threads for each request, from submission to answers. `beside
a device`: a clock simulates the device. It takes STEP_MS for 16,384 tokens, gets a step by OPERATIONS calls that each
occupy the host for a given time and release the interpreter's lock, as torch's do, and holds two steps at most. The row
gives the rate and the idle share of the simulated device, and shows from which launch cost on the host is the limit.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.support import workloads
from benchmarks.support.report import Row, publish
from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.config import EngineConfig
from engine.core import LoopOptions
from engine.engine import Engine
from engine.requests import Int32s, ScoreRequest
from tests.support.toy_model import ToyModel

VOCAB = 151_936
STEP_TOKENS = 16_384
ROUNDS = 7
OPERATIONS = 560  # of a step of 28 layers, by a profile
LAUNCH_US = (0, 12, 25, 50)  # an operation's, for the host
STEP_MS = 31.5  # of 16,384 tokens on an H200, 0.6B
EMPTY = np.zeros(0, np.int32)


class SimulatedDevice:
    """Simulates a device that works on its steps in order."""

    def __init__(self, operations: int, operation_s: float, token_s: float) -> None:
        self._operations, self._operation_s, self._token_s = operations, operation_s, token_s
        self._ends = [0.0, 0.0]  # of the last two steps
        self._blank = torch.zeros(1)
        self.launch_s = operations * operation_s
        self.busy = 0.0

    def launch(self, tokens: int) -> None:
        start = time.perf_counter()
        if self._ends[0] > start:
            time.sleep(self._ends[0] - start)
        begun = max(time.perf_counter(), self._ends[1])
        for _ in range(self._operations):
            until = time.perf_counter() + self._operation_s
            self._blank.add_(1)  # lets go of the lock
            while time.perf_counter() < until:
                pass
        seconds = self._token_s * tokens
        self.busy += seconds
        self._ends = [self._ends[1], max(begun + seconds, time.perf_counter())]

    def wait(self) -> None:
        left = self._ends[1] - time.perf_counter()
        if left > 0:
            time.sleep(left)


class Blank(ToyModel):
    """Answers zeros immediately, or when the simulated device is ready."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(vocab_size=VOCAB, num_slots=num_slots, max_model_len=1_024)
        self.target: SimulatedDevice | None = None

    def label_logits(
        self, kind: StepKind, runs: Sequence[ScheduledSequence], token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        if self.target is not None:
            self.target.launch(sum(len(run.write) for run in runs))
        return torch.zeros((sum(len(run.rows) for run in runs), len(labels)))


class Round(NamedTuple):
    seconds: float
    processor_s: float


async def _round(engine: Engine, device: SimulatedDevice | None, jobs: list[ScoreRequest]) -> Round:
    start, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(engine.score(job) for job in jobs))
    if device is not None:
        device.wait()
    return Round(time.perf_counter() - start, time.process_time() - spent)


def _jobs(requests: int, seed: int) -> list[ScoreRequest]:
    _, _, query, items, item = next(load for load in workloads.SCORING if load[0] == "classify")
    labels, starts = np.array(workloads.LABELS, np.int32), np.array([0, item], np.int32)
    return [
        ScoreRequest(request_id=f"{seed}.{i}", prefix=EMPTY, ids=ids[0], starts=starts, labels=labels, full=False)
        for i, (_, ids) in enumerate(workloads.scoring(requests, query, items, item, seed))
    ]


def measured(requests: int, rounds: int, device_of: Sequence[float | None]) -> list[Row]:
    """Measures the host alone (None), and with a device at each number of microseconds an operation."""
    jobs = _jobs(requests, seed=5)
    model = Blank(num_slots=4 * requests * len(jobs[0].ids))
    engine = Engine(
        model, EngineConfig(max_queued_tokens=1 << 40, token_budget=STEP_TOKENS), options=LoopOptions(overlap=True)
    )
    engine.start()
    try:
        return [_row(engine, model, jobs, rounds, launch_us) for launch_us in device_of]
    finally:
        engine.stop()


def _row(engine: Engine, model: Blank, jobs: list[ScoreRequest], rounds: int, launch_us: float | None) -> Row:
    device = None
    if launch_us is not None:
        device = SimulatedDevice(OPERATIONS, 1e-6 * launch_us, 1e-3 * STEP_MS / STEP_TOKENS)
    model.target = device
    found = [asyncio.run(_round(engine, device, jobs)) for _ in range(rounds + 1)][1:]
    seconds = statistics.median(one.seconds for one in found)
    if device is None:
        each = statistics.median(one.processor_s for one in found) / len(jobs)
        return {"case": "host", "items_s": len(jobs) / seconds, "processor_us": 1e6 * each}
    rates = [len(jobs) / one.seconds for one in found]
    idle = 1 - device.busy / (rounds + 1) / seconds
    row: Row = {"case": f"beside a device, launches of {1e3 * device.launch_s:.3g} ms", "idle": idle}
    return {**row, "items_s": len(jobs) / seconds, "slowest": min(rates), "fastest": max(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4_096)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="beside a first; medians are given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("ASSAY_TEST_FAULTS", "1")  # the stand-in is one of the models for tests
    torch.set_num_threads(1)
    rows = measured(args.requests, args.rounds, [None, *LAUNCH_US])
    publish("host", rows, args.out, notes=f"{args.requests} requests; a device of {STEP_MS} ms a step is a clock")


if __name__ == "__main__":
    main()
