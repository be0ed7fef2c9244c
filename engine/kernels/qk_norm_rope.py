"""Normalises and rotates query and key heads and writes keys and values to the KV storage.

    q, k:  x becomes g x / sqrt(mean(x^2) + eps), if there is a norm            RMSNorm, Zhang and Sennrich 2019
           its halves (a, b) become (a cos - b sin, b cos + a sin)              RoPE, Su et al. 2021
    q goes to `out`, k and v to the token's slot of the storage

It computes in fp32 and rounds once, in one launch between the projections and attention. One program computes one head
of one token, or of a fixed number of them with a warp for each, so that its bits do not depend on other heads or
tokens. Bytes: q, k and v read and written once.

Gain: 1.5 us a layer at 1 row and 1.7 at 16, in place of three kernels and 7.1 of the 40 us of a decoder layer
(`benchmarks/results/qk-norm-rope.json`).

Shape legend: T tokens, N of them together, H query heads, G key/value heads, D head dim.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import captured_pdl_options, launch_dependents, wait_for_previous
from gpu_sampler.kernels.lm_head_logprob import BF16, INTERPRETED, finished

DIMS: Final = (16, 32, 64, 128, 256)
HALVES: Final = (torch.bfloat16, torch.float16)


class Rotation(NamedTuple):
    """Holds the rotary embedding of each token and the norms of query and key heads."""

    cos_TD: torch.Tensor  # any float type, rows of any stride
    sin_TD: torch.Tensor
    q_norm_D: torch.Tensor | None = None  # g, any float type; both norms or neither
    k_norm_D: torch.Tensor | None = None
    eps: float = 0.0


@triton.jit
def _store(place, z, there, UPCAST: tl.constexpr):
    """Stores z where it is there, rounded to the type that `place` points to."""
    if UPCAST and place.dtype.element_ty == tl.bfloat16:  # the interpreter's own conversion cuts bits off
        z = finished(z, z, 1.0, 0.0, False, False, False, BF16)
    tl.store(place, z.to(place.dtype.element_ty), mask=there)


@triton.jit
def _norm_rope_heads(source_N, to_N, norm, cos_N, sin_N, there_N, eps, D: tl.constexpr, UPCAST: tl.constexpr):
    """Normalises and rotates the heads [N, D] that stand at `source_N`, and stores them at `to_N`."""
    at_half, there_NH = tl.arange(0, D // 2)[None, :], there_N[:, None]
    low = tl.load(source_N[:, None] + at_half, mask=there_NH, other=0.0).to(tl.float32)
    high = tl.load(source_N[:, None] + D // 2 + at_half, mask=there_NH, other=0.0).to(tl.float32)
    cos_low = tl.load(cos_N[:, None] + at_half, mask=there_NH, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_N[:, None] + D // 2 + at_half, mask=there_NH, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_N[:, None] + at_half, mask=there_NH, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_N[:, None] + D // 2 + at_half, mask=there_NH, other=0.0).to(tl.float32)
    if norm is not None:
        g_low, g_high = tl.load(norm + at_half).to(tl.float32), tl.load(norm + D // 2 + at_half).to(tl.float32)
        root = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / D + eps)[:, None]
        low, high = low * root * g_low, high * root * g_high
    _store(to_N[:, None] + at_half, low * cos_low - high * sin_low, there_NH, UPCAST)
    _store(to_N[:, None] + D // 2 + at_half, high * cos_high + low * sin_high, there_NH, UPCAST)


@triton.jit(do_not_specialize=["T"])
def _qk_norm_rope_kernel(
    q, k, v, q_row, k_row, v_row, cos, sin, cos_row, sin_row, q_norm, k_norm, eps, slots, out, k_pool, v_pool, T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes one head of TOKENS tokens. Grid (parts of T, H + 2 G): query heads, then keys, then values.

    Args:
        q: [T, H, D] bf16 or fp16, read; each token's heads are contiguous.
        k: [T, G, D] of the same type, likewise.
        v: [T, G, D] of the same type, likewise.
        q_row: Elements from one token of q to the next; `k_row`, `v_row` alike.
        cos: [T, D] any float type, read; `sin` alike.
        cos_row: Elements from one token of cos to the next; `sin_row` alike.
        q_norm: [D] any float type, the RMSNorm's weight, read, or None; `k_norm` alike.
        eps: The epsilon of both norms.
        slots: i32 [T], read.
        out: [T, H, D] of q's type, contiguous, written.
        k_pool: [slots, 1, G, D] of q's type, contiguous, written; `v_pool` alike.
        UPCAST: Whether the kernel runs in Triton's interpreter, which cannot round to bf16.
    """
    wait_for_previous(PDL)
    launch_dependents(PDL)  # not sooner, or attention's programs crowd beside the product in front
    at_N, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    there_N, t_N = at_N < T, at_N.to(tl.int64)
    cos_N, sin_N = cos + t_N * cos_row, sin + t_N * sin_row
    if head < H:
        source_N, to_N = q + t_N * q_row + head * D, out + (t_N * H + head) * D
        _norm_rope_heads(source_N, to_N, q_norm, cos_N, sin_N, there_N, eps, D, UPCAST)
    else:
        slot_N = tl.load(slots + t_N, mask=there_N, other=0).to(tl.int64)
        if head < H + G:
            source_N, to_N = k + t_N * k_row + (head - H) * D, k_pool + (slot_N * G + head - H) * D
            _norm_rope_heads(source_N, to_N, k_norm, cos_N, sin_N, there_N, eps, D, UPCAST)
        else:
            source_N, to_N = v + t_N * v_row + (head - H - G) * D, v_pool + (slot_N * G + head - H - G) * D
            at_D, there_ND = tl.arange(0, D)[None, :], there_N[:, None]
            tl.store(to_N[:, None] + at_D, tl.load(source_N[:, None] + at_D, mask=there_ND), mask=there_ND)


