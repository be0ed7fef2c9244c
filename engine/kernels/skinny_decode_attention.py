"""Attends for a few rows of single tokens, each over its own slots of the KV storage, without a plan on the host.

    o[r, h] = sum_a w_a v_a,  w = softmax over a of cap(scale q_rh . k_a)         cap(z) = softcap tanh(z / softcap)
    lse[r, h] = log2 of the sum over a of e^cap(scale q_rh . k_a)

FlashInfer cuts the contexts of a step on the host, all rows together, and joins the pieces in a launch of its own. Here
a row is cut by its own length alone, on the device, in up to PARTS pieces of a multiple of CHUNK tokens (split KV: Dao
et al. 2023, "Flash-Decoding"), so that its bits do not depend on other rows. The program of a row and head group that
ends last joins their pieces in order. `engine.attention.skinny_decode` says what this gains.

Bytes: keys and values once for all heads of a group, and 8 + 4 D a head and piece, twice.

Shape legend: R rows, H query heads, G key/value heads, H / G query heads of a group, D head dim, A attended tokens.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import captured_pdl_options, launch_dependents, wait_for_previous
from gpu_sampler.kernels.lm_head_logprob import INTERPRETED, LOG2_E

CHUNK: Final = 128  # tokens of one product
WIDE: Final = 128  # the head dim beyond which a product has half as many tokens
PARTS: Final = 32  # pieces of a row at most
HEADS: Final = 16  # rows of a product: the maximum of query heads a group
JOINED: Final = 8  # pieces that one load reads when they are joined
DIMS: Final = (16, 32, 64, 128, 256)
HALVES: Final = (torch.bfloat16, torch.float16)
WARPS: Final = 4
STAGES: Final = 3


class SplitKVWorkspace(NamedTuple):
    """Holds the pieces that programs hand each other; one launch uses it at a time."""

    pieces: torch.Tensor  # f32 [R, G, PARTS, H / G, D], weighted sums of values
    of_pieces: torch.Tensor  # f32 [2, R, G, PARTS, H / G], the largest score and the sum of weights of each
    arrived: torch.Tensor  # i32 [R, G], zeros before and after a launch

    @classmethod
    def of(
        cls, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device, *, parts: int = PARTS
    ) -> "SplitKVWorkspace":
        """Returns a workspace for up to `rows` rows, each cut in at most `parts` pieces."""
        shape = (rows, kv_heads, parts, heads // kv_heads)
        floats = torch.empty((*shape, dim), device=device), torch.empty((2, *shape), device=device)
        return cls(*floats, torch.zeros((rows, kv_heads), dtype=torch.int32, device=device))

    @property
    def parts(self) -> int:
        """The maximum of pieces of a row."""
        return self.pieces.shape[2]


@triton.jit
def _seen(length, window):
    """Returns how many of a row's tokens are seen: the last `window`, or all."""
    return tl.where(window > 0, tl.minimum(length, window), length)


@triton.jit
def _capped(z, softcap, CAPPED: tl.constexpr):
    """Returns the soft-capped score, in base 2."""
    if CAPPED:
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 * LOG2_E) / softcap)))
    return z * LOG2_E


@triton.jit
def _weight(best, overall):
    """Returns the factor of a sum of largest score `best` in one of largest score `overall`; 0 for an empty sum."""
    return tl.where(best == -float("inf"), 0.0, tl.exp2(best - overall))


