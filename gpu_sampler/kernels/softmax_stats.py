"""Reads the logits once: by group of 128 ids, the largest value and the sum of exponentials.

    m_j = max z,  s_j = sum 2^((z - m_j) log2(e) / T)        over what may be drawn (allowed ids)
    rm_j = max z, rs_j = sum 2^((z - rm_j) log2(e))          over the logits as the model gave them, where they differ

T is 1 for rows whose temperature no sum over the whole row needs: greedy rows, and rows whose top-k a list holds
(`sum_temperature`). That spares a second exponential a logit where log-probabilities are reported.

Grid (splits, rows): a program takes every splits-th tile of a row. It loads neighbours as one word, which halves the
registers of the tile under way and the work to unpack it. Where a row cannot be read so, it builds the words from
single values, and the sums are the same. A group never straddles two tiles, and nothing depends on the number of rows
or splits, so a row's statistics have the same bits in every batch. Bytes: one read of the logits, 8 written a group (16
where a row needs both kinds).

| pointer | shape, type | |
|---|---|---|
| logits | [R, V] bf16, fp16 or f32, any row stride | read |
| slots, table, masks | i32 [R], i32 [S, W], i32 [M, ceil(V / 32)] | read |
| maxima, sums, raw_maxima, raw_sums | f32 [R, G] | write |
| targets, ahead_counts | i32 [R], i32 [R, tiles]: with TARGET, what comes before each target | read, write |
| queue | i32 [1 + R], emptied for `sample` | write |
| draft_ids, kinds | i32 [B, K], u8 [B]: with EXPAND, the drafts of the rows' requests | read |
| to_table, to_slots, row_ints | i32 [R + 1, W], i32 [R], i32 [R, 8]: see `verify_rows.expand_row` | write |

With EXPAND the rows are those of a verify step and take the state of their request's slot. The first program of a row
writes its words for the kernels that follow. Rows after the last draft are summed as that slot's too.

This kernel does not look for NaN and +inf. They leave a group with a sum that is not finite, by which `sample` finds
such rows and mends them (`mended_groups`).
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    FLAGS,
    GREEDY,
    GROUP,
    HAS_MASK,
    LOG2_E,
    MASK_ROW,
    TEMPERATURE,
    TOP_K,
    WANTS_LOGPROBS,
    RowLogits,
    group_base,
    group_max,
    group_sum,
    halves,
    in_words,
    next_above,
    number,
    over_tile,
    pair_ids,
    pairs,
    pairs_allowed,
    raw_tile,
    tile_ids,
    tile_values,
    word,
)
from gpu_sampler.kernels.draft_probs import run_length
from gpu_sampler.kernels.verify_rows import VerifyRuns, code, expand_row
from gpu_sampler.output import RowFlag
from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.workspace import TILE_GROUPS, LogitRows

_FLAG_BAD_VALUE: tl.constexpr = tl.constexpr(int(RowFlag.BAD_VALUE))


@triton.jit
def groups_of(m_row, s_row, G, GROUPS: tl.constexpr):
    """Returns the largest value and the sum of exponentials of each group, f32 [GROUPS]."""
    groups = tl.arange(0, GROUPS)
    m = tl.load(m_row + groups, mask=groups < G, other=-float("inf"))
    s = tl.load(s_row + groups, mask=groups < G, other=0.0)
    return m, s


@triton.jit
def mended_groups(
    row, m_row, s_row, to_m, to_s, raw_m_row, raw_s_row, scale, raws, G, GROUPS: tl.constexpr, MOVES: tl.constexpr
):  # fmt: skip
    """Returns `groups_of` a row and its flag; sums groups that hold NaN or +inf again, without those values.

    The mended groups go into `to_m` and `to_s`: the rows that the groups came from, or others (MOVES). `raws`: the raw
    statistics are mended with them.
    """
    flags = tl.zeros([], tl.int32)
    m, s = groups_of(m_row, s_row, G, GROUPS)
    if tl.max((~(s < float("inf")) | ~(m < float("inf"))).to(tl.int32), axis=0) != 0:
        flags = flags | _FLAG_BAD_VALUE
        if MOVES:
            groups = tl.arange(0, GROUPS)
            tl.store(to_m + groups, m, mask=groups < G)
            tl.store(to_s + groups, s, mask=groups < G)
            tl.debug_barrier()
        _mend(row, to_m, to_s, raw_m_row, raw_s_row, scale, raws, G, 32)
        m, s = groups_of(to_m, to_s, G, GROUPS)
    return m, s, flags


@triton.jit
def _mend(row, maxima, sums, raw_maxima, raw_sums, scale, raws, G, GROUPS_AT_ONCE: tl.constexpr):
    """Writes the statistics of the groups that hold NaN or +inf again, with those values taken as -inf.

    All other groups stay as they are. `raws`: also writes the raw statistics.
    """
    for first in range(0, G, GROUPS_AT_ONCE):
        groups = first + tl.arange(0, GROUPS_AT_ONCE)
        ids = tile_ids(first // GROUPS_AT_ONCE, GROUPS_AT_ONCE)
        given = tl.load(row.logits + ids, mask=ids < row.V, other=-float("inf")).to(tl.float32)
        spoilt = (groups < G) & (group_max((~(given < float("inf"))).to(tl.int32)) != 0)
        z = tile_values(row, first // GROUPS_AT_ONCE, GROUPS_AT_ONCE)
        best = group_max(z)
        tl.store(maxima + groups, best, mask=spoilt)
        tl.store(sums + groups, group_sum(tl.exp2(_below(z, best) * scale)), mask=spoilt)
        if raws:
            z = raw_tile(row.logits, first // GROUPS_AT_ONCE, row.V, GROUPS_AT_ONCE)
            best = group_max(z)
            tl.store(raw_maxima + groups, best, mask=spoilt)
            tl.store(raw_sums + groups, group_sum(tl.exp2(_below(z, best) * LOG2_E)), mask=spoilt)
    tl.debug_barrier()


@triton.jit
def _below(z, best):
    """Returns z - best, and z itself where a group has nothing finite."""
    return z - group_base(best)


STATS_WARPS = 1
STATS_REGISTERS = 80  # with targets; 64 without, which is 32 programs a multiprocessor, the most there may be
STATS_PROGRAMS = 132 * 192  # six times as many as run together: the last ones are short; at 256 rows two tiles each
_CANDIDATES: tl.constexpr = tl.constexpr(CANDIDATES)


@triton.jit
def sum_temperature(flags, temperature, top_k):
    """Returns the temperature of a row's sums: its own where it draws from the whole row or looks for a nucleus."""
    listed = (top_k > 0) & (top_k <= _CANDIDATES)
    return tl.where(((flags & GREEDY) != 0) | listed, 1.0, temperature)


