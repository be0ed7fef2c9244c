"""Profiles single steps of a model and the rounds of lone generations, to find what one commit does more than another.

    python -m benchmarks.engine.step_profile --model benchmarks/models/qwen3-0.6b --random-weights --out OUT/now.json
    cd BEFORE && PYTHONPATH=BEFORE:NOW python -m benchmarks.engine.step_profile ... --out OUT/before.json

It runs on the sources of an earlier commit in BEFORE too, whose modules have other names. Rows of three kinds:

- `step`: milliseconds of a step, run back to back; `host_ms` until the host has launched it on an idle device;
  `device_ms` and `kernels` of the device alone, by the profiler, on which the clock of the host has no influence.
- `kernel`: the kernels that take most of such a step, by name: how many a step, and their microseconds together.
- `generation`: milliseconds a token of greedy generations that run together, without HTTP, and the median microseconds
  of a round's parts on the step thread: planning, launching, and waiting for the device. Where a round takes as long as
  all three together the device stands still while the host works; where steps overlap it takes the device's time alone.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.support.earlier import first_of
from gpu_sampler.sampler import Fetched

Sequences: Any = first_of("engine.batch:Run", "engine.batch.input_batch:ScheduledSequence")
StepKind: Any = first_of("engine.batch:StepKind", "engine.batch.input_batch:StepKind")
Engine: Any = first_of("engine.loop:Engine", "engine.engine:Engine")
EngineConfig: Any = first_of("engine.config:EngineConfig")
ModelConfig: Any = first_of("engine.config:ModelConfig")
GenerateRequest: Any = first_of("engine.jobs:GenerateJob", "engine.requests:GenerateRequest")
SamplingParams: Any = first_of("gpu_sampler.params:SamplingParams", "gpu_sampler.sampling_params:SamplingParams")
load_model: Any = first_of("engine.model:load_model", "engine.model.loader:load_model")

Row = dict[str, Any]
EMPTY = np.empty(0, np.int32)
DECODE = ((1, 256), (8, 256), (32, 256), (256, 256), (1, 1024))  # rows, and tokens before each
PREFILL = ((256, 64), (16, 1024), (1, 128))  # sequences, and tokens of each
TOGETHER = (1, 2, 16)  # generations
PROMPT, NEW = 128, 128
PROFILED, SHOWN = 4, 12  # steps of a profile, and kernels of a table
REPEATS, ROUNDS = 12, 3
NAME = 70  # characters of a kernel's name


def steps(model: Any) -> dict[str, Callable[[], Any]]:
    """Returns each step by name."""
    table_of_tokens = torch.ones((300, 2048), dtype=torch.int32, device=model.device)
    found: dict[str, Callable[[], Any]] = {}
    rng = np.random.default_rng(5)

    def step(kind: Any, work: list[Any]) -> Callable[[], Any]:
        return lambda: model.forward(kind, work, table_of_tokens)

    on_cuda = model.device.type == "cuda"
    for rows, context in DECODE if on_cuda else DECODE[:1]:
        if rows * (context + 1) < model.num_slots:
            slots = np.arange(1, 1 + rows * (context + 1), dtype=np.int32).reshape(rows, -1)
            own = [_sequence(i + 1, one[:-1], one[-1:], None) for i, one in enumerate(slots)]
            found[f"decode {rows} rows, {context} context"] = step(StepKind.DECODE, own)
    for count, length in PREFILL if on_cuda else PREFILL[-1:]:
        if count * length < model.num_slots:
            slots = np.arange(1, 1 + count * length, dtype=np.int32).reshape(count, -1)
            ids = rng.integers(9, model.vocab_size, (count, length), dtype=np.int32)
            own = [_sequence(0, EMPTY, one, own_ids) for one, own_ids in zip(slots, ids, strict=True)]
            found[f"prefill {count} x {length}"] = step(StepKind.SCORE, own)
    return found


def _sequence(slot: int, context: Any, write_to: Any, ids: Any) -> Any:
    return Sequences(slot, context, write_to, ids, np.array([len(write_to) - 1], np.int32))


def step_rows(model: Any, name: str, run: Callable[[], Any]) -> list[Row]:
    """Measures one step."""
    for _ in range(3):
        run()
    _wait(model)
    together, alone = [], []
    on_cuda = model.device.type == "cuda"
    for _ in range(REPEATS if on_cuda else 2):
        start = time.perf_counter()
        for _ in range(PROFILED):
            run()
        _wait(model)
        together.append((time.perf_counter() - start) / PROFILED)
        start = time.perf_counter()
        run()
        alone.append(time.perf_counter() - start)
        _wait(model)
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            run()
        _wait(model)
    kernels, micros = Counter[str](), Counter[str]()
    for event in profiled.events() or ():
        if (str(event.device_type).endswith("CUDA")) == on_cuda:
            kernel = _short(event.name)
            kernels[kernel] += 1
            micros[kernel] += event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total
    row: Row = {
        "case": f"step: {name}",
        "ms": 1e3 * statistics.median(together),
        "host_ms": 1e3 * statistics.median(alone),
        "device_ms": sum(micros.values()) / PROFILED / 1e3,
        "kernels": kernels.total() / PROFILED,
    }
    top: list[Row] = [
        {"case": f"kernel: {kernel}", "kernels": kernels[kernel] / PROFILED, "us": us / PROFILED}
        for kernel, us in micros.most_common(SHOWN)
    ]
    return [row, *top]


def _short(name: str) -> str:
    """Returns a kernel's name without its template arguments."""
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return re.sub(r"^void |\(.*$", "", name)[:NAME]


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


