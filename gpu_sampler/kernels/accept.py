"""`accept`: how many drafts of each run are accepted, and where the token behind them comes from.

Grid (B): a program judges one run, draft by draft. Greedy rows and `strict` compare a draft with the token that
`select` found for its row; the other rules compare u with

    standard   p / q, draft after draft until one is refused
    block      h_i = r_i / (r_i + 1 - P_i), the last is P_k; the largest i with u_i <= h_i, P_i = min(1, P_{i-1} p / q)
               r_i = sum of max(P_i p - q, 0) over the next position: P_i (1 - p(S)) + what S adds, S the proposal's ids

Bytes: 64 logits a draft; block verification of dense proposals reads both rows.

| pointer | shape, type | |
|---|---|---|
| draft_ids, kinds | i32 [B, K], u8 [B] | read |
| q_ids, q_probs; q_logits, q_best, q_total | [B, K, 64]; [B, K, V], f32 [B, K] | read |
| drawn | i32 [R], what each row drew itself | read |
| tokens, counts | i32 [R], i32 [B] | write |
| weights | f32 [B]: P of the residual; -1 where the row's own token stands | write |
| flags | i32 [R] | read, write |
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.handover import AT, BEST, FLOATS, INTS, MASS, load_bound
from gpu_sampler.kernels.philox import ACCEPT, uniform
from gpu_sampler.kernels.proposals import (
    DENSE,
    chance,
    dense_q,
    dense_residual_mass,
    named,
    processed_of,
    run_length,
)
from gpu_sampler.kernels.row import (
    BRANCH,
    FLAGS,
    GREEDY,
    LOG_MIN_P,
    MASK_ROW,
    OVERLAY_START,
    TEMPERATURE,
    number,
    seed_of,
    word,
)
from gpu_sampler.kernels.runs import BLOCK, STANDARD, STRICT, SYNTHETIC, code, rule_of
from gpu_sampler.output import RowFlag, VerifyOutput
from gpu_sampler.proposal import Proposal, VerifyRules
from gpu_sampler.run_image import RunImage
from gpu_sampler.workspace import Workspace

_NO_TOKEN: tl.constexpr = tl.constexpr(int(RowFlag.NO_TOKEN))
_BAD_PROPOSAL: tl.constexpr = tl.constexpr(int(RowFlag.BAD_PROPOSAL))


@triton.jit(do_not_specialize=["K"])  # or runs of one draft would compile while serving
def _accept_kernel(
    logits, row_stride, slots, table, masks, mask_words, side_ids, side, side_len, row_ints, row_floats, draft_ids,
    kinds, q_ids, q_probs, q_logits, q_stride, q_best, q_total, rates, drawn, tokens, counts, weights, flags_out, K, V,
    RULE: tl.constexpr, SEEDED: tl.constexpr, SIDE: tl.constexpr, HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    SYNTHETICS: tl.constexpr = (RULE == SYNTHETIC) or (SEEDED == SYNTHETIC)
    BLOCKS: tl.constexpr = (RULE == BLOCK) or (SEEDED == BLOCK)
    RATIOS: tl.constexpr = BLOCKS or (RULE == STANDARD) or (SEEDED == STANDARD)
    b = tl.program_id(0)
    first = b * (K + 1)
    drafts = run_length(draft_ids, kinds, b, K)
    kind = tl.load(kinds + b).to(tl.int32)
    slot = tl.load(slots + first)
    flags = word(table, slot, FLAGS)
    rule = rule_of(flags, RULE, SEEDED)
    compares = ((flags & GREEDY) != 0) | (rule == STRICT)
    temperature = number(table, slot, TEMPERATURE)
    log_min_p = number(table, slot, LOG_MIN_P)
    seed = seed_of(table, slot)
    branch = word(table, slot, BRANCH)
    position = tl.load(row_ints + first * INTS + AT)
    accepted = tl.zeros([], tl.int32)
    weight = tl.full([], 1.0, tl.float32)  # P behind the drafts accepted
    product = weight  # P behind the drafts looked at
    bad = tl.full([], -1, tl.int32)
    step = tl.zeros([], tl.int32)
    going = step < drafts
    while going:
        draft = tl.load(draft_ids + b * K + step)
        taken = draft == tl.load(drawn + first + step)
        goes_on = taken & ~taken
        if ~compares:
            u = uniform(seed, position + step, ACCEPT, step, branch)
            if SYNTHETICS:
                taken = (rule == SYNTHETIC) & (u < tl.load(rates + step)) & (draft < V)
            if RATIOS:
                if rule != SYNTHETIC:
                    p, q = _at_draft(
                        logits, row_stride, table, masks, mask_words, side_ids, side, side_len, row_ints, row_floats,
                        first + step, slot + step, draft, kind, q_ids, q_probs, q_logits, q_stride, q_best, q_total,
                        b * K + step, temperature, log_min_p, V, SIDE, HAS_SPARSE, HAS_DENSE,
                    )  # fmt: skip
                    ratio = tl.where(q > 0.0, p / tl.where(q > 0.0, q, 1.0), 0.0)
                    bad = tl.where((q == 0.0) & (bad < 0), step, bad)
                    taken = u < ratio
                    if BLOCKS:
                        if rule == BLOCK:
                            product = tl.minimum(1.0, product * ratio)
                            limit = product
                            if step + 1 < drafts:
                                mass = _residual_mass(
                                    logits, row_stride, table, masks, mask_words, side_ids, side, side_len, row_ints,
                                    row_floats, first + step + 1, slot + step + 1,
                                    tl.load(draft_ids + b * K + step + 1), kind, q_ids, q_probs, q_logits, q_stride,
                                    q_best, q_total, b * K + step + 1, product, temperature, log_min_p, V, SIDE,
                                    HAS_SPARSE, HAS_DENSE,
                                )  # fmt: skip
                                over = mass + (1.0 - product)
                                limit = tl.where(over > 0.0, mass / tl.where(over > 0.0, over, 1.0), 1.0)
                            taken = u <= limit
                            goes_on = step < drafts
                            weight = tl.where(taken, product, weight)
        step += 1
        accepted = tl.where(taken, step, accepted)
        going = (taken | goes_on) & (step < drafts)

    for at in range(K + 1):
        own = tl.load(drawn + first + at)
        draft = tl.load(draft_ids + b * K + at, mask=at < K, other=-1)
        tl.store(tokens + first + at, tl.where(at < accepted, draft, tl.where(at == accepted, own, -1)))
    tl.store(counts + b, accepted + 1)
    row_flags = tl.load(flags_out + first + accepted)
    draws = compares | (rule == SYNTHETIC) | (accepted == run_length(draft_ids, kinds, b, K))
    if ~draws & (bad == accepted):
        row_flags = row_flags | _BAD_PROPOSAL
        tl.store(flags_out + first + accepted, row_flags)
    tl.store(weights + b, tl.where(draws | ((row_flags & _NO_TOKEN) != 0), -1.0, weight))


@triton.jit
def _row_of(logits, row_stride, table, side_ids, side, side_len, r, slot, SIDE: tl.constexpr):
    """(its logits, its side list's ids and values, their number, its mask's row)."""
    length = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int64)
    if SIDE:
        length = tl.load(side_len + r)
        start = word(table, slot, OVERLAY_START).to(tl.int64)
    row = logits + r.to(tl.int64) * row_stride
    return row, side_ids + start, side + start, length, word(table, slot, MASK_ROW)


@triton.jit
def _at_draft(
    logits, row_stride, table, masks, mask_words, side_ids, side, side_len, row_ints, row_floats, r, slot, draft, kind,
    q_ids, q_probs, q_logits, q_stride, q_best, q_total, place, temperature, log_min_p, V,
    SIDE: tl.constexpr, HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """(p, q) of a draft at its row; 0 for one that the vocabulary does not have."""
    row, own_ids, own, length, mask_row = _row_of(
        logits, row_stride, table, side_ids, side, side_len, r, slot, SIDE
    )  # fmt: skip
    bound = load_bound(row_ints + r * INTS)
    best = tl.load(row_floats + r * FLOATS + BEST)
    mass = tl.load(row_floats + r * FLOATS + MASS)
    one = tl.zeros([16], tl.int32) + draft
    z = processed_of(row, one, own_ids, own, length, masks, mask_row, mask_words, V, SIDE)
    p = tl.max(chance(z, one, bound, best, temperature, log_min_p, mass), axis=0)
    ids, probs = named(kind, draft, q_ids, q_probs, place, HAS_SPARSE)
    q = tl.sum(tl.where((ids == draft) & (draft < V), probs, 0.0), axis=0)
    if HAS_DENSE:
        if kind == DENSE:
            q_row = q_logits + place.to(tl.int64) * q_stride
            z_draft = tl.load(q_row + draft, mask=draft < V, other=-float("inf")).to(tl.float32)
            z_draft = tl.where(z_draft < float("inf"), z_draft, -float("inf"))
            q = dense_q(z_draft, tl.load(q_best + place), tl.load(q_total + place), temperature)
    return p, q


@triton.jit
def _residual_mass(
    logits, row_stride, table, masks, mask_words, side_ids, side, side_len, row_ints, row_floats, r, slot, draft, kind,
    q_ids, q_probs, q_logits, q_stride, q_best, q_total, place, weight, temperature, log_min_p, V,
    SIDE: tl.constexpr, HAS_SPARSE: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """r: the sum of max(P p - q, 0) at a row."""
    row, own_ids, own, length, mask_row = _row_of(
        logits, row_stride, table, side_ids, side, side_len, r, slot, SIDE
    )  # fmt: skip
    bound = load_bound(row_ints + r * INTS)
    best = tl.load(row_floats + r * FLOATS + BEST)
    mass = tl.load(row_floats + r * FLOATS + MASS)
    found = tl.zeros([], tl.float32)
    if best > -float("inf"):
        ids, q = named(kind, draft, q_ids, q_probs, place, HAS_SPARSE)
        inside = (ids >= 0) & (ids < V)
        z = processed_of(row, ids, own_ids, own, length, masks, mask_row, mask_words, V, SIDE)
        p = tl.where(inside, chance(z, ids, bound, best, temperature, log_min_p, mass), 0.0)
        found = weight * tl.maximum(1.0 - tl.sum(p, axis=0), 0.0)
        found += tl.sum(tl.where(inside, tl.maximum(weight * p - q, 0.0), 0.0), axis=0)
        if HAS_DENSE:
            if kind == DENSE:
                q_row = q_logits + place.to(tl.int64) * q_stride
                found = dense_residual_mass(
                    row, q_row, own_ids, own, length, masks, mask_row, mask_words, weight, bound, best, temperature,
                    log_min_p, mass, tl.load(q_best + place), tl.load(q_total + place), V, SIDE,
                )  # fmt: skip
    return found


def accept(
    logits_RV: torch.Tensor, runs: RunImage, work: Workspace, proposal: Proposal, rules: VerifyRules,
    rates: torch.Tensor, q_best: torch.Tensor, q_total: torch.Tensor, drawn_R: torch.Tensor, weights_B: torch.Tensor,
    out: VerifyOutput, *, side: bool,
) -> None:  # fmt: skip
    """Fills the counts, the accepted drafts and, where it is the row's own, the token behind them; what is left of P
    for `residual`. `drawn_R`: the row's own tokens; `rates` f32 [K] those of the synthetic rule."""
    requests, steps = proposal.draft_ids.shape
    none = out.tokens  # stands where nothing is read
    sparse, dense = proposal.q_ids is not None, proposal.q_logits is not None
    _accept_kernel[(requests,)](
        logits_RV, logits_RV.stride(0), runs.slots, runs.table, runs.masks if side else None,
        runs.masks.shape[1] if side else 0, runs.side_ids, runs.side_processed, work.side_len, work.ints,
        work.floats, proposal.draft_ids, proposal.kind, proposal.q_ids if sparse else none,
        proposal.q_probs if sparse else none, proposal.q_logits if dense else logits_RV,
        proposal.q_logits.stride(1) if proposal.q_logits is not None else 0, q_best, q_total, rates, drawn_R,
        out.tokens, out.counts, weights_B, out.flags, steps, logits_RV.shape[1], RULE=code(rules.rule),
        SEEDED=code(rules.seeded), SIDE=side, HAS_SPARSE=sparse, HAS_DENSE=dense, num_warps=8 if dense else 4,
    )  # fmt: skip
