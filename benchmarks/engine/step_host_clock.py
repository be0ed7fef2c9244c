"""Times the host's work for one engine step. `benchmarks.engine.bench_step_host` starts it once for each commit.

The model packs its steps as a real one does and computes nothing, so that all that is left is the host's work. The
module runs on the sources of earlier commits too, whose modules have other names.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.service import clock_service
from benchmarks.service.clock_service import ClockModel, ClockSampler, Engine
from benchmarks.support.earlier import first_of
from gpu_sampler.output import SampleOutput

pack: Any = first_of("engine.batch:pack", "engine.batch.input_batch:pack")
StepKind: Any = first_of("engine.batch:StepKind", "engine.batch.input_batch:StepKind")
ScheduledSequence: Any = first_of("engine.batch:Run", "engine.batch.input_batch:ScheduledSequence")
GenerateRequest: Any = first_of("engine.jobs:GenerateJob", "engine.requests:GenerateRequest")
SamplingParams: Any = first_of("gpu_sampler.params:SamplingParams", "gpu_sampler.sampling_params:SamplingParams")
EngineConfig: Any = first_of("engine.config:EngineConfig")

VOCAB = 151_936
PROMPT, NEW = 128, 256
PACKED = ((64, 128), (256, 32), (8, 1024), (1, 8192))  # prompts and tokens of each
REPEATS = 300


class StepTime(NamedTuple):
    """Says what the step thread had used when it launched a step."""

    decoded: int  # rows of a decode step, else 0
    processor_s: float
    wall_s: float


class PackingModel(ClockModel):
    """Packs every step, and takes no time on the device."""

    def forward(self, kind: Any, sequences: Any, token_table: Any) -> torch.Tensor:
        batch = pack(kind, sequences, token_table, self.device)
        return torch.zeros(1, 1).expand(batch.num_rows, self.vocab_size)


class IdleSampler(ClockSampler):
    """Gives the same tokens in every step."""

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        plan, rows = self.plan_rows(slots), len(slots)
        tokens, flags = np.full(rows, clock_service.FIRST_ID, np.int32), np.zeros(rows, np.uint32)
        if plan.n_top is None:
            return SampleOutput(tokens, None, None, None, None, None, flags)
        top = (rows, plan.n_top)
        ids, values = np.zeros(top, np.int32), np.zeros(top, np.float32)
        numbers = np.zeros(rows, np.float32), np.ones(rows, np.int32)
        return SampleOutput(tokens, *numbers, ids, values, np.zeros((rows, plan.n_chosen), np.float32), flags)


def decode_times(rows: int, *, streamed: bool, logprobs: int | None) -> dict[str, float]:
    """Returns the median microseconds of a decode step of `rows` rows: the step thread's own, and by the clock."""
    model = PackingModel(VOCAB)
    config = EngineConfig(max_running=rows, max_queued_tokens=1 << 40, token_budget=1 << 20)
    times: list[StepTime] = []

    def note(step: Any) -> None:
        decoded = len(step.slots) if str(step.kind) == "decode" else 0
        times.append(StepTime(decoded, time.thread_time(), time.perf_counter()))

    try:
        options = {"options": first_of("engine.core:LoopOptions")(overlap=True, before_step=note)}
    except ImportError:
        options = {"overlap": True, "before_step": note}
    engine = Engine(model, config, IdleSampler(model, config), **options)
    engine.start()
    try:
        asyncio.run(_generate(engine, rows, streamed=streamed, logprobs=logprobs))
    finally:
        engine.stop()
    steps = [
        (then.processor_s - now.processor_s, then.wall_s - now.wall_s)
        for now, then in pairwise(times)
        if now.decoded == then.decoded == rows
    ][8:-8]
    processor, wall = (1e6 * statistics.median(column) for column in zip(*steps, strict=True))
    return {"processor_us": processor, "wall_us": wall, "steps": len(steps)}


async def _generate(engine: Any, rows: int, *, streamed: bool, logprobs: int | None) -> None:
    name = next(iter(GenerateRequest.__dataclass_fields__))  # `request_id`, or its name in earlier commits
    params = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=logprobs)
    draw = np.random.default_rng(5)
    requests = [
        GenerateRequest(**{name: str(i)}, prompt=draw.integers(9, VOCAB, PROMPT, np.int32), params=params, seed=i)
        for i in range(rows)
    ]

    async def read(request: Any) -> None:
        async for _ in engine.generate(request):
            pass

    await asyncio.gather(*((read if streamed else engine.complete)(request) for request in requests))


def packing_times(prompts: int, tokens: int) -> float:
    """Returns the median microseconds of packing a prefill step."""
    table = torch.zeros((2, 16), dtype=torch.int32)
    empty = np.empty(0, np.int32)
    slots = np.random.default_rng(5).permutation(prompts * tokens).astype(np.int32).reshape(prompts, tokens)
    last = np.array([tokens - 1], np.int32)
    step = [ScheduledSequence(i + 1, empty, slots[i], slots[i], last) for i in range(prompts)]
    return _median_us(lambda: pack(StepKind.PREFILL, step, table, torch.device("cpu")))


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    clock_service.DECODE_S = clock_service.ROW_S = clock_service.TOKEN_S = 0.0
    rows: list[dict[str, Any]] = []
    for name, streamed, logprobs in (("plain", False, None), ("streamed", True, None), ("streamed, top 5", True, 5)):
        rows.append(
            {"case": f"decode step of 256 rows, {name}"} | decode_times(256, streamed=streamed, logprobs=logprobs)
        )
    for prompts, tokens in PACKED:
        rows.append({"case": f"packing {prompts} x {tokens} prompt tokens", "wall_us": packing_times(prompts, tokens)})
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("ASSAY_TEST_FAULTS", "1")
    main()
