"""Draws one draft token a row from the drafter's logits, after their `softmax_stats` and `sample`.

Grid (B): a program takes the first 64 tokens that the row's filters keep, from the list of `sample` or from one made
here, and draws one of them with DRAFT noise, whose round is the offset in the run. Rows under `strict` take what
`sample` drew with the row's own noise, and greedy rows take the first token.

| pointer | shape, type | |
|---|---|---|
| drawn | i32 [B], what `sample` and `nucleus_fallback` drew | read |
| keys, picked | i64 [B, SCRATCH], i32 [B, LIST] | read, write |
| ids, q_ids, q_probs | i32 [B], i32 [B, 64], f32 [B, 64] | write |
| kept_ids | i32 [S, MAX_DRAFTS]: the drafts of the slot's run | write |
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    BRANCH,
    FLAGS,
    GREEDY,
    LOG2_E,
    LOG_MIN_P,
    MASK_ROW,
    NO_KEY,
    TEMPERATURE,
    RowLogits,
    id_of,
    load_bound,
    number,
    seed_of,
    side_extent,
    value_of,
    word,
)
from gpu_sampler.kernels.draft_probs import IDS
from gpu_sampler.kernels.gumbel import first_token
from gpu_sampler.kernels.philox import DRAFT_TOKEN, NoiseKey, gumbel
from gpu_sampler.kernels.top_n import first_of_order
from gpu_sampler.kernels.verify_rows import STRICT, code, rule_of
from gpu_sampler.output import SampleOutput
from gpu_sampler.spec_decode import MAX_DRAFTS, Draft, DraftMethod, VerifyRules
from gpu_sampler.workspace import AT, BEST, FLOATS, INTS, LIST, LISTED, SCRATCH, LogitRows

_LIST: tl.constexpr = tl.constexpr(LIST)
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
_DRAFTS: tl.constexpr = tl.constexpr(MAX_DRAFTS)
_WARPS = 8


@triton.jit(do_not_specialize=["offset"])
def _draft_sample_kernel(
    logits, row_stride, run_slots, table, masks, mask_words, maxima, side_ids, side, side_len, row_ints, row_floats,
    keys, picked, drawn, slots, kept_ids, ids_out, q_ids, q_probs, offset, V, G,
    GROUPS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, RULE: tl.constexpr, SEEDED: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Draws draft `offset` of one request. Arguments that the module does not list are those of `_sample_kernel`.

    RULE, SEEDED: codes of the rules. FIRST: every row takes the first token.
    """
    b = tl.program_id(0)
    slot = tl.load(run_slots + b)
    flags = word(table, slot, FLAGS)
    token = tl.load(drawn + b)
    at = tl.arange(0, _LIST)
    best = tl.load(row_floats + b * FLOATS + BEST)
    found = tl.full([_LIST], -1, tl.int32)
    probs = tl.zeros([_LIST], tl.float32)
    certain = ((flags & GREEDY) != 0) | (rule_of(flags, RULE, SEEDED) == STRICT) | FIRST
    if best > -float("inf"):
        groups = tl.arange(0, GROUPS)
        m = tl.load(maxima + b.to(tl.int64) * G + groups, mask=groups < G, other=-float("inf"))
        start, length = side_extent(table, slot, side_len, b, SIDE)
        row = RowLogits(
            logits + b.to(tl.int64) * row_stride, side_ids + start, side + start if SIDE else None, length, masks,
            word(table, slot, MASK_ROW), mask_words, V,
        )  # fmt: skip
        if FIRST:
            token = first_token(row, m, best, GROUPS)
        if certain:
            found = tl.where(at == 0, token, -1)
            probs = tl.where(at == 0, 1.0, 0.0)
        else:
            listed = tl.load(row_ints + b * INTS + LISTED)
            if listed >= 0:
                unsorted = tl.load(keys + b.to(tl.int64) * _SCRATCH + at, mask=at < listed, other=NO_KEY)
                order = tl.sort(unsorted, descending=True)
                count = listed
            else:
                order, count = first_of_order(
                    row, m, picked + b * _LIST, keys + b.to(tl.int64) * _SCRATCH, IDS, GROUPS, HALF
                )  # fmt: skip
            temperature = number(table, slot, TEMPERATURE)
            stays = (at < IDS) & (at < count) & (order >= load_bound(row_ints + b * INTS)) & (order != NO_KEY)
            stays = stays & ((value_of(order) - best) / temperature >= number(table, slot, LOG_MIN_P))
            ids = tl.where(stays, id_of(order), 0)
            x = tl.where(stays, (value_of(order) - best) / temperature, -float("inf"))
            weights = tl.exp2(x * LOG2_E)
            probs = weights / tl.sum(weights, axis=0)
            found = tl.where(stays, ids, -1)
            key = NoiseKey(seed_of(table, slot), tl.load(row_ints + b * INTS + AT), word(table, slot, BRANCH))
            noise = gumbel(ids, key, DRAFT_TOKEN, offset)
            place = tl.argmax(tl.where(stays, x + noise, -float("inf")), axis=0)
            token = tl.max(tl.where(at == place, ids, -1), axis=0)
    tl.store(ids_out + b, token)
    tl.store(q_ids + b * IDS + at, found, mask=at < IDS)
    tl.store(q_probs + b * IDS + at, probs, mask=at < IDS)
    tl.store(kept_ids + tl.load(slots + b).to(tl.int64) * _DRAFTS + offset, token)


def draft_sample(
    rows: LogitRows,
    drawn: SampleOutput,
    slots_B: torch.Tensor,
    kept_ids: torch.Tensor,
    out: Draft,
    offset: int,
    method: DraftMethod,
    rules: VerifyRules,
) -> None:
    """Draws one draft token a row from the drafter's logits.

    Args:
        rows: the B rows with their VerifyState, after `sample` and its fallback.
        drawn: what `sample` drew.
        slots_B: i32 [B], the requests' own slots.
        kept_ids: i32 [S, MAX_DRAFTS], the drafts of each slot's run; column `offset` is written.
        out: outputs on the device.
        offset: the place of the draft in its run, 0 first.
        method: `greedy` takes the first token of the order.
        rules: rows under `strict` take what `sample` drew.
    """
    state, work = rows.state, rows.work
    _draft_sample_kernel[(len(rows.logits),)](
        *rows.inputs, work.maxima, state.side_ids, state.side_processed, work.side_len, work.ints, work.floats,
        work.keys, work.picked, drawn.tokens, slots_B, kept_ids, out.ids, out.q_ids, out.q_probs, offset,
        rows.logits.shape[1], work.groups, GROUPS=work.padded_groups, HALF=rows.logits.dtype == torch.bfloat16,
        SIDE=rows.side, RULE=code(rules.rule), SEEDED=code(rules.seeded), FIRST=method == "greedy", num_warps=_WARPS,
    )  # fmt: skip
