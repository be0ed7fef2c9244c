"""Accepts drafts of each run, draws the token after them, and moves the slot past them (speculative decoding).

Grid (B): a program does one run. It looks at all drafts of the run together, so that its reads are under way together.
Greedy rows and `strict` compare a draft with the token that `sample` drew for its row. The other rules compare u with

    standard   p / q, up to the first draft that is refused (Leviathan, Kalman, Matias 2023; Chen et al. 2023)
    block      h_i = r_i / (r_i + 1 - P_i), the last is P_k; the largest i with u_i <= h_i, P_i = min(1, P_{i-1} p / q)
               r_i = sum of max(P_i p - q, 0) over the next position: P_i (1 - p(S)) + what S adds, S the proposal's ids
               (Sun et al. 2024, "Block verification")

The token after the accepted drafts is the one that its row drew itself, or comes from the residual (`residual_sample`).
The kernel reads slots, drafts, proposals and logits of drafts before it waits for the previous kernel (`pdl`).
Bytes: 64 logits a draft, and those of `residual_sample`; block verification of dense proposals reads both rows.

| pointer | shape, type | |
|---|---|---|
| slots | i32 [B], of all slots | read |
| table | i32 [R + 1, W]: row r's state in slot r + 1, with its side list's place | read |
| draft_ids, kinds | i32 [B, K], u8 [B] | read |
| q_ids, q_probs; q_logits, q_best, q_total | [B, K, 64]; [B, K, V], f32 [B, K] | read |
| rates | f32 [MAX_DRAFTS] of the synthetic rule | read |
| drawn | i32 [R], what each row drew itself | read |
| keys | i64 [R, SCRATCH]: the lists of `sample` | read |
| tokens, counts | i32 [R], i32 [B] | write |
| flags | i32 [R] | read, write |
| to_table, entry_ids, entry_counts, entry_bias | i32 [S, W], i32, i32, f32 [E]: the state of all slots | read, write |

Shape legend: B requests, K draft steps, R = B (K + 1) rows, D = MAX_DRAFTS steps, N ids that a proposal names.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    BRANCH,
    FLAGS,
    GREEDY,
    LOG_MIN_P,
    MASK_ROW,
    POSITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RowLogits,
    load_bound,
    number,
    pdl_options,
    raw_values,
    seed_of,
    side_extent,
    side_find,
    values,
    wait_for_previous,
    word,
)
from gpu_sampler.kernels.draft_probs import (
    DENSE,
    DRAFTS,
    IDS,
    ONE,
    DrafterRow,
    Proposals,
    RowDistribution,
    chance,
    dense_q,
    dense_residual_mass,
    named,
    run_length,
)
from gpu_sampler.kernels.philox import ACCEPT, NoiseKey, uniforms
from gpu_sampler.kernels.residual_sample import residual_sample
from gpu_sampler.kernels.verify_rows import BLOCK, STANDARD, STRICT, SYNTHETIC, advance, code, of_step, rule_of
from gpu_sampler.output import RowFlag, VerifyOutput
from gpu_sampler.spec_decode import Proposal, VerifyRules
from gpu_sampler.state.device_state import DeviceState
from gpu_sampler.workspace import BEST, FLOATS, INTS, LISTED, MASS, SCRATCH, LogitRows

_NO_TOKEN: tl.constexpr = tl.constexpr(int(RowFlag.NO_TOKEN))
_BAD_PROPOSAL: tl.constexpr = tl.constexpr(int(RowFlag.BAD_PROPOSAL))
_ROWS: tl.constexpr = tl.constexpr(16)  # at least those of a run
_WARPS = 8  # part of the contract: it shapes the sums of a residual
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
FEW_REQUESTS = 100  # each has a multiprocessor to itself, and registers enough that hardly any are spilt
_REGISTERS = 128  # of more: two programs a multiprocessor


class _RunRows(NamedTuple):
    """Names the rows of a step as the kernel takes them; those of a run share one mask."""

    logits: Any
    row_stride: Any
    table: Any
    masks: Any
    mask_row: Any
    mask_words: Any
    side_ids: Any
    side: Any  # None where no row has a side list
    side_len: Any
    row_ints: Any
    row_floats: Any
    V: Any


@triton.jit(do_not_specialize=["K"])  # or runs of one draft would compile while serving
def _rejection_sample_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, side_ids, side, side_len, row_ints, row_floats,
    keys, draft_ids, kinds, q_ids, q_probs, q_logits, q_stride, q_best, q_total, rates, drawn, tokens, counts,
    flags_out, to_table, entry_ids, entry_counts, entry_bias, K, V, G, GROUPS: tl.constexpr, RULE: tl.constexpr,
    SEEDED: tl.constexpr, SIDE: tl.constexpr, HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr, PADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Verifies one run; see the module. HAS_SPARSE, HAS_DENSE: some proposal is. PADS: zeroes flags after the count."""
    SYNTHETICS: tl.constexpr = (RULE == SYNTHETIC) or (SEEDED == SYNTHETIC)
    BLOCKS: tl.constexpr = (RULE == BLOCK) or (SEEDED == BLOCK)
    RATIOS: tl.constexpr = BLOCKS or (RULE == STANDARD) or (SEEDED == STANDARD)
    N: tl.constexpr = IDS if HAS_SPARSE else ONE
    b = tl.program_id(0)
    first = b * (K + 1)
    slot = tl.load(slots + b)
    at_D = tl.arange(0, DRAFTS)
    draft_D = tl.load(draft_ids + b * K + at_D, mask=at_D < K, other=-1)
    kind = tl.load(kinds + b).to(tl.int32)
    drafts = run_length(draft_ids, kinds, b, K)
    inside_D = at_D < drafts
    at = tl.arange(0, _ROWS)
    said = tl.load(draft_ids + b * K + at, mask=at < K, other=-1)  # as far as it is accepted
    # The words of the slot are those of the run's first row, and unlike them nothing writes them before this kernel.
    flags = word(to_table, slot, FLAGS)
    rule = rule_of(flags, RULE, SEEDED)
    compares = ((flags & GREEDY) != 0) | (rule == STRICT)
    temperature = number(to_table, slot, TEMPERATURE)
    log_min_p = number(to_table, slot, LOG_MIN_P)
    mask_row = word(to_table, slot, MASK_ROW)
    seed = seed_of(to_table, slot)
    branch = word(to_table, slot, BRANCH)
    position = word(to_table, slot, POSITION)
    rows = _RunRows(
        logits, row_stride, table, masks, mask_row, mask_words, side_ids, side if SIDE else None, side_len, row_ints,
        row_floats, V,
    )  # fmt: skip
    proposals = Proposals(q_ids, q_probs, q_logits, q_stride, q_best, q_total)
    row_D = first + tl.minimum(at_D, K)
    u_D = tl.zeros([DRAFTS], tl.float32)
    z_D = tl.zeros([DRAFTS], tl.float32)
    q_D = tl.zeros([DRAFTS], tl.float32)
    unlimited = (word(to_table, slot, TOP_K) <= 0) & (number(to_table, slot, TOP_P) >= 1.0)
    plain = unlimited & (log_min_p == -float("inf"))
    if ~compares:
        u_D = uniforms(seed, position + at_D, ACCEPT, at_D, branch)
        if RATIOS:
            if rule != SYNTHETIC:
                z_D = _at_drafts(rows, row_D, first, draft_D, drafts)
                q_D = _q_at_drafts(draft_D, kind, proposals, b * K, inside_D, V, HAS_SPARSE, N)

    wait_for_previous(PDL)
    own = tl.load(drawn + first + at, mask=at <= K, other=-1)
    taken_D = draft_D == tl.load(drawn + first + at_D, mask=at_D < K, other=-1)
    spans = tl.zeros([], tl.int32) != 0  # a draft may be accepted after one that is not
    missing_D = at_D < 0
    weight_D = tl.full([DRAFTS], 1.0, tl.float32)  # P after each draft
    p_D = tl.zeros([DRAFTS], tl.float32)
    if RATIOS:  # of all rows together: a load for the row that the run ends at would wait again
        bound_D, best_D, mass_D, _ = _distributions(row_ints, row_floats, row_D, inside_D)
        listed_D = tl.load(row_ints + row_D * INTS + LISTED)
        flags_D = tl.load(flags_out + row_D)
    if ~compares:
        if SYNTHETICS:
            rate_D = tl.load(rates + at_D)
            taken_D = (rule == SYNTHETIC) & (u_D < rate_D) & (draft_D < V)
        if RATIOS:
            if rule != SYNTHETIC:
                if HAS_DENSE:
                    if kind == DENSE:
                        q_D = _dense_at_drafts(draft_D, proposals, b * K, inside_D, temperature, K, V)
                p_D = chance(z_D, draft_D, RowDistribution(bound_D, best_D, temperature, log_min_p, mass_D))
                ratio_D = ratio_of(p_D, q_D)
                missing_D = q_D == 0.0
                taken_D = u_D < ratio_D
                if BLOCKS:
                    if rule == BLOCK:
                        weight_D = _weights(ratio_D, drafts)
                        behind_D = _masses_behind(
                            rows, first, b * K, draft_ids, kind, proposals, weight_D, temperature, log_min_p, drafts, K,
                            HAS_SPARSE, HAS_DENSE, N,
                        )  # fmt: skip
                        over_D = behind_D + (1.0 - weight_D)
                        limit_D = tl.where(over_D > 0.0, behind_D / tl.where(over_D > 0.0, over_D, 1.0), 1.0)
                        taken_D = u_D <= tl.where(at_D + 1 < drafts, limit_D, weight_D)
                        spans = rule == BLOCK
    accepted = tl.min(tl.where(inside_D & ~taken_D, at_D, drafts), axis=0)
    last_taken = tl.max(tl.where(inside_D & taken_D, at_D + 1, 0), axis=0)
    accepted = tl.where(spans, last_taken, accepted)

    r = first + accepted
    token = of_step(own, accepted)
    draws = compares | (rule == SYNTHETIC) | (accepted == drafts)
    if RATIOS:
        if ~draws:
            row_flags = of_step(flags_D | tl.where(missing_D, _BAD_PROPOSAL, 0), accepted)
            if (row_flags & _NO_TOKEN) == 0:
                row_at = r.to(tl.int64)
                start, length = side_extent(table, r + 1, side_len, r, SIDE)
                row = RowLogits(
                    logits + row_at * row_stride, side_ids + start, side + start if SIDE else None, length, masks,
                    mask_row, mask_words, V,
                )  # fmt: skip
                p = RowDistribution(
                    of_step(bound_D, accepted), of_step(best_D, accepted), temperature, log_min_p,
                    of_step(mass_D, accepted),
                )  # fmt: skip
                token, more = residual_sample(
                    row, maxima + row_at * G, sums + row_at * G, keys + row_at * _SCRATCH, of_step(listed_D, accepted),
                    plain, of_step(draft_D, accepted), of_step(p_D, accepted), p, kind, proposals, b * K + accepted,
                    weight_behind(weight_D, accepted), NoiseKey(seed, position + accepted, branch), G, GROUPS,
                    HAS_SPARSE, HAS_DENSE, N,
                )  # fmt: skip
                row_flags = row_flags | more
            tl.store(flags_out + r, row_flags)
    said = tl.where(at < accepted, said, tl.where(at == accepted, token, -1))
    tl.store(tokens + first + at, said, mask=at <= K)
    tl.store(counts + b, accepted + 1)
    if PADS:
        tl.store(flags_out + first + at, 0, mask=(at > accepted) & (at <= K))
    advance(slot, flags, said, accepted + 1, position, to_table, entry_ids, entry_counts, entry_bias, V, SIDE)


