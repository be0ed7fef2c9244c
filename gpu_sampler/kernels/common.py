"""Holds what the kernels of the sampler share: a row's words of state, its values and total order, and early launches.

Shape legend: V vocabulary, G groups of 128 ids, W words of a slot. A side list holds the tokens that
`apply_logits_processors` took out of the logits, where they stand as -inf: their ids, and their values before and after
bias, bans and penalties.

Programmatic dependent launch (PDL; CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization")
starts a kernel before the previous one ends, on GPUs of compute capability 9.0 or newer. Data that such a kernel reads
before it waits is from before the previous kernel began. It waits for that one to end, so a chain of them misses
nothing either. Values are the same with and without.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

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
MIN_PDL_CAPABILITY: Final = 90  # the compute capability that has the instructions
MEASURED_CAPABILITY: Final = 90  # where kernels of a step's layers gain by it
MIN_CAPTURING_DRIVER: Final = 12_030  # of CUDA 12.3, the first whose graphs hold such launches


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the previous kernel is done and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel start, once every program of this one has called this or ended.

    A next kernel that is not launched with `pdl_options` waits as usual. Programs of the next one take room while they
    wait, so that this may cost more than it gains: where each kernel calls it is measured.
    """
    if PDL:
        gdc_launch_dependents()


def pdl_options() -> dict[str, Any]:
    """Returns launch options that start a kernel early where the GPU can: the constant PDL, and `launch_pdl`."""
    if triton.knobs.runtime.interpret or _capability(driver.active) < MIN_PDL_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def captured_pdl_options() -> dict[str, Any]:
    """Returns the same for kernels of a step's layers, which CUDA graphs hold: where they gain by it, and the driver
    captures such launches."""
    options = pdl_options()
    if options["PDL"] and _capability(driver.active) == MEASURED_CAPABILITY and _driver_captures_pdl():
        return options
    return {"PDL": False}


def _driver_captures_pdl() -> bool:
    version = _driver_version()
    return version is None or version >= MIN_CAPTURING_DRIVER


@lru_cache(maxsize=1)
def _driver_version() -> int | None:
    """Returns the version of CUDA that the driver has, 12040 for 12.4; None in a dry run of a torch without CUDA."""
    version: Any = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if version is None else int(version()) or None


@lru_cache(maxsize=4)
def _capability(active: Any) -> int:
    return int(active.get_current_target().arch)


class RowLogits(NamedTuple):
    """Names one row as the functions of kernels read it; a kernel makes it from its arguments."""

    logits: Any  # pointer to the row: [V] bf16, fp16 or f32
    side_ids: Any  # pointer to the row's side list: i32 [length]
    side: Any  # f32 [length], its raw or its processed values; None where no row has a side list
    length: Any
    masks: Any  # i32 [M, mask_words] allow masks; None where no row has one
    mask_row: Any  # the row's own; negative for none
    mask_words: Any
    V: Any


@triton.jit
def side_extent(table, slot, side_len, r, SIDE: tl.constexpr):
    """Returns (start i64, length) of a row's side list; (0, 0) where no row has one."""
    length = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int64)
    if SIDE:
        length = tl.load(side_len + r)
        start = word(table, slot, OVERLAY_START).to(tl.int64)
    return start, length


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
def raw_values(logits, ids, inside):
    """Returns f32 logits of `ids`, -inf for NaN, +inf, and ids that are not `inside`."""
    z = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(z < float("inf"), z, -float("inf"))


@triton.jit
def values(row, ids, inside):
    """Returns `raw_values` of a row, -inf also for ids that its mask forbids.

    A branch on the mask would give the values another layout, and sums over them other bits.
    """
    z = raw_values(row.logits, ids, inside)
    if row.masks is not None:
        z = tl.where(allowed(ids, inside, row.masks, row.mask_row, row.mask_words), z, -float("inf"))
    return z


@triton.jit
def allowed(ids, inside, masks, mask_row, mask_words):
    """Returns whether a slot's mask has the bit of each id; true for all ids where `mask_row` is negative."""
    read = inside & (ids < tl.where(mask_row >= 0, 0x7FFFFFFF, 0))
    bits = tl.load(masks + mask_row.to(tl.int64) * mask_words + (ids >> 5), mask=read, other=-1)
    return ((bits >> (ids & 31)) & 1) != 0


