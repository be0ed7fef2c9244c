"""Lists the first tokens of a row's total order, from its group maxima and a small re-read.

The group lemma: let tau be the n-th largest group maximum. The groups above tau and the first of those at tau (by id, n
in all) hold the first n tokens of the total order, whatever the ties. Their tokens not below tau are gathered into a
scratch list, with those of the side list, and sorted. Where that list is too small (a row of equal values, say),
bisection finds the n-th key exactly, and only the keys down to it are gathered.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_sampler.kernels.common import GROUP, LOG2_E, NO_KEY, SIDE_BLOCK, key, ordered, value_of, values
from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.workspace import LIST, SCRATCH

_LIST: tl.constexpr = tl.constexpr(LIST)
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
_CANDIDATES: tl.constexpr = tl.constexpr(CANDIDATES)
_FEW: tl.constexpr = tl.constexpr(64)  # a nucleus is looked for among so many tokens first
_SURELY_WIDE: tl.constexpr = tl.constexpr(1.001 * CANDIDATES)
_GROUPS_AT_ONCE: tl.constexpr = tl.constexpr(32)
_IN_A_LANE: tl.constexpr = tl.constexpr(8)  # values that one lane loads together, and counts without the others
_AT_ONCE: tl.constexpr = tl.constexpr(16)  # keys that all others are compared with
_LEAST: tl.constexpr = tl.constexpr(-(2**31))
_NOTHING: tl.constexpr = tl.constexpr(-2139095041)  # `ordered` of -inf


class RowFilters(NamedTuple):
    """Holds what a row's filters keep tokens by."""

    best: Any  # its largest value
    temperature: Any
    top_k: Any  # 0: off
    top_p: Any  # 1: off
    log_min_p: Any  # -inf: off
    total: Any  # the sum of exponentials of all tokens, to which top-p refers without a top-k


