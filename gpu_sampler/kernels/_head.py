"""What the kernels of the LM head share: the product of hidden rows and rows of the head, and what becomes of it.

Shape legend: N rows, V rows of the head, D width of a hidden row, K a slice of it.
"""

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)  # whose products of halves are not exact
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NO_ROUNDING: tl.constexpr = tl.constexpr(0)
BF16: tl.constexpr = tl.constexpr(1)
FP16: tl.constexpr = tl.constexpr(2)
_LARGEST_HALF: tl.constexpr = tl.constexpr(65504.0)


@triton.jit
def _slice(source, stride, ids, inside, first, start, D, DEPTH: tl.constexpr, DESCRIBED: tl.constexpr):
    """[ids, DEPTH] of a matrix, zeros outside: by its descriptor from row `first` on, or by the pointers of `ids`."""
    if DESCRIBED:
        found = source.load([first, start])
    else:
        at_K = start + tl.arange(0, DEPTH)
        places = source + ids.to(tl.int64)[:, None] * stride + at_K[None, :]
        found = tl.load(places, mask=inside[:, None] & (at_K < D)[None, :], other=0.0)
    return found


@triton.jit
def products(
    hidden, hidden_stride, rows_N, first_row, head, head_stride, ids_V, known_V, first_id, N, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HIDDEN_DESCRIBED: tl.constexpr, HEAD_DESCRIBED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, COLUMNS] of hidden rows times rows of the head: zeros outside of both."""
    sums_NV = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(tl.cdiv(D, DEPTH)):
        start = part * DEPTH
        h_NK = _slice(hidden, hidden_stride, rows_N, rows_N < N, first_row, start, D, DEPTH, HIDDEN_DESCRIBED)
        w_VK = _slice(head, head_stride, ids_V, known_V, first_id, start, D, DEPTH, HEAD_DESCRIBED)
        if UPCAST:
            h_NK, w_VK = h_NK.to(tl.float32), w_VK.to(tl.float32)
        sums_NV = tl.dot(h_NK, w_VK.T, sums_NV, input_precision="ieee")
    return sums_NV


@triton.jit
def _rounded(z, BITS: tl.constexpr):
    """z to nearest, ties to even, in a type with so many mantissa bits less. A NaN would carry into the sign.

    By integers: the interpreter truncates to bf16, and values held as halves make ptxas serialise the products.
    """
    bits = z.to(tl.uint32, bitcast=True)
    bits = (bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)) >> BITS << BITS
    return tl.where(z == z, bits.to(tl.float32, bitcast=True), z)


@triton.jit
def finished(
    products, bias, scale, softcap,
    BIASED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """f32 logits of products: bias, scale and cap, then the rounding of a head that stores 16-bit logits."""
    z = products
    if BIASED:
        z = z + bias
    if SCALED:
        z = z * scale
    if CAPPED:
        y = z / softcap
        e = tl.exp2(tl.abs(y) * (-2.0 * LOG2_E))  # at most 1, and NaN stays NaN
        tanh = (1.0 - e) / (1.0 + e)
        z = softcap * tl.where(y < 0, -tanh, tanh)
    if ROUNDED == BF16:
        z = _rounded(z, 16)
    if ROUNDED == FP16:
        small = (z + 0.75) - 0.75  # at 0.75 a float32 has the step of a half that is not normal, 2^-24
        z = tl.where(tl.abs(z) < 2.0**-14, small, _rounded(z, 13))
        z = tl.where(z > _LARGEST_HALF, float("inf"), tl.where(z < -_LARGEST_HALF, -float("inf"), z))
    return z


def check_head(hidden_ND: torch.Tensor, head_VD: torch.Tensor, bias_V: torch.Tensor | None) -> None:
    """ValueError unless the rows, the head and its bias belong together."""
    for name, rows in (("hidden", hidden_ND), ("head", head_VD)):
        if rows.ndim != 2 or rows.dtype not in FLOATS or not rows.shape[1] or rows.stride(1) != 1:
            got = f"{rows.dtype} {tuple(rows.shape)} of strides {rows.stride()}"
            raise ValueError(f"got {name} {got}, expected bf16, fp16 or f32 (rows, width) with contiguous rows")
    if head_VD.shape[1] != hidden_ND.shape[1] or head_VD.dtype != hidden_ND.dtype:
        expected = f"{hidden_ND.dtype} (rows, {hidden_ND.shape[1]})"
        raise ValueError(f"got head {head_VD.dtype} {tuple(head_VD.shape)}, expected {expected} as hidden has")
    if head_VD.device != hidden_ND.device:
        raise ValueError(f"got head on {head_VD.device}, expected {hidden_ND.device} as hidden")
    if bias_V is not None and (
        bias_V.shape != head_VD.shape[:1] or not bias_V.is_contiguous() or bias_V.device != head_VD.device
    ):
        got = f"{tuple(bias_V.shape)} on {bias_V.device}"
        raise ValueError(f"got bias {got}, expected contiguous {tuple(head_VD.shape[:1])} on {head_VD.device}")
