"""`count_ahead`: how many tokens of a row, and how much mass, come before given ones in the total order.

One more read of a row, without the tiles whose maxima lie below all that is asked for. Two uses:
- RANK: the rank of a drawn token that is in no list, counts added up by integer atomics (exact in any order);
- JUDGE: for DRAWS draws of a wide nucleus, the mass strictly before each and its rank, by tile, which `settle` adds up
  in a fixed order.

Grid (parts or tiles, rows), the first program of a row also takes its side list. Programs of rows that ask for nothing
end at once.
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.device_image import DeviceImage
from gpu_sampler.kernels.handover import BEST, FLOATS, INTS, JUDGE, N_DRAWS, PENDING, RANKING, VALUE
from gpu_sampler.kernels.row import (
    FLAGS,
    GROUP,
    HAS_MASK,
    LOG2_E,
    MASK_ROW,
    OVERLAY_START,
    SIDE_BLOCK,
    TEMPERATURE,
    number,
    ordered,
    over_tile,
    tile_ids,
    tile_values,
    word,
)
from gpu_sampler.kernels.select import AloneImage
from gpu_sampler.output import SampleOutput
from gpu_sampler.workspace import TILE_GROUPS, Workspace

_TILE_GROUPS: tl.constexpr = tl.constexpr(TILE_GROUPS)
WARPS = 1
PARTS = 32  # in which a rank is counted
TILES_AT_ONCE = 4  # that one program judges, each by itself


@triton.jit
def ahead_of(z, ids, value, token):
    """Whether each (z, id) comes strictly before (value, token)."""
    return (z > value) | ((z == value) & (ids < token) & (z > -float("inf")))


@triton.jit
def _by_lane(x):
    """[TILE_GROUPS, 4]: sums of a tile over what a lane holds by itself; lanes meet only at the end."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], 4, 4, 8]), axis=3), axis=1)


@triton.jit
def _tile_max(maxima, tile, G, TILE_GROUPS: tl.constexpr):
    groups = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    return tl.max(tl.load(maxima + groups, mask=groups < G, other=-float("inf")), axis=0)


@triton.jit
def _rank_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, raw_maxima, side_ids, side, side_len, row_ints,
    row_floats, tokens, ranks, tiles, V, G,
    SIDE: tl.constexpr, PROCESSED: tl.constexpr, TILE_GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    r = tl.program_id(1)
    if tl.load(row_ints + r * INTS + RANKING) == 0:
        return
    row_at = r.to(tl.int64)
    row = logits + row_at * row_stride
    slot = tl.load(slots + r)
    has_mask = (word(table, slot, FLAGS) & HAS_MASK) != 0
    m_row = maxima + row_at * G
    mask_row = tl.full([], -1, tl.int32)
    if PROCESSED:
        mask_row = word(table, slot, MASK_ROW)
    elif has_mask:
        m_row = raw_maxima + row_at * G
    token = tl.load(tokens + r)
    value = tl.load(row_floats + r * FLOATS + VALUE)
    counts = tl.zeros([TILE_GROUPS, 4], tl.int32)
    for tile in range(part, tiles, PARTS):
        if _tile_max(m_row, tile, G, TILE_GROUPS) >= value:
            ids = tile_ids(tile, TILE_GROUPS)
            z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE_GROUPS)
            counts += _by_lane(ahead_of(z, ids, value, token).to(tl.int32))
    count = tl.sum(tl.sum(counts, axis=1), axis=0)
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
    logits, row_stride, slots, table, masks, mask_words, maxima, side_ids, side, side_len, row_ints, row_floats,
    draw_ids, draw_values, ahead_mass, ahead_count, tiles, V, G,
    SIDE: tl.constexpr, TILE_GROUPS: tl.constexpr, TILES_AT_ONCE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    r = tl.program_id(1)
    if tl.load(row_ints + r * INTS + PENDING) != JUDGE:
        return
    row_at = r.to(tl.int64)
    row = logits + row_at * row_stride
    slot = tl.load(slots + r)
    mask_row = word(table, slot, MASK_ROW)
    its_ids = draw_ids + r * N_DRAWS
    its_values = draw_values + r * N_DRAWS
    least = tl.min(tl.load(its_values + tl.arange(0, N_DRAWS)), axis=0)
    best = tl.load(row_floats + r * FLOATS + BEST)
    scale = (1.0 / number(table, slot, TEMPERATURE)) * LOG2_E
    for tile in range(part * TILES_AT_ONCE, tl.minimum((part + 1) * TILES_AT_ONCE, tiles)):
        at = (row_at * (tiles + 1) + tile) * N_DRAWS
        reaches = _tile_max(maxima + row_at * G, tile, G, TILE_GROUPS) >= least
        if reaches:
            z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE_GROUPS)
            _judge_tile(z, tile, best, scale, its_ids, its_values, ahead_mass + at, ahead_count + at, TILE_GROUPS)
        else:
            tl.store(ahead_mass + at + tl.arange(0, N_DRAWS), tl.zeros([N_DRAWS], tl.float32))
            tl.store(ahead_count + at + tl.arange(0, N_DRAWS), tl.zeros([N_DRAWS], tl.int32))
    if part == 0:
        at = (row_at * (tiles + 1) + tiles) * N_DRAWS
        length = tl.zeros([], tl.int32)
        start = tl.zeros([], tl.int64)
        if SIDE:
            length = tl.load(side_len + r)
            start = word(table, slot, OVERLAY_START).to(tl.int64)
        for draw in range(N_DRAWS):
            mass = tl.zeros([], tl.float32)
            count = tl.zeros([], tl.int32)
            for first in range(0, length, SIDE_BLOCK):
                entry = first + tl.arange(0, SIDE_BLOCK)
                singles = tl.load(side_ids + start + entry, mask=entry < length, other=0)
                x = tl.load(side + start + entry, mask=entry < length, other=-float("inf"))
                sooner = ahead_of(x, singles, tl.load(its_values + draw), tl.load(its_ids + draw))
                mass += tl.sum(tl.where(sooner, tl.exp2((x - best) * scale), 0.0), axis=0)
                count += tl.sum(sooner.to(tl.int32), axis=0)
            tl.store(ahead_mass + at + draw, mass)
            tl.store(ahead_count + at + draw, count)


