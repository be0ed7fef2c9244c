"""Measures `skinny_gemm` against torch's product, on the weights of decoder layers and heads. Needs a GPU.

    python -m benchmarks.kernels.bench_skinny_gemm --out benchmarks/results
    python -m benchmarks.kernels.bench_skinny_gemm --sweep --out benchmarks/results    every tiling, and the best

`us` is the median of CUDA-graph replays, one product after another, with the gaps between kernels. Each product of a
graph has a weight of its own, 256 MiB in all, so that the L2 cache holds none. `library_us` is the time of F.linear on
the same inputs, without the gating. `joined_us` is the kernel's time with the residual that a decoder layer adds.
`floor_us` is one read of the weight at 4.25 TB/s, which an H200 reaches. The sweep compiles the tilings in several
processes (`--capability` names the GPU) and prints lines for `TILES` of the kernel's file, best over 2 and 8 rows. A
tiling whose bits depend on the number of rows is named and left out.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels.bench_lm_head_logprob import graph_of, times_ms
from benchmarks.support.report import Row, publish, write
from engine.kernels.skinny_gemm import ROWS as MAX_ROWS
from engine.kernels.skinny_gemm import GemmTile, skinny_gemm, tile_of
from engine.utils.cpu import cores
from gpu_sampler.kernel_cache import compile_variants, dry_run

ROWS = (1, 2, 4, 5, 8, 16)
SWEPT_ROWS = (2, 8)
BYTES_A_US = 4.25e6
POOL_BYTES = 256 << 20  # of weights in one graph
MAX_COPIES = 64
SHARED_BYTES = 227 << 10  # of a multiprocessor
MAX_PROCESSES = 16


class GemmShape(NamedTuple):
    name: str
    columns: int  # of the output
    width: int
    gated: bool = False
    added: bool = False  # to a residual, in a layer

    @property
    def weight_rows(self) -> int:
        return 2 * self.columns if self.gated else self.columns

    @property
    def bytes(self) -> int:
        return 2 * self.weight_rows * self.width

    @property
    def floor_us(self) -> float:
        return self.bytes / BYTES_A_US


SHAPES = (
    GemmShape("0.6B q, k, v", 4096, 1024),
    GemmShape("0.6B o", 1024, 2048, added=True),
    GemmShape("0.6B gate, up", 3072, 1024, gated=True),
    GemmShape("0.6B down", 1024, 3072, added=True),
    GemmShape("0.6B head", 151_936, 1024),
    GemmShape("8B q, k, v", 6144, 4096),
    GemmShape("8B o", 4096, 4096, added=True),
    GemmShape("8B gate, up", 12_288, 4096, gated=True),
    GemmShape("8B down", 4096, 12_288, added=True),
    GemmShape("8B head", 151_936, 4096),
)


def tilings(shape: GemmShape) -> Iterator[GemmTile]:
    """Lists the tilings to try: those that fit a multiprocessor and do not need too many programs."""
    for columns, (depth, warps), stages in itertools.product(
        (8, 16, 32, 64), ((64, 2), (64, 4), (128, 4), (64, 8)), (3, 4, 6)
    ):
        shared = 2 * stages * depth * warps * (MAX_ROWS + columns * (2 if shape.gated else 1))
        if shared <= SHARED_BYTES and shape.columns // columns <= 8192 and (columns < 32 or shape.columns > 2048):
            yield GemmTile(columns, depth, warps, stages)


class GemmInputs:
    """Holds input rows, and more weights than the L2 cache holds."""

    def __init__(self, shape: GemmShape) -> None:
        self.shape = shape
        copies = min(max(-(-POOL_BYTES // shape.bytes), 2), MAX_COPIES)
        generator = torch.Generator("cuda").manual_seed(shape.columns + shape.width)
        options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.x = torch.randn((MAX_ROWS, shape.width), **options)  # type: ignore[call-overload]
        sizes = (shape.weight_rows, shape.width)
        self.weights = [torch.randn(sizes, **options).mul_(shape.width**-0.5) for _ in range(copies)]  # type: ignore[call-overload]
        self.residual = torch.ones((MAX_ROWS, shape.columns), device="cuda", dtype=torch.bfloat16)

    def ours(self, rows: int, tile: GemmTile, *, joined: bool = False) -> Callable[[], None]:
        x, gated = self.x[:rows], self.shape.gated
        residual = self.residual[:rows] if joined and self.shape.added else None

        def products() -> None:
            for weight in self.weights:
                skinny_gemm(x, weight, gated=gated, residual=residual, tile=tile)

        return graph_of(products)

    def library(self, rows: int) -> Callable[[], None]:
        x = self.x[:rows]

        def products() -> None:
            for weight in self.weights:
                F.linear(x, weight)

        return graph_of(products)

    def us(self, replay: Callable[[], None], repeats: int) -> float:
        return 1e3 * times_ms([replay], repeats)[0] / len(self.weights)

    def keeps_bits(self, tile: GemmTile) -> bool:
        """Says whether the bits of a row are the same in batches of 2, 3, 6 and 16 rows."""
        weight, gated = self.weights[0], self.shape.gated
        every = skinny_gemm(self.x, weight, gated=gated, tile=tile)
        parts = ((0, 1), (3, 5), (11, 16))
        return all(torch.equal(skinny_gemm(self.x[a:b], weight, gated=gated, tile=tile), every[a:b]) for a, b in parts)


def measured(
    shape: GemmShape, rows: int, us: float, library_us: float, tile: GemmTile, joined_us: float | None = None
) -> Row:
    return {
        "case": shape.name,
        "rows": rows,
        "us": round(us, 2),
        "joined_us": None if joined_us is None else round(joined_us, 2),
        "library_us": round(library_us, 2),
        "floor_us": round(shape.floor_us, 2),
        "ratio": round(us / shape.floor_us, 2),
        "gb_s": round(shape.bytes / us / 1e3),
        "tile": " ".join(map(str, tile)),
    }


def table_rows(repeats: int) -> list[Row]:
    found = []
    for shape in SHAPES:
        inputs, tile = GemmInputs(shape), tile_of(shape.columns, shape.width)
        for rows in ROWS:
            us, library = (inputs.us(one, repeats) for one in (inputs.ours(rows, tile), inputs.library(rows)))
            joined = inputs.us(inputs.ours(rows, tile, joined=True), repeats) if shape.added else None
            found.append(measured(shape, rows, us, library, tile, joined))
        sys.stderr.write(f"{shape.name}\n")
    return found


def compile_tilings(capability: int) -> None:
    """Compiles the tilings in forked processes, so it runs before CUDA is initialised."""
    torch.set_num_threads(1)
    with dry_run(capability) as found:
        for shape in SHAPES:
            weight = torch.empty((shape.weight_rows, shape.width), dtype=torch.bfloat16)  # its values are not read
            x = torch.zeros((1, shape.width), dtype=torch.bfloat16)
            for tile in tilings(shape):
                skinny_gemm(x, weight, gated=shape.gated, tile=tile)
    done = compile_variants(found, capability, min(cores(), MAX_PROCESSES))
    sys.stderr.write(f"{done.compiled} cuts compiled, {done.found} were there, {len(done.refused)} refused\n")


def swept_rows(repeats: int) -> tuple[list[Row], dict[GemmShape, GemmTile]]:
    found: list[Row] = []
    best: dict[GemmShape, GemmTile] = {}
    for shape in SHAPES:
        inputs, sums = GemmInputs(shape), {}
        library = {rows: inputs.us(inputs.library(rows), repeats) for rows in SWEPT_ROWS}
        for tile in tilings(shape):
            try:
                if not inputs.keeps_bits(tile):
                    sys.stdout.write(f"{shape.name} {tile}: other bits beside other rows\n")
                    continue
                us = {rows: inputs.us(inputs.ours(rows, tile), repeats) for rows in SWEPT_ROWS}
            except Exception as error:  # of whatever a cut that does not fit may raise: the others are still timed
                sys.stdout.write(f"{shape.name} {tile}: {type(error).__name__}: {str(error)[:120]}\n")
                continue
            found += [measured(shape, rows, us[rows], library[rows], tile) for rows in SWEPT_ROWS]
            sums[tile] = sum(us.values())
        best[shape] = min(sums, key=lambda tile: sums[tile])
        sys.stderr.write(f"{shape.name}: {len(sums)} cuts\n")
    return found, best


def say_best(rows: list[Row], best: dict[GemmShape, GemmTile]) -> None:
    """Prints lines of the kernel's table, with the times of the best and of the current tiling."""
    for shape, tile in best.items():
        own = [row for row in rows if row["case"] == shape.name]
        now = " ".join(map(str, tile_of(shape.columns, shape.width)))
        told = {
            name: ", ".join(str(row["us"]) for row in own if row["tile"] == name)
            for name in (" ".join(map(str, tile)), now)
        }
        library = ", ".join(str(row["library_us"]) for row in own[: len(SWEPT_ROWS)])
        comment = f"{shape.name}: {told[' '.join(map(str, tile))]} us; now {told[now]}; library {library}"
        comment += f"; floor {shape.floor_us:.1f}"
        sys.stdout.write(f"    ({shape.columns}, {shape.width}): Tile{tuple(tile)},  # {comment}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, 90 for 9.0; for the sweep")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    notes = "bf16; medians of graph replays over 256 MiB of weights; the library's without the gate"
    if not args.sweep:
        publish("skinny-gemm", table_rows(args.repeats), args.out, notes=notes)
        return
    compile_tilings(args.capability)
    rows, best = swept_rows(args.repeats)
    if args.out is not None:
        write("skinny-gemm-sweep", rows, args.out, notes)
    say_best(rows, best)


if __name__ == "__main__":
    main()
