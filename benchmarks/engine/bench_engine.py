"""Measures the engine without HTTP: packed prefill, decode steps, and scoring and decoding workloads.

    python -m benchmarks.engine.bench_engine --model benchmarks/models/qwen3-0.6b --random-weights --out OUT
    python -m benchmarks.engine.bench_engine --model benchmarks/models/qwen3-0.6b-128k --random-weights --prompts 100000

Rates count the same tokens as other engines' benchmarks: `unique_tok_s` is tokens actually computed, `out_tok_s`
generated tokens over the whole wall time, prefill included. Steps are timed back to back after warm-up; the median of
the repeats is given.

The speed of a host varies, and a process gets faster with time. So all cases run in turn, in rounds after a first one
that does not count, and a case's median round is given with its slowest and fastest. `of_greedy` compares it with the
greedy runs at both ends of the same round.
"""

import argparse
import asyncio
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
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.model.interface import CausalLM
from engine.model.loader import load_model
from engine.requests import GenerateRequest, Int32s, LikelihoodRequest, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams

_FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
_PENALISED = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
GREEDY, AGAIN, STREAMED = "greedy", "greedy again", "greedy streamed"
SAMPLING: tuple[tuple[str, dict[str, float | int]], ...] = (
    (GREEDY, {"temperature": 0.0}),
    ("greedy logprobs=5", {"temperature": 0.0, "logprobs": 5}),
    ("greedy penalties", {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    ("t.8", {"temperature": 0.8}),
    ("t.8 seed", {"temperature": 0.8, "seed": 7}),
    ("t.8 logprobs=5", {"temperature": 0.8, "logprobs": 5}),
    ("t.8k50p.9", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    ("t.8k50p.9 seed", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}),
    ("t.8p.9", {"temperature": 0.8, "top_p": 0.9}),
    ("t.8k50p.9 penalties logprobs=5", {**_FILTERED, **_PENALISED, "logprobs": 5}),
    (AGAIN, {"temperature": 0.0}),
    (STREAMED, {"temperature": 0.0}),
)
ROUNDS = 5
SEED = 100  # of a round's queries, the first round's: none has been seen before
EMPTY = np.zeros(0, np.int32)


def _seconds(
    model: CausalLM, work: list[ScheduledSequence], kind: StepKind, table: torch.Tensor, repeats: int
) -> float:
    """Returns the median seconds of one step, run back to back, so that host work overlaps the device's."""
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
    """Measures one step of up to 16,384 packed tokens, as sequences of 64, 256 and 1,024."""
    rows: list[Row] = []
    for length in (64, 256, 1024):
        count = max(1, 16_384 // length // share)
        ids = workloads.token_lists(count, length, seed=length)
        runs = [
            ScheduledSequence(
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
    """Measures one decode step of 1 to 256 sequences after contexts of the given lengths."""
    rows: list[Row] = []
    for context in contexts:
        for count in (1, 8, 32, 128, 256):
            if count * (context + 1) >= model.num_slots:
                continue
            slots = [
                np.arange(1 + i * (context + 1), 1 + (i + 1) * (context + 1), dtype=np.int32) for i in range(count)
            ]
            runs = [ScheduledSequence(i + 1, s[:-1], s[-1:], None, np.zeros(1, np.int32)) for i, s in enumerate(slots)]
            seconds = _seconds(model, runs, StepKind.DECODE, table, repeats)
            rows.append(
                {"case": f"decode {count} rows, {context} context", "ms": 1e3 * seconds, "tok_s": count / seconds}
            )
    return rows


async def scoring_rows(engine: Engine, vocab: int, names: Sequence[str], share: int, rounds: int) -> list[Row]:
    found: dict[str, list[_Scored]] = {name: [] for name, *_ in workloads.SCORING if name in names}
    for turn in range(-1, rounds):  # the first does not count
        for name, requests, query, items, item in workloads.SCORING:
            if name not in names:
                continue
            size = max(1, requests // share // (1 if turn >= 0 else 8))
            jobs = [
                _score_job(f"{name}{turn}.{i}", query_ids % vocab, [x % vocab for x in item_ids], vocab)
                for i, (query_ids, item_ids) in enumerate(workloads.scoring(size, query, items, item, SEED + turn))
            ]
            scored = await _score_all(engine, jobs, size * items)
            if turn >= 0:
                found[name].append(scored)
    return [_scoring_row(name, runs) for name, runs in found.items()]


class _Scored(NamedTuple):
    """Holds one round of a workload."""

    items_s: float
    unique_tok_s: float


async def _score_all(engine: Engine, jobs: list[ScoreRequest], items: int) -> _Scored:
    start, before = time.perf_counter(), engine.stats()
    await asyncio.gather(*(engine.score(job) for job in jobs))
    seconds, after = time.perf_counter() - start, engine.stats()
    return _Scored(items / seconds, (after.computed_tokens - before.computed_tokens) / seconds)


def _scoring_row(name: str, runs: list[_Scored]) -> Row:
    rates = [run.items_s for run in runs]
    row: Row = {"case": name, "items_s": statistics.median(rates)}
    return {
        **row,
        "slowest": min(rates),
        "fastest": max(rates),
        "unique_tok_s": statistics.median(run.unique_tok_s for run in runs),
    }


async def generate_rows(engine: Engine, vocab: int, names: Sequence[str], share: int, rounds: int) -> list[Row]:
    """Measures whole answers, and greedy ones token by token."""
    rows: list[Row] = []
    for name, prompts, length, new in workloads.DECODE:
        if name not in names:
            continue
        prompts = max(1, prompts // share)
        ids = [x % vocab for x in workloads.token_lists(prompts, length, seed=7)]
        seconds: dict[str, list[float]] = {case: [] for case, _ in SAMPLING}
        for turn in range(-1, rounds):  # the first does not count
            for case, options in SAMPLING:
                params = SamplingParams(max_tokens=new, **options)  # type: ignore[arg-type]
                took = await _generate_all(engine, ids, params, f"{case}{turn}", case == STREAMED)
                seconds[case] += [took] * (turn >= 0)
        rows += [_generate_row(name, case, prompts * new, seconds) for case, _ in SAMPLING]
    return rows


def _generate_row(name: str, case: str, tokens: int, seconds: dict[str, list[float]]) -> Row:
    rates = [tokens / took for took in seconds[case]]
    greedy = [tokens / (ends / 2) for ends in map(sum, zip(seconds[GREEDY], seconds[AGAIN], strict=True))]
    row: Row = {"case": f"{name} {case}", "out_tok_s": statistics.median(rates)}
    ratio = statistics.median(rate / beside for rate, beside in zip(rates, greedy, strict=True))
    return {**row, "slowest": min(rates), "fastest": max(rates), "of_greedy": ratio}


async def _generate_all(
    engine: Engine, prompts: list[Int32s], params: SamplingParams, name: str, streamed: bool
) -> float:
    async def one(i: int, prompt: Int32s) -> int:
        job = GenerateRequest(request_id=f"{name}{i}", prompt=prompt, params=params, seed=i, cache_salt=name)
        if streamed:
            return sum([len(chunk.tokens) async for chunk in engine.generate(job)])
        return sum(len(chunk.tokens) for chunk in await engine.complete(job))

    start = time.perf_counter()
    counts = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    seconds = time.perf_counter() - start
    if set(counts) != {params.max_tokens}:
        raise RuntimeError(f"expected {params.max_tokens} tokens a prompt, got {sorted(set(counts))}")
    return seconds


async def prompt_rows(engine: Engine, vocab: int, lengths: Sequence[int], device: torch.device) -> list[Row]:
    """Measures log-probabilities and ranks of every token of one long prompt, and the memory beyond what the engine
    held before."""
    rows: list[Row] = []
    for length in lengths:
        ids = workloads.token_lists(1, length, seed=length)[0] % vocab
        starts, one = np.array([0, length], np.int32), np.array([length - 1], np.int32)
        job = LikelihoodRequest(
            request_id=f"prompt{length}", prefix=EMPTY, ids=ids, starts=starts, shared=one * 0, wanted=one
        )
        held = _peak_bytes(device, reset=True)
        start = time.perf_counter()
        result = await engine.likelihood(job)
        seconds = time.perf_counter() - start
        if result.logprobs.shape != (length - 1,) or not np.isfinite(result.logprobs).all():
            raise RuntimeError(f"a prompt of {length} tokens has no {length - 1} finite log-probabilities")
        more = (_peak_bytes(device) - held) / 2**20
        case = f"prompt log-probabilities of {length:,} tokens"
        rows.append({"case": case, "seconds": seconds, "tok_s": length / seconds, "more_mib": more})
    return rows


def _peak_bytes(device: torch.device, *, reset: bool = False) -> int:
    """Returns the largest allocation since the last reset, in bytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def _score_job(name: str, query: Int32s, items: list[Int32s], vocab: int) -> ScoreRequest:
    starts = np.cumsum([0, *(len(x) for x in items)]).astype(np.int32)
    labels = np.array(workloads.LABELS, np.int32) % vocab
    return ScoreRequest(
        request_id=name, prefix=query, ids=np.concatenate(items), starts=starts, labels=labels, full=False
    )


def _last(ids: Int32s) -> Int32s:
    return np.array([len(ids) - 1], np.int32)


async def _engine_rows(
    engine: Engine,
    vocab: int,
    names: Sequence[str],
    share: int,
    rounds: int,
    prompts: Sequence[int],
    device: torch.device,
) -> list[Row]:
    engine.start()
    try:
        scored = await scoring_rows(engine, vocab, names, share, rounds)
        generated = await generate_rows(engine, vocab, names, share, rounds)
        return [*scored, *generated, *await prompt_rows(engine, vocab, prompts, device)]
    finally:
        engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--max-model-len", type=int, help="the model's own if absent")
    parser.add_argument("--token-budget", type=int, help="tokens of the engine's steps; its default if absent")
    parser.add_argument("--share", type=int, help="of requests and prompts: 1 in N (1 on CUDA, 32 on a CPU)")
    parser.add_argument("--rounds", type=int, help=f"of the workloads, beside a first ({ROUNDS} on CUDA, 1 on a CPU)")
    parser.add_argument("--workloads", default="decode256,rerank,long-query,classify")
    parser.add_argument("--prompts", default="", help="lengths of prompts whose log-probabilities are timed, by commas")
    parser.add_argument("--numerics", default="fast", choices=("fast", "invariant"), help="`engine.numerics`")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model_config = ModelConfig(path=args.model, random_weights=args.random_weights, max_model_len=args.max_model_len)
    own = {} if args.token_budget is None else {"token_budget": args.token_budget}
    config = EngineConfig(max_queued_tokens=1 << 30, numerics=args.numerics, **own)  # all jobs are submitted together
    model = load_model(model_config, config)
    engine = Engine(model, config)
    stages: list[Row] = []
    engine.warm_up(
        lambda stage, seconds: stages.append({"case": f"start-up: {stage}", "seconds": seconds}), complete=True
    )
    table = torch.ones((config.max_running + 1, model.max_model_len), dtype=torch.int32, device=model.device)
    share = args.share or (1 if model.device.type == "cuda" else 32)
    rounds = args.rounds or (ROUNDS if model.device.type == "cuda" else 1)
    rows = [*stages, *prefill_rows(model, table, args.repeats, share), *decode_rows(model, table, args.repeats)]
    rows += asyncio.run(
        _engine_rows(
            engine,
            model.vocab_size,
            [name for name in args.workloads.split(",") if name],
            share,
            rounds,
            [int(length) for length in args.prompts.split(",") if length],
            model.device,
        )
    )
    name = "engine-" + Path(args.model).name
    notes = f"medians of {rounds} rounds; 1 in {share} of the workloads; steps of {config.token_budget:,} tokens"
    publish(name, rows, args.out, notes)


if __name__ == "__main__":
    main()
