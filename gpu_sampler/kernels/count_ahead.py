"""`count_ahead`: how many tokens of a row, and how much mass, come before given ones in the total order.

One more read of a row, without the parts whose maxima lie below all that is asked for. Two uses:
- RANK: the rank of a drawn token that is in no list, counts added up by integer atomics (exact in any order). Where the
  raw order was listed while the token was drawn, it is looked for in that list first (`_finish`);
- JUDGE: for DRAWS draws of a wide nucleus, the mass strictly before each and its rank, by part, which `settle` adds up
  in a fixed order.

The program of a row's first part also takes its side list. RANK: grid (parts, rows); programs of rows that ask for
nothing end at once. A part has as many tiles as leave the device no more programs than run at once, and reads those
that can hold something: counts are whole numbers, however they are split. JUDGE: a part is four tiles, which shapes its
sums. A fixed number of programs share the parts of the rows that `select` has put into a queue, so that a step in which
no row waits costs little. The order of the queue is that of chance and changes no value.
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.alone_image import AloneImage
from gpu_sampler.kernels.handover import (
    BEST,
    FINISH,
    FLOATS,
    INTS,
    MORE_PLACES,
    N_DRAWS,
    NOTHING_RANKED,
    RANKING,
    REPORT_BEST,
    REPORT_TOTAL,
    SHOWN,
    VALUE,
)
from gpu_sampler.kernels.reporting import store_nothing, value_of_token
from gpu_sampler.kernels.row import (
    FLAGS,
    GROUP,
    HAS_MASK,
    LOG2_E,
    MASK_ROW,
    NO_KEY,
    OVERLAY_START,
    SIDE_BLOCK,
    TEMPERATURE,
    halves,
    id_of,
    in_words,
    next_above,
    number,
    over_tile,
    pairs,
    pairs_allowed,
    tile_ids,
    tile_values,
    value_of,
    word,
)
from gpu_sampler.output import SampleOutput
from gpu_sampler.reference.select import CANDIDATES
from gpu_sampler.run_image import SlotImage
from gpu_sampler.workspace import JUDGE_TILES, LIST, SCRATCH, TILE_GROUPS, Workspace

_LIST: tl.constexpr = tl.constexpr(LIST)
_CANDIDATES: tl.constexpr = tl.constexpr(CANDIDATES)  # a row reports no more of its first tokens
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)

WARPS = 1
RANK_PROGRAMS = 132 * 32  # as many as run at once
RANK_TILES = 32  # of a program, at most
RANK_REGISTERS = 64
JUDGE_PROGRAMS = 132 * 24  # two or three times as many as run at once: its variants differ in registers


@triton.jit
def ahead_of(z, ids, value, token):
    """Whether each (z, id) comes strictly before (value, token)."""
    return (z > value) | ((z == value) & (ids < token) & (z > -float("inf")))


@triton.jit
def _by_lane(low, high):
    """[TILE_GROUPS, 4]: the sum over both halves of a tile of what a lane holds by itself; lanes meet only at the
    end."""
    both = tl.reshape(low + high, [low.shape[0], 4, 4, 4])
    return tl.sum(tl.sum(both, axis=3), axis=1)


@triton.jit
def _tile(words, logits, tile, masks, mask_row, mask_words, TILE_GROUPS: tl.constexpr):
    """The two halves of a tile, -inf for NaN, +inf and ids that are not allowed."""
    low, high = halves(words, logits)
    low = tl.where(low < float("inf"), low, -float("inf"))
    high = tl.where(high < float("inf"), high, -float("inf"))
    if masks is not None:
        may_low, may_high = pairs_allowed(tile, masks, mask_row, mask_words, TILE_GROUPS)
        low = tl.where(may_low, low, -float("inf"))
        high = tl.where(may_high, high, -float("inf"))
    return low, high


@triton.jit
def _part_max(maxima, part, G, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr):
    """The largest value of the tiles that a program reads."""
    groups = part * TILES * TILE_GROUPS + tl.arange(0, TILES * TILE_GROUPS)
    return tl.max(tl.load(maxima + groups, mask=groups < G, other=-float("inf")), axis=0)


@triton.jit
def _least(value, token, tile, TILE_GROUPS: tl.constexpr):
    """What a value of a tile must reach to come before (value, token): equal values come before by their id. In the
    token's own tile they are left out, for `_level` to add."""
    return tl.where(token >= (tile + 1) * TILE_GROUPS * GROUP, value, next_above(value))


