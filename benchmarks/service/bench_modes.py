"""Measures the cost of the service: the same requests to an engine in this process, to a service with Serve's defaults
and to one in fast mode, in turn, so that other load on the machine affects all three.

    assay serve deployments/configs/cpu.yaml                   # on port 8000
    assay serve --fast a-copy-with-another-port.yaml           # on port 8001
    python -m benchmarks.service.bench_modes http://127.0.0.1:8000 http://127.0.0.1:8001 --out benchmarks/results

`overhead_ms` is the median over rounds of the difference of the medians of one round, with one client. `--pids` are
those of the two `assay serve`; `cpu_ms` is then the CPU time of a request in all processes, which is valid on a busy
machine too.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.support.cpu_time import cpu_s
from benchmarks.support.report import Row, publish
from deployments.cli.bench import load_generator, results, runner
from deployments.cli.bench.workloads import NEW_TOKENS, WORKLOADS, BenchRequest, ServedModel
from deployments.cli.launch import system_info
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.model.loader import load_model
from engine.requests import GenerateRequest, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams

BARE = "bare engine"
CALLERS = (1, 16)
OBJECTIVE_MS = 1000.0
KV_SLOTS, TOKEN_BUDGET, MAX_RUNNING = 65_536, 4096, 64  # as configs/cpu.yaml


class ModeCase(NamedTuple):
    target: str
    workload: str
    callers: int


async def bare(
    engine: Engine, model: ServedModel, case: ModeCase, seconds: float, seed: str
) -> list[results.RequestTiming]:
    """Runs a closed loop with the engine in place of a service."""
    found, start = list[results.RequestTiming](), time.perf_counter()

    async def caller(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        while (sent := time.perf_counter() - start) < seconds:
            request = WORKLOADS[case.workload](model, draw)
            first, tokens = await ask(engine, request, f"{seed}/{number}/{sent}", start)
            done = time.perf_counter() - start
            found.append(
                results.RequestTiming(
                    due_s=sent, sent_s=sent, first_s=first, done_s=done, status=results.OK, items=request.items,
                    tokens=tokens,
                )
            )  # fmt: skip

    async with asyncio.TaskGroup() as group:
        for number in range(case.callers):
            group.create_task(caller(number))
    return found


async def ask(engine: Engine, request: BenchRequest, name: str, start: float) -> tuple[float | None, int]:
    """Sends one request; for a generation, returns the time of the first tokens and their number."""
    body = json.loads(request.data)
    if request.workload == "score":
        items = [np.array(item, np.int32) for item in body["items"]]
        starts = np.cumsum([0, *map(len, items)]).astype(np.int32)
        query, labels = np.array(body["query"], np.int32), np.array(body["label_token_ids"], np.int32)
        await engine.score(
            ScoreRequest(request_id=name, prefix=query, ids=np.concatenate(items), starts=starts, labels=labels)
        )
        return None, 0
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=body["temperature"])
    job = GenerateRequest(request_id=name, prompt=np.array(body["prompt"], np.int32), params=params, seed=body["seed"])
    first, tokens = None, 0
    async for chunk in engine.generate(job):
        first = time.perf_counter() - start if first is None else first
        tokens += len(chunk.tokens)
    return first, tokens


class CpuClock:
    """Accumulates CPU seconds of each case, by part of the service."""

    def __init__(self, pids: dict[str, int]) -> None:
        """Knows no CPU time of a target without a process id."""
        self._pids = pids
        self.seconds = defaultdict[ModeCase, Counter[str]](Counter)

    def read(self, case: ModeCase) -> Counter[str]:
        if case.target == BARE:
            return Counter({"engine": time.process_time()})
        return cpu_s(self._pids[case.target]) if case.target in self._pids else Counter()

    def add(self, case: ModeCase, before: Counter[str]) -> None:
        after = self.read(case)
        after.subtract(before)
        self.seconds[case].update(after)


async def measure(
    engine: Engine,
    targets: dict[str, load_generator.Target],
    workloads: list[str],
    rounds: int,
    seconds: float,
    clock: CpuClock,
) -> dict[ModeCase, list[results.LoadRun]]:
    model, _ = runner.served(next(iter(targets.values())))
    found = defaultdict[ModeCase, list[results.LoadRun]](list)
    for number in range(-1, rounds):  # the first warms up
        for workload in workloads:
            for callers in CALLERS:
                for name in (BARE, *targets):
                    case, seed = ModeCase(name, workload, callers), f"{number}/{workload}/{callers}/{name}"
                    before = clock.read(case)
                    if name == BARE:
                        got = await bare(engine, model, case, seconds, seed)
                    else:
                        ask_of = WORKLOADS[workload]
                        got = await load_generator.closed_loop(
                            targets[name], model, ask_of, callers, seconds, seed, lambda one: None
                        )
                    if number >= 0:
                        clock.add(case, before)
                        found[case].append(results.summarise(got, seconds, OBJECTIVE_MS))
        print(f"round {number + 1} of {rounds}, load {system_info.load()[0]}", flush=True)
    return found


def rows_of(found: dict[ModeCase, list[results.LoadRun]], clock: CpuClock) -> list[Row]:
    rows: list[Row] = []
    for case, runs in found.items():
        spread = results.spreads(runs)
        base = found[case._replace(target=BARE)]
        over = [run.p50_ms - bare_run.p50_ms for run, bare_run in zip(runs, base, strict=True)]
        row: Row = {"case": f"{case.workload}, {case.callers} at once", "target": case.target}
        for name in ("answered_per_s", "p50_ms", "p99_ms", "first_p50_ms"):
            if name in spread:
                row |= {name: spread[name].median, f"{name}_q1": spread[name].low, f"{name}_q3": spread[name].high}
        row["overhead_ms"] = statistics.median(over) if case.callers == 1 and case.target != BARE else None
        answered = sum(run.requests - run.failed - run.rejected for run in runs)
        cpu = {part: 1e3 * used / answered for part, used in clock.seconds[case].items()}
        row["cpu_ms"] = sum(cpu.values()) if cpu else None
        row |= {f"cpu_{part}_ms": used for part, used in cpu.items()}
        row["failed"] = sum(run.failed + run.rejected for run in runs)
        rows.append(row)
    return sorted(rows, key=lambda row: (str(row["case"]), [BARE, "default", "fast"].index(str(row["target"]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("default", help="URL of the service with Serve's defaults")
    parser.add_argument("fast", help="URL of the one in fast mode")
    parser.add_argument("--workloads", default="score,completions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pids", type=int, nargs=2, metavar="PID", help="of the two `assay serve`")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(kv_slots=KV_SLOTS, token_budget=TOKEN_BUDGET, max_running=MAX_RUNNING)
    model = load_model(ModelConfig(path="builtin", device="cpu"), config)
    engine = Engine(model, config)
    engine.warm_up(lambda stage, seconds: None)
    engine.start()
    clock = CpuClock(dict(zip(("default", "fast"), args.pids or (), strict=False)))
    before = system_info.load()
    try:
        targets = {"default": load_generator.Target(args.default), "fast": load_generator.Target(args.fast)}
        found = asyncio.run(measure(engine, targets, args.workloads.split(","), args.rounds, args.seconds, clock))
    finally:
        engine.stop()
    notes = (
        f"built-in model on the CPU, one ingress and one replica; medians and quartiles of {args.rounds} rounds of "
        f"{args.seconds:g} s in turns; load of the machine over 1, 5 and 15 minutes: {before} before, "
        f"{system_info.load()} "
        "after"
    )
    publish("modes-builtin", rows_of(found, clock), args.out, notes=notes)


if __name__ == "__main__":
    main()
