"""`label_scores`: log-probabilities of L labels among themselves from hidden rows and the labels' rows of the head.

    z[n, l] = cap(scale (h_n . w_l + b_l))          cap(z) = softcap tanh(z / softcap), or z where softcap is 0
    out[n, l] = z[n, l] - ln sum_l exp z[n, l]      NaN and +inf count as -inf

One kernel of two, chosen by the number of labels alone, so that a row's scores never depend on the rows beside it:
up to 16 labels by products summed in fp32, two rows a program, every load in flight at once; above that by matrix
instructions, 16 rows a program. Both sum in one order for one D. Bytes: N D + ceil(N / rows) L D elements, the second
from the L2 cache, and 4 N L.

Shape legend: N rows, L labels, D width of a hidden row, K a slice of it.

| pointer | shape, type | |
|---|---|---|
| hidden | [N, D] bf16, fp16 or f32, rows of any stride | read |
| head | [L, D] of the same type, rows of any stride | read |
| bias | [L] of any float type | read |
| scores | f32 [N, L] | write |
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels._head import INTERPRETED, LN_2, LOG2_E, NO_ROUNDING, check_head, finished, products

MOST_LABELS = 128
_MOST_PRODUCT_LABELS = 16
_SUMMED_APART: tl.constexpr = tl.constexpr(512)


@triton.jit
def _store_scores(scores, z_NL, rows_N, labels_L, N, L):
    inside_L = labels_L < L
    z_NL = tl.where((z_NL < float("inf")) & inside_L[None, :], z_NL, -float("inf"))
    peak_N = tl.max(z_NL, axis=1)
    peak_N = tl.where(peak_N > -float("inf"), peak_N, 0.0)
    total_N = tl.sum(tl.exp2((z_NL - peak_N[:, None]) * LOG2_E), axis=1)
    log_sum_N = tl.log2(tl.where(total_N > 0.0, total_N, 1.0)) * LN_2
    found_NL = z_NL - peak_N[:, None] - log_sum_N[:, None]
    at_NL = scores + rows_N.to(tl.int64)[:, None] * L + labels_L[None, :]
    tl.store(at_NL, found_NL, mask=(rows_N < N)[:, None] & inside_L[None, :])


@triton.jit(do_not_specialize=["N"])
def _products_kernel(
    hidden, head, bias, scores, hidden_stride, head_stride, N, L, D, scale, softcap,
    ROWS: tl.constexpr, LABELS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / ROWS)). Unrolled over D, so that every load is under way before the first product waits."""
    rows_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    labels_L = tl.arange(0, LABELS)
    hidden_rows = hidden + rows_N.to(tl.int64)[:, None] * hidden_stride
    head_rows = head + labels_L.to(tl.int64)[:, None] * head_stride
    sums_NLK = tl.zeros([ROWS, LABELS, DEPTH], tl.float32)
    for part in tl.static_range(SLICES):
        at_K = part * DEPTH + tl.arange(0, DEPTH)
        inside_K = (at_K < D)[None, :]
        h_NK = tl.load(hidden_rows + at_K[None, :], mask=(rows_N < N)[:, None] & inside_K, other=0.0).to(tl.float32)
        w_LK = tl.load(head_rows + at_K[None, :], mask=(labels_L < L)[:, None] & inside_K, other=0.0).to(tl.float32)
        sums_NLK += h_NK[:, None, :] * w_LK[None, :, :]
    b_L = tl.load(bias + labels_L, mask=labels_L < L, other=0.0).to(tl.float32) if BIASED else labels_L
    z_NL = finished(tl.sum(sums_NLK, axis=2), b_L[None, :], scale, softcap, BIASED, True, CAPPED, NO_ROUNDING)
    _store_scores(scores, z_NL, rows_N, labels_L, N, L)


@triton.jit(do_not_specialize=["N"])
def _dots_kernel(
    hidden, head, bias, scores, hidden_stride, head_stride, N, L, D, scale, softcap,
    ROWS: tl.constexpr, LABELS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / ROWS))."""
    rows_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    labels_L = tl.arange(0, LABELS)
    sums_NL = tl.zeros([ROWS, LABELS], tl.float32)
    for first in range(0, D, _SUMMED_APART):  # one long sum would round 4,096 times at its full size
        sums_NL += products(
            hidden + first, hidden_stride, rows_N, 0, head + first, head_stride, labels_L, labels_L < L, 0, N,
            tl.minimum(D - first, _SUMMED_APART), ROWS, LABELS, DEPTH, False, False, UPCAST,
        )  # fmt: skip
    b_L = tl.load(bias + labels_L, mask=labels_L < L, other=0.0).to(tl.float32) if BIASED else labels_L
    z_NL = finished(sums_NL, b_L[None, :], scale, softcap, BIASED, True, CAPPED, NO_ROUNDING)
    _store_scores(scores, z_NL, rows_N, labels_L, N, L)


def branch(labels: int) -> Literal["products", "dots"]:
    """Which kernel serves a number of labels."""
    return "products" if labels <= _MOST_PRODUCT_LABELS else "dots"


def label_scores(
    hidden_ND: torch.Tensor,
    head_LD: torch.Tensor,
    bias_L: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """f32 [N, L]; see `gpu_sampler.reference.label_scores`. ValueError for more than 128 labels or a wrong kind.

    Reads no value of the device, so that a graph may capture it.
    """
    check_head(hidden_ND, head_LD, bias_L)
    rows, labels = len(hidden_ND), len(head_LD)
    if not 1 <= labels <= MOST_LABELS:
        raise ValueError(f"got {labels} labels, expected 1 to {MOST_LABELS}")
    scores_NL = torch.empty((rows, labels), device=hidden_ND.device)
    if not rows:
        return scores_NL
    hidden_ND, head_LD = _aligned(hidden_ND), _aligned(head_LD)
    width = hidden_ND.shape[1]
    arguments = (hidden_ND, head_LD, bias_L, scores_NL, hidden_ND.stride(0), head_LD.stride(0), rows, labels, width)
    options = {"BIASED": bias_L is not None, "CAPPED": softcap != 0.0}
    if branch(labels) == "products":
        padded = triton.next_power_of_2(labels)
        depth = min(1024, 8192 // padded)
        _products_kernel[(triton.cdiv(rows, 2),)](
            *arguments, float(scale), float(softcap), **options,
            ROWS=2, LABELS=padded, DEPTH=depth, SLICES=triton.cdiv(width, depth), num_warps=8,
        )  # fmt: skip
    else:
        _dots_kernel[(triton.cdiv(rows, 16),)](
            *arguments, float(scale), float(softcap), **options, UPCAST=INTERPRETED,
            ROWS=16, LABELS=max(32, triton.next_power_of_2(labels)), DEPTH=256 // hidden_ND.element_size(),
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return scores_NL


def _aligned(rows_ND: torch.Tensor) -> torch.Tensor:
    """The rows, copied where the compiler would read them otherwise than fresh ones: it might sum in another order."""
    stride, width = rows_ND.stride(0), rows_ND.shape[1]
    if rows_ND.data_ptr() % 16 or (stride != width and (stride % 16 or width % 16)):
        return rows_ND.clone(memory_format=torch.contiguous_format)
    return rows_ND