@triton.jit
def ratio_of(p, q):
    """Returns p / q; 0 where q is 0, which no draft may have."""
    return tl.where(q > 0.0, p / tl.where(q > 0.0, q, 1.0), 0.0)


@triton.jit
def weight_behind(weight_D, accepted):
    """Returns P after so many drafts."""
    before = tl.arange(0, DRAFTS) + 1 == accepted
    return tl.where(accepted > 0, tl.sum(tl.where(before, weight_D, 0.0), axis=0), 1.0)


@triton.jit
def _weights(ratio_D, drafts):
    """Returns P after each draft, one after another: products of another order would have other bits."""
    at_D = tl.arange(0, DRAFTS)
    weight = tl.full([], 1.0, tl.float32)
    weight_D = tl.zeros([DRAFTS], tl.float32)
    for step in range(drafts):
        weight = tl.minimum(1.0, weight * tl.sum(tl.where(at_D == step, ratio_D, 0.0), axis=0))
        weight_D = tl.where(at_D == step, weight, weight_D)
    return weight_D


@triton.jit
def _distributions(row_ints, row_floats, row_D, inside_D):
    """Returns (bound i64, best, mass f32, finite) [D], the distributions of rows; those outside have nothing finite."""
    bound_D = load_bound(row_ints + row_D * INTS)
    best_D = tl.load(row_floats + row_D * FLOATS + BEST)
    mass_D = tl.load(row_floats + row_D * FLOATS + MASS)
    finite_D = inside_D & (best_D > -float("inf"))
    return bound_D, tl.where(finite_D, best_D, 0.0), tl.where(finite_D, mass_D, 1.0), finite_D


