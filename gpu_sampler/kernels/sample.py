"""Draws a token for each row from the statistics that `softmax_stats` left, and reports its log-probabilities.

Two kernels share the helpers of `gumbel`, `top_n` and `logprobs`. Shape legend: R rows, V vocabulary, G groups of 128
ids, W words of a slot, N columns of top ids, C columns of chosen ids.

`_sample_kernel`, grid (R) or (R, 2), draws by the row's own route:
- greedy: the first token of the total order (value descending, id ascending);
- plain: one two-level Gumbel-max draw of the whole row;
- list: the first tokens of the order, cut by top-k, then by the mass before a token (top-p), then by min-p, and one
  Gumbel number for each token that is left;
- a nucleus that may be wider than 256 tokens, or a top-k above 256: left to `nucleus_fallback`. For the nucleus this
  kernel makes the first DRAWS draws of the whole row, which one read by `nucleus_rejection` then judges. With min-p
  alone it judges a draw by its value.

It also reports the log-probabilities that can be read from the values the row draws by:

    logprob(x) = (x - M) - ln Z,  Z = sum_j s_j 2^((m_j - M) log2(e)) + the side list's share

`_report_kernel`, grid (R), reports raw log-probabilities of rows whose raw order is not the one they draw by (overlay,
allow mask, or a draw by FlashInfer), and of rows that nothing is drawn from (SCORING).

With RAW_REPORT and the grid (R, 2), the second program of a row reports raw log-probabilities while the first one
draws, and `token_rank` completes what depends on the token. Neither program waits for the other, in any order:

| memory of a row that both programs use | written by | read by |
|---|---|---|
| logits, side list, words of the slot but POSITION | neither | both |
| POSITION, AT, PENDING, BEST, TOTAL, token, flags, draws, queue, first lists | drawing program | drawing program |
| RANKING, SHOWN, REPORT_BEST, REPORT_TOTAL, reported values, second lists | reporting program | reporting program |
| raw_maxima, raw_sums | reporting program | reporting program |
| maxima, sums | drawing program | both, where no raw statistics exist |

The drawing program rewrites maxima and sums only in groups that NaN or +inf spoilt. The reporting program may see each
of them before or after that: a spoilt sum is not finite, and a spoilt maximum is either not finite or already mended.
So where it finds all of them finite, it has the mended statistics. Otherwise it mends the row into the raw statistics.

Bytes a row: 8 a group, then at most 257 groups of logits where the row needs a list.
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    BRANCH,
    CHOSEN,
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
    POSITION,
    SLOT_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS_LOGPROBS,
    RowLogits,
    launch_dependents,
    number,
    pdl_options,
    seed_of,
    side_extent,
    side_max,
    store_bound,
    wait_for_previous,
    word,
)
from gpu_sampler.kernels.gumbel import first_token, of_list, of_the_whole
from gpu_sampler.kernels.logprobs import (
    LogprobScale,
    ReportOutputs,
    rank_in_list,
    store_chosen,
    store_nothing,
    store_top,
    total_of,
    value_of_token,
)
from gpu_sampler.kernels.philox import NoiseKey
from gpu_sampler.kernels.softmax_stats import groups_of, mended_groups, raw_apart, sum_temperature
from gpu_sampler.kernels.top_n import RowFilters, first_of_order, list_of_row
from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference.filters import WIDE
from gpu_sampler.state.layout import Word
from gpu_sampler.workspace import (
    AT,
    BEST,
    FINISH,
    FLOATS,
    INTS,
    LIST,
    LISTED,
    MASS,
    N_DRAWS,
    NO_DRAW,
    NOTHING_PENDING,
    PENDING,
    PENDING_MASS,
    PENDING_REJECTION,
    PENDING_SCAN,
    RANKING,
    REPORT_BEST,
    REPORT_TOTAL,
    SCRATCH,
    SHOWN,
    TOTAL,
    VALUE,
    LogitRows,
)

_WIDE: tl.constexpr = tl.constexpr(WIDE)
_LIST: tl.constexpr = tl.constexpr(LIST)
_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH)
WARPS = 8  # part of the contract: it shapes the sums of a row
REGISTERS = 128  # two programs a multiprocessor
FEW_REGISTERS = 64  # four, of the code without lists
_FLAG_BAD_VALUE: tl.constexpr = tl.constexpr(int(RowFlag.BAD_VALUE))
_FLAG_NO_TOKEN: tl.constexpr = tl.constexpr(int(RowFlag.NO_TOKEN))
_FLAG_WIDE: tl.constexpr = tl.constexpr(int(RowFlag.WIDE))
_FLAG_REJECTION: tl.constexpr = tl.constexpr(int(RowFlag.REJECTION))


@triton.jit(do_not_specialize=["n_columns", "c_columns"])  # or a new width would compile while serving
def _sample_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, raw_maxima, raw_sums,
    side_ids, side_raw, side_processed, side_len, side_bad, picked, scratch, row_ints, row_floats, queue, draw_ids,
    draw_values, tokens, flags_out, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns,
    elsewhere, V, G,
    GROUPS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, LISTS: tl.constexpr, PROCESSED: tl.constexpr,
    RAW_REPORT: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draws and reports one row. Grid (R), or (R, 2) with RAW_REPORT: see the module for the second program.

    Args:
        logits, row_stride: [R, V] bf16, fp16 or f32 with contiguous rows; -inf where a token is in a side list.
        slots: i32 [R]. table: i32 [S, W]; POSITION advances.
        masks, mask_words: i32 [M, ceil(V / 32)] allow masks and their row length; None where no row has one.
        maxima, sums, raw_maxima, raw_sums: f32 [R, G] of `softmax_stats`.
        side_ids, side_raw, side_processed: i32, f32, f32 [E]; a row's list begins at its OVERLAY_START.
        side_len, side_bad: i32 [R].
        picked, scratch: i32 [2, R, LIST], i64 [2, R, SCRATCH], memory for lists.
        row_ints, row_floats: i32, f32 [R, 8], named in `gpu_sampler.workspace`.
        queue: i32 [1 + R], receives the rows whose draws wait for `nucleus_rejection`.
        draw_ids, draw_values: i32, f32 [R, DRAWS], those draws.
        tokens, flags_out: i32 [R] outputs.
        logprobs, ranks, top_ids, top_logprobs, chosen_logprobs: f32 [R], i32 [R], i32 [R, N], f32 [R, N], f32 [R, C]
            outputs; None where no row wants log-probabilities.
        elsewhere: i32 [R], 1 for rows that FlashInfer draws; None where it draws none.
        GROUPS: G rounded up to a power of two. HALF: values have at most 16 significant bits.
        SIDE: some row has a side list or a mask. LISTS: some row needs the first tokens of its order.
        PROCESSED: log-probabilities are those after all filters. KEPT: also stores what each row keeps.
    """
    LOGPROBS: tl.constexpr = logprobs is not None
    if KEPT:  # the words of a run's rows may be written by `softmax_stats`
        wait_for_previous(PDL)
    r = tl.program_id(0)
    row_at = r.to(tl.int64)
    list_at = row_at
    slot = tl.load(slots + r)
    flags = word(table, slot, FLAGS)
    slot_temperature = number(table, slot, TEMPERATURE)
    top_k = word(table, slot, TOP_K)
    top_p = number(table, slot, TOP_P)
    log_min_p = number(table, slot, LOG_MIN_P)
    position = word(table, slot, POSITION)
    branch = word(table, slot, BRANCH)
    noise_key = NoiseKey(seed_of(table, slot), position, branch)
    report = ReportOutputs(logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns)
    mask_row = word(table, slot, MASK_ROW)
    n_top = word(table, slot, N_TOP)
    n_chosen = word(table, slot, N_CHOSEN)
    if not KEPT:
        wait_for_previous(PDL)
    launch_dependents(PDL)
    draws = True
    if KEPT:  # verification draws such a row's token from its distribution: it is not drawn here as well
        draws = tl.load(row_ints + r * INTS + NO_DRAW) == 0
    greedy = (flags & GREEDY) != 0
    has_mask = (flags & HAS_MASK) != 0
    wants = (flags & WANTS_LOGPROBS) != 0
    summed_at = sum_temperature(flags, slot_temperature, top_k)
    apart = raw_apart(flags, summed_at)
    moved = has_mask | ((flags & HAS_OVERLAY) != 0)  # raw order and drawn order differ
    if elsewhere is not None:  # FlashInfer's token is reported like one that was drawn from other values
        away = tl.load(elsewhere + r) != 0
        moved = moved | away
        greedy = greedy | away
    draws_here: tl.constexpr = True
    reports_here: tl.constexpr = True
    mends_raw: tl.constexpr = not PROCESSED
    if RAW_REPORT:
        draws_here = tl.program_id(1) == 0
        reports_here = draws_here != (wants & moved)
        mends_raw = draws_here & (reports_here | (tl.num_programs(1) == 1))  # or for `report` behind this launch
        if ~draws_here & ~reports_here:
            return
    m_row = maxima + row_at * G
    s_row = sums + row_at * G
    start, length = side_extent(table, slot, side_len, r, SIDE)
    side = side_processed + start if SIDE else None
    temperature = tl.where(greedy, 1.0, slot_temperature)
    to_m, to_s = m_row, s_row
    if RAW_REPORT:
        if ~draws_here:
            mask_row = tl.full([], -1, tl.int32)
            side = side_raw + start
            temperature = tl.full([], 1.0, tl.float32)
            summed_at = temperature
            list_at = row_at + tl.num_programs(0)  # lists of its own
            m_row, s_row = _raw_groups(m_row, s_row, raw_maxima, raw_sums, row_at * G, has_mask, apart)
            to_m = raw_maxima + row_at * G  # no other program writes or reads these
            to_s = raw_sums + row_at * G
    scale = (1.0 / summed_at) * LOG2_E
    row = RowLogits(logits + row_at * row_stride, side_ids + start, side, length, masks, mask_row, mask_words, V)
    m, s, row_flags = mended_groups(
        row, m_row, s_row, to_m, to_s, raw_maxima + row_at * G, raw_sums + row_at * G, scale, mends_raw, G, GROUPS,
        RAW_REPORT,
    )  # fmt: skip
    if SIDE:
        if tl.load(side_bad + r) != 0:
            row_flags = row_flags | _FLAG_BAD_VALUE
    best = tl.max(m, axis=0)
    if SIDE:
        best = tl.maximum(best, side_max(row))
    if reports_here:
        tl.store(row_ints + r * INTS + RANKING, 0)
    if draws_here:
        tl.debug_barrier()  # every warp has read the position: sums over few groups do not make them wait
        tl.store(table + slot * SLOT_WORDS + POSITION, position + 1, mask=slot > 0)
        tl.store(row_ints + r * INTS + AT, position)
        tl.store(row_ints + r * INTS + PENDING, NOTHING_PENDING)
        tl.store(row_floats + r * FLOATS + BEST, best)
    if best == -float("inf"):
        row_flags = row_flags | _FLAG_NO_TOKEN
    if draws_here:
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
                store_nothing(r, report)
        return

    limited = ~greedy & (top_k > 0)
    nucleus = ~greedy & ~limited & ((top_p < 1.0) | (log_min_p > -float("inf")))
    reports = wants
    if RAW_REPORT:
        limited = limited & draws_here
        nucleus = nucleus & draws_here
        reports = wants & reports_here
    elif not PROCESSED:
        reports = wants & ~moved
    n_list = tl.where(reports, n_top, 0)
    total = total_of(row, m, s, best, scale)
    if draws_here:
        tl.store(row_floats + r * FLOATS + TOTAL, total)

    keys, count, need, listed, x, weights, kept = list_of_row(
        row, m, picked + list_at * _LIST, scratch + list_at * _SCRATCH, n_list, limited, nucleus,
        RowFilters(best, temperature, top_k, top_p, log_min_p, total), GROUPS, HALF, LISTS,
    )  # fmt: skip

    pending = tl.full([], NOTHING_PENDING, tl.int32)
    token = tl.full([], -1, tl.int32)
    value = best
    if draws_here:
        if greedy:
            token = first_token(row, m, best, GROUPS)
        elif listed:
            token, value = of_list(keys, x, kept, noise_key)
        elif limited:
            pending = tl.full([], PENDING_SCAN, tl.int32)
        else:
            token, value, pending = of_the_whole(
                row, m, s, best, temperature, log_min_p, noise_key, draws, nucleus, nucleus & (top_p >= 1.0),
                draw_ids + r * N_DRAWS, draw_values + r * N_DRAWS, GROUPS,
            )  # fmt: skip
            if nucleus:
                row_flags = row_flags | _FLAG_REJECTION
                needs_mass = PROCESSED & wants
                if KEPT:
                    needs_mass = needs_mass | ~draws
                pending = tl.where(needs_mass & (pending == NOTHING_PENDING), PENDING_MASS, pending)
                if pending == PENDING_REJECTION:
                    tl.store(queue + 1 + tl.atomic_add(queue, 1, sem="relaxed"), r)
        if top_k > _WIDE:
            row_flags = row_flags | tl.where(greedy, 0, _FLAG_WIDE)
        tl.store(flags_out + r, row_flags)
        tl.store(row_ints + r * INTS + PENDING, pending)
        tl.store(tokens + r, tl.where((pending == PENDING_REJECTION) | (pending == PENDING_SCAN), -1, token))

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
            # The sum is over all tokens at the reported temperature, or over the kept tokens of a processed list.
            over = total
            unit = tl.full([], 1.0, tl.float32)
            if PROCESSED:
                over = mass
                unit = temperature
            else:
                last = tl.full([], NO_KEY, tl.int64)
                if apart & draws_here:
                    _, raw = groups_of(m_row, raw_sums + row_at * G, G, GROUPS)
                    over = total_of(row, m, raw, best, LOG2_E)
            log_over = tl.log(over)
            tl.store(row_floats + r * FLOATS + REPORT_BEST, best)
            tl.store(row_floats + r * FLOATS + REPORT_TOTAL, over)
            if (token >= 0) & (token < V) & (value > -float("inf")):
                tl.store(logprobs + r, (value - best) / unit - log_over)
                ahead, known = rank_in_list(keys, count, need, value, token)
                known = known | greedy
                tl.store(ranks + r, tl.where(known, ahead + 1, 1))  # `token_rank` adds what it finds
                tl.store(row_floats + r * FLOATS + VALUE, value)
                tl.store(row_ints + r * INTS + RANKING, tl.where(known | (pending != NOTHING_PENDING), 0, 1))
            if RAW_REPORT:
                if ~draws_here:
                    tl.store(ranks + r, 1)
                    tl.store(row_ints + r * INTS + SHOWN, tl.minimum(count, need))
                    tl.store(row_ints + r * INTS + RANKING, FINISH)
            scaled = LogprobScale(best, unit, log_over, last)
            store_top(r, keys, count, n_top, scaled, report)
            store_chosen(r, row, table + slot.to(tl.int64) * SLOT_WORDS + CHOSEN, n_chosen, scaled, report)
        elif not wants:
            store_nothing(r, report)


