"""Multiplies rows with a weight so that a row's bits do not depend on the rows beside it.

    y[m, n] = x_m . w_n + b_n          summed in fp32 from the first of K to the last, rounded once
    z[m, n] = r[m, n] + y[m, n]        with a residual: rounded again, as where it is added by itself

A BLAS library chooses its kernel, and with it the order of a sum, by the number of rows (Thinking Machines 2025,
"Defeating Nondeterminism in LLM Inference"): where rows are few it cuts K, and adds the pieces. Here K is never cut. A
tile of the output is one chain of matrix instructions of equal depth, each adding to the sum of those before it, so
that the shape of a tile changes the speed alone. Few rows are the right operand of small tiles, which keep a device
busy; many rows are the left one of large tiles.

fp32 rows beside a bf16 weight are three bf16 terms that add up to them exactly, multiplied one after another at each
step of K: sums as of fp32 products, and the weight is read once. Other fp32 products are three of tf32, which holds
about 22 bits of each factor.

Bytes: x once for every BLOCK_N columns, the weight once for every BLOCK_M rows.

Shape legend: M rows, N columns of the output, K width of a row of x, P terms of a row.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import captured_pdl_options, launch_dependents, wait_for_previous
from gpu_sampler.kernels.lm_head_logprob import FLOATS, INTERPRETED

GROUP: Final = 8  # tiles of rows that share the columns of a weight in cache
TERMS: Final = 3  # of 8 bits each: the 24 bits of fp32
MANY: Final = 1 << 62
COPIED: Final = 1024  # numbers of a row that one program cuts into terms


class Tile(NamedTuple):
    """Says how the output is cut."""

    rows: int
    columns: int
    depth: int  # of K, of one load; with several terms of a row it decides bits
    warps: int
    stages: int
    few: bool = False  # the weight is the left operand of a matrix instruction, whose right one may be narrow


EXACT_DEPTH: Final = 64  # changing it changes bits of fp32 rows
# By the most rows, and the most columns of the output, ascending; measured on an H200.
TILES: Final = {
    (16, 2048): Tile(16, 16, 512, 2, 3, few=True),
    (16, MANY): Tile(16, 64, 128, 4, 6, few=True),
    (96, 4096): Tile(32, 64, 128, 4, 6, few=True),
    (96, MANY): Tile(64, 64, 128, 4, 4, few=True),
    (512, MANY): Tile(64, 64, 64, 4, 4),
    (MANY, MANY): Tile(128, 256, 64, 8, 3),
}
EXACT_TILES: Final = {  # three terms of each row lie in shared memory
    (16, MANY): Tile(16, 64, EXACT_DEPTH, 4, 6, few=True),
    (64, MANY): Tile(32, 128, EXACT_DEPTH, 4, 4, few=True),
    (512, MANY): Tile(64, 256, EXACT_DEPTH, 4, 2),
    (MANY, MANY): Tile(128, 128, EXACT_DEPTH, 8, 3),
}
TF32: Final = Tile(64, 64, 64, 4, 4)
SMALL: Final = Tile(64, 32, 64, 4, 2)  # for the interpreter, which pays for empty rows and columns


@triton.jit(do_not_specialize=["M"])
def _invariant_gemm_kernel(
    x, weight, bias, residual, out, M, N, K, x_row, x_term,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
    PARTS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes one tile. Grid (tiles of rows x tiles of columns), GROUP tiles of rows side by side.

    Args:
        x: [P, M, K], terms `x_term` and rows `x_row` elements apart, read.
        weight: [N, K] contiguous, read.
        bias: [N], read if BIASED.
        residual: [M, N] contiguous of the output's type, read if ADDED.
        out: [M, N] contiguous, written.
        FEW: Whether the weight is the left operand.
        PARTS: P, 1 for rows that are multiplied as they are.
        PRECISION: How fp32 is multiplied.
        UPCAST: Whether the kernel runs in Triton's interpreter, which multiplies fp32 alone.
    """
    program, tiles_M, tiles_N = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_M = program // (GROUP * tiles_N) * GROUP
    side_by_side = tl.minimum(tiles_M - first_M, GROUP)
    within = program % (GROUP * tiles_N)
    row_M = (first_M + within % side_by_side) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = within // side_by_side * BLOCK_N + tl.arange(0, BLOCK_N)
    there_M, there_N = row_M < M, column_N < N
    x_M, weight_N = x + row_M.to(tl.int64) * x_row, weight + column_N.to(tl.int64) * K
    if FEW:
        sum_MN = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    for start in range(0, K, DEPTH):
        at_K = start + tl.arange(0, DEPTH)
        inside_K = at_K < K
        w_NK = tl.load(weight_N[:, None] + at_K[None, :], mask=there_N[:, None] & inside_K[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            x_MK = tl.load(
                x_M[:, None] + part * x_term + at_K[None, :], mask=there_M[:, None] & inside_K[None, :], other=0.0
            )
            if UPCAST or x.dtype.element_ty == tl.float32:
                a_MK, b_NK = x_MK.to(tl.float32), w_NK.to(tl.float32)
            else:
                a_MK, b_NK = x_MK, w_NK
            if FEW:
                sum_MN = tl.dot(b_NK, tl.trans(a_MK), sum_MN, input_precision=PRECISION)
            else:
                sum_MN = tl.dot(a_MK, tl.trans(b_NK), sum_MN, input_precision=PRECISION)
    if FEW:
        sum_MN = tl.trans(sum_MN)
    if BIASED:
        sum_MN += tl.load(bias + column_N, mask=there_N, other=0.0).to(tl.float32)[None, :]
    place_MN, there_MN = row_M.to(tl.int64)[:, None] * N + column_N[None, :], there_M[:, None] & there_N[None, :]
    y_MN = sum_MN.to(out.dtype.element_ty)
    if ADDED:
        r_MN = tl.load(residual + place_MN, mask=there_MN, other=0.0)
        y_MN = (r_MN.to(tl.float32) + y_MN.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + place_MN, y_MN, mask=there_MN)


@triton.jit
def _terms_kernel(x, terms, x_row, x_term, K, TERMS: tl.constexpr, COPIED: tl.constexpr, PDL: tl.constexpr):
    """Cuts a part of a row into terms. Grid (M, parts).

    Args:
        x: fp32 [M, K], rows `x_row` elements apart, read.
        terms: bf16 [TERMS, M, K], terms `x_term` elements apart, written.
    """
    row, at_K = tl.program_id(0).to(tl.int64), tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    inside_K = at_K < K
    launch_dependents(PDL)
    wait_for_previous(PDL)
    rest_K = tl.load(x + row * x_row + at_K, mask=inside_K, other=0.0)
    for part in tl.static_range(TERMS):
        term_K = rest_K.to(tl.bfloat16)
        tl.store(terms + part * x_term + row * K + at_K, term_K, mask=inside_K)
        rest_K -= term_K.to(tl.float32)


def tile_of(rows: int, columns: int, x_dtype: torch.dtype, weight_dtype: torch.dtype, *, few: bool = True) -> Tile:
    """Returns the tile for an output of this form. `few`: whether few rows have tiles of their own."""
    if INTERPRETED:
        return SMALL
    if x_dtype == torch.float32 and weight_dtype != torch.bfloat16:
        return TF32
    tiles = EXACT_TILES if x_dtype == torch.float32 else TILES
    rows = rows if few else MANY
    return next(tile for (most, widest), tile in tiles.items() if rows <= most and columns <= widest)


def invariant_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    few: bool = True,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes a linear layer.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        weight: [N, K] contiguous, of x's type; any of the three beside fp32 rows.
        bias: [N].
        residual: [..., N] of the result's type, is added to it.
        out_dtype: None: x's.
        few: Whether few rows have tiles of their own. No bit depends on it where all matrix instructions of a device
            sum alike, as Hopper's do.
        tile: None: as suits the rows. No bit depends on it, with the same exception.
        out: [rows of x, N] contiguous, of any float type, where the result goes; None: new memory.

    Returns:
        [..., N] in `out_dtype`, contiguous.

    Raises:
        ValueError: Shapes or types do not belong together.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _check(rows, weight, bias)
    (count, width), columns = rows.shape, weight.shape[0]
    if out is None:
        out = torch.empty((count, columns), dtype=out_dtype or x.dtype, device=x.device)
    elif out.shape != (count, columns) or not out.is_contiguous() or out.dtype not in FLOATS:
        raise ValueError(f"got out {out.dtype} {tuple(out.shape)}, expected contiguous floats {(count, columns)}")
    if residual is not None:
        if residual.shape != (*x.shape[:-1], columns) or residual.dtype != out.dtype:
            raise ValueError(f"got residual {residual.dtype} {tuple(residual.shape)}, expected the result's form")
        residual = residual.contiguous()
    if count and columns:
        exact = x.dtype == torch.float32 and weight.dtype == torch.bfloat16
        terms = bf16_terms(rows) if exact else rows[None]
        tile = tile or tile_of(count, columns, x.dtype, weight.dtype, few=few)
        _invariant_gemm_kernel[(-(-count // tile.rows) * -(-columns // tile.columns),)](
            terms, weight, bias, residual, out, count, columns, width, terms.stride(1), terms.stride(0),
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, DEPTH=tile.depth, GROUP=GROUP, FEW=tile.few, PARTS=len(terms),
            BIASED=bias is not None, ADDED=residual is not None, PRECISION="ieee" if INTERPRETED else "tf32x3",
            UPCAST=INTERPRETED, enable_fp_fusion=False, num_warps=tile.warps, num_stages=tile.stages,
            **captured_pdl_options(),
        )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


def bf16_terms(x: torch.Tensor) -> torch.Tensor:
    """Returns bf16 [TERMS, M, K] that add up to x, fp32 [M, K]: each is what the ones before it leave, rounded."""
    rows, width = x.shape
    terms = torch.empty((TERMS, rows, width), dtype=torch.bfloat16, device=x.device)
    grid = rows, -(-width // COPIED)
    _terms_kernel[grid](
        x, terms, x.stride(0), rows * width, width, TERMS=TERMS, COPIED=COPIED, **captured_pdl_options()
    )
    return terms


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless the arguments belong together."""
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
        raise ValueError(f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}, expected contiguous [N, K]")
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or x.dtype not in (weight.dtype, torch.float32):
        raise ValueError(f"got x {x.dtype} and weight {weight.dtype}, expected equal types or fp32 rows")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"got bias {tuple(bias.shape)}, expected ({weight.shape[0]},)")