@triton.jit
def _side_find(rows, r, ids_N):
    """Returns `side_find` in the side list of row r."""
    start, length = side_extent(rows.table, r + 1, rows.side_len, r, True)
    return side_find(RowLogits(None, rows.side_ids + start, rows.side + start, length, None, -1, 0, 0), ids_N, 32)


@triton.jit
def _values_at(rows, row_D, ids, inside):
    """Returns the values of ids at their rows, without those of side lists; -inf for ids that are not `inside`."""
    at = rows.logits + row_D.to(tl.int64) * rows.row_stride
    return values(RowLogits(at, None, None, 0, rows.masks, rows.mask_row, rows.mask_words, rows.V), ids, inside)


@triton.jit
def _at_drafts(rows, row_D, first, draft_D, drafts):
    """Returns the values f32 [D] of the drafts at their rows; -inf for one outside of the vocabulary."""
    at_D = tl.arange(0, DRAFTS)
    inside_D = (at_D < drafts) & (draft_D < rows.V)
    z_D = _values_at(rows, row_D, draft_D, inside_D)
    if rows.side is not None:
        for step in range(drafts):
            one = tl.zeros([ONE], tl.int32) + tl.max(tl.where(at_D == step, draft_D, -1), axis=0)
            found = tl.max(_side_find(rows, first + step, one), axis=0)
            z_D = tl.where((at_D == step) & inside_D, tl.maximum(z_D, found), z_D)
    return z_D


