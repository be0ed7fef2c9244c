"""`behind`: the token behind a rejected draft, drawn from max(P p - q, 0) by numbers of its own; a part of `accept`.

A program draws for one row. By the row and the proposal:
- the kept tokens are in `select`'s list: one number for each;
- all tokens stay, and the proposal names its ids: two levels as in `select`. The named ids stand outside of their
  groups, which are summed anew without them (to subtract would cancel), and compete by numbers of their own;
- all tokens stay, and the proposal is dense: the groups are summed by a joint read of both rows;
- a filter keeps more tokens than a list holds: a read of the row, one number a kept token.
Where nothing has weight, the token comes from p, and the row is flagged.

Where a proposal may name many ids, they are -inf in the row's logits while it draws, and their groups weigh nothing in
its statistics; both are as before when it ends. One id is left out by comparison, and nothing is written.

Legend: N ids that a proposal names.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.philox import RESID_TOKEN, gumbel
from gpu_sampler.kernels.proposals import (
    DENSE,
    chance,
    named,
    processed_of,
)
from gpu_sampler.kernels.residual_sources import (
    best_of,
    from_groups,
    from_joint_groups,
    from_list,
    from_row,
    from_side,
)
from gpu_sampler.kernels.row import OVERLAY_START, word
from gpu_sampler.output import RowFlag
from gpu_sampler.workspace import SCRATCH

_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
_ZERO_RESIDUAL: tl.constexpr = tl.constexpr(int(RowFlag.ZERO_RESIDUAL))


@triton.jit
def behind(
    logits, row_stride, table, masks, mask_row, mask_words, maxima, sums, side_ids, side, side_len, keys, draft, p,
    kind, q_ids, q_probs, q_logits, q_stride, q_best, q_total, weight, r, place, listed, bound, best, mass, plain,
    temperature, log_min_p, seed, position, branch, V, G, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(token, flags) behind a draft of probability `p` at row r, `place` = request x K + step; `weight` is P. `plain`:
    all tokens stay."""
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
    """How much of q is taken off p."""
    return tl.where(attempt == 0, 1.0, 0.0)


@triton.jit
def _attempt(
    row, q_row, keys, listed, m_row, s_row, own_ids, own, length, masks, mask_row, mask_words, ids_N, alone, p_N, q_N,
    weight, share, bound, best, temperature, log_min_p, mass, q_best, q_total, dense, plain, seed, position, branch, V,
    G, GROUPS: tl.constexpr, SIDE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """The token of one draw from max(P p - share q, 0); -1 where nothing has weight."""
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
    """What stood at the named ids, which are -inf from here on."""
    raw_N = tl.load(row + ids_N, mask=ids_N >= 0, other=0.0)
    tl.debug_barrier()
    nothing_N = tl.full(raw_N.shape, -float("inf"), tl.float32).to(raw_N.dtype)
    tl.store(row + ids_N, nothing_N, mask=ids_N >= 0)
    tl.debug_barrier()
    return raw_N


@triton.jit
def _put_back(row, ids_N, raw_N):
    tl.debug_barrier()
    tl.store(row + ids_N, raw_N, mask=ids_N >= 0)
    tl.debug_barrier()
