"""Normalises rows by their root mean square, one program a row, so that a row's bits do not depend on other rows.

    y = x / sqrt(mean(x^2) + eps) (w + offset)          Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"

torch's reduction chooses its launch, and with it the order of the sum, by the number of rows.

Shape legend: M rows, N numbers of a row.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import captured_pdl_options, launch_dependents, wait_for_previous

A_WARP: Final = 256  # numbers of a row that a warp sums, up to 8 warps; changing it changes bits


@triton.jit
def _rms_norm_kernel(
    x, weight, out, x_row, eps, added, N: tl.constexpr, BLOCK: tl.constexpr, ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalises one row. Grid (M).

    Args:
        x: [M, N], rows `x_row` elements apart, read.
        weight: [N], read.
        out: [M, N] contiguous, written.
        added: Is added to the weight.
        ROUND_FIRST: Whether the normalised numbers are rounded to x's type before the weight multiplies them.
    """
    row = tl.program_id(0).to(tl.int64)
    at_N = tl.arange(0, BLOCK)
    inside_N = at_N < N
    launch_dependents(PDL)
    w_N = tl.load(weight + at_N, mask=inside_N, other=0.0).to(tl.float32) + added  # beside the wait, not behind the sum
    wait_for_previous(PDL)
    x_N = tl.load(x + row * x_row + at_N, mask=inside_N, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x_N * x_N, axis=0) / N + eps)
    y_N = x_N * scale
    if ROUND_FIRST:
        y_N = y_N.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + at_N, (y_N * w_N).to(out.dtype.element_ty), mask=inside_N)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalises the last dimension.

    Args:
        x: [..., N] fp32, bf16 or fp16.
        weight: [N].
        eps: Is added to the mean square.
        offset: Is added to the weight (1 for Gemma's).
        round_first: Rounds to x's type before the weight multiplies, as Llama's does.
        out_dtype: None: x's.

    Returns:
        [..., N] in `out_dtype`, contiguous.

    Raises:
        ValueError: The weight has another length.
    """
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"got weight {tuple(weight.shape)}, expected ({width},)")
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=out_dtype or x.dtype, device=x.device)
    if len(rows):
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(len(rows),)](
            rows, weight, out, rows.stride(0), eps, offset, N=width, BLOCK=block, ROUND_FIRST=round_first,
            enable_fp_fusion=False, num_warps=min(max(block // A_WARP, 1), 8), **captured_pdl_options(),
        )  # fmt: skip
    return out.view(x.shape)
