"""Multiplies rows with a weight so that a row's bits do not depend on the rows beside it.

    y[m, n] = x_m . w_n + b_n          summed in fp32 by slices of K, rounded once

A BLAS library chooses its kernel, and with it the order of a sum, by the number of rows (Thinking Machines 2025,
"Defeating Nondeterminism in LLM Inference"). Here K alone decides the order: K is cut in slices of SLICE; a slice is
summed by matrix instructions of equal depth, one after another, and the slices' sums are added in order. Two launches
compute that one sum. `whole`: a program sums all slices of its tile, which suits many rows. `split`: a program sums one
slice, and the program of a tile that ends last adds the slices in order, which keeps a device busy with few rows
(split K). Which of the two runs changes the speed alone.

Every tile has at least 64 rows, so that Hopper multiplies all of them by the same kind of instruction.

Bytes: x once for every BLOCK_N columns, the weight once for every BLOCK_M rows.

Shape legend: M rows, N columns of the output, K width of a row of x, S slices of K.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.arrivals import arrivals
from gpu_sampler.kernels.lm_head_logprob import INTERPRETED

SLICE: Final = 512  # of K; changing it changes bits
DEPTH: Final = 64  # of K, of one load; changing it changes bits
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
GROUP: Final = 8  # tiles of rows that share the columns of a weight in cache


class Tile(NamedTuple):
    """Says how the output is cut. It changes no bits."""

    rows: int  # at least 64
    columns: int
    warps: int  # four for every 64 rows
    stages: int


WHOLE: Final = Tile(128, 128, 8, 3)
SPLIT: Final = Tile(64, 64, 4, 4)
SMALL: Final = Tile(64, 32, 4, 2)  # for the interpreter, which pays for empty rows and columns
MANY_TILES: Final = 128  # tiles of `WHOLE` from which a device is busy without cutting K


@triton.jit
def _sum_of_slice(
    x, weight, row_M, column_N, there_M, there_N, part, K, x_row,
    SLICE: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns f32 [BLOCK_M, BLOCK_N], the products over one slice of K. fp32 rows are multiplied as three tf32 terms,
    which holds about 22 bits of each factor."""
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(part * SLICE, tl.minimum((part + 1) * SLICE, K), DEPTH):
        at_K = start + tl.arange(0, DEPTH)
        inside_K = at_K < K
        x_MK = tl.load(
            x + row_M.to(tl.int64)[:, None] * x_row + at_K[None, :],
            mask=there_M[:, None] & inside_K[None, :],
            other=0.0,
        )
        w_NK = tl.load(
            weight + column_N.to(tl.int64)[:, None] * K + at_K[None, :],
            mask=there_N[:, None] & inside_K[None, :],
            other=0.0,
        )
        if UPCAST:
            sum_MN = tl.dot(x_MK.to(tl.float32), tl.trans(w_NK.to(tl.float32)), sum_MN, input_precision="ieee")
        elif x.dtype.element_ty == tl.float32:
            sum_MN = tl.dot(x_MK, tl.trans(w_NK.to(tl.float32)), sum_MN, input_precision="tf32x3")
        else:
            sum_MN = tl.dot(x_MK, tl.trans(w_NK), sum_MN)
    return sum_MN


@triton.jit
def _store(out, bias, sum_MN, row_M, column_N, there_M, there_N, N, BIASED: tl.constexpr):
    """Adds the bias and stores a tile, rounded to the output's type."""
    if BIASED:
        sum_MN += tl.load(bias + column_N, mask=there_N, other=0.0).to(tl.float32)[None, :]
    place_MN = row_M.to(tl.int64)[:, None] * N + column_N[None, :]
    tl.store(out + place_MN, sum_MN.to(out.dtype.element_ty), mask=there_M[:, None] & there_N[None, :])


