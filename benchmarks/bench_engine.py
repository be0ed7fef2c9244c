"""The engine without HTTP: packed prefill, decode steps, the peers' scoring and decoding workloads.

    python -m benchmarks.bench_engine --model benchmarks/models/qwen3-0.6b --random-weights --out benchmarks/results
    python -m benchmarks.bench_engine --model benchmarks/models/qwen3-0.6b-128k --random-weights --prompts 100000

Rates count what peers count: `unique_tok_s` is tokens actually computed, `out_tok_s` generated tokens over the whole
wall time, prefill included. Steps are timed back to back after warm-up; the median of the repeats is given.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.report import Row, publish
from engine.batch import Run, StepKind
from engine.causal_lm import CausalLM
from engine.config import EngineConfig, ModelConfig
from engine.jobs import GenerateJob, Int32s, LikelihoodJob, ScoreJob
from engine.loop import Engine
from engine.model import load_model
from gpu_sampler.params import SamplingParams

_FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
_PENALISED = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
STREAMED = "greedy streamed"
SAMPLING: tuple[tuple[str, dict[str, float | int]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("greedy logprobs=5", {"temperature": 0.0, "logprobs": 5}),
    ("greedy penalties", {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    ("t.8", {"temperature": 0.8}),
    ("t.8 seed", {"temperature": 0.8, "seed": 7}),
    ("t.8 logprobs=5", {"temperature": 0.8, "logprobs": 5}),
    ("t.8k50p.9", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    ("t.8k50p.9 seed", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}),
    ("t.8p.9", {"temperature": 0.8, "top_p": 0.9}),
    ("t.8k50p.9 penalties logprobs=5", {**_FILTERED, **_PENALISED, "logprobs": 5}),
    ("greedy again", {"temperature": 0.0}),
    (STREAMED, {"temperature": 0.0}),
)
RUNS = 3  # of a decoding case, whose median is given
EMPTY = np.zeros(0, np.int32)


def _seconds(model: CausalLM, work: list[Run], kind: StepKind, table: torch.Tensor, repeats: int) -> float:
    """Median seconds of one step, back to back, so that host work hides behind the device where it can."""
    for _ in range(3):
        model.forward(kind, work, table)
    _wait(model)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(4):
            model.forward(kind, work, table)
        _wait(model)
        times.append((time.perf_counter() - start) / 4)
    return statistics.median(times)


def _wait(model: CausalLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def prefill_rows(model: CausalLM, table: torch.Tensor, repeats: int, share: int) -> list[Row]:
    """One step of 16,384 packed tokens (or a share of them), as sequences of 64, 256 and 1,024."""
    rows: list[Row] = []
    for length in (64, 256, 1024):
        count = max(1, 16_384 // length // share)
        ids = workloads.token_lists(count, length, seed=length)
        runs = [
            Run(
                0,
                EMPTY,
                np.arange(1 + i * length, 1 + (i + 1) * length, dtype=np.int32),
                x % model.vocab_size,
                _last(x),
            )
            for i, x in enumerate(ids)
        ]
        seconds = _seconds(model, runs, StepKind.SCORE, table, repeats)
        rows.append({"case": f"prefill {count} x {length}", "ms": 1e3 * seconds, "tok_s": count * length / seconds})
    return rows


def decode_rows(model: CausalLM, table: torch.Tensor, repeats: int, contexts: Sequence[int] = (256, 1024)) -> list[Row]:
    """One decode step of 1 to 256 rows after contexts of the given lengths."""
    rows: list[Row] = []
    for context in contexts:
        for count in (1, 8, 32, 128, 256):
            if count * (context + 1) >= model.num_slots:
                continue
            slots = [
                np.arange(1 + i * (context + 1), 1 + (i + 1) * (context + 1), dtype=np.int32) for i in range(count)
            ]
            runs = [Run(i + 1, s[:-1], s[-1:], None, np.zeros(1, np.int32)) for i, s in enumerate(slots)]
            seconds = _seconds(model, runs, StepKind.DECODE, table, repeats)
            rows.append(
                {"case": f"decode {count} rows, {context} context", "ms": 1e3 * seconds, "tok_s": count / seconds}
            )
    return rows


async def scoring_rows(engine: Engine, vocab: int, names: Sequence[str], share: int, seed: int = 100) -> list[Row]:
    rows: list[Row] = []
    for name, requests, query, items, item in workloads.SCORING:
        if name not in names:
            continue
        requests = max(1, requests // share)
        jobs = [
            _score_job(f"{name}{i}", query_ids % vocab, [x % vocab for x in item_ids], vocab)
            for i, (query_ids, item_ids) in enumerate(workloads.scoring(requests, query, items, item, seed))
        ]
        start, before = time.perf_counter(), engine.stats()
        await asyncio.gather(*(engine.score(job) for job in jobs))
        seconds, after = time.perf_counter() - start, engine.stats()
        computed = after.computed_tokens - before.computed_tokens
        rows.append({"case": name, "items_s": requests * items / seconds, "unique_tok_s": computed / seconds})
    return rows


async def generate_rows(engine: Engine, vocab: int, names: Sequence[str], share: int) -> list[Row]:
    """Whole answers, as the peers' are timed, and greedy ones token by token."""
    rows: list[Row] = []
    runs = RUNS if share == 1 else 1
    for name, prompts, length, new in workloads.DECODE:
        if name not in names:
            continue
        prompts = max(1, prompts // share)
        ids = [x % vocab for x in workloads.token_lists(prompts, length, seed=7)]
        for case, options in SAMPLING:
            params = SamplingParams(max_tokens=new, **options)  # type: ignore[arg-type]
            seconds = [await _generate_all(engine, ids, params, f"{case}{i}", case == STREAMED) for i in range(runs)]
            median = statistics.median(seconds)
            row: Row = {"case": f"{name} {case}", "out_tok_s": prompts * new / median, "seconds": median}
            rows.append({**row, "fastest": min(seconds), "slowest": max(seconds)})
    return rows


async def _generate_all(
    engine: Engine, prompts: list[Int32s], params: SamplingParams, name: str, streamed: bool
) -> float:
    async def one(i: int, prompt: Int32s) -> int:
        job = GenerateJob(job_id=f"{name}{i}", prompt=prompt, params=params, seed=i, salt=name)
        if streamed:
            return sum([len(chunk.tokens) async for chunk in engine.generate(job)])
        return sum(len(chunk.tokens) for chunk in await engine.complete(job))

    await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts[:32])))  # warm
    start = time.perf_counter()
    counts = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    seconds = time.perf_counter() - start
    if set(counts) != {params.max_tokens}:
        raise RuntimeError(f"expected {params.max_tokens} tokens a prompt, got {sorted(set(counts))}")
    return seconds