class RoundParts:
    """Notes how long the parts of a round take, by wrapping the functions that do them."""

    def __init__(self, engine: Any) -> None:
        self.seconds: dict[str, list[float]] = {"plan": [], "launch": [], "wait": []}
        loop = engine.core if hasattr(engine, "core") else engine._steps
        launcher = loop if hasattr(loop, "_launch") else loop._flight
        self._wrap(loop, "_plan", "plan")
        self._wrap(launcher, "_launch" if launcher is loop else "launch", "launch")
        self._wrap(Fetched, "result", "wait")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        call, noted = getattr(owner, name), self.seconds[part]

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given)
            finally:
                noted.append(time.perf_counter() - start)

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Returns the median microseconds of each part since the last time."""
        found = {f"{part}_us": 1e6 * statistics.median(noted) for part, noted in self.seconds.items() if noted}
        for noted in self.seconds.values():
            noted.clear()
        return found


async def generation_rows(engine: Any, vocab: int) -> list[Row]:
    """Measures generations of several row counts in a started engine."""
    parts, rows = RoundParts(engine), list[Row]()
    name = next(iter(GenerateRequest.__dataclass_fields__))  # `request_id`, or its name in earlier commits
    params = SamplingParams(temperature=0.0, max_tokens=NEW)
    draw = np.random.default_rng(7)
    for count in TOGETHER:
        seconds = list[float]()
        for turn in range(ROUNDS + 1):  # the first does not count
            requests = [
                GenerateRequest(
                    **{name: f"{count}.{turn}.{i}"},
                    prompt=draw.integers(9, vocab, PROMPT, np.int32),
                    params=params,
                    seed=i,
                )
                for i in range(count)
            ]
            parts.take()
            start = time.perf_counter()
            await asyncio.gather(*map(engine.complete, requests))
            seconds += [time.perf_counter() - start] * (turn > 0)
        each: dict[str, Any] = parts.take()
        rows.append({"case": f"generation: {count} together", "ms": 1e3 * statistics.median(seconds) / NEW, **each})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--max-model-len", type=int, help="the model's own if absent")
    parser.add_argument(
        "--numerics", choices=("fast", "invariant"), help="`engine.numerics`, which earlier commits lack"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    numerics = {"numerics": given.numerics} if given.numerics else {}
    config = EngineConfig(max_queued_tokens=1 << 30, **numerics)
    model = load_model(
        ModelConfig(path=given.model, random_weights=given.random_weights, max_model_len=given.max_model_len), config
    )
    engine = Engine(model, config)
    engine.warm_up(lambda stage, seconds: None, complete=True)
    rows = [row for name, run in steps(model).items() for row in step_rows(model, name, run)]
    engine.start()
    try:
        rows += asyncio.run(generation_rows(engine, model.vocab_size))
    finally:
        engine.stop()
    for row in rows:
        figures = (f"{key} {value:.2f}" for key, value in row.items() if key != "case")
        sys.stdout.write(f"{row['case']:<{NAME + 10}}  {'  '.join(figures)}\n")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"machine": _machine(model), "rows": rows}, indent=1) + "\n")


def _machine(model: Any) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
