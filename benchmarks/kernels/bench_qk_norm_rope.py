"""Measures `qk_norm_rope` against compiled torch, on a few tokens of a decoder layer. Needs a GPU.

    python -m benchmarks.kernels.bench_qk_norm_rope --out benchmarks/results

`us` is the median of CUDA-graph replays over the layers of a step, with the gaps between kernels. Queries, keys and
values are views of one product's output and are in the L2 cache, as in a step; each layer has a KV cache of its own.
`compiled_us` is the time of torch.compile's kernels for the RMSNorm and rotation of queries and keys and two
`index_copy_`.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels.bench_lm_head_logprob import graph_of, times_ms
from benchmarks.support.report import Row, publish
from engine.kernels.qk_norm_rope import Rotation, qk_norm_rope

EPS = 1e-6
LAYERS = 36
SLOTS = 4096
ROWS = (1, 2, 5, 16)


class RopeShape(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    dim: int


SHAPES = (RopeShape("0.6B", 16, 8, 128), RopeShape("8B", 32, 8, 128))


def turned(x_THD: torch.Tensor, norm_D: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates as a model's own code does."""
    x_THD = F.rms_norm(x_THD, norm_D.shape, norm_D, EPS)
    low, high = x_THD.chunk(2, dim=2)
    return x_THD * cos_TD[:, None] + torch.cat((-high, low), dim=2) * sin_TD[:, None]


def in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    assert rotation.q_norm_D is not None and rotation.k_norm_D is not None
    angles = rotation.cos_TD, rotation.sin_TD
    keys[:, 0].index_copy_(0, slots, turned(k, rotation.k_norm_D, *angles))
    values[:, 0].index_copy_(0, slots, v)
    return turned(q, rotation.q_norm_D, *angles)


class RopeInputs:
    """Holds the tokens of one step, and a KV cache for each layer."""

    def __init__(self, shape: RopeShape, rows: int) -> None:
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
        generator = torch.Generator("cuda").manual_seed(heads + rows)
        half = torch.bfloat16
        sizes = (rows, heads + 2 * kv_heads, dim)
        merged = torch.randn(sizes, generator=generator, device="cuda", dtype=half)
        self.q, self.k, self.v = torch.split(merged, [heads, kv_heads, kv_heads], dim=1)
        angles = torch.rand((rows, dim // 2), generator=generator, device="cuda").mul(6.0).repeat(1, 2)
        norms = torch.ones((2, dim), device="cuda", dtype=half)
        self.rotation = Rotation(angles.cos().to(half), angles.sin().to(half), norms[0], norms[1], EPS)
        self.pools = torch.zeros((LAYERS, 2, SLOTS, 1, kv_heads, dim), device="cuda", dtype=half)
        self.slots = torch.randperm(SLOTS, generator=generator, device="cuda")[:rows]

    def us(self, op: Callable[..., torch.Tensor], slots: torch.Tensor, repeats: int) -> float:
        def layers() -> None:
            for keys, values in self.pools:
                op(self.q, self.k, self.v, self.rotation, keys, values, slots)

        return 1e3 * times_ms([graph_of(layers)], repeats)[0] / len(self.pools)

    def ours_us(self, repeats: int) -> float:
        return self.us(qk_norm_rope, self.slots.to(torch.int32), repeats)

    def compiled_us(self, repeats: int) -> float:
        torch.compiler.reset()  # else the shapes together are more than it compiles one function for
        return self.us(torch.compile(in_torch, fullgraph=True, dynamic=False), self.slots, repeats)


def table_rows(repeats: int) -> list[Row]:
    found: list[Row] = []
    for shape, rows in itertools.product(SHAPES, ROWS):
        inputs = RopeInputs(shape, rows)
        us, compiled_us = inputs.ours_us(repeats), inputs.compiled_us(repeats)
        found.append(
            {
                "case": shape.name,
                "rows": rows,
                "us": round(us, 2),
                "compiled_us": round(compiled_us, 2),
                "ratio": round(us / compiled_us, 2),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with torch.inference_mode():
        found = table_rows(args.repeats)
    notes = f"bf16; medians of graph replays over {LAYERS} layers"
    publish("qk-norm-rope", found, args.out, notes=notes)


if __name__ == "__main__":
    main()
