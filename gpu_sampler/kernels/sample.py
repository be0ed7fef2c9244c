"""K2 `select`: from a row's statistics to its token and everything reported with it. One program a row; two where
raw and drawn order of some row differ, at once.

A program settles which of two jobs it has, takes the row's statistics (`group_stats`), lists the first tokens of the
order if it needs them (`listing`), draws (`drawing`) and reports (`reporting`).

DRAW: the token by the row's own route, and its log-probabilities where they are read from what it was drawn by:
- greedy: the first token of the total order;
- plain: one two-level draw of the whole row;
- list: the first tokens of the order (`first_of_order`), cut by top-k, then by the mass before a token (top-p), then by
  min-p, and one Gumbel number for each that is left;
- a nucleus that may be wider than 256 tokens, or a top-k above 256: left to `settle`. For the nucleus the first DRAWS
  draws of the whole row are made here, and one read by `judge_draws` judges them all; with min-p alone a draw is judged
  by its value, here.
REPORT: raw log-probabilities of rows whose raw order is not the one they were drawn in (overlay or allowed ids), and of
rows that nothing is drawn from (ALONE).
BOTH: the second program of a row reports as REPORT does while the first one draws. What is said of the token it leaves
to `rank_drawn`. A row is reported by one of the two. Neither waits for the other, in whatever order they run:

| memory of a row that both work on | written by | read by |
|---|---|---|
| logits, side list, words of the slot but POSITION | neither | both |
| POSITION, AT, PENDING, BEST, TOTAL, token, flags, draws, queue, first lists | who draws | who draws |
| RANKING, SHOWN, REPORT_BEST, REPORT_TOTAL, what is reported, second lists | who reports | who reports |
| raw_maxima, raw_sums | who reports | who reports |
| maxima, sums | who draws | both, for what has no raw ones |

The last are written for groups that NaN or +inf spoilt, by the logits and no others. Who reports may find each of their
words mended or not: a spoilt sum is no finite number, and a spoilt maximum is none either, or what it is mended to. So
where it finds all finite, it has what the mended row has. Else it mends the row for itself, into the raw statistics.

Bytes a row: 8 a group, then at most 257 groups of logits where a list is needed.

    logprob(x) = (x - M) - ln Z,  Z = sum_j s_j 2^((m_j - M) log2(e)) + the side list's share
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    BRANCH,
    FLAGS,
    GREEDY,
    HAS_MASK,
    HAS_OVERLAY,
    LOG2_E,
    LOG_MIN_P,
    MASK_ROW,
    N_CHOSEN,
    N_TOP,
    NO_KEY,
    OVERLAY_START,
    POSITION,
    SLOT_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS_LOGPROBS,
    number,
    seed_of,
    side_max,
    word,
)
from gpu_sampler.kernels.gumbel import first_token, of_list, of_the_whole
from gpu_sampler.kernels.logprobs import rank_of_token, store_chosen, store_nothing, store_top, total_of, value_of_token
from gpu_sampler.kernels.pdl import await_turn, call_next, early
from gpu_sampler.kernels.softmax_stats import groups_of, mended_groups, raw_apart, sum_temperature
from gpu_sampler.kernels.top_n import list_of_row
from gpu_sampler.kernels.workspace import (
    AT,
    BEST,
    DRAWN,
    FINISH,
    FLOATS,
    INTS,
    JUDGE,
    LAW,
    LISTED,
    MASS,
    N_DRAWS,
    NOTHING_PENDING,
    PENDING,
    RANKING,
    REPORT_BEST,
    REPORT_TOTAL,
    SCAN,
    SHOWN,
    TOTAL,
    VALUE,
    Workspace,
    store_bound,
)
from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference.filters import WIDE
from gpu_sampler.state.device_state import AloneImage, SlotImage
from gpu_sampler.state.layout import Word

_WIDE: tl.constexpr = tl.constexpr(WIDE)
WARPS = 8  # part of the contract: it shapes the sums of a row
REGISTERS = 128  # two programs a multiprocessor
FEW_REGISTERS = 64  # four, of the code without lists
_FLAG_BAD_VALUE: tl.constexpr = tl.constexpr(int(RowFlag.BAD_VALUE))
_FLAG_NO_TOKEN: tl.constexpr = tl.constexpr(int(RowFlag.NO_TOKEN))
_FLAG_WIDE: tl.constexpr = tl.constexpr(int(RowFlag.WIDE))
_FLAG_REJECTION: tl.constexpr = tl.constexpr(int(RowFlag.REJECTION))


@triton.jit(
    do_not_specialize=["n_columns", "chosen_stride", "c_columns", "splits"]
)  # or a new width would compile while serving
def _select_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, raw_maxima, raw_sums,
    side_ids, side_raw, side_processed, side_len, side_bad, picked, scratch, row_ints, row_floats, queue, draw_ids,
    draw_values, tokens, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_ids, chosen_stride,
    chosen_logprobs, c_columns, flags_out, elsewhere, ahead_parts, splits, tiles, V, G,
    GROUPS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, LISTS: tl.constexpr, PROCESSED: tl.constexpr,
    REPORT: tl.constexpr, BOTH: tl.constexpr, ALONE: tl.constexpr, LOGPROBS: tl.constexpr, ELSEWHERE: tl.constexpr,
    PARTS: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if KEPT:  # the words of a run's rows may be written by `row_stats`
        await_turn(EARLY)
    r = tl.program_id(0)
    row_at = r.to(tl.int64)
    list_at = row_at
    slot = tl.load(slots + r)
    flags = word(table, slot, FLAGS)
    heat = number(table, slot, TEMPERATURE)
    top_k = word(table, slot, TOP_K)
    top_p = number(table, slot, TOP_P)
    log_min_p = number(table, slot, LOG_MIN_P)
    position = word(table, slot, POSITION)
    branch = word(table, slot, BRANCH)
    seed = seed_of(table, slot)
    mask_row = tl.full([], -1, tl.int32)
    if not REPORT:  # what is reported here is raw
        mask_row = word(table, slot, MASK_ROW)
    draws_here: tl.constexpr = not REPORT
    reports_here: tl.constexpr = True
    flags_here: tl.constexpr = ALONE or not REPORT
    mends_raw: tl.constexpr = not PROCESSED
    n_top = word(table, slot, N_TOP)
    n_chosen = word(table, slot, N_CHOSEN)
    if not KEPT:
        await_turn(EARLY)
    call_next(EARLY)
    draws = True
    if KEPT:  # a token that verification draws from the row's law is not drawn here as well
        draws = tl.load(row_ints + r * INTS + LAW) == 0
    greedy = (flags & GREEDY) != 0
    has_mask = (flags & HAS_MASK) != 0
    wants = (flags & WANTS_LOGPROBS) != 0
    summed_at = sum_temperature(flags, heat, top_k)
    apart = raw_apart(flags, summed_at)
    moved = has_mask | ((flags & HAS_OVERLAY) != 0)  # raw order and drawn order differ
    if ELSEWHERE:  # drawn by FlashInfer: nothing is drawn here, and its token is reported like one from other values
        away = tl.load(elsewhere + r) != 0
        moved = moved | away
        greedy = greedy | away
    if REPORT:
        if not ALONE:
            if ~wants | ~moved:
                return
    if BOTH:
        draws_here = tl.program_id(1) == 0
        flags_here = draws_here
        reports_here = draws_here != (wants & moved)
        mends_raw = draws_here & (reports_here | (tl.num_programs(1) == 1))  # or for a report behind this launch
        if ~draws_here & ~reports_here:
            return
    row = logits + row_at * row_stride
    m_row = maxima + row_at * G
    s_row = sums + row_at * G
    length = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int64)
    if SIDE:
        length = tl.load(side_len + r)
        start = word(table, slot, OVERLAY_START).to(tl.int64)
    ids_side = side_ids + start
    side = side_processed + start
    temperature = tl.where(greedy, 1.0, heat)
    if REPORT:
        side = side_raw + start
        temperature = tl.full([], 1.0, tl.float32)
        summed_at = temperature
        m_row, s_row = _raw_groups(m_row, s_row, raw_maxima, raw_sums, row_at * G, has_mask, apart)
    if BOTH:
        if ~draws_here:
            mask_row = tl.full([], -1, tl.int32)
            side = side_raw + start
            temperature = tl.full([], 1.0, tl.float32)
            summed_at = temperature
            list_at = row_at + tl.num_programs(0)  # lists of its own
            m_row, s_row = _raw_groups(m_row, s_row, raw_maxima, raw_sums, row_at * G, has_mask, apart)
    to_m, to_s = m_row, s_row
    if BOTH:
        if ~draws_here:  # nobody else writes or reads these
            to_m = raw_maxima + row_at * G
            to_s = raw_sums + row_at * G
    scale = (1.0 / summed_at) * LOG2_E
    row_flags = tl.zeros([], tl.int32)
    if REPORT and not ALONE:
        row_flags = tl.load(flags_out + r)
        m, s = groups_of(m_row, s_row, G, GROUPS)
    else:
        m, s, row_flags = mended_groups(
            row, m_row, s_row, to_m, to_s, raw_maxima + row_at * G, raw_sums + row_at * G, masks, mask_row, mask_words,
            scale, mends_raw, V, G, GROUPS, BOTH,
        )  # fmt: skip
        if SIDE:
            if tl.load(side_bad + r) != 0:
                row_flags = row_flags | _FLAG_BAD_VALUE
    best = tl.max(m, axis=0)
    if SIDE:
        best = tl.maximum(best, side_max(side, length))
    if reports_here:
        tl.store(row_ints + r * INTS + RANKING, 0)
    if draws_here:
        tl.debug_barrier()  # every warp has read the position: sums over few groups do not make them wait
        tl.store(table + slot * SLOT_WORDS + POSITION, position + 1, mask=slot > 0)
        tl.store(row_ints + r * INTS + AT, position)
        tl.store(row_ints + r * INTS + PENDING, NOTHING_PENDING)
        tl.store(row_floats + r * FLOATS + BEST, best)
    if not REPORT or ALONE:
        if best == -float("inf"):
            row_flags = row_flags | _FLAG_NO_TOKEN
        if flags_here:
            tl.store(flags_out + r, row_flags)
    if LOGPROBS:
        if reports_here:
            tl.store(ranks + r, 0)
            tl.store(logprobs + r, -float("inf"))
    if (row_flags & _FLAG_NO_TOKEN) != 0:
        if draws_here:
            tl.store(tokens + r, -1)
        if LOGPROBS:
            if reports_here:
                store_nothing(r, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, logprobs, ranks)
        return

    limited = ~greedy & (top_k > 0)
    nucleus = ~greedy & ~limited & ((top_p < 1.0) | (log_min_p > -float("inf")))
    reports = wants
    if REPORT:
        limited = r < 0
        nucleus = limited
        if ALONE:
            reports = ~limited
            n_top = n_columns
            n_chosen = c_columns
    elif BOTH:
        limited = limited & draws_here
        nucleus = nucleus & draws_here
        reports = wants & reports_here
    elif not PROCESSED:
        reports = wants & ~moved
    n_list = tl.where(reports, n_top, 0)
    total = total_of(m, s, side, length, best, scale, SIDE)
    if draws_here:
        tl.store(row_floats + r * FLOATS + TOTAL, total)

    keys, count, need, listed, x, weights, kept = list_of_row(
        row, m, ids_side, side, length, masks, mask_row, mask_words, picked, scratch, list_at, n_list, limited, nucleus,
        best, temperature, top_k, top_p, log_min_p, total, V, GROUPS, HALF, SIDE, LISTS,
    )  # fmt: skip

    pending = tl.full([], NOTHING_PENDING, tl.int32)
    token = tl.full([], -1, tl.int32)
    value = best
    if REPORT:
        token = tl.load(tokens + r)
        value = value_of_token(row, ids_side, side, length, token, V, SIDE, 1024)
    elif draws_here:
        if greedy:
            token = first_token(row, m, ids_side, side, length, masks, mask_row, mask_words, best, V, GROUPS, SIDE)
        elif listed:
            token, value = of_list(keys, x, kept, seed, position, branch)
        elif limited:
            pending = tl.full([], SCAN, tl.int32)
        else:
            token, value, pending = of_the_whole(
                row, m, s, ids_side, side, length, masks, mask_row, mask_words, best, temperature, log_min_p,
                seed, position, branch, draws, nucleus, nucleus & (top_p >= 1.0), draw_ids + r * N_DRAWS,
                draw_values + r * N_DRAWS, V, GROUPS, SIDE,
            )  # fmt: skip
            if nucleus:
                row_flags = row_flags | _FLAG_REJECTION
                asked = PROCESSED & wants
                if KEPT:
                    asked = asked | ~draws
                pending = tl.where(asked & (pending == NOTHING_PENDING), DRAWN, pending)
                if pending == JUDGE:
                    tl.store(queue + 1 + tl.atomic_add(queue, 1, sem="relaxed"), r)
        if top_k > _WIDE:
            row_flags = row_flags | tl.where(greedy, 0, _FLAG_WIDE)
        tl.store(flags_out + r, row_flags)
        tl.store(row_ints + r * INTS + PENDING, pending)
        tl.store(tokens + r, tl.where((pending == JUDGE) | (pending == SCAN), -1, token))

    mass = total  # of what the row keeps
    last = tl.full([], NO_KEY, tl.int64)
    if KEPT or PROCESSED:
        if listed & ~greedy:
            mass = tl.sum(tl.where(kept, weights, 0.0), axis=0)
            last = tl.min(tl.where(kept, keys, 0x7FFFFFFFFFFFFFFF), axis=0)
    if KEPT:
        tl.store(row_floats + r * FLOATS + MASS, mass)
        store_bound(row_ints + r * INTS, last)
        tl.store(row_ints + r * INTS + LISTED, tl.where(listed & ~greedy, count, -1))

    if LOGPROBS:
        if reports:
            # Over what: everything at the reported temperature, or the kept tokens of a processed list.
            over = total
            unit = tl.full([], 1.0, tl.float32)
            if PROCESSED:
                over = mass
                unit = temperature
            elif not REPORT:
                last = tl.full([], NO_KEY, tl.int64)
                if apart & draws_here:
                    _, raw = groups_of(m_row, raw_sums + row_at * G, G, GROUPS)
                    over = total_of(m, raw, side, length, best, LOG2_E, SIDE)
            log_over = tl.log(over)
            if not REPORT:
                tl.store(row_floats + r * FLOATS + REPORT_BEST, best)
                tl.store(row_floats + r * FLOATS + REPORT_TOTAL, over)
            if (token >= 0) & (token < V) & (value > -float("inf")):
                tl.store(logprobs + r, (value - best) / unit - log_over)
                ahead, known = rank_of_token(
                    keys, count, need, value, token, greedy, ahead_parts, row_at, splits, tiles, REPORT, ALONE, PARTS
                )
                tl.store(ranks + r, tl.where(known, ahead + 1, 1))  # `rank_drawn` adds what it finds
                tl.store(row_floats + r * FLOATS + VALUE, value)
                tl.store(row_ints + r * INTS + RANKING, tl.where(known | (pending != NOTHING_PENDING), 0, 1))
            if BOTH:
                if ~draws_here:
                    tl.store(ranks + r, 1)
                    tl.store(row_ints + r * INTS + SHOWN, tl.minimum(count, need))
                    tl.store(row_ints + r * INTS + RANKING, FINISH)
            store_top(r, keys, count, n_top, last, best, unit, log_over, top_ids, top_logprobs, n_columns)
            given = chosen_ids + slot.to(tl.int64) * chosen_stride
            if ALONE:
                given = chosen_ids + row_at * chosen_stride
            store_chosen(
                row, ids_side, side, length, masks, mask_row, mask_words, given, n_chosen, last, best, unit,
                log_over, chosen_logprobs + row_at * c_columns, c_columns, V, SIDE,
            )  # fmt: skip
        elif not wants:
            store_nothing(r, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, logprobs, ranks)


@triton.jit
def _raw_groups(m_row, s_row, raw_maxima, raw_sums, at, has_mask, apart):
    """Where the maxima and sums of the raw order stand: with those of the drawn one unless they differ."""
    if has_mask:
        m_row = raw_maxima + at
    if apart:
        s_row = raw_sums + at
    return m_row, s_row


def select(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: SlotImage,
    work: Workspace,
    out: SampleOutput,
    *,
    side: bool,
    processed: bool,
    lists: bool = True,
    elsewhere_R: torch.Tensor | None = None,
    report: bool = False,
    with_report: bool = False,
    kept: bool = False,
) -> None:
    """Fills `out` (tensors as in SampleOutput) as far as one read of the statistics can tell; advances the positions.

    `side`: some row has a side list or an allow mask; `lists`: some row needs the first tokens of its order, for a
    filter or to report them; `elsewhere_R` i32: 1 for the rows that FlashInfer draws. `report`: the
    second pass, for raw log-probabilities of rows with overlay or mask; `with_report`: that pass in the same launch,
    which `rank_drawn` has to finish. `kept`: also says what of each row stays.
    """
    _launch(
        logits_RV,
        slots_R,
        image,
        work,
        out,
        image.table[:, Word.CHOSEN :],
        side,
        processed,
        elsewhere_R,
        report,
        lists=lists,
        with_report=with_report,
        kept=kept,
    )


def _launch(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: SlotImage | AloneImage,
    work: Workspace,
    out: SampleOutput,
    chosen_ids: torch.Tensor,
    side: bool,
    processed: bool,
    elsewhere_R: torch.Tensor | None,
    report: bool,
    *,
    lists: bool = True,
    with_report: bool = False,
    alone: bool = False,
    splits: int = 0,
    kept: bool = False,
) -> None:
    rows, vocab = logits_RV.shape
    none = out.tokens  # stands where nothing is read or written
    n_top = n_chosen = 0
    if wants := out.top_ids is not None and out.chosen_logprobs is not None:
        n_top, n_chosen = out.top_ids.shape[1], out.chosen_logprobs.shape[1]
    # Rows that want a report of their own come with side lists or masks: one variant, whether some want it or not.
    both = side and wants and not (processed or kept or report or elsewhere_R is not None)
    _select_kernel[(rows, 2 if with_report else 1)](
        logits_RV,
        logits_RV.stride(0),
        slots_R,
        image.table,
        image.masks if side else None,
        image.masks.shape[1] if side else 0,
        work.maxima,
        work.sums,
        work.raw_maxima,
        work.raw_sums,
        image.side_ids,
        image.side_raw,
        image.side_processed,
        work.side_len,
        work.side_bad,
        work.picked,
        work.keys,
        work.ints,
        work.floats,
        work.queue,
        work.draw_ids,
        work.draw_values,
        out.tokens,
        out.logprobs if wants else none,
        out.ranks if wants else none,
        out.top_ids if wants else none,
        out.top_logprobs if wants else none,
        n_top,
        chosen_ids,
        chosen_ids.stride(0),
        out.chosen_logprobs if wants else none,
        n_chosen,
        out.flags,
        work.nothing if elsewhere_R is None else elsewhere_R,
        work.ahead_parts,
        splits,
        work.tiles,
        vocab,
        work.groups,
        GROUPS=max(4, triton.next_power_of_2(work.groups)),  # a call of Philox gives four numbers
        HALF=logits_RV.dtype == torch.bfloat16,
        SIDE=side,
        LISTS=lists,
        PROCESSED=processed,
        REPORT=report,
        BOTH=both,
        ALONE=alone,
        LOGPROBS=wants,
        ELSEWHERE=elsewhere_R is not None,
        PARTS=triton.next_power_of_2(work.tiles),
        KEPT=kept,
        num_warps=WARPS,
        **early(),
        maxnreg=REGISTERS if lists else FEW_REGISTERS,
    )


def report_alone(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    image: AloneImage,
    work: Workspace,
    out: SampleOutput,
    ids: torch.Tensor,
    splits: int,
) -> None:
    """Log-probabilities of rows that nothing is drawn from, after their `row_stats`. `out.tokens` are given; `ids` i32
    [R, C] are the chosen ids. `splits` as `row_stats` returned it; where it is 0, ranks are 1."""
    _launch(logits_RV, slots_R, image, work, out, ids, False, False, None, True, alone=True, splits=splits)
