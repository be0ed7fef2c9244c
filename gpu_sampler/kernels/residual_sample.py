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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    GROUP,
    LOG2_E,
    NO_KEY,
    group_sum,
    id_of,
    raw_values,
    tile_ids,
    tile_values,
    value_of,
    values,
    values_with_side,
)
from gpu_sampler.kernels.draft_probs import (
    DENSE,
    TILE,
    TILE_IDS,
    DrafterRow,
    RowDistribution,
    chance,
    dense_q,
    joint_tile,
    named,
)
from gpu_sampler.kernels.gumbel import log_weights
from gpu_sampler.kernels.philox import RESID_GROUP, RESID_TOKEN, gumbel, gumbel_from_0
from gpu_sampler.output import RowFlag

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
def _q_of(ids, inside, q, temperature):
    """Returns q of ids under a dense proposal; 0 under another, which names its ids."""
    found = tl.zeros(ids.shape, tl.float32)
    if q.logits is not None:
        if q.dense:
            found = dense_q(raw_values(q.logits, ids, inside), q.best, q.total, temperature)
    return found


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


class Residual(NamedTuple):
    """Says what one draw takes off the row's probabilities: max(P p - share q, 0), without the named ids."""

    ids_N: Any  # the named ids, -1 for none
    alone: Any  # the one id that is named; None where the named ids are -inf in the row itself
    weight: Any  # P
    share: Any


@triton.jit
def _better_of(score, token, z, ids, inside, q_inside, of, p, q, key):
    """Returns the best (score, token) so far and among tokens `ids` of values z, one number a token."""
    q_ids = _q_of(ids, q_inside, q, p.temperature)
    w = tl.where(inside & ~_is_named(ids, of.ids_N), of.weight * chance(z, ids, p) - of.share * q_ids, 0.0)
    own_score, own_token = best_of(w, gumbel(ids, key, RESID_TOKEN, 0), ids)
    return _better(score, token, own_score, own_token)


@triton.jit
def from_list(score, token, keys, count, of, p, q, key):
    """Returns the best (score, token) so far and among the `count` keys of a list."""
    for first in range(0, count, 64):
        at = first + tl.arange(0, 64)
        listed = tl.load(keys + at, mask=at < count, other=NO_KEY)
        ids = tl.where(at < count, id_of(listed), 0)
        score, token = _better_of(score, token, value_of(listed), ids, at < count, at < count, of, p, q, key)
    return score, token


@triton.jit
def from_side(score, token, row, of, p, q, key):
    """Returns the best (score, token) so far and among the tokens of a side list."""
    for first in range(0, row.length, 64):
        at = first + tl.arange(0, 64)
        inside = at < row.length
        ids = tl.load(row.side_ids + at, mask=inside, other=0)
        z = tl.load(row.side + at, mask=inside, other=-float("inf"))
        q_inside = inside & (ids >= 0) & (ids < row.V)
        score, token = _better_of(score, token, z, ids, inside, q_inside, of, p, q, key)
    return score, token


