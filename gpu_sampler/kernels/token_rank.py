"""Counts the rank of a drawn token that is in no list, by one more read of its row.

    rank = 1 + |{v: (z_v, v) comes before (z_t, t) in the total order}|

Integer atomics add up the counts (exact in any order). Where the raw order was listed while the token was drawn, the
kernel looks for the token in that list first (`_finish`). One comparison decides for each value of a tile: equal values
come before in tiles of smaller ids, and not in tiles of larger ids (`min_before`). In the token's own tile some of them
do (`equals_before`).

Grid (parts, rows); programs of rows without a rank to count end early. A part has as many tiles as leave the device no
more programs than run together, and reads those that can hold something: counts are whole numbers, however they are
split. The program of a row's first part also takes its side list. Bytes: at most one read of the rows to count.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    FLAGS,
    GROUP,
    HAS_MASK,
    MASK_ROW,
    NO_KEY,
    SIDE_BLOCK,
    RowLogits,
    halves,
    id_of,
    in_words,
    next_above,
    over_tile,
    pairs,
    pairs_allowed,
    pdl_options,
    side_block,
    side_extent,
    tile_ids,
    tile_values,
    value_of,
    wait_for_previous,
    word,
)
from gpu_sampler.kernels.logprobs import ReportOutputs, store_nothing, value_of_token
from gpu_sampler.output import SampleOutput
from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.workspace import (
    FINISH,
    FLOATS,
    INTS,
    LIST,
    NOTHING_RANKED,
    RANKING,
    REPORT_BEST,
    REPORT_TOTAL,
    SCRATCH,
    SHOWN,
    TILE_GROUPS,
    VALUE,
    LogitRows,
)


@triton.jit
def ahead_of(z, ids, value, token):
    """Returns whether each (z, id) comes strictly before (value, token)."""
    return (z > value) | ((z == value) & (ids < token) & (z > -float("inf")))


@triton.jit
def clean_halves(words, row, tile, TILE_GROUPS: tl.constexpr):
    """Returns the two halves of a tile, -inf for NaN, +inf and ids that are not allowed."""
    low, high = halves(words, row.logits)
    low = tl.where(low < float("inf"), low, -float("inf"))
    high = tl.where(high < float("inf"), high, -float("inf"))
    if row.masks is not None:
        may_low, may_high = pairs_allowed(row, tile, TILE_GROUPS)
        low = tl.where(may_low, low, -float("inf"))
        high = tl.where(may_high, high, -float("inf"))
    return low, high


@triton.jit
def min_before(value, token, tile, TILE_GROUPS: tl.constexpr):
    """Returns the smallest value of a tile that comes before (value, token): equal values come before by their id.

    In the token's own tile equal values are left out, for `equals_before` to add.
    """
    return tl.where(token >= (tile + 1) * TILE_GROUPS * GROUP, value, next_above(value))


@triton.jit
def equals_before(row, token, value, TILE_GROUPS: tl.constexpr):
    """Returns the equal values that come before a token in its own tile, bool [TILE_GROUPS, 4, 32]."""
    tile = token // (TILE_GROUPS * GROUP)
    z = tile_values(row, tile, TILE_GROUPS)
    return (z == value) & (tile_ids(tile, TILE_GROUPS) < token)


@triton.jit
def by_lane(low, high):
    """Returns the sum [TILE_GROUPS, 4] over both halves of a tile of what a lane holds by itself.

    Lanes meet only at the end.
    """
    both = tl.reshape(low + high, [low.shape[0], 4, 4, 4])
    return tl.sum(tl.sum(both, axis=3), axis=1)


_LIST: tl.constexpr = tl.constexpr(LIST)
_CANDIDATES: tl.constexpr = tl.constexpr(CANDIDATES)  # a row reports no more of its first tokens
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)

WARPS = 1
RANK_PROGRAMS = 132 * 32  # as many as run together
RANK_TILES = 32  # of a program, at most
RANK_REGISTERS = 64


# Or a batch of another size, or a new width, would compile while serving.
@triton.jit(do_not_specialize=["run", "n_columns", "c_columns"])
def _token_rank_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, raw_maxima, side_ids, side, side_len, row_ints,
    row_floats, keys, tokens, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, run, tiles,
    V, G,
    SIDE: tl.constexpr, PROCESSED: tl.constexpr, WORDS: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds to a row's rank what comes before its token in one part. Grid (parts, R).

    Arguments are those of `_sample_kernel`; `side` f32 [E] are raw or processed values by PROCESSED. run: tiles a part.
    WORDS: rows can be loaded as `pairs`. TILES: a power of two, at least `run`.
    """
    wait_for_previous(PDL)
    part = tl.program_id(0)
    r = tl.num_programs(1) - 1 - tl.program_id(1)  # the last rows read are those that the L2 cache still has
    ranking = tl.load(row_ints + r * INTS + RANKING)
    slot = tl.load(slots + r)  # these are under way while it is looked at
    token = tl.load(tokens + r)
    value = tl.load(row_floats + r * FLOATS + VALUE)
    if ranking == NOTHING_RANKED:
        return
    row_at = r.to(tl.int64)
    m_row = maxima + row_at * G
    mask_row = tl.full([], -1, tl.int32)
    if PROCESSED:
        mask_row = word(table, slot, MASK_ROW)
    elif masks is not None:
        if (word(table, slot, FLAGS) & HAS_MASK) != 0:
            m_row = raw_maxima + row_at * G
    start, length = side_extent(table, slot, side_len, r, SIDE)
    own_side = side + start if SIDE else None
    row = RowLogits(logits + row_at * row_stride, side_ids + start, own_side, length, masks, mask_row, mask_words, V)
    if SIDE and not PROCESSED:
        if ranking == FINISH:
            report = ReportOutputs(logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns)
            listed = keys + (row_at + tl.num_programs(1)) * _SCRATCH
            value, counts_on = _finish(r, part, row, token, listed, row_ints, row_floats, report)
            if ~counts_on:
                return
    first = part * run
    count = tl.zeros([], tl.int32)
    hot = _hot_tiles(m_row, value, first, tl.minimum(run, tiles - first), G, TILE_GROUPS, TILES)
    if hot != 0:
        counts = tl.zeros([TILE_GROUPS, 4], tl.int32)
        tile = first + _lowest_bit(hot)
        ahead = pairs(row.logits, tile, V, WORDS, TILE_GROUPS)
        while hot != 0:
            hot = hot & (hot - 1)
            following = tl.where(hot != 0, first + _lowest_bit(hot), tiles)  # behind the last tile nothing is read
            low, high = clean_halves(ahead, row, tile, TILE_GROUPS)
            ahead = pairs(row.logits, following, V, WORDS, TILE_GROUPS)
            least = min_before(value, token, tile, TILE_GROUPS)
            counts += by_lane((low >= least).to(tl.int32), (high >= least).to(tl.int32))
            tile = following
        count = tl.sum(tl.sum(counts, axis=1), axis=0)
        own_tile = token // (TILE_GROUPS * GROUP)
        if (own_tile >= first) & (own_tile < first + run):
            level = equals_before(row, token, value, TILE_GROUPS)
            count += over_tile(level.to(tl.int32))
    if SIDE:
        if part == 0:
            for first in range(0, length, SIDE_BLOCK):
                other, own = side_block(row, first)
                count += tl.sum(ahead_of(own, other, value, token).to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(ranks + r, count, sem="relaxed")


@triton.jit
def _finish(r, part, row, token, keys, row_ints, row_floats, report):
    """Returns (the value of a token drawn while its row was reported, whether its rank is to be counted).

    The first program of the row stores what is known. A row without a token reports nothing.
    """
    places = tl.arange(0, _CANDIDATES)
    listed = tl.load(keys + _LIST + places, mask=places < tl.load(row_ints + r * INTS + SHOWN), other=NO_KEY)
    own = tl.max(tl.where(id_of(listed) == token, listed, NO_KEY), axis=0)
    value = value_of(own)
    if own == NO_KEY:
        value = value_of_token(row, token, 256)
    if part == 0:
        if token >= 0:
            shift = tl.load(row_floats + r * FLOATS + REPORT_BEST)
            over = tl.load(row_floats + r * FLOATS + REPORT_TOTAL)
            tl.store(report.logprobs + r, (value - shift) - tl.log(over))
            if own != NO_KEY:
                tl.store(report.ranks + r, tl.sum((listed >= own).to(tl.int32), axis=0))
        else:
            store_nothing(r, report)
    return value, (own == NO_KEY) & (token >= 0)


@triton.jit
def _hot_tiles(maxima, value, first, tiles, G, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Returns an i64 whose bit i is set where tile first + i, i < tiles, has a maximum that reaches `value`."""
    at = tl.arange(0, TILES)
    groups = (first + at)[:, None] * TILE_GROUPS + tl.arange(0, TILE_GROUPS)[None, :]
    inside = (at < tiles)[:, None] & (groups < G)
    best = tl.max(tl.load(maxima + groups, mask=inside, other=-float("inf")), axis=1)
    return tl.sum(tl.where((best >= value) & (at < tiles), tl.full([TILES], 1, tl.int64) << at, 0), axis=0)


@triton.jit
def _lowest_bit(bits):
    """Returns the place of the lowest bit that is set in an i64 other than 0: the exponent of a power of two."""
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


def token_rank(rows: LogitRows, out: SampleOutput) -> None:
    """Counts the ranks that a list did not show, and completes rows that `sample` reported beside their draw.

    Args:
        rows: the rows, as `sample` took them.
        out: the step's outputs with log-probabilities; `ranks` is completed.

    Raises:
        ValueError: `out` has no log-probabilities.
    """
    if out.logprobs is None:
        raise ValueError("`out` has no log-probabilities")
    state, work = rows.state, rows.work
    parts = max(-(-work.tiles // RANK_TILES), min(work.tiles, triton.cdiv(RANK_PROGRAMS, len(rows.logits))))
    _token_rank_kernel[(parts, len(rows.logits))](
        *rows.inputs,
        work.maxima,
        work.raw_maxima,
        state.side_ids,
        state.side_processed if rows.processed else state.side_raw,
        work.side_len,
        work.ints,
        work.floats,
        work.keys,
        out.tokens,
        *out.reported,
        triton.cdiv(work.tiles, parts),
        work.tiles,
        rows.logits.shape[1],
        work.groups,
        SIDE=rows.side,
        PROCESSED=rows.processed,
        WORDS=in_words(rows.logits),
        TILE_GROUPS=TILE_GROUPS,
        TILES=RANK_TILES,
        **pdl_options(),
        num_warps=WARPS,
        maxnreg=RANK_REGISTERS,
    )