@triton.jit
def values_with_side(row, ids, BLOCK: tl.constexpr):
    """Returns f32 [N] values of any ids, those of the side list included; -inf outside of [0, V)."""
    z = values(row, ids, (ids >= 0) & (ids < row.V))
    if row.side is not None:
        z = tl.maximum(z, side_find(row, ids, BLOCK))
    return z


@triton.jit
def tile_ids(tile, GROUPS: tl.constexpr):
    """Returns the ids of a tile, i32 [GROUPS, 4, 32].

    In this shape the four quarters of a group lie in the registers of the same lanes (a warp holds 8 groups of 16-bit
    values, four lanes each), so that a reduction over a group takes two steps between lanes instead of four.
    """
    group = tl.arange(0, GROUPS) + tile * GROUPS
    return group[:, None, None] * GROUP + tl.arange(0, 4)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]


@triton.jit
def raw_tile(logits, tile, V, GROUPS: tl.constexpr):
    """Returns `raw_values` of a tile, f32 [GROUPS, 4, 32]."""
    ids = tile_ids(tile, GROUPS)
    return raw_values(logits, ids, ids < V)


@triton.jit
def tile_values(row, tile, GROUPS: tl.constexpr):
    """Returns `values` of a tile, f32 [GROUPS, 4, 32]."""
    z = raw_tile(row.logits, tile, row.V, GROUPS)
    if row.masks is not None:
        bits = _mask_bits(row, tile, GROUPS)
        z = tl.where(((bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1) != 0, z, -float("inf"))
    return z


@triton.jit
def _mask_bits(row, tile, GROUPS: tl.constexpr):
    """Returns the words [GROUPS, 4] of a row's mask for a tile.

    One word is read for 32 ids, so that the bits take the layout of the values and not the other way round: the sums
    over the values keep their bits.
    """
    at = (tl.arange(0, GROUPS) + tile * GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    read = at < tl.where(row.mask_row >= 0, row.mask_words, 0)
    return tl.load(row.masks + row.mask_row.to(tl.int64) * row.mask_words + at, mask=read, other=-1)


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
def pairs_allowed(row, tile, GROUPS: tl.constexpr):
    """Returns whether the row's mask has the ids of the low and of the high half of `pairs`."""
    here = _mask_bits(row, tile, GROUPS)[:, :, None] >> (2 * tl.arange(0, 16))[None, None, :]
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
def side_block(row, start):
    """Returns (ids, values) [SIDE_BLOCK] of a side list from `start` on; (0, -inf) after its end."""
    at = start + tl.arange(0, SIDE_BLOCK)
    ids = tl.load(row.side_ids + at, mask=at < row.length, other=0)
    return ids, tl.load(row.side + at, mask=at < row.length, other=-float("inf"))


@triton.jit
def side_max(row):
    """Returns the largest value of a side list, -inf if it is empty."""
    best = tl.full([SIDE_BLOCK], -float("inf"), tl.float32)
    for start in range(0, row.length, SIDE_BLOCK):
        best = tl.maximum(best, side_block(row, start)[1])
    return tl.max(best, axis=0)


@triton.jit
def side_sum(row, shift, scale):
    """Returns the sum of 2^((value - shift) scale) over a side list."""
    total = tl.zeros([SIDE_BLOCK], tl.float32)
    for start in range(0, row.length, SIDE_BLOCK):
        total += tl.exp2((side_block(row, start)[1] - shift) * scale)
    return tl.sum(total, axis=0)


@triton.jit
def side_find(row, ids_N, BLOCK: tl.constexpr):
    """Returns the value f32 [N] that a side list has for each id, -inf where it has none.

    A token may stand in the list twice, one of the two times with -inf.
    """
    found_N = tl.full(ids_N.shape, -float("inf"), tl.float32)
    for start in range(0, row.length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < row.length
        other_B = tl.load(row.side_ids + at, mask=inside, other=-1)
        value_B = tl.load(row.side + at, mask=inside, other=-float("inf"))
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