@triton.jit
def from_groups(score, token, row, m_row, s_row, of, p, key, G, GROUPS: tl.constexpr):
    """Returns the best (score, token) so far and of a two-level draw over the groups, without the named ids.

    Groups that hold named ids are left out of the statistics, and summed again.
    """
    groups = tl.arange(0, GROUPS)
    m = tl.load(m_row + groups, mask=groups < G, other=-float("inf"))
    named_N = of.ids_N >= 0
    its_group = tl.where(named_N, of.ids_N // GROUP, 0)
    ids = its_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = without(values(row, ids, named_N[:, None] & (ids < row.V)), ids, of.alone)
    s = _sums_without(s_row, its_group, of.ids_N, of.alone, G, GROUPS)
    noise_G = gumbel_from_0(GROUPS, key, RESID_GROUP, 0)  # while the row is under way
    shift = tl.log(of.weight) - tl.log(p.mass)
    scores = log_weights(m, s, p.best, p.temperature) + shift + noise_G
    group_score, group = tl.max(scores, axis=0, return_indices=True)
    its_best = tl.max(z, axis=1)
    base = tl.where(its_best > -float("inf"), its_best, 0.0)
    its_sum = tl.sum(tl.exp2((z - base[:, None]) * ((1.0 / p.temperature) * LOG2_E)), axis=1)
    its_scores = log_weights(its_best, its_sum, p.best, p.temperature) + shift
    its_scores += gumbel(its_group, key, RESID_GROUP, 0)
    again = tl.max(tl.where(named_N, its_scores, -float("inf")), axis=0)
    if again > group_score:
        group_score = again
        group = tl.min(tl.where(named_N & (its_scores == again), its_group, _LAST_ID), axis=0)
    if (group_score > -float("inf")) & ((group_score > score) | (token < 0)):
        inside = group * GROUP + tl.arange(0, GROUP)
        z_128 = without(values(row, inside, inside < row.V), inside, of.alone)
        noise = gumbel(inside, key, RESID_TOKEN, 0)
        best_128 = tl.where(z_128 > -float("inf"), (z_128 - p.best) / p.temperature + noise, -float("inf"))
        score = group_score
        token = group * GROUP + tl.argmax(best_128, axis=0)
    return score, token


@triton.jit
def from_joint_groups(score, token, row, of, p, q, key):
    """Returns the best (score, token) so far and of a two-level draw over the groups of a dense proposal."""
    if q.logits is not None:
        group_score = tl.full([], -float("inf"), tl.float32)
        group = tl.zeros([], tl.int32)
        for start in range(0, row.V, TILE_IDS):
            own = group_sum(joint_tile(row, start // TILE_IDS, p, q, of.weight, of.share))
            at = start // GROUP + tl.arange(0, TILE)
            own_score, own_group = best_of(own, gumbel(at, key, RESID_GROUP, 0), at)
            if own_score > group_score:
                group_score = own_score
                group = own_group
        if (group_score > -float("inf")) & ((group_score > score) | (token < 0)):
            inside = group * GROUP + tl.arange(0, GROUP)
            z = values(row, inside, inside < row.V)
            q_128 = dense_q(raw_values(q.logits, inside, inside < row.V), q.best, q.total, p.temperature)
            w_128 = of.weight * chance(z, inside, p) - of.share * q_128
            _, token = best_of(w_128, gumbel(inside, key, RESID_TOKEN, 0), inside)
            score = group_score
    return score, token


@triton.jit
def from_row(score, token, row, of, p, q, key):
    """Returns the best (score, token) so far and among all kept tokens of the row, one number a token."""
    # Hoisted out of the loop, what each turn needs would fill the registers of them all.
    for start in tl.range(0, row.V, TILE_IDS, disable_licm=True):
        tile = start // TILE_IDS
        ids = tile_ids(tile, TILE)
        w = of.weight * chance(without(tile_values(row, tile, TILE), ids, of.alone), ids, p)
        if q.logits is not None:
            if q.dense:
                w = joint_tile(row, tile, p, q, of.weight, of.share)
        noise = gumbel(ids, key, RESID_TOKEN, 0)
        own_score, own_token = best_of(tl.ravel(w), tl.ravel(noise), tl.ravel(ids))
        score, token = _better(score, token, own_score, own_token)
    return score, token


_ZERO_RESIDUAL: tl.constexpr = tl.constexpr(int(RowFlag.ZERO_RESIDUAL))


@triton.jit
def residual_sample(
    row, m_row, s_row, keys, listed, plain, draft, p_draft, p, kind, proposals, place, weight, key, G,
    GROUPS: tl.constexpr, HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns (token, flags) after a draft that was refused.

    Args:
        row, m_row, s_row: the RowLogits and, by group, pointers to its maxima and sums.
        keys, listed: the list of `sample` and how many of its keys are kept; -1 where they are in no list.
        plain: all tokens stay.
        draft, p_draft: the draft and its probability.
        p: the RowDistribution.
        kind, proposals, place: ProposalKind, the step's Proposals, and request x K + step.
        weight: P.
        key: the NoiseKey of the row's position.
    """
    dense = kind == DENSE
    q_row = proposals.q_logits
    its_best = p.best
    its_total = p.mass
    if HAS_DENSE:
        if dense:
            q_row = proposals.q_logits + place.to(tl.int64) * proposals.q_stride
            its_best = tl.load(proposals.q_best + place)
            its_total = tl.load(proposals.q_total + place)
    q = DrafterRow(q_row if HAS_DENSE else None, its_best, its_total, dense)
    one = tl.arange(0, 1)
    ids_1N, q_1N = named(kind, one + draft, proposals, place + one, one == 0, HAS_SPARSE, N)
    ids_N, q_N = tl.reshape(ids_1N, [N]), tl.reshape(q_1N, [N])
    ids_N = tl.where((ids_N >= 0) & (ids_N < row.V), ids_N, -1)
    if HAS_SPARSE or HAS_DENSE:
        alone = None
        p_N = chance(values_with_side(row, ids_N, 32), ids_N, p)
    else:
        alone = tl.max(ids_N, axis=0)
        p_N = tl.zeros([N], tl.float32) + p_draft
    token = tl.full([], -1, tl.int32)
    attempt = tl.zeros([], tl.int32)
    for _ in tl.range(0, 2, disable_licm=True):  # or what only some rows need is made ready for all of them
        if token < 0:
            of = Residual(ids_N, alone, tl.where(attempt == 0, weight, 1.0), share_of(attempt))
            token = _attempt(row, m_row, s_row, keys, listed, plain, of, p_N, q_N, p, q, key, G, GROUPS)
            attempt += 1
    return token, tl.where(attempt == 2, _ZERO_RESIDUAL, 0)


@triton.jit
def share_of(attempt):
    """Returns how much of q is taken off p: all in the first attempt, nothing in the second."""
    return tl.where(attempt == 0, 1.0, 0.0)


@triton.jit
def _attempt(row, m_row, s_row, keys, listed, plain, of, p_N, q_N, p, q, key, G, GROUPS: tl.constexpr):
    """Returns the token of one draw from max(P p - share q, 0); -1 where nothing has weight."""
    score = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    weight_N = tl.where(of.ids_N >= 0, of.weight * p_N - of.share * q_N, 0.0)
    if tl.max(weight_N, axis=0) > 0.0:  # which one certain draft hardly ever leaves
        noise_N = gumbel(tl.maximum(of.ids_N, 0), key, RESID_TOKEN, 0)
        score, token = best_of(weight_N, noise_N, of.ids_N)
    if listed >= 0:
        score, token = from_list(score, token, keys, listed, of, p, q, key)
    else:
        if of.alone is None:
            raw_N = _take_out(row.logits, of.ids_N)
        if row.side is not None:
            score, token = from_side(score, token, row, of, p, q, key)
        if plain:
            if q.dense:
                everything = RowDistribution(NO_KEY, p.best, p.temperature, -float("inf"), p.mass)
                score, token = from_joint_groups(score, token, row, of, everything, q, key)
            else:
                score, token = from_groups(score, token, row, m_row, s_row, of, p, key, G, GROUPS)
        else:
            score, token = from_row(score, token, row, of, p, q, key)
        if of.alone is None:
            _put_back(row.logits, of.ids_N, raw_N)
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
