"""Multiplies a few rows with a weight, as a decode step does, at the speed of reading the weight.

    y[m, n] = x_m . w_n + b_n                                                     summed in fp32, rounded once
    gated:    silu(x_m . w_n + b_n) (x_m . w_(N+n) + b_(N+n))                     silu(z) = z / (1 + exp(-z))
    residual: r[m, n] is added to y[m, n], which is rounded before and after

A BLAS library chooses its kernel by the number of rows, so that a token's numbers change with the batch around it, and
some of those kernels read a small weight at a third of the memory's speed. Here a program reads whole rows of the
weight, as 16-byte copies several slices ahead of the products, and always multiplies 16 rows of x; absent rows are
zeros that are not read from memory. N and K alone decide how a row is summed: each of the program's warps sums its own
slices of K in order, then the warps' sums are added. So a row's bits depend neither on the number of rows beside it nor
on its place among them: a verify step of five rows and a decode step of one multiply alike.

More than 16 rows are correct too, and read the weight again for every 16. Bytes: the weight, and x once a program.
`engine.model.optimize.skinny_linear` says what this gains.

Shape legend: M rows, N columns of the output, K width of a row of x, S warps, each with slices of its own.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import captured_pdl_options, launch_dependents, wait_for_previous
from gpu_sampler.kernels.lm_head_logprob import BF16, FLOATS, INTERPRETED, LOG2_E, finished

ROWS: Final = 16  # of x in a program: what a matrix instruction takes


class GemmTile(NamedTuple):
    """Says how a product is cut. It decides the order of the sums, so it must not depend on M."""

    columns: int  # of the output, one program's
    depth: int  # of K, one warp's in one step
    warps: int
    stages: int  # steps that are loaded ahead, and the current one


# By (N, K) where it was measured: `python -m benchmarks.kernels.bench_skinny_gemm --sweep` prints such lines.
TILES: Final[dict[tuple[int, int], GemmTile]] = {
    (4096, 1024): GemmTile(16, 64, 2, 6),  # 0.6B q, k, v
    (1024, 2048): GemmTile(8, 64, 4, 6),  # 0.6B o
    (3072, 1024): GemmTile(8, 64, 2, 4),  # 0.6B gate, up
    (1024, 3072): GemmTile(8, 64, 4, 6),  # 0.6B down
    (151936, 1024): GemmTile(64, 64, 2, 3),  # 0.6B head
    (6144, 4096): GemmTile(16, 64, 2, 6),  # 8B q, k, v
    (4096, 4096): GemmTile(16, 64, 4, 6),  # 8B o
    (12288, 4096): GemmTile(32, 64, 2, 3),  # 8B gate, up
    (4096, 12288): GemmTile(32, 128, 4, 4),  # 8B down
    (151936, 4096): GemmTile(64, 64, 2, 4),  # 8B head
}
# By N elsewhere, up to so many columns: fewer programs have more bytes in flight each.
_BY_COLUMNS: Final = ((2048, GemmTile(8, 64, 4, 6)), (32768, GemmTile(16, 64, 4, 4)), (1 << 31, GemmTile(32, 64, 4, 3)))


def tile_of(columns: int, width: int) -> GemmTile:
    """Returns the tile for a product of `columns` outputs over rows of `width`."""
    found = TILES.get((columns, width))
    return found or next(tile for limit, tile in _BY_COLUMNS if columns <= limit)


def tiles() -> list[GemmTile]:
    """Returns every tile that `tile_of` gives, each once."""
    return list(dict.fromkeys([*TILES.values(), *(tile for _, tile in _BY_COLUMNS)]))


@triton.jit
def _slice(weight_NK, at_SK, columns_N, N, K, WHOLE: tl.constexpr):
    """Loads a slice [S, K, N] of the weight, zeros outside."""
    places_SNK = weight_NK[None, :, None] + at_SK[:, None, :]
    if WHOLE:
        w_SNK = tl.load(places_SNK)
    else:
        w_SNK = tl.load(places_SNK, mask=(columns_N < N)[None, :, None] & (at_SK < K)[:, None, :], other=0.0)
    return tl.permute(w_SNK, (0, 2, 1))


@triton.jit
def _summed(sums_SMN, bias, columns_N, inside_N, BIASED: tl.constexpr):
    """Adds the warps' sums, and the bias."""
    z_MN = tl.sum(sums_SMN, axis=0)
    if BIASED:
        z_MN += tl.load(bias + columns_N, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    return z_MN


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    x, weight, bias, residual, y, x_stride, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, WHOLE: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums a tile of the output over all of K. Grid (ceil(N / COLUMNS), ceil(M / ROWS)).

    Args:
        x: [M, K] bf16, fp16 or f32, read.
        weight: [N, K] of the same type, contiguous, read; GATED: [2 N, K], the gate's rows first.
        bias: [N or 2 N] any float type, read if BIASED.
        residual: [M, N] of x's type, contiguous, read if ADDED.
        y: [M, N] of x's type, contiguous, written.
        x_stride: Elements from one row of x to the next.
        COLUMNS: See `GemmTile`, with DEPTH, WARPS and STAGES.
        WHOLE: Whether tiles divide N and K.
        UPCAST: Whether the kernel runs in Triton's interpreter, which multiplies fp32 alone.
    """
    rows_M = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns_N = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside_M, inside_N = rows_M < M, columns_N < N
    x_M, w_N = x + rows_M.to(tl.int64) * x_stride, weight + columns_N.to(tl.int64) * K
    u_N = weight + (columns_N + N).to(tl.int64) * K
    first_SK = tl.arange(0, WARPS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    sums_SMN = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)  # a batch of products, one a warp
    ups_SMN = sums_SMN
    places_MN = rows_M.to(tl.int64)[:, None] * N + columns_N[None, :]
    inside_MN = inside_M[:, None] & inside_N[None, :]
    launch_dependents(PDL)
    wait_for_previous(PDL)
    if ADDED:  # loads while products are summed
        r_MN = tl.load(residual + places_MN, mask=inside_MN, other=0.0)
    for start in tl.range(0, K, WARPS * DEPTH, num_stages=STAGES):
        at_SK = start + first_SK
        inside_SMK = inside_M[None, :, None]
        if not WHOLE:
            inside_SMK = inside_SMK & (at_SK < K)[:, None, :]
        x_SMK = tl.load(x_M[None, :, None] + at_SK[:, None, :], mask=inside_SMK, other=0.0)
        w_SKN = _slice(w_N, at_SK, columns_N, N, K, WHOLE)
        if UPCAST:
            x_SMK, w_SKN = x_SMK.to(tl.float32), w_SKN.to(tl.float32)
        sums_SMN = tl.dot(x_SMK, w_SKN, sums_SMN, input_precision="ieee")
        if GATED:
            u_SKN = _slice(u_N, at_SK, columns_N, N, K, WHOLE)
            if UPCAST:
                u_SKN = u_SKN.to(tl.float32)
            ups_SMN = tl.dot(x_SMK, u_SKN, ups_SMN, input_precision="ieee")
    y_MN = _summed(sums_SMN, bias, columns_N, inside_N, BIASED)
    if GATED:
        up_MN = _summed(ups_SMN, bias + N if BIASED else bias, columns_N, inside_N, BIASED)
        y_MN = y_MN / (1.0 + tl.exp2(y_MN * -LOG2_E)) * up_MN
    if ADDED:
        y_MN = _rounded_to(y_MN, y, UPCAST).to(tl.float32) + r_MN.to(tl.float32)
    tl.store(y + places_MN, _rounded_to(y_MN, y, UPCAST), mask=inside_MN)


@triton.jit
def _rounded_to(z_MN, y, UPCAST: tl.constexpr):
    """Rounds z to the type that y points to."""
    if UPCAST and y.dtype.element_ty == tl.bfloat16:  # the interpreter's own conversion cuts bits off
        z_MN = finished(z_MN, z_MN, 1.0, 0.0, False, False, False, BF16)
    return z_MN.to(y.dtype.element_ty)


def skinny_gemm(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tile: GemmTile | None = None,
) -> torch.Tensor:
    """Multiplies rows with a weight, in fp32 and rounded once.

    It reads no value of the device on the host, so that a graph can capture it.

    Args:
        x: [..., K] bf16, fp16 or f32.
        weight_NK: [N, K] of the same type, contiguous; gated: [2 N, K], the gate's rows first.
        bias_N: [N], or [2 N] if gated, any float type.
        gated: Whether the first half of the products goes through silu and is multiplied with the second.
        residual: [..., N] of x's type, added to the rounded result.
        tile: For tuning; None: `tile_of` the shape.

    Returns:
        [..., N] in x's type.

    Raises:
        ValueError: Shapes, types or devices do not belong together.
    """
    _check(x, weight_NK, bias_N, gated)
    (outputs, width), device = weight_NK.shape, x.device
    columns = outputs // 2 if gated else outputs
    _check_residual(x, columns, residual)
    x_MK = _aligned(x.reshape(-1, width))
    y_MN = torch.empty((len(x_MK), columns), dtype=x.dtype, device=device)
    if y_MN.numel():
        tile = tile or tile_of(columns, width)
        _skinny_gemm_kernel[(triton.cdiv(columns, tile.columns), triton.cdiv(len(x_MK), ROWS))](
            x_MK, weight_NK, bias_N, None if residual is None else residual.contiguous(), y_MN, x_MK.stride(0),
            len(x_MK), columns, width,
            ROWS=ROWS, COLUMNS=tile.columns, DEPTH=tile.depth, WARPS=tile.warps, STAGES=tile.stages,
            GATED=gated, BIASED=bias_N is not None, ADDED=residual is not None, UPCAST=INTERPRETED,
            WHOLE=columns % tile.columns == 0 and width % (tile.warps * tile.depth) == 0, num_warps=tile.warps,
            **captured_pdl_options(),
        )  # fmt: skip
    return y_MN.reshape(*x.shape[:-1], columns)


def _check(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, gated: bool) -> None:
    """Raises ValueError unless the arguments belong together."""
    if weight_NK.ndim != 2 or weight_NK.dtype not in FLOATS or not weight_NK.is_contiguous() or not weight_NK.numel():
        got = f"{weight_NK.dtype} {tuple(weight_NK.shape)} of strides {weight_NK.stride()}"
        raise ValueError(f"got weight {got}, expected contiguous bf16, fp16 or f32 (columns, width)")
    if gated and len(weight_NK) % 2:
        raise ValueError(f"got a weight of {len(weight_NK)} rows, expected as many of the gate as of what it gates")
    if not x.ndim or x.shape[-1] != weight_NK.shape[1] or x.dtype != weight_NK.dtype or x.device != weight_NK.device:
        expected = f"{weight_NK.dtype} (..., {weight_NK.shape[1]}) on {weight_NK.device} as the weight"
        raise ValueError(f"got x {x.dtype} {tuple(x.shape)} on {x.device}, expected {expected}")
    if bias_N is not None and (
        bias_N.shape != weight_NK.shape[:1] or not bias_N.is_contiguous() or bias_N.device != weight_NK.device
    ):
        expected = f"contiguous {tuple(weight_NK.shape[:1])} on {weight_NK.device}"
        raise ValueError(f"got bias {tuple(bias_N.shape)} on {bias_N.device}, expected {expected}")


def _check_residual(x: torch.Tensor, columns: int, residual: torch.Tensor | None) -> None:
    """Raises ValueError unless it has the form of the product."""
    shape = (*x.shape[:-1], columns)
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype or residual.device != x.device):
        expected = f"{x.dtype} {shape} on {x.device}"
        raise ValueError(
            f"got residual {residual.dtype} {tuple(residual.shape)} on {residual.device}, expected {expected}"
        )


def _aligned(x_MK: torch.Tensor) -> torch.Tensor:
    """Returns the rows, copied where the compiler would need another variant of the kernel for them."""
    stride, width = x_MK.stride()[0], x_MK.shape[1]
    if x_MK.stride(1) != 1 or x_MK.data_ptr() % 16 or (stride != width and (stride % 16 or width % 16)):
        return x_MK.clone(memory_format=torch.contiguous_format)
    return x_MK
