"""The statistics that `row_stats` leaves of a row, read again, and taken anew where NaN or +inf spoilt them."""

import triton
import triton.language as tl

from gpu_sampler.kernels.row import LOG2_E, group_base, group_max, group_sum, tile_ids, tile_values
from gpu_sampler.output import RowFlag

_FLAG_BAD_VALUE: tl.constexpr = tl.constexpr(int(RowFlag.BAD_VALUE))


@triton.jit
def groups_of(m_row, s_row, G, GROUPS: tl.constexpr):
    """The largest value and the sum of exponentials of each group, f32 [GROUPS]."""
    groups = tl.arange(0, GROUPS)
    m = tl.load(m_row + groups, mask=groups < G, other=-float("inf"))
    s = tl.load(s_row + groups, mask=groups < G, other=0.0)
    return m, s


@triton.jit
def mended_groups(
    row, m_row, s_row, to_m, to_s, raw_m_row, raw_s_row, masks, mask_row, mask_words, scale, raws, V, G,
    GROUPS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """`groups_of` and the flag of a row that holds NaN or +inf, whose groups are read again without those, into `to_m`
    and `to_s`: the rows that the groups came from, or others (MOVES). `raws`: the raw ones are mended with them."""
    flags = tl.zeros([], tl.int32)
    m, s = groups_of(m_row, s_row, G, GROUPS)
    if tl.max((~(s < float("inf")) | ~(m < float("inf"))).to(tl.int32), axis=0) != 0:
        flags = flags | _FLAG_BAD_VALUE
        if MOVES:
            groups = tl.arange(0, GROUPS)
            tl.store(to_m + groups, m, mask=groups < G)
            tl.store(to_s + groups, s, mask=groups < G)
            tl.debug_barrier()
        _mend(row, to_m, to_s, raw_m_row, raw_s_row, masks, mask_row, mask_words, scale, raws, V, G, 32)
        m, s = groups_of(to_m, to_s, G, GROUPS)
    return m, s, flags


@triton.jit
def _mend(
    logits_row, maxima, sums, raw_maxima, raw_sums, masks, mask_row, mask_words, scale, raws, V, G,
    GROUPS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of the groups that hold NaN or +inf anew, those values taken as -inf; all others stay as
    they are. `raws`: the raw ones too."""
    for first in range(0, G, GROUPS_AT_ONCE):
        groups = first + tl.arange(0, GROUPS_AT_ONCE)
        ids = tile_ids(first // GROUPS_AT_ONCE, GROUPS_AT_ONCE)
        given = tl.load(logits_row + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        spoilt = (groups < G) & (group_max((~(given < float("inf"))).to(tl.int32)) != 0)
        z = tile_values(logits_row, first // GROUPS_AT_ONCE, V, masks, mask_row, mask_words, GROUPS_AT_ONCE)
        best = group_max(z)
        tl.store(maxima + groups, best, mask=spoilt)
        tl.store(sums + groups, group_sum(tl.exp2(_below(z, best) * scale)), mask=spoilt)
        if raws:
            z = tile_values(logits_row, first // GROUPS_AT_ONCE, V, None, -1, 0, GROUPS_AT_ONCE)
            best = group_max(z)
            tl.store(raw_maxima + groups, best, mask=spoilt)
            tl.store(raw_sums + groups, group_sum(tl.exp2(_below(z, best) * LOG2_E)), mask=spoilt)
    tl.debug_barrier()


@triton.jit
def _below(z, best):
    """z - best, and z itself where a group has nothing finite."""
    return z - group_base(best)
