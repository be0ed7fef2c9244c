"""Writes chosen rows of logits as the contiguous float32 rows that FlashInfer takes, in one pass.

    out[p, v] = processed(z[rows[p], v]) / T      -inf for NaN, +inf, ids not allowed and bans; finite stays finite

Grid (tiles of 4,096 ids, P): a program writes its tile, and over it the side list's processed values of its own ids, so
that no two programs write the same place. Bytes: P V (logits + 4), and the side list (8 an entry) once a tile.

| pointer | shape, type | |
|---|---|---|
| logits | [R, V] bf16, fp16 or f32, any row stride | read |
| rows | i32 [P], places of rows in the logits | read |
| slots, side_len | i32 [R] | read |
| table, masks | i32 [S, W], i32 [M, ceil(V / 32)] | read |
| side_ids, side | i32 [E], f32 [E]: a row's entries begin at its OVERLAY_START | read |
| out | f32 [P, V] | write |
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    MASK_ROW,
    OVERLAY_START,
    SIDE_BLOCK,
    TEMPERATURE,
    allowed,
    number,
    raw_values,
    word,
)

_BLOCK: tl.constexpr = tl.constexpr(4096)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _apply_temperature_kernel(
    logits, row_stride, rows, slots, side_len, table, masks, mask_words, side_ids, side, out, R, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + place)
    first = tile * BLOCK
    ids = first + tl.arange(0, BLOCK)
    inside = ids < V
    out_row = out + place * V
    if (row < 0) | (row >= R):
        tl.store(out_row + ids, tl.full([BLOCK], -float("inf"), tl.float32), mask=inside)
    else:
        slot = tl.load(slots + row)
        temperature = number(table, slot, TEMPERATURE)
        inverse = tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
        z = raw_values(logits + row.to(tl.int64) * row_stride, ids, inside)
        z = tl.where(allowed(ids, inside, masks, word(table, slot, MASK_ROW), mask_words), z, -float("inf"))
        tl.store(out_row + ids, _tempered(z, inverse), mask=inside)
        length = tl.load(side_len + row)
        if length > 0:
            tl.debug_barrier()  # the tile is written before its entries are written over it
            start = word(table, slot, OVERLAY_START).to(tl.int64)
            for first_entry in range(0, length, SIDE_BLOCK):
                at = first_entry + tl.arange(0, SIDE_BLOCK)
                entry = tl.load(side_ids + start + at, mask=at < length, other=-1)
                processed = tl.load(side + start + at, mask=at < length, other=-float("inf"))
                mine = (entry >= first) & (entry < first + BLOCK) & (entry < V)
                # An entry of -inf is in place already, and may be one of two of the same token.
                tl.store(out_row + entry, _tempered(processed, inverse), mask=mine & (processed > -float("inf")))


@triton.jit
def _tempered(z, inverse):
    """Returns z / T, held inside the range of float32 where z is finite."""
    held = tl.minimum(tl.maximum(z * inverse, -_LARGEST), _LARGEST)
    return tl.where(z > -float("inf"), held, -float("inf"))


def apply_temperature(
    logits_RV: torch.Tensor,
    rows_P: torch.Tensor,
    slots_R: torch.Tensor,
    side_len_R: torch.Tensor,
    table_SW: torch.Tensor,
    masks_MW: torch.Tensor,
    side_ids_E: torch.Tensor,
    side_processed_E: torch.Tensor,
    *,
    out_PV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divides chosen rows by their temperatures, as the module describes.

    It reads nothing back from the device, so that a CUDA graph can capture it.

    Args:
        logits_RV: [R, V] bf16, fp16 or f32 with contiguous rows.
        rows_P: i32 [P], places of rows; a row outside of [0, R) comes out as -inf.
        slots_R, side_len_R: i32 [R], each row's slot and the length of its side list.
        table_SW, masks_MW: i32, the state of the slots and their allow masks.
        side_ids_E, side_processed_E: i32, f32 [E], the side lists.
        out_PV: f32 [P, V] to write; allocated where it is None.

    Returns:
        f32 [P, V].

    Raises:
        ValueError: logits, rows or output are of a wrong kind.
    """
    if logits_RV.ndim != 2 or logits_RV.dtype not in _FLOATS or logits_RV.stride(1) != 1:
        got = f"{logits_RV.dtype} {tuple(logits_RV.shape)} of strides {logits_RV.stride()}"
        raise ValueError(f"got logits {got}, expected bf16, fp16 or f32 (R, V) with contiguous rows")
    if rows_P.ndim != 1 or rows_P.dtype != torch.int32 or rows_P.device != logits_RV.device:
        raise ValueError(f"got rows {rows_P.dtype} {tuple(rows_P.shape)} on {rows_P.device}, expected int32 (P,)")
    rows, vocab = logits_RV.shape
    if out_PV is None:
        out_PV = torch.empty((len(rows_P), vocab), device=logits_RV.device)
    if out_PV.shape != (len(rows_P), vocab) or out_PV.dtype != torch.float32 or not out_PV.is_contiguous():
        raise ValueError(
            f"got out {out_PV.dtype} {tuple(out_PV.shape)}, expected contiguous float32 {len(rows_P), vocab}"
        )
    if not len(rows_P):
        return out_PV
    _apply_temperature_kernel[(triton.cdiv(vocab, _BLOCK.value), len(rows_P))](
        logits_RV,
        logits_RV.stride(0),
        rows_P,
        slots_R,
        side_len_R,
        table_SW,
        masks_MW,
        masks_MW.shape[1],
        side_ids_E,
        side_processed_E,
        out_PV,
        rows,
        vocab,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out_PV