def qk_norm_rope(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_T: torch.Tensor,
    together: int = 1,
) -> torch.Tensor:
    """Normalises and rotates queries and keys, and writes keys and values to their slots.

    It reads no value of the device on the host, so that a graph can capture it.

    Args:
        q_THD: [T, H, D] bf16 or fp16, heads contiguous.
        k_TGD: [T, G, D] of the same type.
        v_TGD: [T, G, D] of the same type.
        rotation: Rotary embedding and norms.
        keys: [slots, 1, G, D] of the same type, contiguous, written.
        values: [slots, 1, G, D], likewise.
        slots_T: i32 [T], not checked: they must lie in the storage.
        together: How many tokens a program computes, a power of two up to 32: one suits few tokens, more suit many. It
            decides bits, so that steps that must agree have the same.

    Returns:
        The queries [T, H, D], contiguous, computed in fp32 and rounded once.

    Raises:
        ValueError: Shapes, types or devices do not belong together.
    """
    _check(q_THD, k_TGD, v_TGD, rotation, keys, values, slots_T)
    tokens, heads, dim = q_THD.shape
    out = torch.empty((tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    if tokens:
        kv_heads = keys.shape[2]
        cos, sin = rotation.cos_TD, rotation.sin_TD
        _qk_norm_rope_kernel[(-(-tokens // together), heads + 2 * kv_heads)](
            q_THD, k_TGD, v_TGD, q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0), cos, sin, cos.stride(0),
            sin.stride(0), rotation.q_norm_D, rotation.k_norm_D, rotation.eps, slots_T, out, keys, values,
            tokens, H=heads, G=kv_heads, D=dim, TOKENS=together, UPCAST=INTERPRETED, num_warps=together,
            **captured_pdl_options(),
        )  # fmt: skip
    return out


def fits(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, keys: torch.Tensor) -> bool:
    """Returns whether the kernel takes heads of this form, and a storage of this type."""
    dim = q_THD.shape[2]
    inside = all(one.stride(2) == 1 and (one.shape[1] == 1 or one.stride(1) == dim) for one in (q_THD, k_TGD, v_TGD))
    alike = q_THD.dtype in HALVES and q_THD.dtype == k_TGD.dtype == v_TGD.dtype == keys.dtype
    return inside and alike and dim in DIMS and dim == k_TGD.shape[2] == v_TGD.shape[2] == keys.shape[3]


def _check(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Raises ValueError unless the arguments belong together."""
    heads = [(f"{one.dtype}", tuple(one.shape), one.stride()) for one in (q_THD, k_TGD, v_TGD)]
    if any(one.ndim != 3 for one in (q_THD, k_TGD, v_TGD)) or keys.ndim != 4 or not fits(q_THD, k_TGD, v_TGD, keys):
        raise ValueError(f"got q, k, v {heads}, expected halves [T, H or G, D] of contiguous heads, D one of {DIMS}")
    tokens, _, dim = q_THD.shape
    kv_heads = keys.shape[2]
    if k_TGD.shape != (tokens, kv_heads, dim) or v_TGD.shape != k_TGD.shape:
        raise ValueError(f"got q, k, v {heads}, expected k and v {(tokens, kv_heads, dim)}")
    shape = (len(keys), 1, kv_heads, dim)
    for name, pool in (("keys", keys), ("values", values)):
        if tuple(pool.shape) != shape or not pool.is_contiguous() or pool.dtype != q_THD.dtype:
            raise ValueError(f"got {name} {pool.dtype} {tuple(pool.shape)}, expected contiguous {q_THD.dtype} {shape}")
    for name, angles in (("cos", rotation.cos_TD), ("sin", rotation.sin_TD)):
        if angles.shape != (tokens, dim) or angles.stride(1) != 1:
            raise ValueError(f"got {name} {tuple(angles.shape)} of strides {angles.stride()}, expected {(tokens, dim)}")
    if (rotation.q_norm_D is None) != (rotation.k_norm_D is None):
        raise ValueError("got one norm, expected one for queries and one for keys, or none")
    for name, norm in (("q_norm", rotation.q_norm_D), ("k_norm", rotation.k_norm_D)):
        if norm is not None and (norm.shape != (dim,) or not norm.is_contiguous()):
            raise ValueError(f"got {name} {tuple(norm.shape)}, expected contiguous {(dim,)}")
    if slots_T.dtype != torch.int32 or slots_T.shape != (tokens,) or not slots_T.is_contiguous():
        raise ValueError(f"got slots {slots_T.dtype} {tuple(slots_T.shape)}, expected contiguous i32 {(tokens,)}")
    given = (q_THD, k_TGD, v_TGD, keys, values, slots_T, *rotation[:4])
    if len(devices := {str(one.device) for one in given if one is not None}) > 1:
        raise ValueError(f"got tensors on {', '.join(sorted(devices))}, expected one device")