async def prompt_rows(engine: Engine, vocab: int, lengths: Sequence[int], device: torch.device) -> list[Row]:
    """Log-probabilities and ranks of every token of one long prompt, and the memory that takes beside what the engine
    held before."""
    rows: list[Row] = []
    for length in lengths:
        ids = workloads.token_lists(1, length, seed=length)[0] % vocab
        starts, one = np.array([0, length], np.int32), np.array([length - 1], np.int32)
        job = LikelihoodJob(job_id=f"prompt{length}", prefix=EMPTY, ids=ids, starts=starts, shared=one * 0, wanted=one)
        held = _most_held(device, reset=True)
        start = time.perf_counter()
        result = await engine.likelihood(job)
        seconds = time.perf_counter() - start
        if result.logprobs.shape != (length - 1,) or not np.isfinite(result.logprobs).all():
            raise RuntimeError(f"a prompt of {length} tokens has no {length - 1} finite log-probabilities")
        more = (_most_held(device) - held) / 2**20
        case = f"prompt log-probabilities of {length:,} tokens"
        rows.append({"case": case, "seconds": seconds, "tok_s": length / seconds, "more_mib": more})
    return rows


def _most_held(device: torch.device, *, reset: bool = False) -> int:
    """Bytes: the largest allocation since the last reset; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def _score_job(name: str, query: Int32s, items: list[Int32s], vocab: int) -> ScoreJob:
    starts = np.cumsum([0, *(len(x) for x in items)]).astype(np.int32)
    labels = np.array(workloads.LABELS, np.int32) % vocab
    return ScoreJob(job_id=name, prefix=query, ids=np.concatenate(items), starts=starts, labels=labels, full=False)


def _last(ids: Int32s) -> Int32s:
    return np.array([len(ids) - 1], np.int32)


async def _engine_rows(
    engine: Engine, vocab: int, names: Sequence[str], share: int, prompts: Sequence[int], device: torch.device
) -> list[Row]:
    engine.start()
    try:
        if names:
            await scoring_rows(engine, vocab, names, 8 * share, seed=99)  # warm, with queries of its own
        rows = [*await generate_rows(engine, vocab, names, share), *await scoring_rows(engine, vocab, names, share)]
        return [*rows, *await prompt_rows(engine, vocab, prompts, device)]
    finally:
        engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--max-model-len", type=int, help="the model's own if absent")
    parser.add_argument("--share", type=int, help="of requests and prompts: 1 in N (1 on CUDA, 32 on a CPU)")
    parser.add_argument("--workloads", default="decode256,rerank,long-query,classify")
    parser.add_argument("--prompts", default="", help="lengths of prompts whose log-probabilities are timed, by commas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model_config = ModelConfig(path=args.model, random_weights=args.random_weights, max_model_len=args.max_model_len)
    config = EngineConfig(max_queued_tokens=1 << 30)  # all jobs are submitted at once
    model = load_model(model_config, config)
    engine = Engine(model, config)
    stages: list[Row] = []
    engine.warm_up(lambda stage, seconds: stages.append({"case": f"start-up: {stage}", "seconds": seconds}))
    table = torch.ones((config.max_running + 1, model.max_model_len), dtype=torch.int32, device=model.device)
    share = args.share or (1 if model.device.type == "cuda" else 32)
    rows = [*stages, *prefill_rows(model, table, args.repeats, share), *decode_rows(model, table, args.repeats)]
    rows += asyncio.run(
        _engine_rows(
            engine,
            model.vocab_size,
            [name for name in args.workloads.split(",") if name],
            share,
            [int(length) for length in args.prompts.split(",") if length],
            model.device,
        )
    )
    name = "engine-" + Path(args.model).name
    publish(name, rows, args.out, notes=f"rates over whole wall time; 1 in {share} of the workloads")


if __name__ == "__main__":
    main()