@triton.jit
def _judge_tile(z, tile, best, scale, its_ids, its_values, masses, counts, TILE_GROUPS: tl.constexpr):
    """Stores the mass and the number of a tile's tokens that come before each draw."""
    weights = tl.exp2((z - best) * scale)
    order = ordered(z)
    first = tile * TILE_GROUPS * GROUP
    last = first + TILE_GROUPS * GROUP
    for draw in range(N_DRAWS):
        value = ordered(tl.load(its_values + draw))
        token = tl.load(its_ids + draw)
        # Equal values come before by their id: all of a tile that ends before the draw's own id, none behind it.
        before = tl.where(order >= value + (last > token).to(tl.int32), weights, 0.0)
        mass = over_tile(before)
        count = over_tile((before > 0.0).to(tl.int32))  # none is 0: a draw has some weight, those before it no less
        if (first < token) & (last > token):
            level = tl.where((order == value) & (tile_ids(tile, TILE_GROUPS) < token), weights, 0.0)
            mass += over_tile(level)
            count += over_tile((level > 0.0).to(tl.int32))
        tl.store(masses + draw, mass)
        tl.store(counts + draw, count)


def rank_drawn(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: DeviceImage | AloneImage,
    work: Workspace,
    out: SampleOutput,
    *,
    side: bool,
    processed: bool,
    masked: bool,
) -> None:
    """Completes `out.ranks` of the rows that `select` or `settle` left to count."""
    rows, vocab = logits_RV.shape
    _rank_kernel[(PARTS, rows)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        image.table,
        image.masks if masked else None,
        image.masks.shape[1] if masked else 0,
        work.maxima,
        work.raw_maxima,
        image.side_ids,
        image.side_processed if processed else image.side_raw,
        work.side_len,
        work.ints,
        work.floats,
        out.tokens,
        out.ranks,
        work.tiles,
        vocab,
        work.groups,
        SIDE=side,
        PROCESSED=processed,
        TILE_GROUPS=_TILE_GROUPS,
        PARTS=PARTS,
        num_warps=WARPS,
    )


def judge_draws(
    logits_RV: torch.Tensor, slots_R: torch.Tensor, image: DeviceImage, work: Workspace, *, side: bool, masked: bool
) -> None:
    """Fills `work.ahead_mass` and `work.ahead_count` for the rows whose draws wait to be judged."""
    rows, vocab = logits_RV.shape
    _judge_kernel[(triton.cdiv(work.tiles, TILES_AT_ONCE), rows)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        image.table,
        image.masks if masked else None,
        image.masks.shape[1] if masked else 0,
        work.maxima,
        image.side_ids,
        image.side_processed,
        work.side_len,
        work.ints,
        work.floats,
        work.draw_ids,
        work.draw_values,
        work.ahead_mass,
        work.ahead_count,
        work.tiles,
        vocab,
        work.groups,
        SIDE=side,
        TILE_GROUPS=_TILE_GROUPS,
        TILES_AT_ONCE=TILES_AT_ONCE,
        num_warps=WARPS,
    )
