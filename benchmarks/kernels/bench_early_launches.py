"""Measures the kernels of a decode step's layers that start before the ones in front of them end. Needs a Hopper GPU.

    python -m benchmarks.kernels.bench_early_launches --out benchmarks/results

`early_ms` is the median of CUDA-graph replays of a step's layers, without embedding, head and sampler; `in_turn_ms`
that of the same kernels launched in turn. Both are replayed alternately. Weights are random, and each layer has its
own. Norms of fast numerics and the gate of invariant numerics, which a model's compiled layer leaves to the compiler,
are torch's own and start in turn.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.kernels.bench_lm_head_logprob import graph_of, times_ms
from benchmarks.support.report import Row, publish
from engine.kernels import (
    invariant_attention,
    invariant_gemm,
    qk_norm_rope,
    rms_norm,
    skinny_decode_attention,
    skinny_gemm,
)

MODULES: Final = invariant_attention, invariant_gemm, qk_norm_rope, rms_norm, skinny_decode_attention, skinny_gemm
EPS: Final = 1e-6
SKINNY_ROWS: Final = 16  # up to which fast numerics multiply by these kernels
PROGRAMS: Final = 16  # that share an invariant context where rows are few
FEW: Final = 32  # rows
STEPS: Final = ((1, 256), (8, 256), (16, 256), (1, 1024), (8, 1024), (32, 256), (128, 256))  # rows and tokens of each
Step = Callable[[], torch.Tensor]


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


@contextmanager
def in_turn() -> Iterator[None]:
    """Launches the kernels in turn inside, as on a GPU that cannot do otherwise."""
    with ExitStack() as patches:
        for module in MODULES:
            patches.enter_context(mock.patch.object(module, "captured_pdl_options", _in_turn))
        yield


def _in_turn() -> dict[str, Any]:
    return {"PDL": False}


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
        self.rotation = qk_norm_rope.Rotation(angles.cos(), angles.sin(), of_head, of_head, EPS)
        self.workspace = skinny_decode_attention.SplitKVWorkspace.of(
            rows, shape.heads, shape.kv_heads, shape.dim, device
        )

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.x.device, dtype=self.x.dtype)

    def _weight(self, columns: int, width: int) -> torch.Tensor:
        return self._normal(columns, width) / math.sqrt(width)

    def fast(self) -> torch.Tensor:
        """Returns the hidden states behind the layers by the kernels of fast numerics, for few rows."""
        hidden = self.x
        for layer in self.layers:
            qkv = skinny_gemm.skinny_gemm(F.rms_norm(hidden, self.norm.shape, self.norm, EPS), layer.qkv)
            attended, _ = skinny_decode_attention.skinny_decode_attention(
                self._rotated(qkv),
                self.keys,
                self.values,
                self.indptr,
                self.indices,
                self.workspace,
                scale=1 / math.sqrt(self.shape.dim),
            )
            hidden = skinny_gemm.skinny_gemm(attended.view(self.rows, -1), layer.out, residual=hidden)
            normed = F.rms_norm(hidden, self.norm.shape, self.norm, EPS)
            gated = skinny_gemm.skinny_gemm(normed, layer.gate_up, gated=True)
            hidden = skinny_gemm.skinny_gemm(gated, layer.down, residual=hidden)
        return hidden

    def invariant(self) -> torch.Tensor:
        """Returns the same by the kernels of invariant numerics."""
        multiply, norm = invariant_gemm.invariant_gemm, rms_norm.rms_norm
        hidden = self.x
        for layer in self.layers:
            attended, _ = invariant_attention.invariant_attention(
                self._rotated(multiply(norm(hidden, self.norm, EPS), layer.qkv)),
                self.keys,
                self.values,
                invariant_attention.Tiles(None, None, None, self.indptr, self.indices),
                invariant_attention.Heads(1 / math.sqrt(self.shape.dim)),
                parts=invariant_attention.Parts(),
                longest=self.context,
                programs=PROGRAMS if self.rows < FEW else 1,
                form=invariant_attention.single_form(self.rows * self.shape.kv_heads),
            )
            hidden = multiply(attended.view(self.rows, -1), layer.out, residual=hidden)
            gate, up = multiply(norm(hidden, self.norm, EPS), layer.gate_up).chunk(2, dim=1)
            hidden = multiply(F.silu(gate) * up, layer.down, residual=hidden)
        return hidden

    def _rotated(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(self.rows, -1, self.shape.dim) for part in torch.split(qkv, self.parts, dim=1))
        return qk_norm_rope.qk_norm_rope(q, k, v, self.rotation, self.keys, self.values, self.slots)


def table_rows(repeats: int) -> list[Row]:
    found: list[Row] = []
    for shape, numerics, (rows, context) in itertools.product(SHAPES, ("fast", "invariant"), STEPS):
        if numerics == "fast" and rows > SKINNY_ROWS:
            continue
        x = torch.randn((rows, shape.width), generator=torch.Generator("cuda").manual_seed(rows), device="cuda")
        layers = DecodeLayers(shape, rows, context, x.bfloat16())
        step = layers.fast if numerics == "fast" else layers.invariant
        early = graph_of(step)
        with in_turn():
            plain = graph_of(step)
        early_ms, in_turn_ms = times_ms([early, plain], repeats)
        found.append(
            {
                "case": f"{shape.name}, {numerics}",
                "rows": rows,
                "context": context,
                "early_ms": round(early_ms, 3),
                "in_turn_ms": round(in_turn_ms, 3),
                "ratio": round(early_ms / in_turn_ms, 3),
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
    publish("early-launches", found, args.out, notes="bf16; medians of graph replays, alternately")


if __name__ == "__main__":
    main()
