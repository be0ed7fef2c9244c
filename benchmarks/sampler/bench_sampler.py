"""Measures the sampler against FlashInfer and torch, on the same logits in one run.

    python -m benchmarks.sampler.bench_sampler --out benchmarks/results   the whole table, some minutes
    python -m benchmarks.sampler.bench_sampler --quick --only topp.9      1 to 1,024 rows of the cases so named
    python -m benchmarks.sampler.bench_sampler --peers flashinfer-k,flashinfer  also FlashInfer's path for one top_k

`us` is the median of CUDA-graph replays and `plain_us` that of plain launches (where a step cannot be captured, `us`
is `plain_us`, and `note` says why). `floor_us` is one read of the logits at 4.25 TB/s, what an H200 reaches;
`target_us` is what the case must not exceed there. See sampler_cases.py for the cases and device_clock.py for how time
is taken.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.sampler.peers import peers
from benchmarks.sampler.sampler_cases import (
    CASES,
    N_TOP,
    ROWS,
    TARGET_ROWS,
    SamplerCase,
    Shape,
    fill,
    ids,
    nucleus_size,
)
from benchmarks.support.device_clock import DeviceClock, Step, Timing
from benchmarks.support.report import Row, publish
from gpu_sampler.backend import Backend
from gpu_sampler.logprobs import token_logprobs, topk_logprobs
from gpu_sampler.sampler import Sampler

BYTES_A_US = 4.25e6
POOL_BYTES = 256 << 20  # of logits in all, so that the L2 does not hold them
MAX_BUFFERS = 16
OURS, OURS_BY_FLASHINFER = "assay", "assay, backend flashinfer"
BACKENDS: frozenset[str] = frozenset(get_args(Backend))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLASHINFER_CASES = ("topk50_topp.9", "topp.9")  # also with our backend of that name


class SamplerBench:
    """Runs the cases of one vocabulary and dtype on one device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.vocab_size: int = args.vocab
        self.dtype = DTYPES[args.dtype]
        self.wanted = frozenset(args.peers.split(","))
        self.clock = DeviceClock(self.device, repeats=7 if args.quick else 25)

    def rows(self, case: SamplerCase, shape: Shape, count: int) -> Iterator[Row]:
        """Measures a case with each implementation."""
        pool = self._pool(shape, count)
        kept = pool.clone() if case.history else None  # penalties and bias write to the logits

        def restore() -> None:
            if kept is not None:
                pool.copy_(kept)

        for name, make in self._implementations(case, count).items():
            restore()
            step, branches = make(pool[0])
            restore()
            yield self._row(case, shape, count, name, self.clock.time(step, list(pool), restore), branches)

    def _pool(self, shape: Shape, count: int) -> torch.Tensor:
        """Returns logits [buffers, R, V]."""
        one = count * self.vocab_size * self.dtype.itemsize
        buffers = min(max(-(-POOL_BYTES // one), 2), MAX_BUFFERS) if self.device.type == "cuda" else 1
        pool = torch.empty((buffers, count, self.vocab_size), dtype=self.dtype, device=self.device)
        for i, logits_RV in enumerate(pool):
            fill(logits_RV, shape, seed=i)
        return pool

    def _implementations(self, case: SamplerCase, count: int) -> dict[str, Callable[[torch.Tensor], tuple[Step, str]]]:
        """Returns the implementations by name: a step, and the branches and flags of one step on a buffer."""
        if case.kind == "given":
            made = {OURS: lambda logits_RV: (self._given(count), "")}
        else:
            own = "triton" if "triton" in BACKENDS and self.device.type == "cuda" else "auto"
            made = {OURS: lambda logits_RV: self._ours(case, count, own, logits_RV)}
        if self._has_flashinfer_backend() and case.name in FLASHINFER_CASES:
            made[OURS_BY_FLASHINFER] = lambda logits_RV: self._ours(case, count, "flashinfer", logits_RV)
        for name, step in peers(case.peers, count, self.vocab_size, self.device, self.wanted).items():
            made[name] = lambda logits_RV, step=step: (step, "")  # type: ignore[misc]
        return made

    def _ours(self, case: SamplerCase, count: int, backend: Any, logits_RV: torch.Tensor) -> tuple[Step, str]:
        sampler = Sampler(num_slots=count + 1, vocab_size=self.vocab_size, device=self.device, backend=backend)
        for row in range(count):
            emitted = case.emitted(row, self.vocab_size)
            params, prompt = case.params(row, self.vocab_size), case.prompt(row, self.vocab_size)
            sampler.admit(row + 1, params, prompt, seed=row, output_ids=emitted)
        slots = np.arange(1, count + 1, dtype=np.int32)
        sampler.fetch(sampler.sample(logits_RV, slots)).result()
        stats = sampler.stats()
        branches = {name: rows for name, rows in (stats.rows | stats.flags).items() if rows}
        return lambda given_RV: sampler.sample(given_RV, slots), " ".join(f"{k}:{v}" for k, v in branches.items())

    def _given(self, count: int) -> Step:
        tokens_R = torch.from_numpy(ids(0, 1, self.vocab_size, 5)).to(self.device).expand(count).contiguous()
        if self.device.type == "cuda":
            from gpu_sampler.device_logprobs import report  # both in one read

            return lambda logits_RV: report(logits_RV, tokens_R=tokens_R, n_top=N_TOP)
        return lambda logits_RV: (topk_logprobs(logits_RV, N_TOP), token_logprobs(logits_RV, tokens_R))

    def _has_flashinfer_backend(self) -> bool:
        backend: Any = "flashinfer"
        if backend not in BACKENDS or backend not in self.wanted:
            return False
        try:
            Sampler(num_slots=2, vocab_size=self.vocab_size, device=self.device, backend=backend)
        except ValueError:
            return False
        return True

    def _row(self, case: SamplerCase, shape: Shape, count: int, name: str, timing: Timing, branches: str) -> Row:
        floor = target = None
        if self.device.type == "cuda":
            floor = count * self.vocab_size * self.dtype.itemsize / BYTES_A_US
            target = case.target(shape, count, self.vocab_size, self.dtype) if name == OURS else None
        return {
            "case": case.name,
            "logits": shape,
            "rows": count,
            "impl": name,
            **timing.cells(floor, target),
            "branches": branches or None,
        }


def nuclei(bench: SamplerBench) -> str:
    """Describes the size of the nucleus for each kind of logits."""
    found = []
    for shape in get_args(Shape):
        logits_RV = torch.empty((8, bench.vocab_size), dtype=bench.dtype, device=bench.device)
        fill(logits_RV, shape, seed=0)
        found.append(f"{shape}: top-p 0.9 at temperature 0.8 keeps {nucleus_size(logits_RV):,} tokens")
    return "; ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--rows", help="numbers of rows, by commas")
    parser.add_argument("--only", help="names of cases, by commas", default="")
    parser.add_argument(
        "--peers", default="flashinfer,torch", help="of flashinfer, flashinfer-k, torch; empty for none"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}")
    counts = [int(x) for x in args.rows.split(",")] if args.rows else list(TARGET_ROWS if args.quick else ROWS)
    bench = SamplerBench(args)
    rows: list[Row] = []
    for case in (case for case in CASES if not names or case.name in names):
        for shape in case.shapes:
            for count in counts:
                rows += bench.rows(case, shape, count)
                sys.stderr.write(f"{case.name} {shape} {count}\n")
    name = "sampler" if args.vocab == 151_936 and args.dtype == "bf16" else f"sampler-{args.vocab}-{args.dtype}"
    publish(name, rows, args.out, notes=f"V = {args.vocab:,}, {args.dtype}; {nuclei(bench)}")
    missed = [row for row in rows if row["ok"] == "NO"]
    sys.stdout.write(f"{len(missed)} of {sum(row['ok'] is not None for row in rows)} targets missed\n")


if __name__ == "__main__":
    main()