@triton.jit
def list_of_row(
    row, m, picked, scratch, n_list, limited, nucleus, filters,
    GROUPS: tl.constexpr, HALF: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Returns (keys, count, need, listed, x, weights, kept): the list of the row in `scratch`, and what stays.

    The first `need` keys are those of the order, if there are as many: `n_list` to report, a top-k of at most 256 where
    the row is `limited`, and what shows the end of a `nucleus`. `listed`: all that the row keeps stands there."""
    keys = tl.full([_LIST], NO_KEY, tl.int64)
    count = tl.zeros([], tl.int32)
    x = tl.full([_LIST], -float("inf"), tl.float32)
    weights = tl.zeros([_LIST], tl.float32)
    kept = tl.arange(0, _LIST) < 0
    listed = limited & (filters.top_k <= _CANDIDATES)
    need = tl.maximum(n_list, tl.where(listed, filters.top_k, tl.where(nucleus, _FEW, 0)))
    # Each of the first 256 tokens weighs at most 1: where that cannot reach p of the whole, and min-p cuts nothing, no
    # list needs to be seen.
    wide = nucleus & (filters.top_p < 1.0) & (filters.top_p * filters.total > _SURELY_WIDE)
    wide = wide & (filters.log_min_p == -float("inf"))
    need = tl.where(wide, n_list, need)
    if LISTS:
        looking = need > 0
        while looking:
            keys, count = first_of_order(row, m, picked, scratch, need, GROUPS, HALF)
            looking = nucleus & ~nucleus
            if listed | nucleus:
                x, weights, kept = kept_of_list(keys, count, filters, limited)
            if nucleus & ~wide:
                seen = tl.sum(kept.to(tl.int32), axis=0)
                # The list shows the end of the nucleus if it goes on behind it, or holds all that is finite.
                ended = (seen < tl.minimum(need, count)) | (count < need)
                listed = ended & (seen <= _CANDIDATES)
                looking = ~ended & (need <= _CANDIDATES)
                need = tl.where(looking, _CANDIDATES + 1, need)
    return keys, count, need, listed, x, weights, kept


@triton.jit
def first_of_order(row, m, picked, scratch, need, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Returns (keys i64 [LIST], their number) from the group maxima m [GROUPS].

    The first `need` <= 257 tokens with a finite value come first, in order, then some of those that follow, then
    NO_KEY. `HALF`: the values have no more than 16 bits, so that half a search is enough.
    """
    tl.debug_barrier()  # the scratch lists may still be read
    tau, n_picked = _pick_groups(m, picked, need, GROUPS, HALF)
    tl.debug_barrier()
    bound = tau.to(tl.int64) << 32
    count = _gather(row, picked, n_picked, scratch, bound)
    if count > _SCRATCH:
        bound = _nth_key(row, picked, n_picked, need)
        tl.debug_barrier()
        count = _gather(row, picked, n_picked, scratch, bound)
    tl.debug_barrier()
    if count > _LIST:
        count = _cut(scratch, count, need)
        tl.debug_barrier()
    return _sorted(scratch, count), count


@triton.jit
def _sorted(scratch, count):
    """Returns the keys i64 [LIST] of the scratch list, descending, then NO_KEY.

    No two are equal, so that the place of a key is the number of keys before it. For a list of the usual hundred this
    is a fraction of a sorting network's instructions, and of the code to fetch.
    """
    at = tl.arange(0, _LIST)
    keys = tl.load(scratch + at, mask=at < count, other=NO_KEY)
    places = tl.zeros([_LIST], tl.int32)
    some = tl.arange(0, _AT_ONCE)
    others = tl.load(scratch + some, mask=some < count, other=NO_KEY)
    for start in range(0, count, _AT_ONCE):
        following = start + _AT_ONCE + some
        ahead = tl.load(scratch + following, mask=following < count, other=NO_KEY)  # under way while these are counted
        places += tl.sum((others[:, None] > keys[None, :]).to(tl.int32), axis=0)
        others = ahead
    tl.store(scratch + _LIST + places, keys, mask=at < count)
    tl.debug_barrier()
    return tl.load(scratch + _LIST + at, mask=at < count, other=NO_KEY)


@triton.jit
def _cut(scratch, count, need):
    """Leaves the first `need` keys of the scratch list and some that follow, at most LIST; returns their number."""
    at = _in_lanes(_SCRATCH)
    keys = tl.load(scratch + at, mask=at < count, other=NO_KEY)
    tl.debug_barrier()
    high = (keys >> 32).to(tl.int32)
    bound = tl.full([], _LEAST, tl.int32)
    bit = bound  # the sign bit first: it is cleared where the lower ones are set
    for _ in range(32):
        raised = bound ^ bit
        bound = tl.where(_number(high >= raised) >= need, raised, bound)
        bit = (bit >> 1) & 0x7FFFFFFF
    least = bound.to(tl.int64) << 32
    if _number(keys >= least) > _LIST:  # many equal values: the lower words decide
        low_bit = tl.full([], 1 << 31, tl.int64)
        for _ in range(32):
            lower = least | low_bit
            least = tl.where(_number(keys >= lower) >= need, lower, least)
            low_bit = low_bit >> 1
    return _append(scratch, tl.zeros([], tl.int32), keys, keys >= least)


@triton.jit
def _pick_groups(m, picked, need, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Writes the ids of at most `need` groups, ascending; returns (tau as `ordered`, number of groups)."""
    groups = tl.arange(0, GROUPS)
    best = ordered(m)
    places = best.to(tl.uint32, bitcast=True) ^ 0x80000000
    if HALF:
        places = places >> 16
    finite = best > _NOTHING
    tau, bit = _search_from(places, finite, need)
    while bit != 0:  # two bits a turn: what a turn takes is the exchange between warps, not the counting
        low = tau + (bit >> 1)
        high = tau + bit
        both = high + (bit >> 1)
        numbers = _reaching(places, low, 0) + _reaching(places, high, 16) + _reaching(places, both, 32)
        reached = tl.sum(numbers, axis=0)
        to_low = ((reached & 0xFFFF) >= need) & (low > tau)  # a sum past 32 bits is none
        to_high = (((reached >> 16) & 0xFFFF) >= need) & (high > tau)
        to_both = ((reached >> 32) >= need) & (both > tau)
        tau = tl.where(to_both, both, tl.where(to_high, high, tl.where(to_low, low, tau)))
        bit = bit >> 2
    above = finite & (places > tau)
    level = finite & (places == tau)
    wholes = above.to(tl.int32) + (level.to(tl.int32) << 16)
    through = tl.cumsum(wholes, axis=0)
    n_above = tl.sum(above.to(tl.int32), axis=0)
    n_level = tl.sum(level.to(tl.int32), axis=0)
    if HALF:
        tau = tau << 16
    least = (tau ^ 0x80000000).to(tl.int32, bitcast=True)
    room = tl.minimum(need - n_above, n_level)
    nth_level = through >> 16
    chosen = above | (level & (nth_level <= room))
    at = (through & 0xFFFF) + tl.minimum(nth_level, room) - 1
    tl.store(picked + at, groups, mask=chosen)
    return tl.maximum(least, _NOTHING + 1), n_above + room  # tau is below every value where there are too few groups


@triton.jit
def _reaching(places, bound, SHIFT: tl.constexpr):
    """Returns i64 1 << SHIFT for each place that reaches `bound`, of fewer than 2^16 places."""
    return (places >= bound).to(tl.int64) << SHIFT


@triton.jit
def _search_from(places, finite, need):
    """Returns (u32, u32): a place that at least `need` groups reach, and the largest step of the search from there.

    The search for the highest such place goes between the smallest and the largest place, which are near each other.
    With too few groups it is over, at 0.
    """
    least = tl.min(tl.where(finite, places, 0xFFFFFFFF), axis=0)
    span = tl.max(tl.where(finite, places, 0), axis=0) - least
    exponent = ((span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127).to(tl.uint32, bitcast=True)
    few = tl.sum(finite.to(tl.int32), axis=0) < need
    step = tl.where(few | (span == 0), 0, tl.full([], 1, tl.uint32) << tl.minimum(exponent, 31))
    return tl.where(few, 0, least), step


@triton.jit
def _gather(row, picked, n_picked, scratch, bound):
    """Writes the keys that are not below `bound` to the scratch list, as far as it holds; returns their number."""
    count = tl.zeros([], tl.int32)
    for start in range(0, n_picked, _GROUPS_AT_ONCE):
        keys = _picked_keys(row, picked, n_picked, start)
        count = _append(scratch, count, keys, keys >= bound)
    if row.side is not None:
        for start in range(0, row.length, SIDE_BLOCK):
            keys = _side_keys(row, start)
            count = _append(scratch, count, keys, keys >= bound)
    return count


@triton.jit
def _in_lanes(COUNT: tl.constexpr):
    """Returns 0 to COUNT - 1 as i32 [8, COUNT / 8]. A lane has the whole of a column."""
    columns: tl.constexpr = COUNT // _IN_A_LANE
    return tl.arange(0, _IN_A_LANE)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def _number(chosen):
    """Returns how many of [A, B] are true."""
    return tl.sum(tl.sum(chosen.to(tl.int32), axis=0), axis=0)


@triton.jit
def _append(scratch, count, keys, chosen):
    """Writes the `chosen` keys of [A, B] after the first `count`; returns the new number."""
    one = chosen.to(tl.int32)
    in_B = tl.sum(one, axis=0)
    before_B = tl.cumsum(in_B, axis=0) - in_B
    at = count + before_B[None, :] + tl.cumsum(one, axis=0) - 1
    tl.store(scratch + at, keys, mask=chosen & (at < _SCRATCH))
    return count + tl.sum(in_B, axis=0)


@triton.jit
def _picked_keys(row, picked, n_picked, start):
    """Returns the keys i64 [8, GROUPS_AT_ONCE x 16] of some of the picked groups, NO_KEY for none."""
    lanes: tl.constexpr = GROUP // _IN_A_LANE
    column = tl.arange(0, _GROUPS_AT_ONCE * lanes)
    at = start + column // lanes
    groups = tl.load(picked + at, mask=at < n_picked, other=0)
    first = groups * GROUP + (column % lanes) * _IN_A_LANE
    ids = first[None, :] + tl.arange(0, _IN_A_LANE)[:, None]
    inside = (at < n_picked)[None, :] & (ids < row.V)
    z = values(row, ids, inside)
    return tl.where(z > -float("inf"), key(z, ids), NO_KEY)


@triton.jit
def _side_keys(row, start):
    """Returns the keys of a block of the side list, NO_KEY for none."""
    at = start + _in_lanes(SIDE_BLOCK)
    ids = tl.load(row.side_ids + at, mask=at < row.length, other=0)
    z = tl.load(row.side + at, mask=at < row.length, other=-float("inf"))
    return tl.where(z > -float("inf"), key(z, ids), NO_KEY)


@triton.jit
def _nth_key(row, picked, n_picked, need):
    """Returns the largest bound that at least `need` keys reach."""
    found = tl.full([], NO_KEY, tl.int64)
    bit = found  # the sign bit first: it is cleared where the lower ones are set
    for _ in range(64):
        raised = found ^ bit
        count = tl.zeros([], tl.int32)
        for start in range(0, n_picked, _GROUPS_AT_ONCE):
            count += _number(_picked_keys(row, picked, n_picked, start) >= raised)
        if row.side is not None:
            for start in range(0, row.length, SIDE_BLOCK):
                count += _number(_side_keys(row, start) >= raised)
        found = tl.where(count >= need, raised, found)
        bit = (bit >> 1) & 0x7FFFFFFFFFFFFFFF
    return found


@triton.jit
def kept_of_list(keys, count, filters, has_top_k):
    """Returns (x, weights, kept) of a list [LIST]: top-k, top-p and min-p keep a prefix of at least one token."""
    places = tl.arange(0, _LIST)
    valid = places < count
    valid = valid & (~has_top_k | (places < filters.top_k))
    x = tl.where(valid, (value_of(keys) - filters.best) / filters.temperature, -float("inf"))
    weights = tl.exp2(x * LOG2_E)
    whole = tl.where(has_top_k, tl.sum(weights, axis=0), filters.total)
    before = tl.cumsum(weights, axis=0) - weights
    limit = tl.where(filters.top_p < 1.0, filters.top_p * whole, float("inf"))
    kept = valid & ((places == 0) | ((before < limit) & (x >= filters.log_min_p)))
    # `before` is rounded: one token past a cut must not come back.
    cut = tl.min(tl.where(kept, _LIST, places), axis=0)
    return x, weights, kept & (places < cut)
