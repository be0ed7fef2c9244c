"""`residual`: the token behind a rejected draft, drawn from max(P p - q, 0) by numbers of its own.

Grid (B): a program draws for one row, or ends at once where the row's own token stands. By the row and the proposal:
- the kept tokens are in `select`'s list: one number for each;
- all tokens stay, and the proposal names its ids: two levels as in `select`. The named ids stand outside of their
  groups, which are summed anew without them (to subtract would cancel), and compete by numbers of their own;
- all tokens stay, and the proposal is dense: the groups are summed by a joint read of both rows;
- a filter keeps more tokens than a list holds: a read of the row, one number a kept token.
Where nothing has weight, the token comes from p, and the row is flagged.

While it draws, the named ids are -inf in the row's logits, which are as before when it ends.

| pointer | shape, type | |
|---|---|---|
| weights, counts | f32 [B], i32 [B] | read |
| keys | i64 [R, SCRATCH]: the lists of `select` | read |
| tokens, flags | i32 [R] | write |
| others | as in `accept` | read |
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.drawing import log_weights
from gpu_sampler.kernels.handover import AT, BEST, FLOATS, INTS, LISTED, MASS, load_bound
from gpu_sampler.kernels.philox import RESID_GROUP, RESID_TOKEN, gumbel, gumbel_from_0
from gpu_sampler.kernels.proposals import (
    DENSE,
    IDS,
    TILE,
    TILE_IDS,
    chance,
    dense_q,
    named,
    processed_of,
)
from gpu_sampler.kernels.row import (
    BRANCH,
    GROUP,
    LOG2_E,
    LOG_MIN_P,
    MASK_ROW,
    NO_KEY,
    OVERLAY_START,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    group_sum,
    id_of,
    number,
    seed_of,
    tile_ids,
    tile_values,
    value_of,
    values,
    word,
)
from gpu_sampler.output import RowFlag, VerifyOutput
from gpu_sampler.proposal import Proposal
from gpu_sampler.run_image import RunImage
from gpu_sampler.workspace import LIST, SCRATCH, Workspace

_LIST: tl.constexpr = tl.constexpr(LIST)
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
_LAST_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_ZERO_RESIDUAL: tl.constexpr = tl.constexpr(int(RowFlag.ZERO_RESIDUAL))
_WARPS = 8


@triton.jit
def _residual_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, side_ids, side, side_len, row_ints, row_floats,
    keys, draft_ids, kinds, q_ids, q_probs, q_logits, q_stride, q_best, q_total, weights, counts, tokens, flags_out,
    K, V, G, GROUPS: tl.constexpr, SIDE: tl.constexpr, HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    weight = tl.load(weights + b)
    if weight < 0.0:
        return
    step = tl.load(counts + b) - 1
    r = b * (K + 1) + step
    place = b * K + step
    row = logits + r.to(tl.int64) * row_stride
    slot = tl.load(slots + r)
    temperature = number(table, slot, TEMPERATURE)
    log_min_p = number(table, slot, LOG_MIN_P)
    seed = seed_of(table, slot)
    branch = word(table, slot, BRANCH)
    mask_row = word(table, slot, MASK_ROW)
    position = tl.load(row_ints + r * INTS + AT)
    best = tl.load(row_floats + r * FLOATS + BEST)
    mass = tl.load(row_floats + r * FLOATS + MASS)
    bound = load_bound(row_ints + r * INTS)
    listed = tl.load(row_ints + r * INTS + LISTED)
    kind = tl.load(kinds + b).to(tl.int32)
    plain = (
        (word(table, slot, TOP_K) <= 0) & (number(table, slot, TOP_P) >= 1.0) & (log_min_p == -float("inf"))
    )  # fmt: skip
    length = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int64)
    if SIDE:
        length = tl.load(side_len + r)
        start = word(table, slot, OVERLAY_START).to(tl.int64)
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
    ids_N, q_N = named(kind, tl.load(draft_ids + place), q_ids, q_probs, place, HAS_SPARSE)
    ids_N = tl.where((ids_N >= 0) & (ids_N < V), ids_N, -1)
    z_N = processed_of(row, ids_N, own_ids, own, length, masks, mask_row, mask_words, V, SIDE)
    p_N = chance(z_N, ids_N, bound, best, temperature, log_min_p, mass)
    _, token = _attempt(
        row, q_row, keys + r.to(tl.int64) * _SCRATCH, listed, maxima + r.to(tl.int64) * G, sums + r.to(tl.int64) * G,
        own_ids, own, length, masks, mask_row, mask_words, ids_N, p_N, q_N, weight, 1.0, bound, best, temperature,
        log_min_p, mass, its_best, its_total, dense, plain, seed, position, branch, V, G, GROUPS, SIDE, HAS_DENSE,
    )  # fmt: skip
    if token < 0:
        tl.store(flags_out + r, tl.load(flags_out + r) | _ZERO_RESIDUAL)
        _, token = _attempt(
            row, q_row, keys + r.to(tl.int64) * _SCRATCH, listed, maxima + r.to(tl.int64) * G,
            sums + r.to(tl.int64) * G, own_ids, own, length, masks, mask_row, mask_words, ids_N, p_N, q_N, 1.0, 0.0,
            bound, best, temperature, log_min_p, mass, its_best, its_total, dense, plain, seed, position, branch, V,
            G, GROUPS, SIDE, HAS_DENSE,
        )  # fmt: skip
    tl.store(tokens + r, token)


@triton.jit
def _attempt(
    row, q_row, keys, listed, m_row, s_row, own_ids, own, length, masks, mask_row, mask_words, ids_N, p_N, q_N, weight,
    share, bound, best, temperature, log_min_p, mass, q_best, q_total, dense, plain, seed, position, branch, V, G,
    GROUPS: tl.constexpr, SIDE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """(score, token) of one draw from max(P p - share q, 0); token -1 where nothing has weight."""
    noise_N = gumbel(tl.maximum(ids_N, 0), seed, position, RESID_TOKEN, 0, branch)
    score, token = _best_of(tl.where(ids_N >= 0, weight * p_N - share * q_N, 0.0), noise_N, ids_N)
    if listed >= 0:
        score, token = _from_list(
            keys, listed, ids_N, weight, share, bound, best, temperature, log_min_p, mass, q_row, q_best, q_total,
            dense, seed, position, branch, score, token, V, HAS_DENSE,
        )  # fmt: skip
    else:
        raw_N = tl.load(row + ids_N, mask=ids_N >= 0, other=0.0)
        tl.debug_barrier()
        nothing_N = tl.full(raw_N.shape, -float("inf"), tl.float32).to(raw_N.dtype)
        tl.store(row + ids_N, nothing_N, mask=ids_N >= 0)
        tl.debug_barrier()
        if SIDE:
            score, token = _from_side(
                own_ids, own, length, ids_N, weight, share, bound, best, temperature, log_min_p, mass, q_row, q_best,
                q_total, dense, seed, position, branch, score, token, V, HAS_DENSE,
            )  # fmt: skip
        if plain:
            if dense:
                score, token = _from_joint_groups(
                    row, q_row, masks, mask_row, mask_words, weight, share, best, temperature, mass, q_best, q_total,
                    seed, position, branch, score, token, V, HAS_DENSE,
                )  # fmt: skip
            else:
                score, token = _from_groups(
                    row, m_row, s_row, masks, mask_row, mask_words, ids_N, weight, best, temperature, mass, seed,
                    position, branch, score, token, V, G, GROUPS,
                )  # fmt: skip
        else:
            score, token = _from_row(
                row, q_row, masks, mask_row, mask_words, weight, share, bound, best, temperature, log_min_p, mass,
                q_best, q_total, dense, seed, position, branch, score, token, V, HAS_DENSE,
            )  # fmt: skip
        tl.debug_barrier()
        tl.store(row + ids_N, raw_N, mask=ids_N >= 0)
        tl.debug_barrier()
    return score, token


@triton.jit
def _best_of(weights, noise, ids):
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
def _from_list(
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
        own_score, own_token = _best_of(w, gumbel(ids, seed, position, RESID_TOKEN, 0, branch), ids)
        score, token = _better(score, token, own_score, own_token)
    return score, token


@triton.jit
def _from_side(
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
        own_score, own_token = _best_of(w, gumbel(ids, seed, position, RESID_TOKEN, 0, branch), ids)
        score, token = _better(score, token, own_score, own_token)
    return score, token


@triton.jit
def _from_groups(
    row, m_row, s_row, masks, mask_row, mask_words, ids_N, weight, best, temperature, mass, seed, position, branch,
    score, token, V, G, GROUPS: tl.constexpr,
):  # fmt: skip
    """Two levels over the groups, without the named ids, which are -inf in the row."""
    groups = tl.arange(0, GROUPS)
    m = tl.load(m_row + groups, mask=groups < G, other=-float("inf"))
    s = tl.load(s_row + groups, mask=groups < G, other=0.0)
    shift = tl.log(weight) - tl.log(mass)
    scores = log_weights(m, s, best, temperature) + shift
    scores += gumbel_from_0(GROUPS, seed, position, RESID_GROUP, 0, branch)
    touched = groups < 0
    at = tl.arange(0, IDS)
    for n in range(IDS):
        named_id = tl.max(tl.where(at == n, ids_N, -1), axis=0)
        touched = touched | ((groups == named_id // GROUP) & (named_id >= 0))
    scores = tl.where(touched, -float("inf"), scores)
    group_score = tl.max(scores, axis=0)
    group = tl.argmax(scores, axis=0)
    its_group = tl.where(ids_N >= 0, ids_N // GROUP, 0)
    ids = its_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = values(row, ids, (ids_N >= 0)[:, None] & (ids < V), masks, mask_row, mask_words)
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
        z_128 = values(row, inside, inside < V, masks, mask_row, mask_words)
        noise = gumbel(inside, seed, position, RESID_TOKEN, 0, branch)
        best_128 = tl.where(z_128 > -float("inf"), (z_128 - best) / temperature + noise, -float("inf"))
        score = group_score
        token = group * GROUP + tl.argmax(best_128, axis=0)
    return score, token


@triton.jit
def _from_joint_groups(
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
            own_score, own_group = _best_of(own, gumbel(at, seed, position, RESID_GROUP, 0, branch), at)
            if own_score > group_score:
                group_score = own_score
                group = own_group
        if (group_score > -float("inf")) & ((group_score > score) | (token < 0)):
            inside = group * GROUP + tl.arange(0, GROUP)
            z = values(row, inside, inside < V, masks, mask_row, mask_words)
            q = dense_q(values(q_row, inside, inside < V, None, -1, 0), q_best, q_total, temperature)
            w_128 = weight * chance(z, inside, NO_KEY, best, temperature, -float("inf"), mass) - share * q
            _, token = _best_of(w_128, gumbel(inside, seed, position, RESID_TOKEN, 0, branch), inside)
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
def _from_row(
    row, q_row, masks, mask_row, mask_words, weight, share, bound, best, temperature, log_min_p, mass, q_best, q_total,
    dense, seed, position, branch, score, token, V, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """One number a kept token, wherever it stands in the row."""
    for start in range(0, V, TILE_IDS):
        tile = start // TILE_IDS
        ids = tile_ids(tile, TILE)
        z = tile_values(row, tile, V, masks, mask_row, mask_words, TILE)
        w = weight * chance(z, ids, bound, best, temperature, log_min_p, mass)
        if HAS_DENSE:
            if dense:
                w = _joint(
                    row, q_row, tile, masks, mask_row, mask_words, weight, share, bound, best, temperature, log_min_p,
                    mass, q_best, q_total, V,
                )  # fmt: skip
        noise = gumbel(ids, seed, position, RESID_TOKEN, 0, branch)
        own_score, own_token = _best_of(tl.ravel(w), tl.ravel(noise), tl.ravel(ids))
        score, token = _better(score, token, own_score, own_token)
    return score, token


def residual(
    logits_RV: torch.Tensor, runs: RunImage, work: Workspace, proposal: Proposal, q_best: torch.Tensor,
    q_total: torch.Tensor, weights_B: torch.Tensor, out: VerifyOutput, *, side: bool,
) -> None:  # fmt: skip
    """Writes the token behind the last accepted draft where `accept` left a weight that is not negative."""
    requests, steps = proposal.draft_ids.shape
    none = out.tokens  # stands where nothing is read
    sparse, dense = proposal.q_ids is not None, proposal.q_logits is not None
    _residual_kernel[(requests,)](
        logits_RV, logits_RV.stride(0), runs.slots, runs.table, runs.masks if side else None,
        runs.masks.shape[1] if side else 0, work.maxima, work.sums, runs.side_ids, runs.side_processed,
        work.side_len, work.ints, work.floats, work.keys, proposal.draft_ids, proposal.kind,
        proposal.q_ids if sparse else none, proposal.q_probs if sparse else none,
        proposal.q_logits if dense else logits_RV,
        proposal.q_logits.stride(1) if proposal.q_logits is not None else 0, q_best, q_total, weights_B, out.counts,
        out.tokens, out.flags, steps, logits_RV.shape[1], work.groups,
        GROUPS=max(4, triton.next_power_of_2(work.groups)), SIDE=side, HAS_SPARSE=sparse, HAS_DENSE=dense,
        num_warps=_WARPS,
    )  # fmt: skip