@triton.jit
def raw_apart(flags, at_temperature):
    """Returns whether a row wants raw statistics that differ from those it draws by, summed at `sum_temperature`."""
    apart = ((flags & HAS_MASK) != 0) | (at_temperature != 1.0)
    return apart & ((flags & WANTS_LOGPROBS) != 0)


@triton.jit(do_not_specialize=["splits", "K", "E"])  # or a batch of a new size would compile while serving
def _softmax_stats_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, raw_maxima, raw_sums, targets, ahead_counts,
    queue, draft_ids, kinds, to_table, to_slots, row_ints, V, G, tiles, splits, K, E,
    PROCESSED: tl.constexpr, WORDS: tl.constexpr, TARGET: tl.constexpr, EXPAND: tl.constexpr, RULE: tl.constexpr,
    SEEDED: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums a row's tiles, every splits-th from `split` on. Grid (splits, R); the module lists the arguments."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    here = logits + row.to(tl.int64) * row_stride
    ahead = pairs(here, split, V, WORDS, TILE_GROUPS)
    tl.store(queue, 0, mask=(split == 0) & (row == 0))
    holder = row
    if EXPAND:
        holder = row // (K + 1)
    slot = tl.load(slots + holder)
    flags = word(table, slot, FLAGS)
    if EXPAND:
        if split == 0:
            drafts = run_length(draft_ids, kinds, holder, K)
            step = row - holder * (K + 1)
            expand_row(row, step, drafts, slot, flags, table, to_table, to_slots, row_ints, E, RULE, SEEDED)
    temperature = sum_temperature(flags, number(table, slot, TEMPERATURE), word(table, slot, TOP_K))
    scale = (1.0 / temperature) * LOG2_E
    apart = raw_apart(flags, temperature)
    m_row = maxima + row.to(tl.int64) * G
    s_row = sums + row.to(tl.int64) * G
    rm_row = raw_maxima + row.to(tl.int64) * G
    rs_row = raw_sums + row.to(tl.int64) * G
    if TARGET:
        target = tl.load(targets + row)
        asked = tl.load(here + target, mask=(target >= 0) & (target < V), other=float("inf")).to(tl.float32)
        count = tl.zeros([], tl.int32)
    for tile in range(split, tiles, splits):
        low, high = halves(ahead, logits)
        ahead = pairs(here, tile + splits, V, WORDS, TILE_GROUPS)  # under way while this one is summed
        groups = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        exists = groups < G
        if TARGET:
            count += _ahead_in(low, high, tile, asked, target, TILE_GROUPS)
        raw_best = group_max(tl.maximum(low, high))
        raw_base = group_base(raw_best)
        raw_low = low - raw_base
        raw_high = high - raw_base
        best = raw_best
        low_below = raw_low
        high_below = raw_high
        if masks is not None:
            spoilt = group_max((~(low < float("inf")) | ~(high < float("inf"))).to(tl.int32))
            masked = RowLogits(here, None, None, 0, masks, word(table, slot, MASK_ROW), mask_words, V)
            may_low, may_high = pairs_allowed(masked, tile, TILE_GROUPS)
            low = tl.where(may_low, low, -float("inf"))
            high = tl.where(may_high, high, -float("inf"))
            best = group_max(tl.maximum(low, high))
            base = group_base(best)
            low_below = low - base
            high_below = high - base
        total = group_sum(tl.exp2(low_below * scale) + tl.exp2(high_below * scale))
        if masks is not None:
            total = tl.where(spoilt != 0, float("nan"), total)
        tl.store(m_row + groups, best, mask=exists)
        tl.store(s_row + groups, total, mask=exists)
        if not PROCESSED:
            if apart:
                raw_total = group_sum(tl.exp2(raw_low * LOG2_E) + tl.exp2(raw_high * LOG2_E))
                tl.store(rm_row + groups, raw_best, mask=exists)
                tl.store(rs_row + groups, raw_total, mask=exists)
    if TARGET:
        tl.store(ahead_counts + row.to(tl.int64) * tiles + split, count)


