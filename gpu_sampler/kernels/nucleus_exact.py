"""`nucleus_scan`: which tokens of a row stay, however many those are, by bisection over the keys of the total order.

A token stays iff its key reaches a bound: the k-th key, or the largest key t whose mass down to t is at least p of the
whole (then the mass strictly before every token from t on is below p, and of no token after it). Each step of a
bisection reads the row once: slow, and only for rows that keep more than a list holds.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.common import NO_KEY, SIDE_BLOCK, key, over_tile, tile_ids, tile_values
from gpu_sampler.kernels.philox import SAMPLE_TOKEN, gumbel

SCAN_GROUPS: tl.constexpr = tl.constexpr(64)
SCAN_BLOCK: tl.constexpr = tl.constexpr(64 * 128)
_ONES: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def reach(
    row, side_ids, side, length, masks, mask_row, mask_words, bound, best, temperature, log_min_p, scale, V,
    SIDE: tl.constexpr,
):  # fmt: skip
    """(count i32, mass f32) of the tokens whose key is at least `bound` and that pass min-p."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([SCAN_GROUPS, 4, 32], tl.float32)
    for start in range(0, V, SCAN_BLOCK):
        ids = tile_ids(start // SCAN_BLOCK, SCAN_GROUPS)
        z = tile_values(row, start // SCAN_BLOCK, V, masks, mask_row, mask_words, SCAN_GROUPS)
        stays = (z > -float("inf")) & (key(z, ids) >= bound) & ((z - best) / temperature >= log_min_p)
        count += over_tile(stays.to(tl.int32))
        mass += tl.where(stays, tl.exp2((z - best) * scale), 0.0)
    total = over_tile(mass)
    if SIDE:
        more = tl.zeros([SIDE_BLOCK], tl.float32)
        for start in range(0, length, SIDE_BLOCK):
            at = start + tl.arange(0, SIDE_BLOCK)
            singles = tl.load(side_ids + at, mask=at < length, other=0)
            x = tl.load(side + at, mask=at < length, other=-float("inf"))
            remain = (x > -float("inf")) & (key(x, singles) >= bound) & ((x - best) / temperature >= log_min_p)
            count += tl.sum(remain.to(tl.int32), axis=0)
            more += tl.where(remain, tl.exp2((x - best) * scale), 0.0)
        total += tl.sum(more, axis=0)
    return count, total


@triton.jit
def bound_of(
    row, side_ids, side, length, masks, mask_row, mask_words, best, temperature, scale, wanted, V,
    ID_BITS: tl.constexpr, SIDE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The largest key down to which the count (or, with MASS, the mass) is at least `wanted`; NO_KEY if none is."""
    found = tl.full([], NO_KEY, tl.int64)
    bit = found  # the sign bit first: it is cleared where the lower ones are set
    for step in range(32 + ID_BITS):
        if step == 32:  # the low word of every key has ones above its ID_BITS
            found = found | (_ONES >> ID_BITS << ID_BITS)
            bit = bit >> (32 - ID_BITS)
        raised = found ^ bit
        count, mass = reach(
            row, side_ids, side, length, masks, mask_row, mask_words, raised, best, temperature, -float("inf"), scale,
            V, SIDE,
        )  # fmt: skip
        if MASS:
            enough = mass >= wanted
        else:
            enough = count >= wanted
        found = tl.where(enough, raised, found)
        bit = (bit >> 1) & 0x7FFFFFFFFFFFFFFF
    return found


@triton.jit
def draw_kept(
    row, side_ids, side, length, masks, mask_row, mask_words, bound, best, temperature, log_min_p,
    seed, position, branch, round_, V, SIDE: tl.constexpr,
):  # fmt: skip
    """(id, value) of one draw among the tokens from `bound` on that pass min-p, one Gumbel number each."""
    score = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    value = tl.full([], -float("inf"), tl.float32)
    for start in range(0, V, SCAN_BLOCK):
        ids = tile_ids(start // SCAN_BLOCK, SCAN_GROUPS)
        z = tile_values(row, start // SCAN_BLOCK, V, masks, mask_row, mask_words, SCAN_GROUPS)
        score, token, value = _better(
            z, ids, bound, best, temperature, log_min_p, seed, position, branch, round_, score, token, value
        )
    if SIDE:
        for start in range(0, length, SIDE_BLOCK):
            at = start + tl.arange(0, SIDE_BLOCK)
            singles = tl.load(side_ids + at, mask=at < length, other=0)
            x = tl.load(side + at, mask=at < length, other=-float("inf"))
            score, token, value = _better(
                x, singles, bound, best, temperature, log_min_p, seed, position, branch, round_, score, token, value
            )
    return token, value


@triton.jit
def _better(z, ids, bound, best, temperature, log_min_p, seed, position, branch, round_, score, token, value):
    x = (z - best) / temperature
    stays = (z > -float("inf")) & (key(z, ids) >= bound) & (x >= log_min_p)
    scores = tl.where(stays, x + gumbel(ids, seed, position, SAMPLE_TOKEN, round_, branch), -float("inf"))
    own = tl.max(tl.ravel(scores), axis=0)
    wins = own > score
    here = tl.min(tl.ravel(tl.where(scores == own, ids, 0x7FFFFFFF)), axis=0)
    token = tl.where(wins, here, token)
    value = tl.where(wins, tl.max(tl.ravel(tl.where(ids == here, z, -float("inf"))), axis=0), value)
    return tl.maximum(score, own), token, value
