"""Draws from a whole row: its first token, or one Gumbel number a group and then one a token of the group that won.

    token = argmax_x (z_x - M) / T + g_x     group = argmax_j ln s_j + (m_j - M) / T + g_j

Both are exact, by max-stability of the Gumbel distribution (Maddison, Tarlow, Minka 2014, "A* Sampling"). A token of
the side list is a group of its own, with its own noise.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.common import GROUP, NO_KEY, SIDE_BLOCK, id_of, side_block, value_of, values
from gpu_sampler.kernels.philox import SAMPLE_GROUP, SAMPLE_TOKEN, gumbel, gumbel_from_0
from gpu_sampler.reference.filters import MAX_DRAWS
from gpu_sampler.workspace import N_DRAWS, NOTHING_PENDING, PENDING_REJECTION, PENDING_SCAN

_MAX_DRAWS: tl.constexpr = tl.constexpr(MAX_DRAWS)


@triton.jit
def log_weights(m, s, best, temperature):
    """Returns ln of the weight of each group, f32 [GROUPS], -inf for an empty one.

    `best`, the largest value of the row, is taken off before the division, which would round the noise away at small
    temperatures.
    """
    held = s > 0.0
    return tl.where(held, tl.log(tl.where(held, s, 1.0)) + (m - best) / temperature, -float("inf"))


@triton.jit
def two_level(row, log_weights_G, best, temperature, key, round_, GROUPS: tl.constexpr):
    """Returns (id, value) of one draw from the `log_weights` of the groups; `best` is the largest value of the row."""
    scores = log_weights_G + gumbel_from_0(GROUPS, key, SAMPLE_GROUP, round_)
    score, group = tl.max(scores, axis=0, return_indices=True)
    ids = group * GROUP + tl.arange(0, GROUP)
    z = values(row, ids, ids < row.V)
    noise = gumbel(ids, key, SAMPLE_TOKEN, round_)
    inside = tl.where(z > -float("inf"), (z - best) / temperature + noise, -float("inf"))
    token = group * GROUP + tl.argmax(inside, axis=0)
    value = tl.max(tl.where(ids == token, z, -float("inf")), axis=0)
    if row.side is not None:
        for start in range(0, row.length, SIDE_BLOCK):
            singles, x = side_block(row, start)
            own_noise = gumbel(singles, key, SAMPLE_TOKEN, round_)
            alone = tl.where(x > -float("inf"), (x - best) / temperature + own_noise, -float("inf"))
            own = tl.max(alone, axis=0)
            if own > score:
                score = own
                token = tl.min(tl.where(alone == own, singles, 0x7FFFFFFF), axis=0)
                value = tl.max(tl.where(singles == token, x, -float("inf")), axis=0)
    return token, value


@triton.jit
def of_the_whole(
    row, m, s, best, temperature, log_min_p, key, draws, nucleus, by_value, draw_ids, draw_values, GROUPS: tl.constexpr
):  # fmt: skip
    """Returns (token, value, what is pending) of a draw of the whole row.

    A plain row takes its first draw, and a row with min-p alone (`by_value`) the first draw that passes. A row with
    top-p leaves its first draws for `nucleus_rejection`. Without `draws` the token is -1.
    """
    limit = tl.where(draws, tl.where(nucleus, tl.where(by_value, _MAX_DRAWS, N_DRAWS), 1), 0)
    weights_G = log_weights(m, s, best, temperature)
    token = tl.full([], -1, tl.int32)
    value = best
    tries = tl.zeros([], tl.int32)
    drawing = tries < limit
    while drawing:
        token, value = two_level(row, weights_G, best, temperature, key, tries, GROUPS)
        if nucleus & ~by_value:
            tl.store(draw_ids + tries, token)
            tl.store(draw_values + tries, value)
        tries += 1
        drawing = (tries < limit) & (~by_value | ((value - best) / temperature < log_min_p))
    failed = by_value & ((value - best) / temperature < log_min_p)
    pending = tl.where(failed, PENDING_SCAN, tl.where(by_value, NOTHING_PENDING, PENDING_REJECTION))
    return token, value, tl.where(nucleus & draws, pending, NOTHING_PENDING)


@triton.jit
def first_token(row, m, best, GROUPS: tl.constexpr):
    """Returns the first token of the total order; `best` is its value."""
    group = tl.min(tl.where(m == best, tl.arange(0, GROUPS), GROUPS), axis=0)
    ids = group * GROUP + tl.arange(0, GROUP)
    z = values(row, ids, ids < row.V)
    token = tl.min(tl.where(z == best, ids, 0x7FFFFFFF), axis=0)
    if row.side is not None:
        for start in range(0, row.length, SIDE_BLOCK):
            other, own = side_block(row, start)
            token = tl.minimum(token, tl.min(tl.where(own == best, other, 0x7FFFFFFF), axis=0))
    return token


@triton.jit
def of_list(keys, x, kept, key):
    """Returns (id, value) of the draw from the `kept` tokens of a list; `x` f32 are their (z - M) / T."""
    places = tl.arange(0, keys.shape[0])
    scores = x + gumbel(id_of(keys), key, SAMPLE_TOKEN, 0)
    place = tl.argmax(tl.where(kept, scores, -float("inf")), axis=0)
    own = tl.max(tl.where(places == place, keys, NO_KEY), axis=0)
    return id_of(own), value_of(own)
