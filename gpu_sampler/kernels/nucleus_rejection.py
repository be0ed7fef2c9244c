"""Finds the mass strictly before each of the first DRAWS draws of a wide nucleus, and how many tokens come before it.

    mass = sum 2^((z - M) log2(e) / T)        over what comes before the draw in the total order

One more read of a row, without the parts whose maxima lie below all draws, judges all of them: a draw belongs to the
nucleus where its mass is below p of the whole. Masses and counts are kept by part, and `nucleus_fallback` adds them up
in a fixed order. A part is four tiles, which shapes its sums.

A fixed number of programs share the parts of the rows that `sample` has queued, so that a step without such rows costs
little. The order of the queue is random and changes no value. The program of a row's first part also takes its side
list. Bytes: at most one read of the queued rows.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    GROUP,
    LOG2_E,
    MASK_ROW,
    SIDE_BLOCK,
    TEMPERATURE,
    RowLogits,
    in_words,
    launch_dependents,
    number,
    over_tile,
    pairs,
    pdl_options,
    side_block,
    side_extent,
    wait_for_previous,
    word,
)
from gpu_sampler.kernels.token_rank import ahead_of, by_lane, clean_halves, equals_before, min_before
from gpu_sampler.workspace import BEST, FLOATS, MORE_PLACES, N_DRAWS, REJECTION_TILES, TILE_GROUPS, LogitRows

WARPS = 1
REJECTION_PROGRAMS = 132 * 24  # two or three times as many as run together: its variants differ in registers


@triton.jit
def _nucleus_rejection_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, side_ids, side, side_len, row_floats, queue,
    draw_ids, draw_values, ahead_mass, ahead_count, parts, tiles, V, G,
    SIDE: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Judges the draws of the queued rows. Grid: at most REJECTION_PROGRAMS programs, which share (row, part) items.

    Arguments are those of `_sample_kernel`, and `ahead_mass`, `ahead_count` f32, i32 [R, parts + 2, DRAWS] outputs.
    COUNT: some row wants ranks. WORDS: rows can be loaded as `pairs`. TILE_GROUPS, TILES: groups a tile, tiles a part.
    """
    wait_for_previous(PDL)
    launch_dependents(PDL)
    waiting = tl.load(queue)
    for item in range(tl.program_id(0), waiting * parts, tl.num_programs(0)):
        place = item // parts
        r = tl.load(queue + waiting - place)  # the last rows read are those that the L2 cache still has
        row_at = r.to(tl.int64)
        slot = tl.load(slots + r)
        start, length = side_extent(table, slot, side_len, r, SIDE)
        row = RowLogits(
            logits + row_at * row_stride, side_ids + start, side + start if SIDE else None, length, masks,
            word(table, slot, MASK_ROW), mask_words, V,
        )  # fmt: skip
        first = row_at * (parts + MORE_PLACES) * N_DRAWS
        _reject_in_part(
            row, item - place * parts, maxima + row_at * G, draw_ids + r * N_DRAWS, draw_values + r * N_DRAWS,
            ahead_mass + first, ahead_count + first, tl.load(row_floats + r * FLOATS + BEST),
            (1.0 / number(table, slot, TEMPERATURE)) * LOG2_E, parts, tiles, G, COUNT, WORDS, TILE_GROUPS, TILES,
        )  # fmt: skip