@triton.jit
def _level(row, token, value, V, masks, mask_row, mask_words, TILE_GROUPS: tl.constexpr):
    """bool [TILE_GROUPS, 4, 32]: equal values that come before a token in its own tile."""
    tile = token // (TILE_GROUPS * GROUP)
    z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE_GROUPS)
    return (z == value) & (tile_ids(tile, TILE_GROUPS) < token)


@triton.jit
def _hot_tiles(maxima, value, first, tiles, G, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr):
    """i64: bit i is set where tile first + i, i < tiles, has a maximum that reaches `value`."""
    at = tl.arange(0, TILES)
    groups = (first + at)[:, None] * TILE_GROUPS + tl.arange(0, TILE_GROUPS)[None, :]
    inside = (at < tiles)[:, None] & (groups < G)
    best = tl.max(tl.load(maxima + groups, mask=inside, other=-float("inf")), axis=1)
    return tl.sum(tl.where((best >= value) & (at < tiles), tl.full([TILES], 1, tl.int64) << at, 0), axis=0)


@triton.jit
def _lowest_bit(bits):
    """The place of the lowest bit that is set, of an i64 that is not 0: the exponent of a power of two."""
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _finish(
    r, part, row, ids_side, side, length, token, keys, row_ints, row_floats, logprobs, ranks, top_ids, top_logprobs,
    n_columns, chosen_logprobs, c_columns, V,
):  # fmt: skip
    """(the value of a token drawn while its row was reported, whether its rank is to be counted). The first program of
    the row says what is known; a row that has no token reports nothing."""
    places = tl.arange(0, _CANDIDATES)
    listed = tl.load(
        keys + _LIST + places, mask=places < tl.load(row_ints + r * INTS + SHOWN), other=NO_KEY
    )  # fmt: skip
    own = tl.max(tl.where(id_of(listed) == token, listed, NO_KEY), axis=0)
    value = value_of(own)
    if own == NO_KEY:
        value = value_of_token(row, ids_side, side, length, token, V, True, 256)
    if part == 0:
        if token >= 0:
            shift = tl.load(row_floats + r * FLOATS + REPORT_BEST)
            over = tl.load(row_floats + r * FLOATS + REPORT_TOTAL)
            tl.store(logprobs + r, (value - shift) - tl.log(over))
            if own != NO_KEY:
                tl.store(ranks + r, tl.sum((listed >= own).to(tl.int32), axis=0))
        else:
            store_nothing(r, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, logprobs, ranks)
    return value, (own == NO_KEY) & (token >= 0)