@triton.jit
def _q_at_drafts(draft_D, kind, proposals, place, inside_D, V, HAS_SPARSE: tl.constexpr, N: tl.constexpr):
    """Returns q f32 [D] of the drafts of a proposal that names its ids; 0 for one outside of the vocabulary."""
    ids_DN, q_DN = named(kind, draft_D, proposals, place + tl.arange(0, DRAFTS), inside_D, HAS_SPARSE, N)
    its_DN = (ids_DN == draft_D[:, None]) & (inside_D & (draft_D < V))[:, None]
    return tl.sum(tl.where(its_DN, q_DN, 0.0), axis=1)


@triton.jit
def _dense_at_drafts(draft_D, proposals, place, inside_D, temperature, K, V):
    """Returns q f32 [D] of the drafts of a dense proposal."""
    inside_D = inside_D & (draft_D < V)
    place_D = place + tl.minimum(tl.arange(0, DRAFTS), K - 1)
    z_D = raw_values(proposals.q_logits + place_D.to(tl.int64) * proposals.q_stride, draft_D, inside_D)
    best_D = tl.load(proposals.q_best + place_D, mask=inside_D, other=0.0)
    return dense_q(z_D, best_D, tl.load(proposals.q_total + place_D, mask=inside_D, other=1.0), temperature)


