"""Draws the token after a rejected draft, from max(P p - q, 0) with noise of its own; a part of `rejection_sample`.

A program draws for one row. Each source gives (score, token) of the best so far: a token's score is the logarithm of
its weight max(P p - share q, 0) plus a Gumbel number. By the row and the proposal, the source is:
- the list of `sample`, where it holds all kept tokens: one number for each;
- the groups, where all tokens stay and the proposal names its ids: two levels as in `sample`. The named ids stand
  outside of their groups, which are summed again without them (subtraction would cancel), and compete by numbers of
  their own;
- a joint read of both rows by groups, where all tokens stay and the proposal is dense;
- a read of the row, one number a kept token, where a filter keeps more tokens than a list holds.
Where no token has weight, the token comes from p, and the row is flagged.

Where a proposal may name many ids, they are -inf in the row's logits while it draws, and their groups weigh nothing in
its statistics; both are as before when it ends. One id is left out by comparison, and nothing is written.

Shape legend: N ids that a proposal names.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    GROUP,
    LOG2_E,
    NO_KEY,
    OVERLAY_START,
    group_sum,
    id_of,
    tile_ids,
    tile_values,
    value_of,
    values,
    word,
)
from gpu_sampler.kernels.draft_probs import DENSE, TILE, TILE_IDS, chance, dense_q, named, processed_of
from gpu_sampler.kernels.gumbel import log_weights
from gpu_sampler.kernels.philox import RESID_GROUP, RESID_TOKEN, gumbel, gumbel_from_0
from gpu_sampler.output import RowFlag
from gpu_sampler.workspace import SCRATCH

_LAST_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_of(weights, noise, ids):
    """Returns (score, id) of the best of flat arrays; (-inf, -1) where nothing has weight."""
    held = weights > 0.0
    scores = tl.where(held, tl.log(tl.where(held, weights, 1.0)) + noise, -float("inf"))
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(held & (scores == score), ids, _LAST_ID), axis=0)
    return score, tl.where(token == _LAST_ID, -1, token)


@triton.jit
def _better(score, token, other_score, other_token):
    """Returns the better of two (score, token), where token -1 is none."""
    wins = (other_token >= 0) & ((other_score > score) | (token < 0))
    return tl.where(wins, other_score, score), tl.where(wins, other_token, token)


@triton.jit
def _q_of(ids, inside, q_row, q_best, q_total, dense, temperature, HAS_DENSE: tl.constexpr):
    """Returns q of ids under a dense proposal; 0 under another, which names its ids."""
    q = tl.zeros(ids.shape, tl.float32)
    if HAS_DENSE:
        if dense:
            q = dense_q(values(q_row, ids, inside, None, -1, 0), q_best, q_total, temperature)
    return q


@triton.jit
def _is_named(ids, ids_N):
    """Returns whether ids [M] are among the named ones."""
    return tl.max((ids[:, None] == ids_N[None, :]).to(tl.int32), axis=1) != 0


@triton.jit
def without(z, ids, alone):
    """Returns z, -inf at the one id that a proposal names (`alone`). None: named ids are -inf in the row itself."""
    if alone is not None:
        z = tl.where(ids == alone, -float("inf"), z)
    return z


@triton.jit
def _sums_without(s_row, its_group, ids_N, alone, G, GROUPS: tl.constexpr):
    """Returns the sums f32 [GROUPS] of a row's groups; 0 for groups that hold named ids."""
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
    """Returns the best (score, token) so far and among the `count` keys of a list."""
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
    """Returns the best (score, token) so far and among the tokens of a side list."""
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
    """Returns the best (score, token) so far and of a two-level draw over the groups, without the named ids.

    Groups that hold named ids are left out of the statistics, and summed again.
    """
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
    """Returns the best (score, token) so far and of a two-level draw over the groups of a dense proposal."""
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
    """Returns max(P p - share q, 0) of a tile, [TILE, 4, 32]."""
    z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE)
    p = chance(z, tile_ids(tile, TILE), bound, best, temperature, log_min_p, mass)
    q = dense_q(tile_values(q_row, tile, V, None, -1, 0, TILE), q_best, q_total, temperature)
    return tl.maximum(weight * p - share * q, 0.0)


