"""K1 `row_stats`: the one read of the logits. By group of 128 ids: the largest value and the sum of exponentials.

    m_j = max z,  s_j = sum 2^((z - m_j) log2(e) / T)        over what may be drawn (allowed ids)
    rm_j = max z, rs_j = sum 2^((z - rm_j) log2(e))          over the logits as the model gave them, where they differ

Grid (splits, rows): a program takes every splits-th tile of a row. A group never straddles two tiles and nothing
depends on the number of rows or splits, so a row's statistics have the same bits in every batch. Bytes: one read of the
logits, 8 written a group (16 where a row needs both kinds).

| pointer | shape, type | |
|---|---|---|
| logits | [R, V] bf16, fp16 or f32, any row stride | read |
| slots, table, masks | i32 [R], i32 [S, W], i32 [M, ceil(V / 32)] | read |
| maxima, sums, raw_maxima, raw_sums | f32 [R, G] | write |

NaN and +inf are not looked for here: they leave a group with a sum that is no finite number, by which `select` finds
such rows and has them mended (`mend`).
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.row import (
    FLAGS,
    GREEDY,
    HAS_MASK,
    LOG2_E,
    MASK_ROW,
    TEMPERATURE,
    WANTS_LOGPROBS,
    by_group,
    group_max,
    group_sum,
    number,
    tile_allowed,
    tile_ids,
    tile_values,
    word,
)
from gpu_sampler.workspace import Workspace

STATS_GROUPS = 8  # of a tile; it changes no value
STATS_WARPS = 1
STATS_PROGRAMS = 132 * 64  # twice as many as run at once: at 256 rows each takes four or five tiles


@triton.jit
def raw_apart(flags, temperature):
    """Whether a row's raw statistics, which it wants, are not those it draws by."""
    apart = (flags & HAS_MASK) != 0
    if (flags & GREEDY) == 0:
        apart = apart | (temperature != 1.0)
    return apart & ((flags & WANTS_LOGPROBS) != 0)


@triton.jit(do_not_specialize=["splits"])  # or a batch of a new size would compile while serving
def _row_stats_kernel(
    logits,
    row_stride,
    slots,
    table,
    masks,
    mask_words,
    maxima,
    sums,
    raw_maxima,
    raw_sums,
    V,
    G,
    tiles,
    splits,
    PROCESSED: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    here = logits + row.to(tl.int64) * row_stride
    ids = tile_ids(split, TILE_GROUPS)
    ahead = tl.load(here + ids, mask=ids < V, other=-float("inf"))
    slot = tl.load(slots + row)
    flags = word(table, slot, FLAGS)
    temperature = number(table, slot, TEMPERATURE)
    scale = (1.0 / tl.where((flags & GREEDY) != 0, 1.0, temperature)) * LOG2_E
    apart = raw_apart(flags, temperature)
    m_row = maxima + row.to(tl.int64) * G
    s_row = sums + row.to(tl.int64) * G
    rm_row = raw_maxima + row.to(tl.int64) * G
    rs_row = raw_sums + row.to(tl.int64) * G
    for tile in range(split, tiles, splits):
        z = ahead.to(tl.float32)
        next_ids = tile_ids(tile + splits, TILE_GROUPS)
        ahead = tl.load(here + next_ids, mask=next_ids < V, other=-float("inf"))  # under way while this one is summed
        groups = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        exists = groups < G
        raw_best = group_max(z)
        raw_below = _below(z, raw_best)
        best = raw_best
        below = raw_below
        if masks is not None:
            spoilt = group_max((~(z < float("inf"))).to(tl.int32))
            mask_row = word(table, slot, MASK_ROW)
            z = tl.where(tile_allowed(tile, masks, mask_row, mask_words, TILE_GROUPS), z, -float("inf"))
            best = group_max(z)
            below = _below(z, best)
        total = group_sum(tl.exp2(below * scale))
        if masks is not None:
            total = tl.where(spoilt != 0, float("nan"), total)
        tl.store(m_row + groups, best, mask=exists)
        tl.store(s_row + groups, total, mask=exists)
        if not PROCESSED:
            if apart:
                tl.store(rm_row + groups, raw_best, mask=exists)
                tl.store(rs_row + groups, group_sum(tl.exp2(raw_below * LOG2_E)), mask=exists)


@triton.jit
def _below(z, best):
    """z - best, and z itself where a group has nothing finite."""
    return z - by_group(tl.where(best > -float("inf"), best, 0.0))


@triton.jit
def mend(
    logits_row, maxima, sums, raw_maxima, raw_sums, masks, mask_row, mask_words, scale, V, G,
    RAW: tl.constexpr, GROUPS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of a row anew where NaN or +inf spoilt them, those values taken as -inf."""
    for first in range(0, G, GROUPS_AT_ONCE):
        groups = first + tl.arange(0, GROUPS_AT_ONCE)
        exists = groups < G
        z = tile_values(logits_row, first // GROUPS_AT_ONCE, V, masks, mask_row, mask_words, GROUPS_AT_ONCE)
        best = group_max(z)
        tl.store(maxima + groups, best, mask=exists)
        tl.store(sums + groups, group_sum(tl.exp2(_below(z, best) * scale)), mask=exists)
        if RAW:
            z = tile_values(logits_row, first // GROUPS_AT_ONCE, V, None, -1, 0, GROUPS_AT_ONCE)
            best = group_max(z)
            tl.store(raw_maxima + groups, best, mask=exists)
            tl.store(raw_sums + groups, group_sum(tl.exp2(_below(z, best) * LOG2_E)), mask=exists)
    tl.debug_barrier()


def row_stats(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    table_SW: torch.Tensor,
    masks: torch.Tensor | None,
    work: Workspace,
    *,
    processed: bool,
) -> None:
    """Fills the statistics of `work` for the rows of `logits_RV`. `masks` None: no row has an allow mask."""
    rows, vocab = logits_RV.shape
    tiles = triton.cdiv(work.groups, STATS_GROUPS)
    splits = max(1, min(tiles, triton.cdiv(STATS_PROGRAMS, rows)))  # geometry only: it changes no value
    _row_stats_kernel[(splits, rows)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        table_SW,
        masks,
        0 if masks is None else masks.shape[1],
        work.maxima,
        work.sums,
        work.raw_maxima,
        work.raw_sums,
        vocab,
        work.groups,
        tiles,
        splits,
        PROCESSED=processed,
        TILE_GROUPS=STATS_GROUPS,
        num_warps=STATS_WARPS,
    )