@triton.jit
def _masses_behind(
    rows, first, place, draft_ids, kind, proposals, weight_D, temperature, log_min_p, drafts, K,
    HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns r [D], the sum of max(P p - q, 0) at the row after each draft; 0 after the last one."""
    at_D = tl.arange(0, DRAFTS)
    inside_D = at_D + 1 < drafts
    row_D = first + tl.minimum(at_D + 1, K)
    bound_D, best_D, mass_D, finite_D = _distributions(rows.row_ints, rows.row_floats, row_D, inside_D)
    draft_D = tl.load(draft_ids + place + at_D + 1, mask=inside_D, other=-1)
    ids_DN, q_DN = named(kind, draft_D, proposals, place + at_D + 1, inside_D, HAS_SPARSE, N)
    inside_DN = (ids_DN >= 0) & (ids_DN < rows.V)
    z_DN = _values_at(rows, row_D[:, None], ids_DN, inside_DN)
    if rows.side is not None:
        for step in range(drafts - 1):
            ids_N = tl.max(tl.where(at_D[:, None] == step, ids_DN, -1), axis=0)
            found_N = _side_find(rows, first + step + 1, ids_N)
            here = (at_D[:, None] == step) & inside_DN
            z_DN = tl.where(here, tl.maximum(z_DN, found_N[None, :]), z_DN)
    p = RowDistribution(bound_D[:, None], best_D[:, None], temperature, log_min_p, mass_D[:, None])
    p_DN = chance(z_DN, ids_DN, p)
    p_DN = tl.where(inside_DN, p_DN, 0.0)
    found_D = weight_D * tl.maximum(1.0 - tl.sum(p_DN, axis=1), 0.0)
    found_D += tl.sum(tl.where(inside_DN, tl.maximum(weight_D[:, None] * p_DN - q_DN, 0.0), 0.0), axis=1)
    if HAS_DENSE:
        if kind == DENSE:
            for step in range(drafts - 1):
                weight = weight_behind(weight_D, step + 1)
                found = _joint_mass(rows, first + step + 1, place + step + 1, proposals, weight, temperature, log_min_p)
                found_D = tl.where(at_D == step, found, found_D)
    return tl.where(finite_D, found_D, 0.0)


@triton.jit
def _joint_mass(rows, r, place, proposals, weight, temperature, log_min_p):
    """Returns r at one row of a dense proposal."""
    found = tl.zeros([], tl.float32)
    best = tl.load(rows.row_floats + r * FLOATS + BEST)
    if best > -float("inf"):
        start, length = side_extent(rows.table, r + 1, rows.side_len, r, rows.side is not None)
        row = RowLogits(
            rows.logits + r.to(tl.int64) * rows.row_stride, rows.side_ids + start,
            rows.side + start if rows.side is not None else None, length, rows.masks, rows.mask_row, rows.mask_words,
            rows.V,
        )  # fmt: skip
        mass = tl.load(rows.row_floats + r * FLOATS + MASS)
        p = RowDistribution(load_bound(rows.row_ints + r * INTS), best, temperature, log_min_p, mass)
        q_row = proposals.q_logits + place.to(tl.int64) * proposals.q_stride
        q = DrafterRow(q_row, tl.load(proposals.q_best + place), tl.load(proposals.q_total + place), True)
        found = dense_residual_mass(row, p, q, weight)
    return found


class DraftProbs(NamedTuple):
    """Holds the distributions that the drafts of a verify step were drawn from, on the device."""

    proposal: Proposal
    q_best: torch.Tensor  # f32 [B, K], the largest logit of a dense proposal's position; not read for others
    q_total: torch.Tensor  # f32 [B, K], its sum of exponentials
    rules: VerifyRules
    rates: torch.Tensor  # f32 [MAX_DRAFTS] of the synthetic rule


def rejection_sample(
    slots: DeviceState,
    slots_B: torch.Tensor,
    rows: LogitRows,
    drafts: DraftProbs,
    drawn_R: torch.Tensor,
    out: VerifyOutput,
    *,
    crowded: bool,
) -> None:
    """Accepts drafts of each run, draws the token behind them, and moves the slots past the emitted tokens.

    Args:
        slots: the state of all slots, which advances.
        slots_B: i32 [B], the slots of the requests.
        rows: the R = B (K + 1) rows with their VerifyState, after `sample` and its fallback.
        drafts: the proposal and its probabilities.
        drawn_R: i32 [R], the token that each row drew itself.
        out: outputs; tokens and counts are written, and the flags after the counts where nothing else is reported.
        crowded: takes the code for more than FEW_REQUESTS, which gives the same results.
    """
    proposal, none = drafts.proposal, out.tokens  # stands where nothing is read
    requests, steps = proposal.draft_ids.shape
    sparse, dense = proposal.q_ids is not None, proposal.q_logits is not None
    state, work = rows.state, rows.work
    _rejection_sample_kernel[(requests,)](
        rows.logits, rows.logits.stride(0), slots_B, *rows.inputs[3:], work.maxima, work.sums, state.side_ids,
        state.side_processed, work.side_len, work.ints, work.floats, work.keys, proposal.draft_ids, proposal.kind,
        proposal.q_ids if sparse else none, proposal.q_probs if sparse else none,
        proposal.q_logits if dense else rows.logits,
        proposal.q_logits.stride(1) if proposal.q_logits is not None else 0, drafts.q_best, drafts.q_total,
        drafts.rates, drawn_R, out.tokens, out.counts, out.flags, slots.table, slots.entry_ids, slots.entry_counts,
        slots.entry_bias, steps, rows.logits.shape[1], work.groups, GROUPS=work.padded_groups,
        RULE=code(drafts.rules.rule), SEEDED=code(drafts.rules.seeded), SIDE=rows.side, HAS_SPARSE=sparse,
        HAS_DENSE=dense, PADS=out.logprobs is None, num_warps=_WARPS, **pdl_options(),
        **({"maxnreg": _REGISTERS} if crowded else {}),
    )  # fmt: skip
