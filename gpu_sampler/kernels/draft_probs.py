"""Computes probabilities of a verify step: the target's of any token, and what a draft was drawn from.

    p(x) = 2^((z - M) log2(e) / T) / mass   for the kept x, 0 for others
    q(x) = 1 at the draft; or as the proposal's ids and numbers give it; or 2^((z' - M') log2(e) / T) / Z' of the
           drafter's logits

Shape legend: B requests, K draft steps, D = MAX_DRAFTS steps, V vocabulary, N ids that a proposal names: 64 where some
are sparse.
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    LOG2_E,
    SIDE_BLOCK,
    TEMPERATURE,
    key,
    number,
    over_tile,
    side_find,
    tile_ids,
    tile_values,
    values,
)
from gpu_sampler.spec_decode import MAX_DRAFTS, PROPOSAL_IDS, ProposalKind

DRAFTS: tl.constexpr = tl.constexpr(MAX_DRAFTS)
IDS: tl.constexpr = tl.constexpr(PROPOSAL_IDS)
ONE: tl.constexpr = tl.constexpr(16)  # places for one id: fewer would give a residual's sums another layout
NONE: tl.constexpr = tl.constexpr(int(ProposalKind.NONE))
ONE_HOT: tl.constexpr = tl.constexpr(int(ProposalKind.ONE_HOT))
SPARSE: tl.constexpr = tl.constexpr(int(ProposalKind.SPARSE))
DENSE: tl.constexpr = tl.constexpr(int(ProposalKind.DENSE))
TILE: tl.constexpr = tl.constexpr(64)  # groups read together
TILE_IDS: tl.constexpr = tl.constexpr(64 * 128)


@triton.jit
def run_length(draft_ids, kinds, request, K):
    """Returns how many drafts stand before the first negative id; 0 for a request without a proposal."""
    at = tl.arange(0, DRAFTS)
    ids = tl.load(draft_ids + request * K + at, mask=at < K, other=-1)
    length = tl.min(tl.where(ids < 0, at, DRAFTS), axis=0)
    return tl.where(tl.load(kinds + request).to(tl.int32) == NONE, 0, length)


@triton.jit
def chance(z, ids, bound, best, temperature, log_min_p, mass):
    """Returns p of tokens by their processed values; 0 where nothing is finite."""
    x = (z - best) / temperature
    stays = (z > -float("inf")) & (key(z, ids) >= bound) & (x >= log_min_p)
    return tl.where(stays, tl.exp2(x * LOG2_E) / mass, 0.0)


@triton.jit
def processed_of(row, ids, side_ids, side, length, masks, mask_row, mask_words, V, SIDE: tl.constexpr):
    """Returns processed values f32 [N] of any ids; -inf outside of [0, V)."""
    z = values(row, ids, (ids >= 0) & (ids < V), masks, mask_row, mask_words)
    if SIDE:
        z = tl.maximum(z, side_find(side_ids, side, length, ids, 32))
    return z


@triton.jit
def named(kind, draft_D, q_ids, q_probs, place_D, inside_D, HAS_SPARSE: tl.constexpr, N: tl.constexpr):
    """Returns (ids i32 [D, N], q f32 [D, N]) that a proposal names at places = request x K + step.

    A certain draft names one id; a dense proposal, and steps that are not `inside_D`, name none.
    """
    at = tl.arange(0, N)[None, :]
    inside = (at < N) & inside_D[:, None]
    certain = (at == 0) & inside & (kind == ONE_HOT)
    ids = tl.where(certain, draft_D[:, None], -1)
    q = tl.where(certain, 1.0, 0.0)
    if HAS_SPARSE:
        names = inside & (kind == SPARSE)
        places = place_D.to(tl.int64)[:, None] * IDS + at
        ids = tl.where(names, tl.load(q_ids + places, mask=inside, other=-1), ids)
        q = tl.where(names, tl.load(q_probs + places, mask=inside, other=0.0), q)
    return ids, q


@triton.jit
def dense_q(z, q_best, q_total, temperature):
    """Returns q of tokens by the drafter's logits."""
    total = tl.where(q_total > 0.0, q_total, float("inf"))  # nothing finite: q is 0
    return tl.where(z > -float("inf"), tl.exp2((z - q_best) / temperature * LOG2_E) / total, 0.0)