@triton.jit
def _reject_in_part(
    row, part, m_row, its_ids, its_values, ahead_mass, ahead_count, best, scale, parts, tiles, G,
    COUNT: tl.constexpr, WORDS: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Stores the mass and number of what comes before each of a row's draws, in one part of the row."""
    masses = ahead_mass + part * N_DRAWS
    counts = ahead_count + part * N_DRAWS
    least = tl.min(tl.load(its_values + tl.arange(0, N_DRAWS)), axis=0)
    mass_0 = tl.zeros([TILE_GROUPS, 4], tl.float32)  # by name: a loop over four arrays would not keep them in registers
    mass_1, mass_2, mass_3 = mass_0, mass_0, mass_0
    count_0, count_1, count_2, count_3 = mass_0, mass_0, mass_0, mass_0
    if _part_max(m_row, part, G, TILE_GROUPS, TILES) >= least:
        ahead = pairs(row.logits, part * TILES, row.V, WORDS, TILE_GROUPS)
        for tile in range(part * TILES, tl.minimum((part + 1) * TILES, tiles)):
            low, high = clean_halves(ahead, row, tile, TILE_GROUPS)
            ahead = pairs(row.logits, tile + 1, row.V, WORDS, TILE_GROUPS)
            w_low = tl.exp2((low - best) * scale)
            w_high = tl.exp2((high - best) * scale)
            more, number_ = _before(low, high, w_low, w_high, tile, its_values, its_ids, COUNT, TILE_GROUPS)
            mass_0 += more
            count_0 += number_
            more, number_ = _before(low, high, w_low, w_high, tile, its_values + 1, its_ids + 1, COUNT, TILE_GROUPS)
            mass_1 += more
            count_1 += number_
            more, number_ = _before(low, high, w_low, w_high, tile, its_values + 2, its_ids + 2, COUNT, TILE_GROUPS)
            mass_2 += more
            count_2 += number_
            more, number_ = _before(low, high, w_low, w_high, tile, its_values + 3, its_ids + 3, COUNT, TILE_GROUPS)
            mass_3 += more
            count_3 += number_
    _store_before(masses, counts, mass_0, count_0, COUNT)
    _store_before(masses + 1, counts + 1, mass_1, count_1, COUNT)
    _store_before(masses + 2, counts + 2, mass_2, count_2, COUNT)
    _store_before(masses + 3, counts + 3, mass_3, count_3, COUNT)
    for draw in range(N_DRAWS):
        token = tl.load(its_ids + draw)
        value = tl.load(its_values + draw)
        at = parts * N_DRAWS + draw
        if token // (TILE_GROUPS * GROUP * TILES) == part:
            level = equals_before(row, token, value, TILE_GROUPS)
            number_ = over_tile(level.to(tl.int32))
            tl.store(ahead_mass + at, number_.to(tl.float32) * tl.exp2((value - best) * scale))
            tl.store(ahead_count + at, number_)
        if part == 0:
            mass = tl.zeros([], tl.float32)
            count = tl.zeros([], tl.int32)
            if row.side is not None:
                for start in range(0, row.length, SIDE_BLOCK):
                    singles, x = side_block(row, start)
                    sooner = ahead_of(x, singles, value, token)
                    mass += tl.sum(tl.where(sooner, tl.exp2((x - best) * scale), 0.0), axis=0)
                    count += tl.sum(sooner.to(tl.int32), axis=0)
            tl.store(ahead_mass + at + N_DRAWS, mass)
            tl.store(ahead_count + at + N_DRAWS, count)


@triton.jit
def _part_max(maxima, part, G, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Returns the largest value of the tiles of a part."""
    groups = part * TILES * TILE_GROUPS + tl.arange(0, TILES * TILE_GROUPS)
    return tl.max(tl.load(maxima + groups, mask=groups < G, other=-float("inf")), axis=0)


@triton.jit
def _before(low, high, w_low, w_high, tile, its_value, its_id, COUNT: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """Returns (mass, number) by lane of what comes before one draw in a tile; numbers in f32, exact below 2^24."""
    least = min_before(tl.load(its_value), tl.load(its_id), tile, TILE_GROUPS)
    is_low = tl.where(low >= least, 1.0, 0.0)
    is_high = tl.where(high >= least, 1.0, 0.0)
    mass = by_lane(w_low * is_low, w_high * is_high)  # exact products: the sum has the same bits fused or not
    count = mass
    if COUNT:
        count = by_lane(is_low, is_high)
    return mass, count


@triton.jit
def _store_before(masses, counts, mass, count, COUNT: tl.constexpr):
    """Stores the sums over lanes of one draw's mass and, with COUNT, number."""
    tl.store(masses, tl.sum(tl.sum(mass, axis=1), axis=0))
    if COUNT:
        tl.store(counts, tl.sum(tl.sum(count, axis=1), axis=0).to(tl.int32))


def nucleus_rejection(rows: LogitRows, *, count: bool) -> None:
    """Fills `work.ahead_mass` and, if `count`, `work.ahead_count` for the rows whose draws wait in the queue.

    Args:
        rows: the rows, as `sample` took them.
        count: some row wants ranks.
    """
    work = rows.work
    _nucleus_rejection_kernel[(min(REJECTION_PROGRAMS, work.parts * len(rows.logits)),)](
        *rows.inputs,
        work.maxima,
        rows.state.side_ids,
        rows.state.side_processed,
        work.side_len,
        work.floats,
        work.queue,
        work.draw_ids,
        work.draw_values,
        work.ahead_mass,
        work.ahead_count,
        work.parts,
        work.tiles,
        rows.logits.shape[1],
        work.groups,
        SIDE=rows.side,
        COUNT=count,
        WORDS=in_words(rows.logits),
        TILE_GROUPS=TILE_GROUPS,
        TILES=REJECTION_TILES,
        **pdl_options(),
        num_warps=WARPS,
    )