@triton.jit
def _ahead_in(low, high, tile, value, token, TILE_GROUPS: tl.constexpr):
    """Returns how many values of a tile come before (value, token)."""
    first = tile * TILE_GROUPS * GROUP
    last = first + TILE_GROUPS * GROUP
    least = tl.where(token >= last, value, next_above(value))  # equal values come before by their id
    count = over_tile(((low >= least) & (low < float("inf"))).to(tl.int32))
    count += over_tile(((high >= least) & (high < float("inf"))).to(tl.int32))
    if (token > first) & (token < last):
        ids = 2 * pair_ids(tile, TILE_GROUPS)
        count += over_tile(((low == value) & (ids < token)).to(tl.int32))
        count += over_tile(((high == value) & (ids + 1 < token)).to(tl.int32))
    return count


def softmax_stats(
    rows: LogitRows, *, masked: bool, targets_R: torch.Tensor | None = None, runs: VerifyRuns | None = None
) -> int:
    """Fills the statistics of the rows' workspace, and empties its queue.

    Args:
        rows: the rows, after `apply_logits_processors` where some row has an overlay. With `runs`, `slots` are those of
            the B requests and `state` is the slots' own.
        masked: some row has an allow mask.
        targets_R: i32 [R] tokens. The kernel also counts the tokens before each of them in the raw order, into
            `work.ahead_parts`. No token comes before an id outside of [0, V).
        runs: the runs of a verify step that the rows belong to. The tables and slots of their state are then filled as
            by `expand`, for requests without an overlay, a mask or last tokens.

    Returns:
        The number of parts that the counts are in; 0 without targets.
    """
    logits, work = rows.logits, rows.work
    masks = rows.state.masks if masked else None
    splits = max(1, min(work.tiles, triton.cdiv(STATS_PROGRAMS, len(logits))))  # geometry only: it changes no value
    none = rows.slots  # stands where nothing is read or written
    _softmax_stats_kernel[(splits, len(logits))](
        logits,
        logits.stride(0),
        rows.slots,
        rows.state.table,
        masks,
        0 if masks is None else masks.shape[1],
        work.maxima,
        work.sums,
        work.raw_maxima,
        work.raw_sums,
        none if targets_R is None else targets_R,
        work.ahead_parts,
        work.queue,
        none if runs is None else runs.draft_ids,
        none if runs is None else runs.kinds,
        none if runs is None else runs.state.table,
        none if runs is None else runs.state.slots,
        none if runs is None else work.ints,
        logits.shape[1],
        work.groups,
        work.tiles,
        splits,
        0 if runs is None else runs.draft_ids.shape[1],
        0 if runs is None else runs.state.entries,
        PROCESSED=rows.processed,
        WORDS=in_words(logits),
        TARGET=targets_R is not None,
        EXPAND=runs is not None,
        RULE=0 if runs is None else code(runs.rules.rule),
        SEEDED=0 if runs is None else code(runs.rules.seeded),
        TILE_GROUPS=TILE_GROUPS,
        num_warps=STATS_WARPS,
        maxnreg=STATS_REGISTERS,
    )
    return 0 if targets_R is None else splits
