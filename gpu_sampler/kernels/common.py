"""Reads what every kernel of the sampler needs of a row: its words of state, its values, and its total order.

Shape legend: V vocabulary, G groups of 128 ids, W words of a slot. A side list holds the tokens that
`apply_logits_processors` took out of the logits, where they stand as -inf: their ids, and their values before and after
bias, bans and penalties.
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.state.host_state import SlotFlag
from gpu_sampler.state.layout import Word
from gpu_sampler.workspace import BOUND_HIGH, BOUND_LOW

GROUP: tl.constexpr = tl.constexpr(128)
SLOT_WORDS: tl.constexpr = tl.constexpr(int(Word.SLOT_WORDS))
SEED_LOW: tl.constexpr = tl.constexpr(int(Word.SEED_LOW))
SEED_HIGH: tl.constexpr = tl.constexpr(int(Word.SEED_HIGH))
BRANCH: tl.constexpr = tl.constexpr(int(Word.BRANCH))
POSITION: tl.constexpr = tl.constexpr(int(Word.POSITION))
TEMPERATURE: tl.constexpr = tl.constexpr(int(Word.TEMPERATURE))
TOP_K: tl.constexpr = tl.constexpr(int(Word.TOP_K))
TOP_P: tl.constexpr = tl.constexpr(int(Word.TOP_P))
LOG_MIN_P: tl.constexpr = tl.constexpr(int(Word.LOG_MIN_P))
FLAGS: tl.constexpr = tl.constexpr(int(Word.FLAGS))
OVERLAY_START: tl.constexpr = tl.constexpr(int(Word.OVERLAY_START))
N_TOP: tl.constexpr = tl.constexpr(int(Word.N_TOP))
N_CHOSEN: tl.constexpr = tl.constexpr(int(Word.N_CHOSEN))
MASK_ROW: tl.constexpr = tl.constexpr(int(Word.MASK_ROW))
CHOSEN: tl.constexpr = tl.constexpr(int(Word.CHOSEN))
GREEDY: tl.constexpr = tl.constexpr(int(SlotFlag.GREEDY))
WANTS_LOGPROBS: tl.constexpr = tl.constexpr(int(SlotFlag.WANTS_LOGPROBS))
HAS_MASK: tl.constexpr = tl.constexpr(int(SlotFlag.HAS_MASK))
HAS_OVERLAY: tl.constexpr = tl.constexpr(int(SlotFlag.HAS_OVERLAY))

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_KEY: tl.constexpr = tl.constexpr(-(2**63))  # below every key of a token
SIDE_BLOCK: tl.constexpr = tl.constexpr(1024)
_NOTHING_BF16: tl.constexpr = tl.constexpr(0xFF80FF80 - 2**32)  # two of -inf
_NOTHING_F16: tl.constexpr = tl.constexpr(0xFC00FC00 - 2**32)
_NOTHING_F32: tl.constexpr = tl.constexpr(0xFF800000FF800000 - 2**64)
_LOW_WORD: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def word(table, slot, index: tl.constexpr):
    """Returns one word of a slot, an i32 scalar."""
    return tl.load(table + slot * SLOT_WORDS + index)


@triton.jit
def number(table, slot, index: tl.constexpr):
    """Returns one word of a slot as an f32 scalar, its bits taken as a number."""
    return word(table, slot, index).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(table, slot):
    """Returns the 64-bit seed of a slot, a u64 scalar."""
    low = word(table, slot, SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = word(table, slot, SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def values(row, ids, inside, masks, mask_row, mask_words):
    """Returns f32 logits of `ids`, -inf for NaN, +inf, ids that are not `inside`, and ids that the slot's mask forbids.

    `masks` is None where no row has one. A branch would give the values another layout, and sums over them other bits.
    """
    z = tl.load(row + ids, mask=inside, other=-float("inf")).to(tl.float32)
    z = tl.where(z < float("inf"), z, -float("inf"))
    if masks is not None:
        z = tl.where(allowed(ids, inside, masks, mask_row, mask_words), z, -float("inf"))
    return z


@triton.jit
def allowed(ids, inside, masks, mask_row, mask_words):
    """Returns whether a slot's mask has the bit of each id; true for all ids where `mask_row` is negative."""
    read = inside & (ids < tl.where(mask_row >= 0, 0x7FFFFFFF, 0))
    bits = tl.load(masks + mask_row.to(tl.int64) * mask_words + (ids >> 5), mask=read, other=-1)
    return ((bits >> (ids & 31)) & 1) != 0


