"""Measures `head_logprob` against the matrix product alone and against full logits. Needs a GPU.

    python -m benchmarks.kernels.bench_lm_head_logprob --out benchmarks/results
    python -m benchmarks.kernels.bench_lm_head_logprob --tune

Each time is the median of CUDA graph replays; compared ops run in turn so that they share the device's clock rate.
Inputs are random bf16 with logits of standard deviation 3. `extra_mib` is the peak of allocated memory beyond the
inputs. `--tune` times the tilings of the product, and torch.mm by chunks of the vocabulary.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.report import Row, publish, table
from gpu_sampler.kernels.lm_head_logprob import HALF, HeadTile, head_logprob

ROWS = (256, 1024, 4096)
WIDTHS = (1024, 4096)
VOCABULARIES = (32_000, 151_936)
TUNED = (
    HALF,
    HALF._replace(group=8),
    HALF._replace(group=32),
    HALF._replace(bulk=False),
    HeadTile(128, 128, 64, group=16, warps=4, stages=3, programs=2),
)
_cuda: Any = torch.cuda  # its streams and events are untyped
CHUNK = 2048  # columns of torch.mm into one fp32 buffer of 32 MiB


def graph_of(op: Callable[[], object]) -> Callable[[], None]:
    """Captures a call in a CUDA graph and returns its replay."""
    side: torch.cuda.Stream = _cuda.Stream()
    side.wait_stream(_cuda.current_stream())  # which may still be writing what the call reads
    with torch.cuda.stream(side):
        op()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op()
    return graph.replay


def times_ms(replays: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Returns the median milliseconds of each replay, run in turn."""
    for replay in replays:
        replay()
    events = [
        [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(repeats)] for _ in replays
    ]
    for turn in range(repeats):
        for replay, pairs in zip(replays, events, strict=True):
            pairs[turn][0].record()
            replay()
            pairs[turn][1].record()
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in pairs) for pairs in events]


def inputs(rows: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    generator = torch.Generator("cuda").manual_seed(rows + width + vocab)
    hidden = torch.randn(rows, width, generator=generator, **options)  # type: ignore[call-overload]
    head = torch.randn(vocab, width, generator=generator, **options)  # type: ignore[call-overload]
    targets = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    return hidden, head.mul_(3 / math.sqrt(width)), targets


def extra_mib(op: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def head_row(rows: int, width: int, vocab: int, repeats: int) -> Row:
    hidden, head, targets = inputs(rows, width, vocab)
    logits = torch.empty(rows, vocab, device="cuda", dtype=torch.bfloat16)

    def fused() -> object:
        return head_logprob(hidden, head, targets)

    def product() -> object:
        return torch.matmul(hidden, head.T, out=logits)

    def materialised() -> object:
        product()
        values = logits.float()
        return values.gather(1, targets[:, None])[:, 0] - values.logsumexp(1)

    fused()
    extra = extra_mib(fused)
    ours, alone, whole = times_ms([graph_of(op) for op in (fused, product, materialised)], repeats)
    return {
        "case": f"head_logprob N={rows} d={width} V={vocab}",
        "ms": ours,
        "matmul_ms": alone,
        "ratio": ours / alone,
        "materialised_ms": whole,
        "tflops": 2 * rows * width * vocab / ours / 1e9,
        "extra_mib": extra,
    }


def tuned_rows(rows: int, width: int, vocab: int, repeats: int) -> None:
    """Prints a line for each tiling immediately, so that an interrupted run has results."""
    hidden, head, targets = inputs(rows, width, vocab)
    logits = torch.empty(rows, vocab, device="cuda", dtype=torch.bfloat16)
    product = graph_of(lambda: torch.matmul(hidden, head.T, out=logits))
    part = torch.empty(rows, CHUNK, device="cuda")
    last = torch.empty(rows, vocab % CHUNK, device="cuda")

    def by_chunks(read: bool) -> None:
        for first in range(0, vocab, CHUNK):
            columns = head[first : first + CHUNK]
            out = part if len(columns) == CHUNK else last
            torch.mm(hidden, columns.T, out_dtype=torch.float32, out=out)
            if read:
                out.amax(1)

    def shown(case: str, replay: Callable[[], None], **more: str | int | float) -> None:
        ours, alone = times_ms([replay, product], repeats)
        table([{"case": case, "ms": ours, "matmul_ms": alone, "ratio": ours / alone, **more}])

    expected = head_logprob(hidden, head, targets)
    for tile in TUNED:
        try:
            found = head_logprob(hidden, head, targets, tile=tile)
            off = {
                "ranks_off": int((found.ranks != expected.ranks).sum()),
                "largest_difference": float((found.logprobs - expected.logprobs).abs().max()),
            }
            shown(str(tile), graph_of(lambda: head_logprob(hidden, head, targets, tile=tile)), **off)  # noqa: B023
        except Exception as error:  # of whatever a cut that does not fit may raise: the others are still timed
            table([{"case": f"{tile}: {type(error).__name__}: {str(error)[:200]}"}])
    try:
        shown(f"torch.mm by {CHUNK} columns, products alone", graph_of(lambda: by_chunks(False)))
        shown(f"torch.mm by {CHUNK} columns, each read once", graph_of(lambda: by_chunks(True)))
    except (RuntimeError, TypeError) as error:
        table([{"case": f"torch.mm by chunks: {type(error).__name__}: {str(error)[:200]}"}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="time the cuts at 4,096 x 4,096 x 151,936 and stop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tune:
        tuned_rows(4096, 4096, 151_936, args.repeats)
        return
    rows = [head_row(n, d, v, args.repeats) for n in ROWS for d in WIDTHS for v in VOCABULARIES]
    publish("head_logprob", rows, args.out, notes="bf16; medians of graph replays by turns")


if __name__ == "__main__":
    main()