# Or a batch of another size, or a new width, would compile while serving.
@triton.jit(do_not_specialize=["run", "n_columns", "c_columns"])
def _rank_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, raw_maxima, side_ids, side, side_len, row_ints,
    row_floats, keys, tokens, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, run, tiles,
    V, G,
    SIDE: tl.constexpr, PROCESSED: tl.constexpr, WORDS: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    r = tl.num_programs(1) - 1 - tl.program_id(1)  # the last rows read are those that the L2 cache still has
    ranking = tl.load(row_ints + r * INTS + RANKING)
    slot = tl.load(slots + r)  # these are under way while it is looked at
    token = tl.load(tokens + r)
    value = tl.load(row_floats + r * FLOATS + VALUE)
    if ranking == NOTHING_RANKED:
        return
    row_at = r.to(tl.int64)
    row = logits + row_at * row_stride
    if SIDE and not PROCESSED:
        if ranking == FINISH:
            start = word(table, slot, OVERLAY_START).to(tl.int64)
            list_at = row_at + tl.num_programs(1)
            value, counts_on = _finish(
                r, part, row, side_ids + start, side + start, tl.load(side_len + r), token, keys + list_at * _SCRATCH,
                row_ints, row_floats, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, V,
            )  # fmt: skip
            if ~counts_on:
                return
    m_row = maxima + row_at * G
    mask_row = tl.full([], -1, tl.int32)
    if PROCESSED:
        mask_row = word(table, slot, MASK_ROW)
    elif masks is not None:
        if (word(table, slot, FLAGS) & HAS_MASK) != 0:
            m_row = raw_maxima + row_at * G
    first = part * run
    count = tl.zeros([], tl.int32)
    hot = _hot_tiles(m_row, value, first, tl.minimum(run, tiles - first), G, TILE_GROUPS, TILES)
    if hot != 0:
        counts = tl.zeros([TILE_GROUPS, 4], tl.int32)
        tile = first + _lowest_bit(hot)
        ahead = pairs(row, tile, V, WORDS, TILE_GROUPS)
        while hot != 0:
            hot = hot & (hot - 1)
            following = tl.where(hot != 0, first + _lowest_bit(hot), tiles)  # behind the last tile nothing is read
            low, high = _tile(ahead, logits, tile, masks, mask_row, mask_words, TILE_GROUPS)
            ahead = pairs(row, following, V, WORDS, TILE_GROUPS)
            least = _least(value, token, tile, TILE_GROUPS)
            counts += _by_lane((low >= least).to(tl.int32), (high >= least).to(tl.int32))
            tile = following
        count = tl.sum(tl.sum(counts, axis=1), axis=0)
        own_tile = token // (TILE_GROUPS * GROUP)
        if (own_tile >= first) & (own_tile < first + run):
            count += over_tile(_level(row, token, value, V, masks, mask_row, mask_words, TILE_GROUPS).to(tl.int32))
    if SIDE:
        if part == 0:
            length = tl.load(side_len + r)
            start = word(table, slot, OVERLAY_START).to(tl.int64)
            for first in range(0, length, SIDE_BLOCK):
                at = first + tl.arange(0, SIDE_BLOCK)
                other = tl.load(side_ids + start + at, mask=at < length, other=0)
                own = tl.load(side + start + at, mask=at < length, other=-float("inf"))
                count += tl.sum(ahead_of(own, other, value, token).to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(ranks + r, count, sem="relaxed")


@triton.jit
def _judge_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, side_ids, side, side_len, row_floats, queue,
    draw_ids, draw_values, ahead_mass, ahead_count, parts, tiles, V, G,
    SIDE: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    waiting = tl.load(queue)
    for item in range(tl.program_id(0), waiting * parts, tl.num_programs(0)):
        place = item // parts
        r = tl.load(queue + waiting - place)  # the last rows read are those that the L2 cache still has
        _judge_part(
            r, item - place * parts, logits, row_stride, slots, table, masks, mask_words, maxima, side_ids, side,
            side_len, row_floats, draw_ids, draw_values, ahead_mass, ahead_count, parts, tiles, V, G,
            SIDE, COUNT, WORDS, TILE_GROUPS, TILES,
        )  # fmt: skip


@triton.jit
def _judge_part(
    r, part, logits, row_stride, slots, table, masks, mask_words, maxima, side_ids, side, side_len, row_floats,
    draw_ids, draw_values, ahead_mass, ahead_count, parts, tiles, V, G,
    SIDE: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The mass and number of what comes before each of a row's draws, in one part of the row."""
    row_at = r.to(tl.int64)
    row = logits + row_at * row_stride
    slot = tl.load(slots + r)
    mask_row = word(table, slot, MASK_ROW)
    its_ids = draw_ids + r * N_DRAWS
    its_values = draw_values + r * N_DRAWS
    best = tl.load(row_floats + r * FLOATS + BEST)
    scale = (1.0 / number(table, slot, TEMPERATURE)) * LOG2_E
    masses = ahead_mass + (row_at * (parts + MORE_PLACES) + part) * N_DRAWS
    counts = ahead_count + (row_at * (parts + MORE_PLACES) + part) * N_DRAWS
    least = tl.min(tl.load(its_values + tl.arange(0, N_DRAWS)), axis=0)
    mass_0 = tl.zeros([TILE_GROUPS, 4], tl.float32)  # by name: a loop over four arrays would not keep them in registers
    mass_1, mass_2, mass_3 = mass_0, mass_0, mass_0
    count_0, count_1, count_2, count_3 = mass_0, mass_0, mass_0, mass_0
    if _part_max(maxima + row_at * G, part, G, TILE_GROUPS, TILES) >= least:
        ahead = pairs(row, part * TILES, V, WORDS, TILE_GROUPS)
        for tile in range(part * TILES, tl.minimum((part + 1) * TILES, tiles)):
            low, high = _tile(ahead, logits, tile, masks, mask_row, mask_words, TILE_GROUPS)
            ahead = pairs(row, tile + 1, V, WORDS, TILE_GROUPS)
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
        at = (row_at * (parts + MORE_PLACES) + parts) * N_DRAWS + draw
        if token // (TILE_GROUPS * GROUP * TILES) == part:
            level = _level(row, token, value, V, masks, mask_row, mask_words, TILE_GROUPS)
            number_ = over_tile(level.to(tl.int32))
            tl.store(ahead_mass + at, number_.to(tl.float32) * tl.exp2((value - best) * scale))
            tl.store(ahead_count + at, number_)
        if part == 0:
            mass = tl.zeros([], tl.float32)
            count = tl.zeros([], tl.int32)
            if SIDE:
                start = word(table, slot, OVERLAY_START).to(tl.int64)
                length = tl.load(side_len + r)
                for first in range(0, length, SIDE_BLOCK):
                    entry = first + tl.arange(0, SIDE_BLOCK)
                    singles = tl.load(side_ids + start + entry, mask=entry < length, other=0)
                    x = tl.load(side + start + entry, mask=entry < length, other=-float("inf"))
                    sooner = ahead_of(x, singles, value, token)
                    mass += tl.sum(tl.where(sooner, tl.exp2((x - best) * scale), 0.0), axis=0)
                    count += tl.sum(sooner.to(tl.int32), axis=0)
            tl.store(ahead_mass + at + N_DRAWS, mass)
            tl.store(ahead_count + at + N_DRAWS, count)


@triton.jit
def _before(
    low, high, w_low, w_high, tile, its_value, its_id, COUNT: tl.constexpr, TILE_GROUPS: tl.constexpr
):  # fmt: skip
    """(mass, number) by lane of what of a tile comes before one draw; numbers in f32, exact below 2^24."""
    least = _least(tl.load(its_value), tl.load(its_id), tile, TILE_GROUPS)
    is_low = tl.where(low >= least, 1.0, 0.0)
    is_high = tl.where(high >= least, 1.0, 0.0)
    mass = _by_lane(w_low * is_low, w_high * is_high)  # exact products: the sum has the same bits fused or not
    count = mass
    if COUNT:
        count = _by_lane(is_low, is_high)
    return mass, count


@triton.jit
def _store_before(masses, counts, mass, count, COUNT: tl.constexpr):
    tl.store(masses, tl.sum(tl.sum(mass, axis=1), axis=0))
    if COUNT:
        tl.store(counts, tl.sum(tl.sum(count, axis=1), axis=0).to(tl.int32))


def rank_drawn(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: SlotImage | AloneImage,
    work: Workspace,
    out: SampleOutput,
    *,
    side: bool,
    processed: bool,
) -> None:
    """Completes `out.ranks` of the rows that `select` or `settle` left to count, and all that is said of the tokens of
    rows that were reported `with_report`. ValueError for an `out` without log-probabilities."""
    rows, vocab = logits_RV.shape
    if out.top_ids is None or out.chosen_logprobs is None:
        raise ValueError("`out` has no log-probabilities")
    parts = max(-(-work.tiles // RANK_TILES), min(work.tiles, triton.cdiv(RANK_PROGRAMS, rows)))
    _rank_kernel[(parts, rows)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        image.table,
        image.masks if side else None,
        image.masks.shape[1] if side else 0,
        work.maxima,
        work.raw_maxima,
        image.side_ids,
        image.side_processed if processed else image.side_raw,
        work.side_len,
        work.ints,
        work.floats,
        work.keys,
        out.tokens,
        out.logprobs,
        out.ranks,
        out.top_ids,
        out.top_logprobs,
        out.top_ids.shape[1],
        out.chosen_logprobs,
        out.chosen_logprobs.shape[1],
        triton.cdiv(work.tiles, parts),
        work.tiles,
        vocab,
        work.groups,
        SIDE=side,
        PROCESSED=processed,
        WORDS=in_words(logits_RV),
        TILE_GROUPS=TILE_GROUPS,
        TILES=RANK_TILES,
        num_warps=WARPS,
        maxnreg=RANK_REGISTERS,
    )


def judge_draws(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: SlotImage,
    work: Workspace,
    *,
    side: bool,
    count: bool,
) -> None:
    """Fills `work.ahead_mass` and, if `count`, `work.ahead_count` for the rows whose draws wait to be judged."""
    rows, vocab = logits_RV.shape
    _judge_kernel[(min(JUDGE_PROGRAMS, work.parts * rows),)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        image.table,
        image.masks if side else None,
        image.masks.shape[1] if side else 0,
        work.maxima,
        image.side_ids,
        image.side_processed,
        work.side_len,
        work.floats,
        work.queue,
        work.draw_ids,
        work.draw_values,
        work.ahead_mass,
        work.ahead_count,
        work.parts,
        work.tiles,
        vocab,
        work.groups,
        SIDE=side,
        COUNT=count,
        WORDS=in_words(logits_RV),
        TILE_GROUPS=TILE_GROUPS,
        TILES=JUDGE_TILES,
        num_warps=WARPS,
    )
