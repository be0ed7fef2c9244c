"""Measures programmatic dependent launch (PDL) of the kernels of a decode step's layers. Needs a Hopper GPU.

    python -m benchmarks.kernels.bench_pdl --out benchmarks/results

`pdl_ms` is the median of CUDA-graph replays of a step's layers, without embedding, head and sampler; `plain_ms` that of
the same kernels, each launched once the one in front of it has ended. Both are replayed alternately. Weights are
random, and each layer has its own. Norms of fast numerics and the gate of invariant numerics, which a model's compiled
layer leaves to the compiler, are torch's own and launched plainly.
"""

import argparse
import itertools
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.kernels.bench_lm_head_logprob import graph_of, times_ms
from benchmarks.support.report import Row, publish
from engine.attention.interface import NO_SOFTCAP, NO_WINDOW
from engine.attention.invariant_backend import InvariantAttention
from engine.attention.plans import AttentionParams
from engine.kernels.invariant_attention import Tiles
from engine.kernels.invariant_gemm import invariant_gemm
from engine.kernels.qk_norm_rope import Rotation, qk_norm_rope
from engine.kernels.rms_norm import rms_norm
from engine.kernels.skinny_decode_attention import SplitKVWorkspace, skinny_decode_attention
from engine.kernels.skinny_gemm import skinny_gemm
from engine.model.optimize.skinny_linear import MAX_ROWS
from gpu_sampler.kernels import common

EPS: Final = 1e-6
STEPS: Final = ((1, 256), (8, 256), (16, 256), (1, 1024), (8, 1024), (32, 256), (128, 256))  # rows and tokens of each


class LayerShape(NamedTuple):
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    inner: int


SHAPES: Final = (LayerShape("0.6B", 28, 1024, 16, 8, 128, 3072), LayerShape("8B", 36, 4096, 32, 8, 128, 12_288))


class LayerWeights(NamedTuple):
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def without_pdl() -> AbstractContextManager[object]:
    """Launches the layers' kernels plainly inside."""
    return mock.patch.object(common, "MEASURED_CAPABILITY", 0)


class DecodeLayers:
    """Holds the layers of a decode step, the KV cache of its rows, and where their tokens stand."""

    def __init__(self, shape: LayerShape, rows: int, context: int, x: torch.Tensor) -> None:
        """x: [rows, width], the step's hidden states; each row's token is the last of `context` tokens of its own."""
        self.shape, self.rows, self.context, self.x = shape, rows, context, x
        self.parts = [heads * shape.dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self._generator = torch.Generator(x.device).manual_seed(0)
        self.layers = [
            LayerWeights(
                self._weight(sum(self.parts), shape.width),
                self._weight(shape.width, self.parts[0]),
                self._weight(2 * shape.inner, shape.width),
                self._weight(shape.width, shape.inner),
            )
            for _ in range(shape.layers)
        ]
        device = x.device
        self.norm, of_head = (torch.ones(size, device=device, dtype=x.dtype) for size in (shape.width, shape.dim))
        pool = (rows * context, 1, shape.kv_heads, shape.dim)
        self.keys, self.values = self._normal(*pool), self._normal(*pool)
        self.indptr = torch.arange(0, rows * context + 1, context, dtype=torch.int32, device=device)
        self.indices = torch.randperm(rows * context, generator=self._generator, device=device, dtype=torch.int32)
        self.slots = self.indices[self.indptr[1:].long() - 1].contiguous()
        angles = torch.rand((rows, shape.dim), generator=self._generator, device=device)
        self.rotation = Rotation(angles.cos(), angles.sin(), of_head, of_head, EPS)
        self.scale = 1 / math.sqrt(shape.dim)
        self.workspace = SplitKVWorkspace.of(rows, shape.heads, shape.kv_heads, shape.dim, device)
        self.backend = InvariantAttention(device, context)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.x.device, dtype=self.x.dtype)

    def _weight(self, columns: int, width: int) -> torch.Tensor:
        return self._normal(columns, width) / math.sqrt(width)

    def fast(self) -> torch.Tensor:
        """Returns the hidden states behind the layers by the kernels of fast numerics, for few rows."""
        hidden = self.x
        for layer in self.layers:
            q = self._rotated(skinny_gemm(F.rms_norm(hidden, self.norm.shape, self.norm, EPS), layer.qkv))
            attended, _ = skinny_decode_attention(
                q, self.keys, self.values, self.indptr, self.indices, self.workspace, scale=self.scale
            )
            hidden = skinny_gemm(attended.view(self.rows, -1), layer.out, residual=hidden)
            gated = skinny_gemm(F.rms_norm(hidden, self.norm.shape, self.norm, EPS), layer.gate_up, gated=True)
            hidden = skinny_gemm(gated, layer.down, residual=hidden)
        return hidden

    def invariant(self) -> torch.Tensor:
        """Returns the same by the kernels of invariant numerics."""
        shape, hidden = self.shape, self.x
        params = AttentionParams(shape.heads, shape.kv_heads, shape.dim, NO_WINDOW, NO_SOFTCAP, self.scale)
        tiles = Tiles(None, None, None, self.indptr, self.indices)
        for layer in self.layers:
            q = self._rotated(invariant_gemm(rms_norm(hidden, self.norm, EPS), layer.qkv))
            cache = self.keys, self.values
            attended, _ = self.backend.run(params, tiles, self.context, q, cache, torch.empty_like(q))
            hidden = invariant_gemm(attended.view(self.rows, -1), layer.out, residual=hidden)
            gate, up = invariant_gemm(rms_norm(hidden, self.norm, EPS), layer.gate_up).chunk(2, dim=1)
            hidden = invariant_gemm(F.silu(gate) * up, layer.down, residual=hidden)
        return hidden

    def _rotated(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(self.rows, -1, self.shape.dim) for part in torch.split(qkv, self.parts, dim=1))
        return qk_norm_rope(q, k, v, self.rotation, self.keys, self.values, self.slots)


def table_rows(repeats: int) -> list[Row]:
    found: list[Row] = []
    for shape, numerics, (rows, context) in itertools.product(SHAPES, ("fast", "invariant"), STEPS):
        if numerics == "fast" and rows > MAX_ROWS:
            continue
        x = torch.randn((rows, shape.width), generator=torch.Generator("cuda").manual_seed(rows), device="cuda")
        layers = DecodeLayers(shape, rows, context, x.bfloat16())
        step = layers.fast if numerics == "fast" else layers.invariant
        pdl = graph_of(step)
        with without_pdl():
            plain = graph_of(step)
        pdl_ms, plain_ms = times_ms([pdl, plain], repeats)
        found.append(
            {
                "case": f"{shape.name}, {numerics}",
                "rows": rows,
                "context": context,
                "pdl_ms": round(pdl_ms, 3),
                "plain_ms": round(plain_ms, 3),
                "ratio": round(pdl_ms / plain_ms, 3),
            }
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with torch.inference_mode():
        found = table_rows(args.repeats)
    publish("pdl", found, args.out, notes="bf16; medians of graph replays, alternately")


if __name__ == "__main__":
    main()
