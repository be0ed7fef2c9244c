"""Measures speculative decoding in the engine, without HTTP: speed, greedy tokens and acceptance.

    python -m benchmarks.speculation.bench_speculation --model benchmarks/models/qwen3-8b \\
        --draft benchmarks/models/qwen3-0.6b --random-weights --out benchmarks/results
    python -m benchmarks.speculation.bench_speculation --greedy --acceptance --out benchmarks/results  the built-in pair

Speed: tokens a second with a draft model against plain decoding of the same engine, over the whole wall time. Drafts
are accepted at fixed rates (`--accepted` of `--drafts` in the mean), because models with random weights do not agree.
A step's time without prefill: `draft_ms` and `judge_ms` (the rejection step) by device events, `forward_ms` the rest of
a verify step (the target's forward pass over the drafts and its launch), `rest_ms` the time between steps. Greedy:
prompts whose tokens differ from those of plain decoding, one at a time and several, and the gap between the two best
log-probabilities at the first difference. Acceptance: the accepted share of verified drafts, beside the sum of min(p,
q) over the same drafts.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.speculation.runs import (
    OverlapSampler,
    TimedSampler,
    builtin_prompts,
    complete,
    running,
    with_speculation,
)
from benchmarks.support import workloads
from benchmarks.support.report import Row, publish
from engine.batch.input_batch import StepKind
from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.engine import Engine
from engine.metrics import EngineStats
from engine.model.loader import LoadedModels, load_models
from engine.requests import GenerateChunk
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Rule

PROMPT_TOKENS = 128
CHECKED_TOKENS = 32  # of a prompt of the built-in pair, at most


def even_rates(accepted: float, drafts: int) -> tuple[float, ...]:
    """Returns the rate, equal at every position, with which `accepted` of `drafts` are accepted in the mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate ** (at + 1) for at in range(drafts)) < accepted else (low, rate)
    return (round(high, 6),) * drafts


class Measured(NamedTuple):
    """Holds one run of some sequences."""

    tokens: int
    seconds: float
    judge_s: float
    before: EngineStats
    after: EngineStats

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def of(self, kind: StepKind) -> tuple[int, float]:
        """Returns the number of steps of a kind, and their seconds."""
        name = kind.value
        steps = self.after.steps[name] - self.before.steps[name]
        return steps, self.after.step_seconds[name] - self.before.step_seconds[name]

    def row(self, case: str, plain: float | None) -> Row:
        """Returns the table's row. `plain` is the rate of plain decoding."""
        verify_steps, _ = self.of(StepKind.VERIFY)
        decode_steps, decode_s = self.of(StepKind.DECODE)
        steps, prefill_s = verify_steps + decode_steps, self.of(StepKind.PREFILL)[1]
        draft_s = self.after.draft_seconds - self.before.draft_seconds
        verify_s = self.after.verify_seconds - self.before.verify_seconds
        rest_s = self.seconds - prefill_s - sum(self.of(kind)[1] for kind in (StepKind.VERIFY, StepKind.DECODE))
        drafts = self.after.drafts - self.before.drafts
        accepted = sum(self.after.drafts_accepted) - sum(self.before.drafts_accepted)
        each = 1e3 / max(1, steps)
        return {
            "case": case,
            "out_tok_s": self.rate,
            "speed_up": None if plain is None else self.rate / plain,
            "accepted": accepted / drafts if drafts else None,
            "steps": steps,
            "draft_ms": each * draft_s if drafts else None,
            "forward_ms": each * (verify_s - self.judge_s + (decode_s if not drafts else 0.0)),
            "judge_ms": each * self.judge_s if drafts else None,
            "rest_ms": each * rest_s,
            "prefill_ms": 1e3 * prefill_s,
            "seconds": self.seconds,
        }


async def measured(engine: Engine, count: int, new: int, seed: int) -> Measured:
    """Measures `count` prompts that no earlier run has used."""
    judge = engine.sampler
    assert isinstance(judge, TimedSampler)
    prompts = [ids % engine.model.vocab_size for ids in workloads.token_lists(count, PROMPT_TOKENS, seed)]
    judge.seconds()
    before, start = engine.stats(), time.perf_counter()
    chunks = await complete(engine, prompts, SamplingParams(max_tokens=new, temperature=1.0), first_seed=1000 * seed)
    seconds = time.perf_counter() - start
    tokens = sum(len(chunk.tokens) for chunk in chunks)
    if tokens != count * new:
        raise RuntimeError(f"expected {new} tokens of each of {count} prompts, got {tokens} in all")
    return Measured(tokens, seconds, judge.seconds(), before, engine.stats())


