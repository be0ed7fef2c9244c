"""Runs the benchmarks that need no service one after another, each in a process of its own.

    python -m benchmarks --list
    python -m benchmarks --out benchmarks/results
    python -m benchmarks --only engine-0.6b,verify --within 600 --out benchmarks/results

A benchmark that fails does not end the others, but the exit status is 1. GPU benchmarks are left out on a machine
without a GPU, and with `--within` those that would not end in time by their estimated seconds on one H200.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.support.report import Row, table

MODELS = "benchmarks/models"
SMALL = ("--model", f"{MODELS}/qwen3-0.6b", "--random-weights")
LARGE = ("--model", f"{MODELS}/qwen3-8b", "--random-weights")
LONG = ("--model", f"{MODELS}/qwen3-0.6b-128k", "--random-weights")
PAIR = (*LARGE, "--draft", f"{MODELS}/qwen3-0.6b")
DRAFT = ("--model", "engine/builtin/draft", "--texts", "catalogue", "--name", "builtin-draft")
SCORING = ("--workloads", "rerank,long-query,classify")
LARGE_STEPS = ("--token-budget", "32768")
LARGE_ENCODER = (
    *("--device", "cuda", "--dtype", "bfloat16", "--name", "encoder-large", "--pairs", "1024"),
    *("--shapes", "bge-reranker-v2-m3", "--lengths", "mixed,128,512"),
)


class Case(NamedTuple):
    """Names one run of a benchmark."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    seconds: int = 60  # estimated, on one H200 of a machine with 16 cores
    gpu: bool = True
    folder: str = ""  # of the results, where another case has files of the same names


CASES = (  # benchmarks that depend on the host come first, while the machine is quiet
    Case("host", "engine.bench_host", seconds=90, gpu=False),
    Case("growth", "service.bench_growth", seconds=30, gpu=False),
    Case("sim-routing", "fleet.sim_routing", ("--requests", "8000"), seconds=240, gpu=False),
    Case("encoder", "engine.bench_encoder", ("--threads", "2"), seconds=120, gpu=False),
    Case("encoder-cuda", "engine.bench_encoder", ("--device", "cuda", "--dtype", "bfloat16"), 40),
    Case("encoder-large", "engine.bench_encoder", LARGE_ENCODER, 90),
    Case("heads", "engine.bench_heads", (), 80),
    Case("heads-8b", "engine.bench_heads", ("--model", f"{MODELS}/qwen3-8b", "--rows", "1024"), 160),
    Case("engine-builtin", "engine.bench_engine", seconds=60, gpu=False),
    Case("engine-0.6b", "engine.bench_engine", SMALL, 150),
    Case("engine-0.6b-large-steps", "engine.bench_engine", (*SMALL, *SCORING, *LARGE_STEPS), 70, folder="large-steps"),
    Case("engine-8b", "engine.bench_engine", (*LARGE, *SCORING, "--rounds", "3"), 260),
    Case("long-prompt", "engine.bench_engine", (*LONG, "--workloads", "", "--prompts", "100000"), 40),
    Case("speculation", "speculation.bench_speculation", PAIR, 240),
    Case("speculation-pair", "speculation.bench_speculation", ("--greedy", "--acceptance"), 300),
    Case("agreement", "quality.bench_agreement", (), 50),
    Case("agreement-draft", "quality.bench_agreement", DRAFT, 40),
    Case("agreement-0.6b", "quality.bench_agreement", SMALL, 40),
    Case("sampler", "sampler.bench_sampler", (), 300),
    Case("verify", "sampler.bench_verify", (), 150),
    Case("lm-head", "kernels.bench_lm_head_logprob", (), 60),
    Case("skinny-gemm", "kernels.bench_skinny_gemm", (), 40),
    Case("invariant-gemm", "kernels.bench_invariant_gemm", (), 40),
    Case("skinny-decode-attention", "kernels.bench_skinny_decode_attention", (), 40),
    Case("qk-norm-rope", "kernels.bench_qk_norm_rope", (), 40),
    Case("pdl", "kernels.bench_pdl", (), 60),
)  # fmt: skip


def chosen(cases: Sequence[Case], only: str, *, gpu: bool) -> list[Case]:
    """Returns the cases that `only` names, or all; without a GPU those that need none. Raises ValueError."""
    names = [name for name in only.split(",") if name]
    known = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"`--only` must name some of {', '.join(known)}. Given: {', '.join(unknown)}.")
    return [case for case in ([known[name] for name in names] or cases) if gpu or not case.gpu]


def run_all(
    cases: Sequence[Case],
    run: Callable[[Case], int],
    within: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """Runs the cases and returns seconds and `status` of each: `done`, `left out` or `exit N`."""
    rows: list[Row] = []
    start = clock()
    for case in cases:
        since = clock()
        if within is not None and since - start + case.seconds > within:
            rows.append({"case": case.name, "status": "left out", "seconds": None})
            continue
        code = run(case)
        rows.append({"case": case.name, "status": f"exit {code}" if code else "done", "seconds": clock() - since})
    return rows


def _run(case: Case, out: Path | None) -> int:
    command = [sys.executable, "-m", f"benchmarks.{case.module}", *case.arguments]
    if out is not None:
        command += ["--out", str(out / case.folder)]
    sys.stdout.write(f"\n{case.name}: {' '.join(command[1:])}\n")
    sys.stdout.flush()
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="names of benchmarks, with commas, in the order to run")
    parser.add_argument("--within", type=float, help="seconds for all benchmarks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.list:
        table([{"case": case.name, "seconds": case.seconds, "gpu": "yes" if case.gpu else "-"} for case in CASES])
        return 0
    try:
        cases = chosen(CASES, args.only, gpu=torch.cuda.is_available())
    except ValueError as error:
        parser.error(str(error))
    rows = run_all(cases, lambda case: _run(case, args.out), args.within)
    sys.stdout.write("\n")
    table(rows)
    return int(any(str(row["status"]).startswith("exit") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