@triton.jit
def from_row(
    row, q_row, masks, mask_row, mask_words, alone, weight, share, bound, best, temperature, log_min_p, mass, q_best,
    q_total, dense, seed, position, branch, score, token, V, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """Returns the best (score, token) so far and among all kept tokens of the row, one number a token."""
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


_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
_ZERO_RESIDUAL: tl.constexpr = tl.constexpr(int(RowFlag.ZERO_RESIDUAL))


@triton.jit
def residual_sample(
    logits, row_stride, table, masks, mask_row, mask_words, maxima, sums, side_ids, side, side_len, keys, draft, p,
    kind, q_ids, q_probs, q_logits, q_stride, q_best, q_total, weight, r, place, listed, bound, best, mass, plain,
    temperature, log_min_p, seed, position, branch, V, G, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns (token, flags) after a draft of probability `p` at row r.

    `place` is request x K + step, `weight` is P, and `plain` says that all tokens stay.
    """
    row = logits + r.to(tl.int64) * row_stride
    length = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int64)
    if SIDE:
        length = tl.load(side_len + r)
        start = word(table, r + 1, OVERLAY_START).to(tl.int64)
    own_ids = side_ids + start
    own = side + start
    dense = kind == DENSE
    q_row = q_logits
    its_best = best
    its_total = mass
    if HAS_DENSE:
        if dense:
            q_row = q_logits + place.to(tl.int64) * q_stride
            its_best = tl.load(q_best + place)
            its_total = tl.load(q_total + place)
    one = tl.arange(0, 1)
    ids_1N, q_1N = named(kind, one + draft, q_ids, q_probs, place + one, one == 0, HAS_SPARSE, N)
    ids_N, q_N = tl.reshape(ids_1N, [N]), tl.reshape(q_1N, [N])
    ids_N = tl.where((ids_N >= 0) & (ids_N < V), ids_N, -1)
    if HAS_SPARSE or HAS_DENSE:
        alone = None
        z_N = processed_of(row, ids_N, own_ids, own, length, masks, mask_row, mask_words, V, SIDE)
        p_N = chance(z_N, ids_N, bound, best, temperature, log_min_p, mass)
    else:
        alone = tl.max(ids_N, axis=0)
        p_N = tl.zeros([N], tl.float32) + p
    token = tl.full([], -1, tl.int32)
    attempt = tl.zeros([], tl.int32)
    for _ in tl.range(0, 2, disable_licm=True):  # or what only some rows need is made ready for all of them
        if token < 0:
            token = _attempt(
                row, q_row, keys + r.to(tl.int64) * _SCRATCH, listed, maxima + r.to(tl.int64) * G,
                sums + r.to(tl.int64) * G, own_ids, own, length, masks, mask_row, mask_words, ids_N, alone, p_N, q_N,
                tl.where(attempt == 0, weight, 1.0), share_of(attempt), bound, best, temperature, log_min_p, mass,
                its_best, its_total, dense, plain, seed, position, branch, V, G, GROUPS, SIDE, HAS_DENSE,
            )  # fmt: skip
            attempt += 1
    return token, tl.where(attempt == 2, _ZERO_RESIDUAL, 0)


@triton.jit
def share_of(attempt):
    """Returns how much of q is taken off p: all in the first attempt, nothing in the second."""
    return tl.where(attempt == 0, 1.0, 0.0)


@triton.jit
def _attempt(
    row, q_row, keys, listed, m_row, s_row, own_ids, own, length, masks, mask_row, mask_words, ids_N, alone, p_N, q_N,
    weight, share, bound, best, temperature, log_min_p, mass, q_best, q_total, dense, plain, seed, position, branch, V,
    G, GROUPS: tl.constexpr, SIDE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """Returns the token of one draw from max(P p - share q, 0); -1 where nothing has weight."""
    score = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    weight_N = tl.where(ids_N >= 0, weight * p_N - share * q_N, 0.0)
    if tl.max(weight_N, axis=0) > 0.0:  # which one certain draft hardly ever leaves
        noise_N = gumbel(tl.maximum(ids_N, 0), seed, position, RESID_TOKEN, 0, branch)
        score, token = best_of(weight_N, noise_N, ids_N)
    if listed >= 0:
        score, token = from_list(
            keys, listed, ids_N, weight, share, bound, best, temperature, log_min_p, mass, q_row, q_best, q_total,
            dense, seed, position, branch, score, token, V, HAS_DENSE,
        )  # fmt: skip
    else:
        if alone is None:
            raw_N = _take_out(row, ids_N)
        if SIDE:
            score, token = from_side(
                own_ids, own, length, ids_N, weight, share, bound, best, temperature, log_min_p, mass, q_row, q_best,
                q_total, dense, seed, position, branch, score, token, V, HAS_DENSE,
            )  # fmt: skip
        if plain:
            if dense:
                score, token = from_joint_groups(
                    row, q_row, masks, mask_row, mask_words, weight, share, best, temperature, mass, q_best, q_total,
                    seed, position, branch, score, token, V, HAS_DENSE,
                )  # fmt: skip
            else:
                score, token = from_groups(
                    row, m_row, s_row, masks, mask_row, mask_words, ids_N, alone, weight, best, temperature, mass,
                    seed, position, branch, score, token, V, G, GROUPS,
                )  # fmt: skip
        else:
            score, token = from_row(
                row, q_row, masks, mask_row, mask_words, alone, weight, share, bound, best, temperature, log_min_p,
                mass, q_best, q_total, dense, seed, position, branch, score, token, V, HAS_DENSE,
            )  # fmt: skip
        if alone is None:
            _put_back(row, ids_N, raw_N)
    return token


@triton.jit
def _take_out(row, ids_N):
    """Returns the logits at the named ids, which are -inf from here on."""
    raw_N = tl.load(row + ids_N, mask=ids_N >= 0, other=0.0)
    tl.debug_barrier()
    nothing_N = tl.full(raw_N.shape, -float("inf"), tl.float32).to(raw_N.dtype)
    tl.store(row + ids_N, nothing_N, mask=ids_N >= 0)
    tl.debug_barrier()
    return raw_N


@triton.jit
def _put_back(row, ids_N, raw_N):
    """Restores the logits that `_take_out` returned."""
    tl.debug_barrier()
    tl.store(row + ids_N, raw_N, mask=ids_N >= 0)
    tl.debug_barrier()
