"""Measures `invariant_gemm` against torch's product without split K, on the weights of decoder layers. Needs a GPU.

    python -m benchmarks.kernels.bench_invariant_gemm --out benchmarks/results

`us` is the median of CUDA-graph replays of one product, with the tile that the kernel takes for so many rows, and
`library_us` that of F.linear with cuBLASLt, which may not cut K. `same` tells whether both have the same bits. A weight
that fits in the L2 cache stays there.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.kernels.bench_lm_head_logprob import graph_of, times_ms
from benchmarks.support.report import Row, publish
from engine.kernels.invariant_gemm import invariant_gemm
from engine.model.invariant.linear import LIBRARY_ROWS, stop_cutting

SHAPES = (
    ("0.6B q, k, v", 4096, 1024),
    ("0.6B o", 1024, 2048),
    ("0.6B gate, up", 6144, 1024),
    ("0.6B down", 1024, 3072),
    ("8B q, k, v", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate, up", 24_576, 4096),
    ("8B down", 4096, 12_288),
)  # name, columns of the output, width
ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 8192)


def measured(name: str, columns: int, width: int, repeats: int) -> list[Row]:
    """Measures one weight."""
    generator = torch.Generator("cuda").manual_seed(columns + width)
    weight = torch.randn((columns, width), generator=generator, device="cuda").mul_(width**-0.5).bfloat16()
    found: list[Row] = []
    for rows in ROWS:
        x = torch.randn((rows, width), generator=generator, device="cuda").bfloat16()
        ours, library = (
            graph_of(lambda: invariant_gemm(x, weight)),  # noqa: B023  # captured immediately
            graph_of(lambda: F.linear(x, weight)),  # noqa: B023
        )
        us, library_us = (1e3 * ms for ms in times_ms([ours, library], repeats))
        found.append(
            {
                "case": name,
                "rows": rows,
                "us": round(us, 1),
                "library_us": round(library_us, 1),
                "used": "library" if rows >= LIBRARY_ROWS else "kernel",
                "same": torch.equal(invariant_gemm(x, weight), F.linear(x, weight)),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not stop_cutting():
        raise SystemExit("torch cannot stop its library from cutting K")
    rows = [row for shape in SHAPES for row in measured(*shape, args.repeats)]
    publish("invariant-gemm", rows, args.out, notes="bf16; medians of graph replays")


if __name__ == "__main__":
    main()