@triton.jit(do_not_specialize=["window"])
def _skinny_decode_attention_kernel(
    q, q_row, q_head, k_pool, v_pool, indptr, indices, out, lse, pieces, of_pieces, arrived, scale, softcap, window,
    GROUP: tl.constexpr, ROUND_GROUP: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, JOINED: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attends with the heads of one group of one row over one piece of its context. Grid (G, R, PARTS): programs
    without a piece end immediately, and start last.

    Args:
        q: [R, H, D] bf16 or fp16, read.
        q_row: Elements from one row of q to the next; `q_head` from one head to the next.
        k_pool: [slots, 1, G, D] of the same type, contiguous, read; `v_pool` alike.
        indptr: i32 [R + 1], where the slots of each row begin in `indices`, read; no row is empty.
        indices: i32 [A], read.
        out: [R, H, D] of the same type, contiguous, written.
        lse: f32 [R, H], written.
        pieces: See `SplitKVWorkspace`; `of_pieces` and `arrived` alike.
        scale: Multiplies the scores.
        softcap: Bounds the scores, unless CAPPED is false.
        window: The last tokens that a row sees; 0: all.
        GROUP: H / G; ROUND_GROUP is the next power of two.
        UPCAST: Whether the kernel runs in Triton's interpreter, which multiplies fp32 alone.
    """
    wait_for_previous(PDL)
    g, r, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads, rows = tl.num_programs(0), tl.num_programs(1)
    end = tl.load(indptr + r + 1)
    seen = _seen(end - tl.load(indptr + r), window)
    piece = tl.maximum(tl.cdiv(tl.cdiv(seen, PARTS), CHUNK), 1) * CHUNK
    count = tl.maximum(tl.cdiv(seen, piece), 1)
    if part >= count:
        return
    first = end - seen + part * piece
    last = tl.minimum(first + piece, end)
    at_D, at_C = tl.arange(0, D), tl.arange(0, CHUNK)
    head_H = tl.arange(0, HEADS)
    exists_H = head_H < GROUP
    q_HD = q + r.to(tl.int64) * q_row + (g * GROUP + head_H)[:, None] * q_head + at_D[None, :]
    q_HD = tl.load(q_HD, mask=exists_H[:, None], other=0.0)
    if UPCAST:
        q_HD = q_HD.to(tl.float32)
    best_H = tl.full([HEADS], -float("inf"), tl.float32)
    total_H = tl.zeros([HEADS], tl.float32)
    sum_HD = tl.zeros([HEADS, D], tl.float32)
    for start in tl.range(first, last, CHUNK, num_stages=STAGES):
        inside_C = start + at_C < last
        slot_C = tl.load(indices + start + at_C, mask=inside_C, other=0).to(tl.int64)
        place_CD = (slot_C * kv_heads + g)[:, None] * D + at_D[None, :]
        k_CD = tl.load(k_pool + place_CD, mask=inside_C[:, None], other=0.0)
        v_CD = tl.load(v_pool + place_CD, mask=inside_C[:, None], other=0.0)
        if UPCAST:
            k_CD, v_CD = k_CD.to(tl.float32), v_CD.to(tl.float32)
        z_HC = _capped(tl.dot(q_HD, tl.trans(k_CD), input_precision="ieee") * scale, softcap, CAPPED)
        z_HC = tl.where(inside_C[None, :], z_HC, -float("inf"))
        new_H = tl.maximum(best_H, tl.max(z_HC, axis=1))
        weight_HC = tl.exp2(z_HC - new_H[:, None])
        kept_H = tl.exp2(best_H - new_H)
        total_H = total_H * kept_H + tl.sum(weight_HC, axis=1)
        sum_HD = tl.dot(weight_HC.to(v_CD.dtype), v_CD, sum_HD * kept_H[:, None], input_precision="ieee")
        best_H = new_H
    launch_dependents(PDL)  # not sooner: waiting programs would stand between these
    pair = r * kv_heads + g
    own_H = pair * GROUP + head_H
    if count == 1:
        whole_HD = (sum_HD / total_H[:, None]).to(out.dtype.element_ty)
        tl.store(out + own_H.to(tl.int64)[:, None] * D + at_D[None, :], whole_HD, mask=exists_H[:, None])
        tl.store(lse + own_H, best_H + tl.log2(total_H), mask=exists_H)
        return
    of_piece_H = (pair * PARTS + part) * GROUP + head_H
    of_all = rows * kv_heads * PARTS * GROUP
    tl.store(pieces + of_piece_H.to(tl.int64)[:, None] * D + at_D[None, :], sum_HD, mask=exists_H[:, None])
    tl.store(of_pieces + of_piece_H, best_H, mask=exists_H)
    tl.store(of_pieces + of_all + of_piece_H, total_H, mask=exists_H)
    tl.debug_barrier()  # all of the piece is written before its program counts as arrived
    if tl.atomic_add(arrived + pair, 1, sem="acq_rel") < count - 1:
        return
    tl.store(arrived + pair, 0)
    tl.debug_barrier()
    head_N = tl.arange(0, ROUND_GROUP)
    there_N = head_N < GROUP
    piece_P = tl.arange(0, PARTS)
    at_PN = (pair * PARTS + piece_P)[:, None] * GROUP + head_N[None, :]
    there_PN = (piece_P < count)[:, None] & there_N[None, :]
    best_PN = tl.load(of_pieces + at_PN, mask=there_PN, other=-float("inf"))
    overall_N = tl.max(best_PN, axis=0)
    totals_PN = tl.load(of_pieces + of_all + at_PN, mask=there_PN, other=0.0)
    over_N = tl.sum(totals_PN * _weight(best_PN, overall_N[None, :]), axis=0)
    joined_ND = tl.zeros([ROUND_GROUP, D], tl.float32)
    for block in range(0, count, JOINED):
        few_J = block + tl.arange(0, JOINED)
        at_JN = (pair * PARTS + few_J)[:, None] * GROUP + head_N[None, :]
        there_JN = (few_J < count)[:, None] & there_N[None, :]
        weight_JN = _weight(tl.load(of_pieces + at_JN, mask=there_JN, other=-float("inf")), overall_N[None, :])
        place_JND = at_JN.to(tl.int64)[:, :, None] * D + at_D[None, None, :]
        piece_JND = tl.load(pieces + place_JND, mask=there_JN[:, :, None], other=0.0)
        joined_ND += tl.sum(piece_JND * weight_JN[:, :, None], axis=0)
    own_N = pair * GROUP + head_N
    joined_ND = (joined_ND / over_N[:, None]).to(out.dtype.element_ty)
    tl.store(out + own_N.to(tl.int64)[:, None] * D + at_D[None, :], joined_ND, mask=there_N[:, None])
    tl.store(lse + own_N, overall_N + tl.log2(over_N), mask=there_N)


def skinny_decode_attention(
    q_RHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    workspace: SplitKVWorkspace,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    out_RHD: torch.Tensor | None = None,
    chunk: int = CHUNK,
    warps: int = WARPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with each row over its own slots.

    It reads no value of the device on the host, so that a graph can capture it.

    Args:
        q_RHD: [R, H, D] bf16 or fp16, each head's numbers contiguous.
        keys: [slots, 1, G, D] of the same type, contiguous.
        values: [slots, 1, G, D], likewise.
        indptr: i32 [R + 1]; row r attends to indices[indptr[r] : indptr[r + 1]], one slot or more.
        indices: i32 [A].
        workspace: For as many rows or more.
        scale: Multiplies the scores.
        softcap: 0: none.
        window: The last tokens that a row sees; 0: all.
        out_RHD: Where the result goes; None: new memory.
        chunk: For tuning, as `warps` is.

    Returns:
        [R, H, D] in q's type, and the log-sum-exps f32 [R, H] in base 2.

    Raises:
        ValueError: Shapes or types do not belong together.
    """
    _check(q_RHD, keys, values, indptr, workspace)
    rows, heads, dim = q_RHD.shape
    kv_heads = keys.shape[2]
    out = torch.empty((rows, heads, dim), dtype=q_RHD.dtype, device=q_RHD.device) if out_RHD is None else out_RHD
    lse = torch.empty((rows, heads), device=q_RHD.device)
    if rows:
        group, parts = heads // kv_heads, workspace.parts
        _skinny_decode_attention_kernel[(kv_heads, rows, parts)](
            q_RHD, q_RHD.stride(0), q_RHD.stride(1), keys, values, indptr, indices, out, lse, *workspace, scale,
            softcap, window, GROUP=group, ROUND_GROUP=triton.next_power_of_2(group), D=dim, CHUNK=chunk_of(dim, chunk),
            PARTS=parts, HEADS=HEADS, JOINED=JOINED, CAPPED=softcap != 0.0, UPCAST=INTERPRETED, STAGES=STAGES,
            num_warps=warps, **captured_pdl_options(),
        )  # fmt: skip
    return out, lse


def chunk_of(dim: int, chunk: int) -> int:
    """Returns the tokens of one product: `chunk`, or half of it for wide heads."""
    return chunk if dim <= WIDE else chunk // 2


def fits(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernel takes attention of this shape."""
    return dtype in HALVES and dim in DIMS and heads % kv_heads == 0 and heads // kv_heads <= HEADS


def _check(
    q_RHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, indptr: torch.Tensor, workspace: SplitKVWorkspace
) -> None:
    """Raises ValueError unless the arguments belong together."""
    if q_RHD.ndim != 3 or keys.ndim != 4 or not fits(q_RHD.shape[1], keys.shape[2], q_RHD.shape[2], q_RHD.dtype):
        got = f"q {q_RHD.dtype} {tuple(q_RHD.shape)}, keys {tuple(keys.shape)}"
        raise ValueError(
            f"got {got}, expected halves [R, H, D] and [slots, 1, G, D], D one of {DIMS}, H / G <= {HEADS}"
        )
    if q_RHD.stride(2) != 1:
        raise ValueError(f"got q of strides {q_RHD.stride()}, expected heads of contiguous numbers")
    shape = (len(keys), 1, keys.shape[2], q_RHD.shape[2])
    for name, pool in (("keys", keys), ("values", values)):
        if tuple(pool.shape) != shape or not pool.is_contiguous() or pool.dtype != q_RHD.dtype:
            raise ValueError(f"got {name} {pool.dtype} {tuple(pool.shape)}, expected contiguous {q_RHD.dtype} {shape}")
    if indptr.dtype != torch.int32 or indptr.shape != (len(q_RHD) + 1,):
        raise ValueError(f"got indptr {indptr.dtype} {tuple(indptr.shape)}, expected i32 ({len(q_RHD) + 1},)")
    max_rows, kv_heads, _, group, dim = workspace.pieces.shape
    if len(q_RHD) > max_rows or (kv_heads * group, kv_heads, dim) != (q_RHD.shape[1], keys.shape[2], q_RHD.shape[2]):
        raise ValueError(f"got q {tuple(q_RHD.shape)} and room for {(max_rows, kv_heads * group, dim)}")