@triton.jit
def dense_residual_mass(
    row, q_row, side_ids, side, length, masks, mask_row, mask_words, weight, bound, best, temperature, log_min_p, mass,
    q_best, q_total, V, SIDE: tl.constexpr,
):  # fmt: skip
    """Returns the sum of max(P p - q, 0) by one joint read of both rows."""
    total = tl.zeros([TILE, 4, 32], tl.float32)
    for start in range(0, V, TILE_IDS):
        tile = start // TILE_IDS
        ids = tile_ids(tile, TILE)
        p = chance(
            tile_values(row, tile, V, masks, mask_row, mask_words, TILE), ids, bound, best, temperature, log_min_p, mass
        )
        q = dense_q(tile_values(q_row, tile, V, None, -1, 0, TILE), q_best, q_total, temperature)
        total += tl.maximum(weight * p - q, 0.0)
    found = over_tile(total)
    if SIDE:
        for start in range(0, length, SIDE_BLOCK):
            at = start + tl.arange(0, SIDE_BLOCK)
            ids = tl.load(side_ids + at, mask=at < length, other=-1)
            z = tl.load(side + at, mask=at < length, other=-float("inf"))
            p = chance(z, ids, bound, best, temperature, log_min_p, mass)
            q = dense_q(values(q_row, ids, (ids >= 0) & (ids < V), None, -1, 0), q_best, q_total, temperature)
            found += tl.sum(tl.maximum(weight * p - q, 0.0), axis=0)
    return found


@triton.jit(do_not_specialize=["K"])  # or runs of one draft would compile while serving
def _dense_totals_kernel(q_logits, q_stride, draft_ids, kinds, slots, table, q_best, q_total, K, V):
    """Stores M' and Z' of one position of a dense proposal, by one read of its logits. Grid (B K)."""
    place = tl.program_id(0)
    request = place // K
    if tl.load(kinds + request).to(tl.int32) != DENSE:
        return
    if place - request * K >= run_length(draft_ids, kinds, request, K):
        return
    temperature = number(table, tl.load(slots + request), TEMPERATURE)
    row = q_logits + place.to(tl.int64) * q_stride
    best = tl.full([], -float("inf"), tl.float32)
    for start in range(0, V, TILE_IDS):
        z = tile_values(row, start // TILE_IDS, V, None, -1, 0, TILE)
        best = tl.maximum(best, tl.max(tl.max(tl.max(z, axis=1), axis=1), axis=0))
    total = tl.zeros([TILE, 4, 32], tl.float32)
    if (best > -float("inf")) & (temperature > 0.0):
        for start in range(0, V, TILE_IDS):
            z = tile_values(row, start // TILE_IDS, V, None, -1, 0, TILE)
            total += tl.exp2((z - best) / temperature * LOG2_E)
    tl.store(q_best + place, best)
    tl.store(q_total + place, over_tile(total))


def dense_totals(
    q_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    kinds: torch.Tensor,
    slots_B: torch.Tensor,
    table_SW: torch.Tensor,
    q_best: torch.Tensor,
    q_total: torch.Tensor,
) -> None:
    """Fills the largest logit and the sum of exponentials of dense proposals.

    Args:
        q_logits: [B, K, V] of any float type, the drafter's.
        draft_ids, kinds: i32 [B, K], u8 [B] drafts and ProposalKind.
        slots_B, table_SW: i32, the requests' slots and their state.
        q_best, q_total: f32 [B, K] outputs; other proposals leave them alone.
    """
    requests, steps, vocab = q_logits.shape
    if requests and steps:
        _dense_totals_kernel[(requests * steps,)](
            q_logits,
            q_logits.stride(1),
            draft_ids,
            kinds,
            slots_B,
            table_SW,
            q_best,
            q_total,
            steps,
            vocab,
            num_warps=8,
        )