@triton.jit(do_not_specialize=["n_columns", "chosen_stride", "c_columns", "splits"])  # as above
def _report_kernel(
    logits, row_stride, slots, table, maxima, sums, raw_maxima, raw_sums, side_ids, side_raw, side_len, picked, scratch,
    row_ints, row_floats, tokens, flags_out, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs,
    c_columns, chosen_ids, chosen_stride, elsewhere, ahead_parts, splits, tiles, V, G,
    GROUPS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, SCORING: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Reports the raw log-probabilities of one row. Grid (R).

    Arguments that `_sample_kernel` has too mean the same here, but `tokens` are read, and so are `flags_out` without
    SCORING. Rows that do not want log-probabilities, or were reported with their draw, end early.

    Args:
        chosen_ids, chosen_stride: i32 ids to report, by slot, or by row [R, C] with SCORING, and their row stride.
        ahead_parts, splits, tiles: i32 [R, tiles] counts of what comes before each token, in `splits` parts; read with
            SCORING alone.
        SCORING: nothing is drawn from the rows. All of them report, and statistics are mended here.
        PARTS: `tiles` rounded up to a power of two.
    """
    r = tl.program_id(0)
    row_at = r.to(tl.int64)
    slot = tl.load(slots + r)
    flags = word(table, slot, FLAGS)
    slot_temperature = number(table, slot, TEMPERATURE)
    top_k = word(table, slot, TOP_K)
    n_top = word(table, slot, N_TOP)
    n_chosen = word(table, slot, N_CHOSEN)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    has_mask = (flags & HAS_MASK) != 0
    apart = raw_apart(flags, sum_temperature(flags, slot_temperature, top_k))
    if not SCORING:
        moved = has_mask | ((flags & HAS_OVERLAY) != 0)
        if elsewhere is not None:
            moved = moved | (tl.load(elsewhere + r) != 0)
        if ((flags & WANTS_LOGPROBS) == 0) | ~moved:
            return
    m_row, s_row = _raw_groups(
        maxima + row_at * G, sums + row_at * G, raw_maxima, raw_sums, row_at * G, has_mask, apart
    )
    start, length = side_extent(table, slot, side_len, r, SIDE)
    side = side_raw + start if SIDE else None
    row = RowLogits(logits + row_at * row_stride, side_ids + start, side, length, None, -1, 0, V)
    report = ReportOutputs(logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns)
    if SCORING:
        m, s, row_flags = mended_groups(
            row, m_row, s_row, m_row, s_row, raw_maxima + row_at * G, raw_sums + row_at * G, LOG2_E, True, G, GROUPS,
            False,
        )  # fmt: skip
    else:
        row_flags = tl.load(flags_out + r)
        m, s = groups_of(m_row, s_row, G, GROUPS)
    best = tl.max(m, axis=0)
    if SIDE:
        best = tl.maximum(best, side_max(row))
    tl.store(row_ints + r * INTS + RANKING, 0)
    if SCORING:
        if best == -float("inf"):
            row_flags = row_flags | _FLAG_NO_TOKEN
        tl.store(flags_out + r, row_flags)
    tl.store(ranks + r, 0)
    tl.store(logprobs + r, -float("inf"))
    if (row_flags & _FLAG_NO_TOKEN) != 0:
        store_nothing(r, report)
        return

    given = chosen_ids + slot.to(tl.int64) * chosen_stride
    if SCORING:
        n_top = n_columns
        n_chosen = c_columns
        given = chosen_ids + row_at * chosen_stride
    log_total = tl.log(total_of(row, m, s, best, LOG2_E))
    keys = tl.full([_LIST], NO_KEY, tl.int64)
    count = tl.zeros([], tl.int32)
    if n_top > 0:
        keys, count = first_of_order(
            row, m, picked + row_at * _LIST, scratch + row_at * _SCRATCH, n_top, GROUPS, HALF
        )  # fmt: skip
    token = tl.load(tokens + r)
    value = value_of_token(row, token, 1024)
    if (token >= 0) & (token < V) & (value > -float("inf")):
        tl.store(logprobs + r, (value - best) - log_total)
        if SCORING:
            part = tl.arange(0, PARTS)
            ahead = tl.sum(tl.load(ahead_parts + row_at * tiles + part, mask=part < splits, other=0), axis=0)
            tl.store(ranks + r, ahead + 1)
        else:
            ahead, known = rank_in_list(keys, count, n_top, value, token)
            tl.store(ranks + r, tl.where(known, ahead + 1, 1))  # `token_rank` adds what it finds
            tl.store(row_ints + r * INTS + RANKING, tl.where(known, 0, 1))
        tl.store(row_floats + r * FLOATS + VALUE, value)
    scaled = LogprobScale(best, 1.0, log_total, NO_KEY)
    store_top(r, keys, count, n_top, scaled, report)
    store_chosen(r, row, given, n_chosen, scaled, report)


@triton.jit
def _raw_groups(m_row, s_row, raw_maxima, raw_sums, at, has_mask, apart):
    """Returns where the maxima and sums of the raw order stand: with those of the drawn one unless they differ."""
    if has_mask:
        m_row = raw_maxima + at
    if apart:
        s_row = raw_sums + at
    return m_row, s_row


def sample(
    rows: LogitRows,
    out: SampleOutput,
    *,
    lists: bool = True,
    elsewhere_R: torch.Tensor | None = None,
    with_report: bool = False,
    kept: bool = False,
) -> None:
    """Draws a token a row, advances the positions, and reports what one read of the statistics can tell.

    Args:
        rows: the rows, after `softmax_stats`.
        out: outputs on the rows' device, shapes as in SampleOutput.
        lists: some row needs the first tokens of its order, for a filter or to report them.
        elsewhere_R: i32 [R], 1 for rows that FlashInfer draws.
        with_report: reports raw log-probabilities of rows with overlay or mask in the same launch. `token_rank` has to
            complete them.
        kept: also stores what each row keeps, for verification.
    """
    wants = out.logprobs is not None
    # Rows that want a report of their own come with side lists or masks: one variant, whether some want it or not.
    raw_report = rows.side and wants and not (rows.processed or kept or elsewhere_R is not None)
    state, work = rows.state, rows.work
    _sample_kernel[(len(rows.logits), 2 if with_report else 1)](
        *rows.inputs,
        work.maxima,
        work.sums,
        work.raw_maxima,
        work.raw_sums,
        state.side_ids,
        state.side_raw,
        state.side_processed,
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
        out.flags,
        *out.reported,
        elsewhere_R,
        rows.logits.shape[1],
        work.groups,
        GROUPS=work.padded_groups,
        HALF=rows.logits.dtype == torch.bfloat16,
        SIDE=rows.side,
        LISTS=lists,
        PROCESSED=rows.processed,
        RAW_REPORT=raw_report,
        KEPT=kept,
        num_warps=WARPS,
        **pdl_options(),
        maxnreg=REGISTERS if lists else FEW_REGISTERS,
    )


def report(
    rows: LogitRows,
    out: SampleOutput,
    elsewhere_R: torch.Tensor | None = None,
    *,
    ids_RC: torch.Tensor | None = None,
    splits: int = 0,
) -> None:
    """Reports raw log-probabilities of rows with overlay or mask, that FlashInfer drew, or that nothing is drawn from.

    It is a launch of its own.

    Args:
        rows: the rows, after their tokens were drawn.
        out: the step's outputs with tokens and flags, and with arrays for log-probabilities.
        elsewhere_R: i32 [R], 1 for rows that FlashInfer drew.
        ids_RC: i32 [R, C], the chosen ids of rows that nothing is drawn from, with a StatelessRows, after their
            `softmax_stats`; flags are then written. None: rows that were drawn.
        splits: the number that `softmax_stats` returned for them; where it is 0, ranks are 1.
    """
    chosen_ids = rows.state.table[:, Word.CHOSEN :] if ids_RC is None else ids_RC
    state, work = rows.state, rows.work
    _report_kernel[(len(rows.logits),)](
        *rows.inputs[:4],
        work.maxima,
        work.sums,
        work.raw_maxima,
        work.raw_sums,
        state.side_ids,
        state.side_raw,
        work.side_len,
        work.picked,
        work.keys,
        work.ints,
        work.floats,
        out.tokens,
        out.flags,
        *out.reported,
        chosen_ids,
        chosen_ids.stride(0),
        elsewhere_R,
        work.ahead_parts,
        splits,
        work.tiles,
        rows.logits.shape[1],
        work.groups,
        GROUPS=work.padded_groups,
        HALF=rows.logits.dtype == torch.bfloat16,
        SIDE=rows.side,
        SCORING=ids_RC is not None,
        PARTS=triton.next_power_of_2(work.tiles),
        num_warps=WARPS,
        **pdl_options(),
        maxnreg=REGISTERS,
    )