@triton.jit(do_not_specialize=["M"])
def _whole_kernel(
    x, weight, bias, out, M, N, K, x_row,
    SLICE: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    BIASED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes one tile over all slices. Grid (tiles of rows x tiles of columns), GROUP tiles of rows side by side.

    Args:
        x: [M, K], rows `x_row` elements apart, read.
        weight: [N, K] contiguous, read.
        bias: [N], read if BIASED.
        out: [M, N] contiguous, written.
        UPCAST: Whether the kernel runs in Triton's interpreter, which multiplies fp32 alone.
    """
    program, tiles_M, tiles_N = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_M = program // (GROUP * tiles_N) * GROUP
    side_by_side = tl.minimum(tiles_M - first_M, GROUP)
    within = program % (GROUP * tiles_N)
    row_M = (first_M + within % side_by_side) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = within // side_by_side * BLOCK_N + tl.arange(0, BLOCK_N)
    there_M, there_N = row_M < M, column_N < N
    total_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in range(tl.cdiv(K, SLICE)):
        total_MN += _sum_of_slice(
            x, weight, row_M, column_N, there_M, there_N, part, K, x_row, SLICE, DEPTH, BLOCK_M, BLOCK_N, UPCAST
        )
    _store(out, bias, total_MN, row_M, column_N, there_M, there_N, N, BIASED)


@triton.jit(do_not_specialize=["M"])
def _split_kernel(
    x, weight, bias, out, sums, arrived, M, N, K, x_row,
    SLICE: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes one slice of a tile; the last program of a tile adds its slices. Grid (tiles of columns, tiles of rows,
    S).

    Args:
        sums: f32 [S, M, N], written and read.
        arrived: i32, one for each tile, zeros before and after the launch. Other arguments as in `_whole_kernel`.
    """
    part, slices = tl.program_id(2), tl.num_programs(2)
    row_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there_M, there_N = row_M < M, column_N < N
    sum_MN = _sum_of_slice(
        x, weight, row_M, column_N, there_M, there_N, part, K, x_row, SLICE, DEPTH, BLOCK_M, BLOCK_N, UPCAST
    )
    total_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if slices == 1:
        total_MN += sum_MN
        _store(out, bias, total_MN, row_M, column_N, there_M, there_N, N, BIASED)
        return
    place_MN = row_M.to(tl.int64)[:, None] * N + column_N[None, :]
    there_MN = there_M[:, None] & there_N[None, :]
    of_slice = M.to(tl.int64) * N
    tl.store(sums + part * of_slice + place_MN, sum_MN, mask=there_MN)
    tl.debug_barrier()  # all of the slice is written before its program counts as arrived
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < slices - 1:
        return
    tl.store(arrived + tile, 0)
    tl.debug_barrier()
    for other in range(slices):
        total_MN += tl.load(sums + other * of_slice + place_MN, mask=there_MN, other=0.0)
    _store(out, bias, total_MN, row_M, column_N, there_M, there_N, N, BIASED)


def invariant_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """Computes a linear layer.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        weight: [N, K] contiguous, of x's type; any of the three beside fp32 rows.
        bias: [N].
        out_dtype: None: x's.
        split: Whether K is cut over programs; None: as suits the device. No bit depends on it.

    Returns:
        [..., N] in `out_dtype`, contiguous.

    Raises:
        ValueError: Shapes or types do not belong together.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _check(rows, weight, bias)
    (count, width), columns = rows.shape, weight.shape[0]
    out = torch.empty((count, columns), dtype=out_dtype or x.dtype, device=x.device)
    if count and columns:
        slices = -(-width // SLICE)
        whole = WHOLE if not INTERPRETED else SMALL
        if split is None:
            split = -(-count // whole.rows) * -(-columns // whole.columns) < MANY_TILES
        tile = (SPLIT if split else WHOLE) if not INTERPRETED else SMALL
        tiles = -(-columns // tile.columns), -(-count // tile.rows)
        common = {
            "SLICE": SLICE, "DEPTH": DEPTH, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BIASED": bias is not None,
            "UPCAST": INTERPRETED, "enable_fp_fusion": False, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        if split:
            sums = torch.empty((slices, count, columns) if slices > 1 else (1,), device=x.device)
            arrived = arrivals(x.device, tiles[0] * tiles[1])
            _split_kernel[(*tiles, slices)](
                rows, weight, bias, out, sums, arrived, count, columns, width, rows.stride(0), **common
            )
        else:
            _whole_kernel[(tiles[0] * tiles[1],)](
                rows, weight, bias, out, count, columns, width, rows.stride(0), GROUP=GROUP, **common
            )
    return out.view(*x.shape[:-1], columns)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless the arguments belong together."""
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
        raise ValueError(f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}, expected contiguous [N, K]")
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or x.dtype not in (weight.dtype, torch.float32):
        raise ValueError(f"got x {x.dtype} and weight {weight.dtype}, expected equal types or fp32 rows")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"got bias {tuple(bias.shape)}, expected ({weight.shape[0]},)")
