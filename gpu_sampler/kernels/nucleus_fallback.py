"""`settle`: the rows that `select` could not finish from a list. One program a row; other rows end at once.

- JUDGE: the masses that `judge_draws` found before the first DRAWS draws; the first draw with less than p of the whole
  before it, and not below min-p, is the token: the law of the nucleus, ties included. Should all fail, draw after draw
  is judged here by a read of its own, and after MOST_DRAWS the kept tokens are scanned.
- SCAN: more tokens stay than a list holds (a top-k above 256): `nucleus_scan`, then one number a kept token.
- Processed log-probabilities of both need the exact kept mass, which is a scan too, and so does the law of a row that
  verification draws from: of such a row nothing else is asked.
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    BRANCH,
    CHOSEN,
    FLAGS,
    HAS_MASK,
    HAS_OVERLAY,
    LOG2_E,
    LOG_MIN_P,
    MASK_ROW,
    N_CHOSEN,
    N_TOP,
    NO_KEY,
    OVERLAY_START,
    SLOT_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS_LOGPROBS,
    key,
    number,
    seed_of,
    side_find,
    values,
    word,
)
from gpu_sampler.kernels.gumbel import log_weights, two_level
from gpu_sampler.kernels.nucleus_exact import bound_of, draw_kept, reach
from gpu_sampler.kernels.pdl import await_turn, call_next, early
from gpu_sampler.kernels.workspace import (
    AT,
    BEST,
    DRAWN,
    FLOATS,
    INTS,
    JUDGE,
    LAW,
    MASS,
    MORE_PLACES,
    N_DRAWS,
    NOTHING_PENDING,
    PENDING,
    PLACES_MORE,
    REPORT_BEST,
    REPORT_TOTAL,
    TOTAL,
    VALUE,
    Workspace,
    store_bound,
)
from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference.filters import MOST_DRAWS
from gpu_sampler.state.device_state import SlotImage

_MOST_DRAWS: tl.constexpr = tl.constexpr(MOST_DRAWS)
_REPORT_BLOCK: tl.constexpr = tl.constexpr(128)
_FLAG_SCAN: tl.constexpr = tl.constexpr(int(RowFlag.NUCLEUS_SCAN))


@triton.jit(do_not_specialize=["n_columns", "c_columns"])  # or a new width would compile while serving
def _settle_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, side_ids, side_processed, side_len, row_ints,
    row_floats, draw_ids, draw_values, ahead_mass, ahead_count, tokens, logprobs, ranks, top_ids, top_logprobs,
    n_columns, chosen_logprobs, c_columns, flags_out, parts, V, G,
    GROUPS: tl.constexpr, PLACES: tl.constexpr, ID_BITS: tl.constexpr, SIDE: tl.constexpr, PROCESSED: tl.constexpr,
    LOGPROBS: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_turn(EARLY)
    call_next(EARLY)
    r = tl.program_id(0)
    pending = tl.load(row_ints + r * INTS + PENDING)
    if pending == NOTHING_PENDING:
        return
    row_at = r.to(tl.int64)
    row = logits + row_at * row_stride
    slot = tl.load(slots + r)
    flags = word(table, slot, FLAGS)
    temperature = number(table, slot, TEMPERATURE)
    top_k = word(table, slot, TOP_K)
    top_p = number(table, slot, TOP_P)
    log_min_p = number(table, slot, LOG_MIN_P)
    seed = seed_of(table, slot)
    branch = word(table, slot, BRANCH)
    position = tl.load(row_ints + r * INTS + AT)
    best = tl.load(row_floats + r * FLOATS + BEST)
    total = tl.load(row_floats + r * FLOATS + TOTAL)
    scale = (1.0 / temperature) * LOG2_E
    mask_row = word(table, slot, MASK_ROW)
    length = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int64)
    if SIDE:
        length = tl.load(side_len + r)
        start = word(table, slot, OVERLAY_START).to(tl.int64)
    ids_side = side_ids + start
    side = side_processed + start
    row_flags = tl.load(flags_out + r)
    law = pending < 0
    if KEPT:  # then nothing was drawn, and nothing is drawn here
        law = tl.load(row_ints + r * INTS + LAW) != 0

    token = tl.full([], -1, tl.int32)
    value = tl.full([], -float("inf"), tl.float32)
    ahead = tl.zeros([], tl.int32)
    counted = tl.full([], 0, tl.int32)
    if pending == JUDGE:
        draws = tl.arange(0, N_DRAWS)
        places = tl.arange(0, PLACES)
        at = (row_at * (parts + MORE_PLACES) + places[:, None]) * N_DRAWS + draws[None, :]
        inside = (places < parts + MORE_PLACES)[:, None]
        mass_D = tl.sum(tl.load(ahead_mass + at, mask=inside, other=0.0), axis=0)
        count_D = tl.sum(tl.load(ahead_count + at, mask=inside, other=0), axis=0)
        value_D = tl.load(draw_values + r * N_DRAWS + draws)
        good_D = (mass_D < top_p * total) & ((value_D - best) / temperature >= log_min_p)
        accepted = tl.min(tl.where(good_D, draws, N_DRAWS), axis=0)
        round_ = tl.full([], N_DRAWS, tl.int32)
        refused = tl.full([], NO_KEY, tl.int64)  # a draw that is not before this one needs no read
        groups = tl.arange(0, GROUPS)
        m = tl.load(maxima + row_at * G + groups, mask=groups < G, other=-float("inf"))
        s = tl.load(sums + row_at * G + groups, mask=groups < G, other=0.0)
        weights_G = log_weights(m, s, best, temperature)
        if accepted < N_DRAWS:
            token = tl.load(draw_ids + r * N_DRAWS + accepted)
            value = tl.load(draw_values + r * N_DRAWS + accepted)
            ahead = tl.max(tl.where(draws == accepted, count_D, 0), axis=0)
            counted = tl.full([], 1, tl.int32)
        while (token < 0) & (round_ < _MOST_DRAWS):
            drawn, its = two_level(
                row, weights_G, ids_side, side, length, masks, mask_row, mask_words,
                best, temperature, seed, position, branch, round_, V, GROUPS, SIDE,
            )  # fmt: skip
            round_ += 1
            own = key(its, drawn)
            if (own > refused) & ((its - best) / temperature >= log_min_p):
                count, mass = reach(
                    row, ids_side, side, length, masks, mask_row, mask_words, own + 1, best, temperature, -float("inf"),
                    scale, V, SIDE,
                )  # fmt: skip
                if mass < top_p * total:
                    token = drawn
                    value = its
                    ahead = count
                    counted = tl.full([], 1, tl.int32)
                else:
                    refused = own
    elif pending == DRAWN:
        token = tl.load(tokens + r)
        value = tl.where(law, -float("inf"), tl.load(row_floats + r * FLOATS + VALUE))

    wants = (flags & WANTS_LOGPROBS) != 0
    processed = wants & PROCESSED
    bound = tl.full([], NO_KEY, tl.int64)
    if (token < 0) | processed | law:
        row_flags = row_flags | tl.where((top_k == 0), _FLAG_SCAN, 0)
        if top_k > 0:
            if top_k < V:
                bound = bound_of(
                    row, ids_side, side, length, masks, mask_row, mask_words, best, temperature, scale, top_k, V,
                    ID_BITS, SIDE, False,
                )  # fmt: skip
            _, total = reach(
                row, ids_side, side, length, masks, mask_row, mask_words, bound, best, temperature, -float("inf"),
                scale, V, SIDE,
            )  # fmt: skip
        if top_p < 1.0:
            by_mass = bound_of(
                row, ids_side, side, length, masks, mask_row, mask_words, best, temperature, scale, top_p * total, V,
                ID_BITS, SIDE, True,
            )  # fmt: skip
            bound = tl.maximum(bound, by_mass)
        if (token < 0) & ~law:
            round_0 = tl.where(top_k > 0, 0, _MOST_DRAWS)
            token, value = draw_kept(
                row, ids_side, side, length, masks, mask_row, mask_words, bound, best, temperature, log_min_p,
                seed, position, branch, round_0, V, SIDE,
            )  # fmt: skip
    if KEPT:
        if law:
            _, mass = reach(
                row, ids_side, side, length, masks, mask_row, mask_words, bound, best, temperature, log_min_p, scale,
                V, SIDE,
            )  # fmt: skip
            tl.store(row_floats + r * FLOATS + MASS, mass)
            store_bound(row_ints + r * INTS, bound)
    tl.store(tokens + r, token)
    tl.store(flags_out + r, row_flags)
    if not LOGPROBS:
        return
    if wants & (PROCESSED | ((flags & (HAS_MASK | HAS_OVERLAY)) == 0)):
        if (counted == 0) & ~law:
            ahead, _ = reach(
                row, ids_side, side, length, masks, mask_row, mask_words, key(value, token) + 1, best, temperature,
                -float("inf"), scale, V, SIDE,
            )  # fmt: skip
        tl.store(ranks + r, ahead + 1)
        if PROCESSED:
            _, kept = reach(
                row, ids_side, side, length, masks, mask_row, mask_words, bound, best, temperature, log_min_p, scale,
                V, SIDE,
            )  # fmt: skip
            over = tl.log(kept)
            tl.store(logprobs + r, (value - best) / temperature - over)
            n_top = word(table, slot, N_TOP)
            for first in range(0, n_top, _REPORT_BLOCK):
                at = first + tl.arange(0, _REPORT_BLOCK)
                ids = tl.load(top_ids + r * n_columns + at, mask=at < n_top, other=-1)
                found = _kept_logprobs(
                    row, ids_side, side, length, masks, mask_row, mask_words, ids, bound, best, temperature,
                    log_min_p, over, V, SIDE,
                )  # fmt: skip
                tl.store(top_logprobs + r * n_columns + at, found, mask=at < n_top)
            n_chosen = word(table, slot, N_CHOSEN)
            for first in range(0, n_chosen, _REPORT_BLOCK):
                at = first + tl.arange(0, _REPORT_BLOCK)
                ids = tl.load(table + slot * SLOT_WORDS + CHOSEN + at, mask=at < n_chosen, other=-1)
                found = _kept_logprobs(
                    row, ids_side, side, length, masks, mask_row, mask_words, ids, bound, best, temperature,
                    log_min_p, over, V, SIDE,
                )  # fmt: skip
                tl.store(chosen_logprobs + r * c_columns + at, found, mask=at < n_chosen)
        else:
            report_best = tl.load(row_floats + r * FLOATS + REPORT_BEST)
            report_total = tl.load(row_floats + r * FLOATS + REPORT_TOTAL)
            tl.store(logprobs + r, (value - report_best) - tl.log(report_total))


@triton.jit
def _kept_logprobs(
    row, side_ids, side, length, masks, mask_row, mask_words, ids, bound, best, temperature, log_min_p, over, V,
    SIDE: tl.constexpr,
):  # fmt: skip
    """f32 [N] processed log-probabilities of ids, -inf for those removed."""
    inside = (ids >= 0) & (ids < V)
    z = values(row, ids, inside, masks, mask_row, mask_words)
    if SIDE:
        z = tl.maximum(z, side_find(side_ids, side, length, ids, 32))
    x = (z - best) / temperature
    stays = inside & (z > -float("inf")) & (key(z, ids) >= bound) & (x >= log_min_p)
    return tl.where(stays, x - over, -float("inf"))


def settle(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: SlotImage,
    work: Workspace,
    out: SampleOutput,
    *,
    side: bool,
    processed: bool,
    kept: bool = False,
) -> None:
    """Completes the rows that `select` left pending. Needs `judge_draws` before it where a row waits to be judged.
    `kept`: also says what stays of the rows whose law is needed."""
    rows, vocab = logits_RV.shape
    none = out.tokens  # stands where nothing is read or written
    n_top = n_chosen = 0
    if wants := out.top_ids is not None and out.chosen_logprobs is not None:
        n_top, n_chosen = out.top_ids.shape[1], out.chosen_logprobs.shape[1]
    _settle_kernel[(rows,)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        image.table,
        image.masks if side else None,
        image.masks.shape[1] if side else 0,
        work.maxima,
        work.sums,
        image.side_ids,
        image.side_processed,
        work.side_len,
        work.ints,
        work.floats,
        work.draw_ids,
        work.draw_values,
        work.ahead_mass,
        work.ahead_count,
        out.tokens,
        out.logprobs if wants else none,
        out.ranks if wants else none,
        out.top_ids if wants else none,
        out.top_logprobs if wants else none,
        n_top,
        out.chosen_logprobs if wants else none,
        n_chosen,
        out.flags,
        work.parts,
        vocab,
        work.groups,
        GROUPS=max(4, triton.next_power_of_2(work.groups)),  # a call of Philox gives four numbers
        PLACES=triton.next_power_of_2(work.parts + PLACES_MORE),
        ID_BITS=max(1, (vocab - 1).bit_length()),
        SIDE=side,
        PROCESSED=processed,
        LOGPROBS=wants,
        KEPT=kept,
        **early(),
        num_warps=8,
    )