async def medians(engine: Engine, counts: Sequence[int], new: int, repeats: int) -> dict[int, Measured]:
    """Returns the run with the median rate by number of sequences."""
    found = {}
    for count in counts:
        await measured(engine, count, new, seed=count)  # whatever is launched anywhere in a run is compiled now
        runs = [await measured(engine, count, new, seed=100 * count + again + 1) for again in range(repeats)]
        found[count] = sorted(runs, key=lambda run: run.rate)[len(runs) // 2]
    return found


def speed_rows(loaded: LoadedModels, config: EngineConfig, counts: Sequence[int], new: int, repeats: int) -> list[Row]:
    found = []
    for one in (with_speculation(config), config):
        with running(loaded.target, loaded.draft, one) as engine:
            found.append(asyncio.run(medians(engine, counts, new, repeats)))
    rows = []
    for count in counts:
        rate = found[0][count].rate
        rows.append(found[0][count].row(f"{count} sequences, plain", None))
        rows.append(found[1][count].row(f"{count} sequences, {config.speculation.num_speculative_tokens} drafts", rate))
    return rows


def difference(plain: GenerateChunk, found: GenerateChunk) -> tuple[int, float] | None:
    """Returns the first position with different tokens, and the gap of the two best there; None if none differs."""
    size = min(len(plain.tokens), len(found.tokens))
    differ = np.flatnonzero(plain.tokens[:size] != found.tokens[:size])
    if not len(differ) and len(plain.tokens) == len(found.tokens):
        return None
    at = int(differ[0]) if len(differ) else size - 1
    best = None if plain.top_logprobs is None else plain.top_logprobs[at]
    return at, float("nan") if best is None else float(best[0] - best[1])


def _differing(
    case: str, expected: Sequence[GenerateChunk], chunks: Sequence[GenerateChunk], accepted: float | None
) -> list[Row]:
    """Returns the number of prompts with other tokens than expected, then a row for each of them."""
    found = [difference(own, other) for own, other in zip(expected, chunks, strict=True)]
    differ = [(number, *one) for number, one in enumerate(found) if one is not None]
    rows: list[Row] = [{"case": case, "prompts": len(found), "differ": len(differ), "accepted": accepted}]
    return rows + [{"case": case, "prompt": i, "position": at, "gap": gap} for i, at, gap in differ]


def greedy_rows(
    loaded: LoadedModels, config: EngineConfig, prompts: int, at_once: Sequence[int], overlap: bool | None, device: str
) -> list[Row]:
    """Compares both proposers with plain decoding at each number of concurrent prompts, and plain decoding at different
    numbers with itself, which shows the effect of batch sizes alone."""
    ids = builtin_prompts(prompts)
    stops = loaded.target.eos_token_ids
    params = SamplingParams(max_tokens=CHECKED_TOKENS, temperature=0.0, logprobs=2, stop_token_ids=stops)
    settings = {
        "plain": with_speculation(config),
        "draft model": config,
        "n-gram": with_speculation(config, method="ngram"),
    }
    plain: dict[int, list[GenerateChunk]] = {}
    rows: list[Row] = []
    for name, one in settings.items():
        for count in at_once:
            with running(loaded.target, loaded.draft, one, overlap=overlap) as engine:
                chunks = asyncio.run(complete(engine, ids, params, at_once=count))
                stats = engine.stats()
            case = f"greedy, {name}, {count} at once, {device}"
            if name != "plain":
                rows += _differing(case, plain[count], chunks, sum(stats.drafts_accepted) / max(1, stats.drafts))
                continue
            plain[count] = chunks
            if count != at_once[0]:
                rows += _differing(f"{case}, against {at_once[0]}", plain[at_once[0]], chunks, None)
    return rows


def acceptance_rows(loaded: LoadedModels, config: EngineConfig, prompts: int, device: str) -> list[Row]:
    """Measures the acceptance of each verification rule."""
    ids = builtin_prompts(prompts)
    params = SamplingParams(max_tokens=CHECKED_TOKENS, stop_token_ids=loaded.target.eos_token_ids)
    drafts = config.speculation.num_speculative_tokens
    rules: tuple[Rule, ...] = ("standard", "block", "strict")
    rows: list[Row] = []
    for rule in rules:
        one = with_speculation(
            config, method="draft_model", draft="builtin", num_speculative_tokens=drafts, rejection_sample_method=rule
        )
        with running(loaded.target, loaded.draft, one, OverlapSampler) as engine:
            asyncio.run(complete(engine, ids, params))
            stats, judge = engine.stats(), engine.sampler
        assert isinstance(judge, OverlapSampler)
        reached, accepted = sum(stats.drafts_reached), sum(stats.drafts_accepted)
        overlap = None if rule == "strict" else float(np.mean(judge.sums))
        rows.append(
            {
                "case": f"{rule}, {drafts} drafts, {device}",
                "reached": reached,
                "rate": accepted / reached,
                "sum_min_p_q": overlap,
                "ratio": None if overlap is None else accepted / reached / overlap,
                "accepted": accepted / stats.drafts,
                "tokens_a_run": stats.generated_tokens / stats.drafts,
            }
        )
    return rows


def load(args: argparse.Namespace, config: EngineConfig, max_model_len: int) -> LoadedModels:
    torch.manual_seed(0)
    model = ModelConfig(
        path=args.model, device=args.device, random_weights=args.random_weights, max_model_len=max_model_len
    )
    return load_models(model, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="builtin")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--accepted", type=float, default=2.8, help="mean number of accepted drafts of a run")
    parser.add_argument("--sequences", default="1,32", help="numbers of concurrent sequences, with commas")
    parser.add_argument("--new", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--greedy", action="store_true", help="tokens of the built-in pair in place of speed")
    parser.add_argument("--acceptance", action="store_true", help="acceptance of the built-in pair in place of speed")
    parser.add_argument("--prompts", type=int, default=200, help="of --greedy and --acceptance")
    parser.add_argument("--at-once", default="1,3,16", help="prompts of --greedy, by commas")
    parser.add_argument("--library-gemm", action="store_true", help="no skinny GEMM kernels, with --greedy")
    parser.add_argument("--no-overlap", action="store_true", help="of plain decoding's steps, with --greedy")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.acceptance and (args.library_gemm or args.no_overlap):
        parser.error("--library-gemm and --no-overlap are of --greedy alone")

    exact = SpeculationConfig(method="draft_model", draft=args.draft, num_speculative_tokens=args.drafts)
    if args.greedy or args.acceptance:
        config = EngineConfig(
            kv_slots=16_384,
            max_running=16,
            max_queued_tokens=1 << 30,
            skinny_gemm=not args.library_gemm,
            speculation=exact,
        )
        loaded = load(args, config, max_model_len=256)
        device, kind = loaded.target.device.type, "bfloat16" if loaded.target.device.type == "cuda" else "float32"
        if args.greedy:
            counts = [int(count) for count in args.at_once.split(",")]
            rows = greedy_rows(loaded, config, args.prompts, counts, False if args.no_overlap else None, device)
            changed = "-library" * args.library_gemm + "-no-overlap" * args.no_overlap
            name = f"speculation-greedy{changed}-{device}"
            publish(name, rows, args.out, notes=f"built-in pair, {kind}")
        if args.acceptance:
            rows = acceptance_rows(loaded, config, args.prompts, device)
            publish(f"speculation-acceptance-{device}", rows, args.out, notes=f"built-in pair, {kind}, temperature 1")
        return
    counts = [int(count) for count in args.sequences.split(",")]
    length = PROMPT_TOKENS + args.new + 64
    synthetic = with_speculation(
        EngineConfig(
            kv_slots=(max(counts) + 1) * length,
            max_running=max(counts),
            max_queued_tokens=1 << 30,  # all jobs are submitted together
        ),
        method="draft_model",
        draft=args.draft,
        num_speculative_tokens=args.drafts,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=even_rates(args.accepted, args.drafts),
    )
    loaded = load(args, synthetic, max_model_len=length)
    rows = speed_rows(loaded, synthetic, counts, args.new, args.repeats)
    rate = synthetic.speculation.synthetic_acceptance_rates[0]
    notes = f"{PROMPT_TOKENS} + {args.new} tokens, temperature 1, drafts accepted at {rate}"
    publish(f"speculation-{Path(args.model).name}", rows, args.out, notes=notes)


if __name__ == "__main__":
    main()
