"""What comes before a token in the total order of its row, tile by tile.

One comparison decides for each value of a tile, with `least_before` of that tile: equal values come before in the tiles
of smaller ids, and do not in those of larger ones. In the token's own tile some of them do (`equals_before`).
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.row import GROUP, halves, next_above, pairs_allowed, tile_ids, tile_values


@triton.jit
def ahead_of(z, ids, value, token):
    """Whether each (z, id) comes strictly before (value, token)."""
    return (z > value) | ((z == value) & (ids < token) & (z > -float("inf")))


@triton.jit
def clean_halves(words, logits, tile, masks, mask_row, mask_words, TILE_GROUPS: tl.constexpr):
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
def least_before(value, token, tile, TILE_GROUPS: tl.constexpr):
    """What a value of a tile must reach to come before (value, token): equal values come before by their id. In the
    token's own tile they are left out, for `equals_before` to add."""
    return tl.where(token >= (tile + 1) * TILE_GROUPS * GROUP, value, next_above(value))


@triton.jit
def equals_before(row, token, value, V, masks, mask_row, mask_words, TILE_GROUPS: tl.constexpr):
    """bool [TILE_GROUPS, 4, 32]: equal values that come before a token in its own tile."""
    tile = token // (TILE_GROUPS * GROUP)
    z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE_GROUPS)
    return (z == value) & (tile_ids(tile, TILE_GROUPS) < token)


@triton.jit
def by_lane(low, high):
    """[TILE_GROUPS, 4]: the sum over both halves of a tile of what a lane holds by itself; lanes meet only at the
    end."""
    both = tl.reshape(low + high, [low.shape[0], 4, 4, 4])
    return tl.sum(tl.sum(both, axis=3), axis=1)
