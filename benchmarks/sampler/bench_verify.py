"""Measures the rejection step of speculative decoding: all kernels of `Sampler.verify`.

    python -m benchmarks.sampler.bench_verify --out benchmarks/results        the whole table, some minutes
    python -m benchmarks.sampler.bench_verify --quick --only standard,block   64 and 256 requests of the cases so named
    python -m benchmarks.sampler.bench_verify --device cpu --vocab 4096 --requests 1,8   the reference, to try it out

A request has five rows of logits, for 4 drafts and the bonus token. `us` is the median of CUDA-graph replays and
`plain_us` that of plain launches. Every pass begins with the state in which its drafts were made, so that each accepts
the same ones: `accepted`, the mean of 4. `floor_us` is one read of all rows at 4.25 TB/s, `target_us` the largest
allowed time, `vllm_us` the time of vLLM 0.26. The last rows show the memory of q between drafting and verification.
See verify_cases.py for the cases and device_clock.py for how time is taken.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sampler.bench_sampler import BYTES_A_US, DTYPES, MAX_BUFFERS, POOL_BYTES
from benchmarks.sampler.sampler_cases import SEEN, fill, ids
from benchmarks.sampler.verify_cases import CASES, DRAFTS, REQUESTS, VerifyCase, make_certain, propose
from benchmarks.support.device_clock import DeviceClock, Timing
from benchmarks.support.report import Row, publish
from engine.spec_decode.draft_state import DraftState
from gpu_sampler.sampler import Sampler
from gpu_sampler.spec_decode import Proposal

QUICK_REQUESTS = (64, 256)
KEPT_SLOTS = 1024


class Saved:
    """Saves a sampler's state and restores it, because verification changes positions and counts."""

    def __init__(self, sampler: Sampler) -> None:
        on_device: Any = sampler._triton
        if on_device is None:
            state = sampler.state
            host = (state.table, state.entry_ids, state.entry_counts, state.entry_bias)
            self._parts = [torch.from_numpy(part) for part in host]
        else:
            on_device.apply()
            self._parts = [on_device.device_state.words]
        self._kept = [part.clone() for part in self._parts]

    def restore(self) -> None:
        for part, kept in zip(self._parts, self._kept, strict=True):
            part.copy_(kept)


class VerifyBench:
    """Runs the cases of one vocabulary and dtype on one device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.vocab_size: int = args.vocab
        self.dtype = DTYPES[args.dtype]
        self.clock = DeviceClock(self.device, repeats=7 if args.quick else 25)

    def row(self, case: VerifyCase, requests: int) -> Row:
        pool = self._pool(case, requests)
        kept = pool.clone() if case.history else None  # penalties write to the logits
        sampler, slots = self._sampler(case, requests), np.arange(1, requests + 1, dtype=np.int32)
        saved = Saved(sampler)
        proposals: dict[int, Proposal] = {}
        accepted = []
        for i, logits_RV in enumerate(pool):  # in the order in which they are timed: a draft is for its own position
            proposals[logits_RV.data_ptr()] = drafts = propose(case, sampler, logits_RV, slots, seed=i)
            output = sampler.fetch(sampler.verify(logits_RV, slots, drafts, case.rules)).result()
            accepted.append(float(output.counts.mean() - 1))

        def restore() -> None:
            saved.restore()
            if kept is not None:
                pool.copy_(kept)

        def step(logits_RV: torch.Tensor) -> object:
            return sampler.verify(logits_RV, slots, proposals[logits_RV.data_ptr()], case.rules)

        restore()
        return self._row(case, requests, self.clock.time(step, list(pool), restore), float(np.mean(accepted)))

    def _pool(self, case: VerifyCase, requests: int) -> torch.Tensor:
        """Returns logits [buffers, R, V]."""
        rows = requests * (DRAFTS + 1)
        one = rows * self.vocab_size * self.dtype.itemsize
        buffers = min(max(-(-POOL_BYTES // one), 2), MAX_BUFFERS) if self.device.type == "cuda" else 1
        pool = torch.empty((buffers, rows, self.vocab_size), dtype=self.dtype, device=self.device)
        for i, logits_RV in enumerate(pool):
            fill(logits_RV, "peaked", seed=i)
            if case.kind == "certain":
                make_certain(logits_RV)
        return pool

    def _sampler(self, case: VerifyCase, requests: int) -> Sampler:
        sampler = Sampler(num_slots=requests + 1, vocab_size=self.vocab_size, device=self.device)
        for row in range(requests):
            prompt, emitted = (ids(row, SEEN if case.history else 0, self.vocab_size, salt) for salt in (1, 2))
            sampler.admit(row + 1, case.params, prompt, seed=row, output_ids=emitted)
        return sampler

    def _row(self, case: VerifyCase, requests: int, timing: Timing, accepted: float) -> Row:
        floor = target = vllm = None
        if self.device.type == "cuda":
            floor = requests * (DRAFTS + 1) * self.vocab_size * self.dtype.itemsize / BYTES_A_US
            if (self.vocab_size, self.dtype) == (151_936, torch.bfloat16):
                target, vllm = case.targets_us.get(requests), case.vllm_us.get(requests)
        return {
            "case": case.name,
            "requests": requests,
            **timing.cells(floor, target),
            "vllm_us": vllm,
            "accepted": round(accepted, 3),
        }


def kept_rows(vocab_size: int) -> list[Row]:
    """Returns the bytes of q between drafting and verification, as the engine stores it and as dense probabilities."""
    state = DraftState(KEPT_SLOTS, DRAFTS, torch.device("cpu"))
    parts = (state.ids, state.kinds, state.q_ids, state.q_probs)
    sparse, dense = sum(part.nbytes for part in parts) / KEPT_SLOTS, 4.0 * DRAFTS * vocab_size
    names = {"q as kept: 64 ids and their float32 probabilities a draft": sparse, "q as dense float32 [K, V]": dense}
    return [
        {"case": name, "bytes_a_slot": bytes_, f"mib_{KEPT_SLOTS}_slots": KEPT_SLOTS * bytes_ / 2**20}
        for name, bytes_ in names.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--requests", help="numbers of requests, by commas")
    parser.add_argument("--only", help="names of cases, by commas", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}")
    counts = [int(x) for x in args.requests.split(",")] if args.requests else QUICK_REQUESTS if args.quick else REQUESTS
    bench = VerifyBench(args)
    rows: list[Row] = []
    for case in (case for case in CASES if not names or case.name in names):
        for count in counts:
            rows.append(bench.row(case, count))
            sys.stderr.write(f"{case.name} {count}\n")
    name = "verify" if args.vocab == 151_936 and args.dtype == "bf16" else f"verify-{args.vocab}-{args.dtype}"
    publish(name, [*rows, *kept_rows(args.vocab)], args.out, notes=f"V = {args.vocab:,}, {args.dtype}, K = {DRAFTS}")
    missed = [row for row in rows if row["ok"] == "NO"]
    sys.stdout.write(f"{len(missed)} of {sum(row['ok'] is not None for row in rows)} targets missed\n")


if __name__ == "__main__":
    main()
