"""Measures `skinny_decode_attention` against FlashInfer's decode kernels, on contexts of equal length. Needs a GPU.

    python -m benchmarks.kernels.bench_skinny_decode_attention --out benchmarks/results
    python -m benchmarks.kernels.bench_skinny_decode_attention --sweep    chunks, pieces and warps of the shapes

`us` is the median of CUDA-graph replays over the layers of a step, with the gaps between kernels. Each layer has keys
and values of its own, 256 MiB in all, so that the L2 cache holds none. `library_us` is FlashInfer's time as the engine
calls it (planned before, with its merge of partial results). `floor_us` is one read of keys and values at 4.25 TB/s,
which an H200 reaches.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.bench_lm_head_logprob import graph_of, times_ms
from benchmarks.support.report import Row, publish
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.flashinfer_wrappers import PlannedWrapper
from engine.attention.interface import NO_SOFTCAP, NO_WINDOW
from engine.attention.plans import AttentionParams, GraphBuffers, Sequences
from engine.kernels.skinny_decode_attention import CHUNK, PARTS, WARPS, SplitKVWorkspace, skinny_decode_attention

BYTES_A_US = 4.25e6
POOL_BYTES = 256 << 20
MAX_LAYERS = 36
ROWS = (1, 2, 5, 16)
CONTEXTS = (300, 700, 4_000, 32_000)
Cut = tuple[int, int, int]  # chunk, pieces, warps
OURS: Cut = (CHUNK, PARTS, WARPS)
CUTS: tuple[Cut, ...] = (*itertools.product((32, 64, 128), (32,), (4, 8)), (64, 16, 4), (64, 64, 4))


class AttentionShape(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    dim: int

    @property
    def kind(self) -> AttentionParams:
        return AttentionParams(self.heads, self.kv_heads, self.dim, NO_WINDOW, NO_SOFTCAP, self.dim**-0.5)


SHAPES = (AttentionShape("0.6B", 16, 8, 128), AttentionShape("8B", 32, 8, 128))


class AttentionInputs:
    """Holds sequences that each attend to a context of their own."""

    def __init__(self, shape: AttentionShape, rows: int, context: int) -> None:
        self.shape, self.rows, self.tokens = shape, rows, rows * context
        self.bytes = 4 * self.tokens * shape.kv_heads * shape.dim
        layers = min(max(-(-POOL_BYTES // self.bytes), 2), MAX_LAYERS)
        options: Any = {"device": "cuda", "dtype": torch.bfloat16}
        pool = (layers, 2, self.tokens, 1, shape.kv_heads, shape.dim)
        self.pools = torch.randn(pool, **options)
        self.q = torch.randn((rows, shape.heads, shape.dim), **options)
        self.out = torch.empty_like(self.q)
        self.indices = torch.randperm(self.tokens, device="cuda").to(torch.int32)
        self.host = torch.arange(0, self.tokens + 1, context, dtype=torch.int32)
        self.indptr = self.host.cuda()

    @property
    def floor_us(self) -> float:
        return self.bytes / BYTES_A_US

    def us(self, repeats: int, cut: Cut = OURS) -> float:
        shape, (chunk, parts, warps) = self.shape, cut
        room = SplitKVWorkspace.of(self.rows, shape.heads, shape.kv_heads, shape.dim, self.q.device, parts=parts)
        options: Any = {"scale": shape.kind.scale, "out_RHD": self.out, "chunk": chunk, "warps": warps}

        def layers() -> None:
            for keys, values in self.pools:
                skinny_decode_attention(self.q, keys, values, self.indptr, self.indices, room, **options)

        return 1e3 * times_ms([graph_of(layers)], repeats)[0] / len(self.pools)

    def library_us(self, body: FlashInferAttention, repeats: int) -> float:
        ones = torch.ones(self.rows, dtype=torch.int32, device="cuda")
        buffers = GraphBuffers(torch.zeros_like(self.indptr), self.indices.clone(), ones)
        wrapper: PlannedWrapper = body.wrappers.graph_decoder(self.shape.kind, buffers, self.rows)
        queries = torch.arange(self.rows + 1, dtype=torch.int32)
        wrapper.plan(self.shape.kind, Sequences(queries, self.host, self.indices, causal=True))

        def layers() -> None:
            for keys, values in self.pools:
                wrapper.run(self.q, (keys, values), out=self.out)

        return 1e3 * times_ms([graph_of(layers)], repeats)[0] / len(self.pools)


def table_rows(repeats: int) -> list[Row]:
    body, found = FlashInferAttention(torch.device("cuda"), torch.bfloat16), list[Row]()
    for shape, rows, context in itertools.product(SHAPES, ROWS, CONTEXTS):
        inputs = AttentionInputs(shape, rows, context)
        us, library_us = inputs.us(repeats), inputs.library_us(body, repeats)
        found.append(
            {
                "case": shape.name,
                "rows": rows,
                "context": context,
                "us": round(us, 2),
                "library_us": round(library_us, 2),
                "floor_us": round(inputs.floor_us, 2),
                "ratio": round(us / inputs.floor_us, 2),
            }
        )
    return found


def sweep(repeats: int) -> list[Row]:
    found: list[Row] = []
    for shape, rows, context in itertools.product(SHAPES, (2, 5), CONTEXTS[1:3]):
        inputs = AttentionInputs(shape, rows, context)
        timed = [(inputs.us(repeats, cut), cut) for cut in CUTS]
        best = "; ".join(f"{us:.2f} {cut}" for us, cut in sorted(timed)[:4])
        found.append({"case": shape.name, "rows": rows, "context": context, "best": best})
        sys.stderr.write(f"{shape.name} {rows} {context}: {best}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.sweep:
        publish("skinny-decode-attention-sweep", sweep(args.repeats), None, notes="(chunk, pieces, warps)")
        return
    notes = "bf16; medians of graph replays over 256 MiB of keys and values"
    publish("skinny-decode-attention", table_rows(args.repeats), args.out, notes=notes)


if __name__ == "__main__":
    main()