@triton.jit
def tile_ids(tile, GROUPS: tl.constexpr):
    """Returns the ids of a tile, i32 [GROUPS, 4, 32].

    In this shape the four quarters of a group lie in the registers of the same lanes (a warp holds 8 groups of 16-bit
    values, four lanes each), so that a reduction over a group takes two steps between lanes instead of four.
    """
    group = tl.arange(0, GROUPS) + tile * GROUPS
    return group[:, None, None] * GROUP + tl.arange(0, 4)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]


@triton.jit
def tile_values(row, tile, V, masks, mask_row, mask_words, GROUPS: tl.constexpr):
    """Returns `values` of a tile, f32 [GROUPS, 4, 32]."""
    ids = tile_ids(tile, GROUPS)
    z = tl.load(row + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    z = tl.where(z < float("inf"), z, -float("inf"))
    if masks is not None:
        z = tl.where(tile_allowed(tile, masks, mask_row, mask_words, GROUPS), z, -float("inf"))
    return z


@triton.jit
def tile_allowed(tile, masks, mask_row, mask_words, GROUPS: tl.constexpr):
    """Returns `allowed` of a tile, [GROUPS, 4, 32].

    It reads one word of the mask for 32 ids, so that the bits take the layout of the values and not the other way
    round: the sums over the values keep their bits.
    """
    at = (tl.arange(0, GROUPS) + tile * GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    read = at < tl.where(mask_row >= 0, mask_words, 0)
    bits = tl.load(masks + mask_row.to(tl.int64) * mask_words + at, mask=read, other=-1)
    return ((bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1) != 0


@triton.jit
def pair_ids(tile, GROUPS: tl.constexpr):
    """Returns half the even ids of a tile, i32 [GROUPS, 4, 16]."""
    group = tl.arange(0, GROUPS) + tile * GROUPS
    half = group[:, None, None] * (GROUP // 2) + tl.arange(0, 4)[None, :, None] * 16
    return half + tl.arange(0, 16)[None, None, :]


@triton.jit
def pairs(row, tile, V, WORDS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns words [GROUPS, 4, 16] of a tile: an even id's value and, in the high half, its neighbour's; -inf after V.

    `WORDS`: the row can be loaded so, which needs an even V and an aligned row (`in_words`).
    """
    ids = pair_ids(tile, GROUPS)
    if WORDS:
        inside = ids < V // 2
        if row.dtype.element_ty == tl.float32:
            words = tl.load(row.to(tl.pointer_type(tl.int64)) + ids, mask=inside, other=_NOTHING_F32)
        elif row.dtype.element_ty == tl.float16:
            words = tl.load(row.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=_NOTHING_F16)
        else:
            words = tl.load(row.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=_NOTHING_BF16)
    else:
        low = tl.load(row + 2 * ids, mask=2 * ids < V, other=-float("inf"))
        high = tl.load(row + 2 * ids + 1, mask=2 * ids + 1 < V, other=-float("inf"))
        if row.dtype.element_ty == tl.float32:
            low_bits = low.to(tl.int32, bitcast=True).to(tl.int64) & _LOW_WORD
            words = low_bits | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)
        else:
            low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            words = low_bits | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


def in_words(logits_RV: torch.Tensor) -> bool:
    """Returns whether `pairs` can load words in every row of logits [R, V]."""
    even = logits_RV.shape[1] % 2 == 0 and logits_RV.stride(0) % 2 == 0
    return even and logits_RV.data_ptr() % (2 * logits_RV.element_size()) == 0


@triton.jit
def halves(words, like):
    """Returns the two values (f32, f32) [GROUPS, 4, 16] of each of `pairs`, of the type that `like` points to."""
    if like.dtype.element_ty == tl.float32:
        low = words.to(tl.int32).to(tl.float32, bitcast=True)
        high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif like.dtype.element_ty == tl.float16:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def pairs_allowed(tile, masks, mask_row, mask_words, GROUPS: tl.constexpr):
    """Returns `tile_allowed` of the low and of the high half of `pairs`."""
    at = (tl.arange(0, GROUPS) + tile * GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    read = at < tl.where(mask_row >= 0, mask_words, 0)
    bits = tl.load(masks + mask_row.to(tl.int64) * mask_words + at, mask=read, other=-1)
    here = bits[:, :, None] >> (2 * tl.arange(0, 16))[None, None, :]
    return (here & 1) != 0, (here & 2) != 0


@triton.jit
def by_group(x):
    """Shapes a value a group as [GROUPS, 1, 1]."""
    return x[:, None, None]


@triton.jit
def group_base(best):
    """Returns the largest value of each group, [GROUPS, 1, 1]; 0 where a group has nothing finite."""
    return by_group(tl.where(best > -float("inf"), best, 0.0))


@triton.jit
def group_max(z):
    """Returns the maxima [GROUPS] of a tile."""
    return tl.max(tl.max(z, axis=1), axis=1)


@triton.jit
def group_sum(z):
    """Returns the sums [GROUPS] of a tile."""
    return tl.sum(tl.sum(z, axis=1), axis=1)


@triton.jit
def over_tile(x):
    """Returns the sum over [GROUPS, 4, 32]."""
    return tl.sum(tl.sum(tl.sum(x, axis=1), axis=1), axis=0)


@triton.jit
def ordered(z):
    """Returns i32 whose order is that of the f32 values, -0 equal to +0."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def next_above(z):
    """Returns the smallest f32 above a scalar that is no NaN; NaN above +inf."""
    bits = ordered(z) + 1
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits).to(tl.float32, bitcast=True)


@triton.jit
def key(z, ids):
    """Returns i64 whose descending order is the total order: value descending, id ascending."""
    return (ordered(z).to(tl.int64) << 32) | (ids.to(tl.int64) ^ _LOW_WORD)


@triton.jit
def id_of(keys):
    """Returns the ids of keys, i32."""
    return ((keys & _LOW_WORD) ^ _LOW_WORD).to(tl.int32)


@triton.jit
def value_of(keys):
    """Returns the values of keys, f32."""
    bits = (keys >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits).to(tl.float32, bitcast=True)


@triton.jit
def side_max(side, length):
    """Returns the largest value of a side list, -inf if it is empty."""
    best = tl.full([SIDE_BLOCK], -float("inf"), tl.float32)
    for start in range(0, length, SIDE_BLOCK):
        at = start + tl.arange(0, SIDE_BLOCK)
        best = tl.maximum(best, tl.load(side + at, mask=at < length, other=-float("inf")))
    return tl.max(best, axis=0)


@triton.jit
def side_sum(side, length, shift, scale):
    """Returns the sum of 2^((value - shift) scale) over a side list."""
    total = tl.zeros([SIDE_BLOCK], tl.float32)
    for start in range(0, length, SIDE_BLOCK):
        at = start + tl.arange(0, SIDE_BLOCK)
        z = tl.load(side + at, mask=at < length, other=-float("inf"))
        total += tl.exp2((z - shift) * scale)
    return tl.sum(total, axis=0)


@triton.jit
def side_find(side_ids, side, length, ids_N, BLOCK: tl.constexpr):
    """Returns the value f32 [N] that a side list has for each id, -inf where it has none.

    A token may stand in the list twice, one of the two times with -inf.
    """
    found_N = tl.full(ids_N.shape, -float("inf"), tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        other_B = tl.load(side_ids + at, mask=inside, other=-1)
        value_B = tl.load(side + at, mask=inside, other=-float("inf"))
        same_NB = ids_N[:, None] == other_B[None, :]
        found_N = tl.maximum(found_N, tl.max(tl.where(same_NB, value_B[None, :], -float("inf")), axis=1))
    return found_N


@triton.jit
def store_bound(ints, bound):
    """Stores an i64 key as the BOUND words of a row's integers."""
    tl.store(ints + BOUND_LOW, (bound & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True))
    tl.store(ints + BOUND_HIGH, (bound >> 32).to(tl.int32))


@triton.jit
def load_bound(ints):
    """Returns the key that `store_bound` stored."""
    low = tl.load(ints + BOUND_LOW).to(tl.uint32, bitcast=True).to(tl.int64)
    return (tl.load(ints + BOUND_HIGH).to(tl.int64) << 32) | low
