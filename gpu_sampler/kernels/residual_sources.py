"""Where the residual's tokens come from: `select`'s list, the side list, the groups, or the whole row.

Each gives (score, token) of the best so far: a token's score is the logarithm of its weight max(P p - share q, 0) plus
a Gumbel number of its own.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.drawing import log_weights
from gpu_sampler.kernels.philox import RESID_GROUP, RESID_TOKEN, gumbel, gumbel_from_0
from gpu_sampler.kernels.proposals import TILE, TILE_IDS, chance, dense_q
from gpu_sampler.kernels.row import (
    GROUP,
    LOG2_E,
    NO_KEY,
    group_sum,
    id_of,
    tile_ids,
    tile_values,
    value_of,
    values,
)

_LAST_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_of(weights, noise, ids):
    """(score, id) of the best of flat arrays; (-inf, -1) where nothing has weight."""
    held = weights > 0.0
    scores = tl.where(held, tl.log(tl.where(held, weights, 1.0)) + noise, -float("inf"))
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(held & (scores == score), ids, _LAST_ID), axis=0)
    return score, tl.where(token == _LAST_ID, -1, token)


@triton.jit
def _better(score, token, other_score, other_token):
    wins = (other_token >= 0) & ((other_score > score) | (token < 0))
    return tl.where(wins, other_score, score), tl.where(wins, other_token, token)


@triton.jit
def _q_of(ids, inside, q_row, q_best, q_total, dense, temperature, HAS_DENSE: tl.constexpr):
    """q of ids that a dense proposal has; 0 under another, which names its ids."""
    q = tl.zeros(ids.shape, tl.float32)
    if HAS_DENSE:
        if dense:
            q = dense_q(values(q_row, ids, inside, None, -1, 0), q_best, q_total, temperature)
    return q


@triton.jit
def _is_named(ids, ids_N):
    """Whether ids [M] are among the named ones."""
    return tl.max((ids[:, None] == ids_N[None, :]).to(tl.int32), axis=1) != 0


@triton.jit
def without(z, ids, alone):
    """z; -inf at the id that a proposal names `alone`. None: what is named is -inf in the row itself."""
    if alone is not None:
        z = tl.where(ids == alone, -float("inf"), z)
    return z


@triton.jit
def _sums_without(s_row, its_group, ids_N, alone, G, GROUPS: tl.constexpr):
    """f32 [GROUPS] sums of a row's groups; 0 of those that hold named ids."""
    groups = tl.arange(0, GROUPS)
    if alone is not None:
        s = tl.load(s_row + groups, mask=groups < G, other=0.0)
        s = tl.where((alone >= 0) & (groups == alone // GROUP), 0.0, s)
    else:
        whole_N = tl.load(s_row + its_group, mask=ids_N >= 0, other=0.0)
        tl.debug_barrier()
        tl.store(s_row + its_group, 0.0, mask=ids_N >= 0)
        tl.debug_barrier()
        s = tl.load(s_row + groups, mask=groups < G, other=0.0)
        tl.debug_barrier()
        tl.store(s_row + its_group, whole_N, mask=ids_N >= 0)
    return s


@triton.jit
def from_list(
    keys, count, ids_N, weight, share, bound, best, temperature, log_min_p, mass, q_row, q_best, q_total, dense,
    seed, position, branch, score, token, V, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    for first in range(0, count, 64):
        at = first + tl.arange(0, 64)
        listed = tl.load(keys + at, mask=at < count, other=NO_KEY)
        ids = tl.where(at < count, id_of(listed), 0)
        p = chance(value_of(listed), ids, bound, best, temperature, log_min_p, mass)
        q = _q_of(ids, at < count, q_row, q_best, q_total, dense, temperature, HAS_DENSE)
        w = tl.where((at < count) & ~_is_named(ids, ids_N), weight * p - share * q, 0.0)
        own_score, own_token = best_of(w, gumbel(ids, seed, position, RESID_TOKEN, 0, branch), ids)
        score, token = _better(score, token, own_score, own_token)
    return score, token


@triton.jit
def from_side(
    side_ids, side, length, ids_N, weight, share, bound, best, temperature, log_min_p, mass, q_row, q_best, q_total,
    dense, seed, position, branch, score, token, V, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    for first in range(0, length, 64):
        at = first + tl.arange(0, 64)
        ids = tl.load(side_ids + at, mask=at < length, other=0)
        z = tl.load(side + at, mask=at < length, other=-float("inf"))
        p = chance(z, ids, bound, best, temperature, log_min_p, mass)
        q = _q_of(ids, (at < length) & (ids >= 0) & (ids < V), q_row, q_best, q_total, dense, temperature, HAS_DENSE)
        w = tl.where((at < length) & ~_is_named(ids, ids_N), weight * p - share * q, 0.0)
        own_score, own_token = best_of(w, gumbel(ids, seed, position, RESID_TOKEN, 0, branch), ids)
        score, token = _better(score, token, own_score, own_token)
    return score, token


@triton.jit
def from_groups(
    row, m_row, s_row, masks, mask_row, mask_words, ids_N, alone, weight, best, temperature, mass, seed, position,
    branch, score, token, V, G, GROUPS: tl.constexpr,
):  # fmt: skip
    """Two levels over the groups, `without` the named ids. Groups that hold some are left out of the statistics, and
    summed anew."""
    groups = tl.arange(0, GROUPS)
    m = tl.load(m_row + groups, mask=groups < G, other=-float("inf"))
    its_group = tl.where(ids_N >= 0, ids_N // GROUP, 0)
    ids = its_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = values(row, ids, (ids_N >= 0)[:, None] & (ids < V), masks, mask_row, mask_words)
    z = without(z, ids, alone)
    s = _sums_without(s_row, its_group, ids_N, alone, G, GROUPS)
    noise_G = gumbel_from_0(GROUPS, seed, position, RESID_GROUP, 0, branch)  # while the row is under way
    shift = tl.log(weight) - tl.log(mass)
    scores = log_weights(m, s, best, temperature) + shift + noise_G
    group_score, group = tl.max(scores, axis=0, return_indices=True)
    its_best = tl.max(z, axis=1)
    base = tl.where(its_best > -float("inf"), its_best, 0.0)
    its_sum = tl.sum(tl.exp2((z - base[:, None]) * ((1.0 / temperature) * LOG2_E)), axis=1)
    its_scores = log_weights(its_best, its_sum, best, temperature) + shift
    its_scores += gumbel(its_group, seed, position, RESID_GROUP, 0, branch)
    again = tl.max(tl.where(ids_N >= 0, its_scores, -float("inf")), axis=0)
    if again > group_score:
        group_score = again
        group = tl.min(tl.where((ids_N >= 0) & (its_scores == again), its_group, _LAST_ID), axis=0)
    if (group_score > -float("inf")) & ((group_score > score) | (token < 0)):
        inside = group * GROUP + tl.arange(0, GROUP)
        z_128 = without(values(row, inside, inside < V, masks, mask_row, mask_words), inside, alone)
        noise = gumbel(inside, seed, position, RESID_TOKEN, 0, branch)
        best_128 = tl.where(z_128 > -float("inf"), (z_128 - best) / temperature + noise, -float("inf"))
        score = group_score
        token = group * GROUP + tl.argmax(best_128, axis=0)
    return score, token


@triton.jit
def from_joint_groups(
    row, q_row, masks, mask_row, mask_words, weight, share, best, temperature, mass, q_best, q_total, seed, position,
    branch, score, token, V, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """Two levels over the groups of a dense proposal."""
    if HAS_DENSE:
        group_score = tl.full([], -float("inf"), tl.float32)
        group = tl.zeros([], tl.int32)
        for start in range(0, V, TILE_IDS):
            w = _joint(
                row, q_row, start // TILE_IDS, masks, mask_row, mask_words, weight, share, NO_KEY, best, temperature,
                -float("inf"), mass, q_best, q_total, V,
            )  # fmt: skip
            own = group_sum(w)
            at = start // GROUP + tl.arange(0, TILE)
            own_score, own_group = best_of(own, gumbel(at, seed, position, RESID_GROUP, 0, branch), at)
            if own_score > group_score:
                group_score = own_score
                group = own_group
        if (group_score > -float("inf")) & ((group_score > score) | (token < 0)):
            inside = group * GROUP + tl.arange(0, GROUP)
            z = values(row, inside, inside < V, masks, mask_row, mask_words)
            q = dense_q(values(q_row, inside, inside < V, None, -1, 0), q_best, q_total, temperature)
            w_128 = weight * chance(z, inside, NO_KEY, best, temperature, -float("inf"), mass) - share * q
            _, token = best_of(w_128, gumbel(inside, seed, position, RESID_TOKEN, 0, branch), inside)
            score = group_score
    return score, token


@triton.jit
def _joint(
    row, q_row, tile, masks, mask_row, mask_words, weight, share, bound, best, temperature, log_min_p, mass, q_best,
    q_total, V,
):  # fmt: skip
    """max(P p - q, 0) of a tile [TILE, 4, 32]."""
    z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE)
    p = chance(z, tile_ids(tile, TILE), bound, best, temperature, log_min_p, mass)
    q = dense_q(tile_values(q_row, tile, V, None, -1, 0, TILE), q_best, q_total, temperature)
    return tl.maximum(weight * p - share * q, 0.0)


@triton.jit
def from_row(
    row, q_row, masks, mask_row, mask_words, alone, weight, share, bound, best, temperature, log_min_p, mass, q_best,
    q_total, dense, seed, position, branch, score, token, V, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """One number a kept token, wherever it stands in the row."""
    for start in tl.range(0, V, TILE_IDS, disable_licm=True):  # or what each turn needs fills the registers of them all
        tile = start // TILE_IDS
        ids = tile_ids(tile, TILE)
        z = without(tile_values(row, tile, V, masks, mask_row, mask_words, TILE), ids, alone)
        w = weight * chance(z, ids, bound, best, temperature, log_min_p, mass)
        if HAS_DENSE:
            if dense:
                w = _joint(
                    row, q_row, tile, masks, mask_row, mask_words, weight, share, bound, best, temperature, log_min_p,
                    mass, q_best, q_total, V,
                )  # fmt: skip
        noise = gumbel(ids, seed, position, RESID_TOKEN, 0, branch)
        own_score, own_token = best_of(tl.ravel(w), tl.ravel(noise), tl.ravel(ids))
        score, token = _better(score, token, own_score, own_token)
    return score, token
