"""Computes probabilities of a verify step: the target's of any token, and what a draft was drawn from.

    p(x) = 2^((z - M) log2(e) / T) / mass   for the kept x, 0 for others
    q(x) = 1 at the draft; or as the proposal's ids and numbers give it; or 2^((z' - M') log2(e) / T) / Z' of the
           drafter's logits

Shape legend: B requests, K draft steps, D = MAX_DRAFTS steps, V vocabulary, N ids that a proposal names: 64 where some
are sparse.
"""

from typing import Any, NamedTuple

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
    raw_tile,
    raw_values,
    side_block,
    tile_ids,
    tile_values,
)
from gpu_sampler.spec_decode import MAX_DRAFTS, PROPOSAL_IDS, Proposal, ProposalKind

DRAFTS: tl.constexpr = tl.constexpr(MAX_DRAFTS)
IDS: tl.constexpr = tl.constexpr(PROPOSAL_IDS)
ONE: tl.constexpr = tl.constexpr(16)  # places for one id: fewer would give a residual's sums another layout
NONE: tl.constexpr = tl.constexpr(int(ProposalKind.NONE))
ONE_HOT: tl.constexpr = tl.constexpr(int(ProposalKind.ONE_HOT))
SPARSE: tl.constexpr = tl.constexpr(int(ProposalKind.SPARSE))
DENSE: tl.constexpr = tl.constexpr(int(ProposalKind.DENSE))
TILE: tl.constexpr = tl.constexpr(64)  # groups read together
TILE_IDS: tl.constexpr = tl.constexpr(64 * 128)


class RowDistribution(NamedTuple):
    """Holds what a row's kept tokens have their probabilities by."""

    bound: Any  # the last kept key of the total order
    best: Any  # the row's largest value
    temperature: Any
    log_min_p: Any
    mass: Any  # the sum of exponentials of the kept tokens


class Proposals(NamedTuple):
    """Names the arrays of a step's proposals; those of a kind that no request has are not read."""

    q_ids: Any  # i32 [B, K, 64]
    q_probs: Any  # f32 [B, K, 64]
    q_logits: Any  # [B, K, V] and its stride
    q_stride: Any
    q_best: Any  # f32 [B, K] of `dense_totals`
    q_total: Any


class DrafterRow(NamedTuple):
    """Names one position of a dense proposal; of another proposal nothing is read."""

    logits: Any  # pointer to the drafter's logits [V]; None where no proposal of the step is dense
    best: Any  # the largest of them
    total: Any  # the sum of their exponentials
    dense: Any  # whether the row's own proposal is


@triton.jit
def run_length(draft_ids, kinds, request, K):
    """Returns how many drafts stand before the first negative id; 0 for a request without a proposal."""
    at = tl.arange(0, DRAFTS)
    ids = tl.load(draft_ids + request * K + at, mask=at < K, other=-1)
    length = tl.min(tl.where(ids < 0, at, DRAFTS), axis=0)
    return tl.where(tl.load(kinds + request).to(tl.int32) == NONE, 0, length)


@triton.jit
def chance(z, ids, p):
    """Returns the probability of tokens under a RowDistribution by their processed values; 0 where none is finite."""
    x = (z - p.best) / p.temperature
    stays = (z > -float("inf")) & (key(z, ids) >= p.bound) & (x >= p.log_min_p)
    return tl.where(stays, tl.exp2(x * LOG2_E) / p.mass, 0.0)


@triton.jit
def named(kind, draft_D, proposals, place_D, inside_D, HAS_SPARSE: tl.constexpr, N: tl.constexpr):
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
        ids = tl.where(names, tl.load(proposals.q_ids + places, mask=inside, other=-1), ids)
        q = tl.where(names, tl.load(proposals.q_probs + places, mask=inside, other=0.0), q)
    return ids, q


@triton.jit
def dense_q(z, q_best, q_total, temperature):
    """Returns q of tokens by the drafter's logits."""
    total = tl.where(q_total > 0.0, q_total, float("inf"))  # nothing finite: q is 0
    return tl.where(z > -float("inf"), tl.exp2((z - q_best) / temperature * LOG2_E) / total, 0.0)


@triton.jit
def joint_tile(row, tile, p, q, weight, share):
    """Returns max(P p - share q, 0) of a tile of a dense proposal, [TILE, 4, 32]; `weight` is P."""
    chances = chance(tile_values(row, tile, TILE), tile_ids(tile, TILE), p)
    q_tile = dense_q(raw_tile(q.logits, tile, row.V, TILE), q.best, q.total, p.temperature)
    return tl.maximum(weight * chances - share * q_tile, 0.0)


@triton.jit
def dense_residual_mass(row, p, q, weight):
    """Returns the sum of max(P p - q, 0) by one joint read of both rows."""
    total = tl.zeros([TILE, 4, 32], tl.float32)
    for start in range(0, row.V, TILE_IDS):
        total += joint_tile(row, start // TILE_IDS, p, q, weight, 1.0)
    found = over_tile(total)
    if row.side is not None:
        for start in range(0, row.length, SIDE_BLOCK):
            ids, z = side_block(row, start)
            q_B = dense_q(raw_values(q.logits, ids, (ids >= 0) & (ids < row.V)), q.best, q.total, p.temperature)
            found += tl.sum(tl.maximum(weight * chance(z, ids, p) - q_B, 0.0), axis=0)
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
        z = raw_tile(row, start // TILE_IDS, V, TILE)
        best = tl.maximum(best, tl.max(tl.max(tl.max(z, axis=1), axis=1), axis=0))
    total = tl.zeros([TILE, 4, 32], tl.float32)
    if (best > -float("inf")) & (temperature > 0.0):
        for start in range(0, V, TILE_IDS):
            z = raw_tile(row, start // TILE_IDS, V, TILE)
            total += tl.exp2((z - best) / temperature * LOG2_E)
    tl.store(q_best + place, best)
    tl.store(q_total + place, over_tile(total))


def dense_totals(
    proposal: Proposal, slots_B: torch.Tensor, table_SW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what softmax needs of a step's dense proposals.

    Args:
        proposal: the drafts on the device, with the drafter's logits [B, K, V] of any float type.
        slots_B, table_SW: i32, the requests' slots and their state.

    Returns:
        The largest logit and the sum of exponentials of each position, f32 [B, K]; undefined for other proposals.
    """
    q_logits, ids = proposal.q_logits, proposal.draft_ids
    requests, steps = ids.shape
    # Apart: half of one tensor begins at a multiple of 16 bytes or not, and each would be compiled for.
    q_best, q_total = (torch.empty((requests, max(1, steps)), device=ids.device) for _ in range(2))
    if q_logits is not None and requests and steps:
        _dense_totals_kernel[(requests * steps,)](
            q_logits, q_logits.stride(1), ids, proposal.kind, slots_B, table_SW, q_best, q_total, steps,
            q_logits.shape[2], num_warps=8,
        )  # fmt: skip
    return q_best, q_total
