"""Completes the rows that `sample` could not finish from a list. One program a row; programs of other rows end early.

- PENDING_REJECTION: `nucleus_rejection` found the masses before the first DRAWS draws. The token is the first draw with
  a mass below p of the whole before it that also passes min-p, which is a draw from the nucleus, ties included. Where
  all of them fail, this kernel judges draw after draw by a read of its own, and after MAX_DRAWS scans the kept tokens.
- PENDING_SCAN: the row keeps more tokens than a list holds (a top-k above 256). The scan finds them by bisection, and
  draws with one Gumbel number a kept token.
- PENDING_MASS: processed log-probabilities need the exact kept mass, which is a scan too. So does the distribution of a
  row that verification draws from, which nothing is drawn from here.

The scan: a token stays if and only if its key of the total order reaches a bound. The bound is the k-th key, or the
largest key t whose mass down to t is at least p of the whole: then the mass strictly before each token from t on is
below p. Each step of a bisection reads the row once: slow, and only for rows that keep more than a list holds.
"""

from typing import Any, NamedTuple

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
    SIDE_BLOCK,
    SLOT_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS_LOGPROBS,
    RowLogits,
    key,
    launch_dependents,
    number,
    over_tile,
    pdl_options,
    seed_of,
    side_block,
    side_extent,
    store_bound,
    tile_ids,
    tile_values,
    values_with_side,
    wait_for_previous,
    word,
)
from gpu_sampler.kernels.gumbel import log_weights, two_level
from gpu_sampler.kernels.philox import SAMPLE_TOKEN, NoiseKey, gumbel
from gpu_sampler.kernels.softmax_stats import groups_of
from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference.filters import MAX_DRAWS
from gpu_sampler.workspace import (
    AT,
    BEST,
    FLOATS,
    INTS,
    MASS,
    MORE_PLACES,
    N_DRAWS,
    NO_DRAW,
    NOTHING_PENDING,
    PENDING,
    PENDING_MASS,
    PENDING_REJECTION,
    PLACES_MORE,
    REPORT_BEST,
    REPORT_TOTAL,
    TOTAL,
    VALUE,
    LogitRows,
)

_MAX_DRAWS: tl.constexpr = tl.constexpr(MAX_DRAWS)
_REPORT_BLOCK: tl.constexpr = tl.constexpr(128)
_FLAG_SCAN: tl.constexpr = tl.constexpr(int(RowFlag.NUCLEUS_SCAN))

SCAN_GROUPS: tl.constexpr = tl.constexpr(64)
SCAN_BLOCK: tl.constexpr = tl.constexpr(64 * 128)
_ONES: tl.constexpr = tl.constexpr(0xFFFFFFFF)


class ValueScale(NamedTuple):
    """Says what a row's values weigh: 2^((z - best) scale), scale = log2(e) / temperature."""

    best: Any  # the row's largest value
    temperature: Any
    scale: Any


@triton.jit
def _stays(z, ids, unit, bound, log_min_p):
    """Returns whether tokens have a key that is at least `bound`, and pass min-p."""
    return (z > -float("inf")) & (key(z, ids) >= bound) & ((z - unit.best) / unit.temperature >= log_min_p)


@triton.jit
def reach(row, unit, bound, log_min_p):
    """Returns (count i32, mass f32) of the tokens whose key is at least `bound` and that pass min-p."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([SCAN_GROUPS, 4, 32], tl.float32)
    for start in range(0, row.V, SCAN_BLOCK):
        ids = tile_ids(start // SCAN_BLOCK, SCAN_GROUPS)
        z = tile_values(row, start // SCAN_BLOCK, SCAN_GROUPS)
        stays = _stays(z, ids, unit, bound, log_min_p)
        count += over_tile(stays.to(tl.int32))
        mass += tl.where(stays, tl.exp2((z - unit.best) * unit.scale), 0.0)
    total = over_tile(mass)
    if row.side is not None:
        more = tl.zeros([SIDE_BLOCK], tl.float32)
        for start in range(0, row.length, SIDE_BLOCK):
            singles, x = side_block(row, start)
            remain = _stays(x, singles, unit, bound, log_min_p)
            count += tl.sum(remain.to(tl.int32), axis=0)
            more += tl.where(remain, tl.exp2((x - unit.best) * unit.scale), 0.0)
        total += tl.sum(more, axis=0)
    return count, total


@triton.jit
def bound_of(row, unit, wanted, ID_BITS: tl.constexpr, MASS: tl.constexpr):
    """Returns the largest key down to which the count (with MASS, the mass) is at least `wanted`; NO_KEY if none is."""
    found = tl.full([], NO_KEY, tl.int64)
    bit = found  # the sign bit first: it is cleared where the lower ones are set
    for step in range(32 + ID_BITS):
        if step == 32:  # the low word of every key has ones above its ID_BITS
            found = found | (_ONES >> ID_BITS << ID_BITS)
            bit = bit >> (32 - ID_BITS)
        raised = found ^ bit
        count, mass = reach(row, unit, raised, -float("inf"))
        if MASS:
            enough = mass >= wanted
        else:
            enough = count >= wanted
        found = tl.where(enough, raised, found)
        bit = (bit >> 1) & 0x7FFFFFFFFFFFFFFF
    return found


@triton.jit
def draw_kept(row, unit, bound, log_min_p, noise_key, round_):
    """Returns (id, value) of one draw among the tokens from `bound` on that pass min-p, one Gumbel number each."""
    score = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    value = tl.full([], -float("inf"), tl.float32)
    for start in range(0, row.V, SCAN_BLOCK):
        ids = tile_ids(start // SCAN_BLOCK, SCAN_GROUPS)
        z = tile_values(row, start // SCAN_BLOCK, SCAN_GROUPS)
        score, token, value = _better(z, ids, unit, bound, log_min_p, noise_key, round_, score, token, value)
    if row.side is not None:
        for start in range(0, row.length, SIDE_BLOCK):
            singles, x = side_block(row, start)
            score, token, value = _better(x, singles, unit, bound, log_min_p, noise_key, round_, score, token, value)
    return token, value


@triton.jit
def _better(z, ids, unit, bound, log_min_p, noise_key, round_, score, token, value):
    """Returns the better of the best draw so far and the best of these tokens."""
    stays = _stays(z, ids, unit, bound, log_min_p)
    x = (z - unit.best) / unit.temperature
    scores = tl.where(stays, x + gumbel(ids, noise_key, SAMPLE_TOKEN, round_), -float("inf"))
    own = tl.max(tl.ravel(scores), axis=0)
    wins = own > score
    here = tl.min(tl.ravel(tl.where(scores == own, ids, 0x7FFFFFFF)), axis=0)
    token = tl.where(wins, here, token)
    value = tl.where(wins, tl.max(tl.ravel(tl.where(ids == here, z, -float("inf"))), axis=0), value)
    return tl.maximum(score, own), token, value


@triton.jit(do_not_specialize=["n_columns", "c_columns"])  # or a new width would compile while serving
def _nucleus_fallback_kernel(
    logits, row_stride, slots, table, masks, mask_words, maxima, sums, side_ids, side_processed, side_len, row_ints,
    row_floats, draw_ids, draw_values, ahead_mass, ahead_count, tokens, flags_out, logprobs, ranks, top_ids,
    top_logprobs, n_columns, chosen_logprobs, c_columns, parts, V, G,
    GROUPS: tl.constexpr, PLACES: tl.constexpr, ID_BITS: tl.constexpr, SIDE: tl.constexpr, PROCESSED: tl.constexpr,
    KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Completes one row that `sample` left pending; a program of another row ends early. Grid (R).

    Arguments are those of `_sample_kernel`, and `ahead_mass`, `ahead_count` f32, i32 [R, parts + 2, DRAWS] of
    `nucleus_rejection`. PLACES: parts + 2 rounded up to a power of two. ID_BITS: bits of the largest id.
    """
    wait_for_previous(PDL)
    launch_dependents(PDL)
    r = tl.program_id(0)
    pending = tl.load(row_ints + r * INTS + PENDING)
    if pending == NOTHING_PENDING:
        return
    row_at = r.to(tl.int64)
    slot = tl.load(slots + r)
    flags = word(table, slot, FLAGS)
    temperature = number(table, slot, TEMPERATURE)
    top_k = word(table, slot, TOP_K)
    top_p = number(table, slot, TOP_P)
    log_min_p = number(table, slot, LOG_MIN_P)
    noise_key = NoiseKey(seed_of(table, slot), tl.load(row_ints + r * INTS + AT), word(table, slot, BRANCH))
    best = tl.load(row_floats + r * FLOATS + BEST)
    total = tl.load(row_floats + r * FLOATS + TOTAL)
    unit = ValueScale(best, temperature, (1.0 / temperature) * LOG2_E)
    start, length = side_extent(table, slot, side_len, r, SIDE)
    row = RowLogits(
        logits + row_at * row_stride, side_ids + start, side_processed + start if SIDE else None, length, masks,
        word(table, slot, MASK_ROW), mask_words, V,
    )  # fmt: skip
    row_flags = tl.load(flags_out + r)
    no_draw = pending < 0
    if KEPT:  # then nothing was drawn, and nothing is drawn here
        no_draw = tl.load(row_ints + r * INTS + NO_DRAW) != 0

    token = tl.full([], -1, tl.int32)
    value = tl.full([], -float("inf"), tl.float32)
    ahead = tl.zeros([], tl.int32)
    counted = tl.full([], 0, tl.int32)
    if pending == PENDING_REJECTION:
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
        refused = tl.full([], NO_KEY, tl.int64)  # a draw that does not come before this one needs no read
        m, s = groups_of(maxima + row_at * G, sums + row_at * G, G, GROUPS)
        weights_G = log_weights(m, s, best, temperature)
        if accepted < N_DRAWS:
            token = tl.load(draw_ids + r * N_DRAWS + accepted)
            value = tl.load(draw_values + r * N_DRAWS + accepted)
            ahead = tl.max(tl.where(draws == accepted, count_D, 0), axis=0)
            counted = tl.full([], 1, tl.int32)
        while (token < 0) & (round_ < _MAX_DRAWS):
            drawn, its = two_level(row, weights_G, best, temperature, noise_key, round_, GROUPS)
            round_ += 1
            own = key(its, drawn)
            if (own > refused) & ((its - best) / temperature >= log_min_p):
                count, mass = reach(row, unit, own + 1, -float("inf"))
                if mass < top_p * total:
                    token = drawn
                    value = its
                    ahead = count
                    counted = tl.full([], 1, tl.int32)
                else:
                    refused = own
    elif pending == PENDING_MASS:
        token = tl.load(tokens + r)
        value = tl.where(no_draw, -float("inf"), tl.load(row_floats + r * FLOATS + VALUE))

    wants = (flags & WANTS_LOGPROBS) != 0
    processed = wants & PROCESSED
    bound = tl.full([], NO_KEY, tl.int64)
    if (token < 0) | processed | no_draw:
        row_flags = row_flags | tl.where((top_k == 0), _FLAG_SCAN, 0)
        if top_k > 0:
            if top_k < V:
                bound = bound_of(row, unit, top_k, ID_BITS, False)
            _, total = reach(row, unit, bound, -float("inf"))
        if top_p < 1.0:
            bound = tl.maximum(bound, bound_of(row, unit, top_p * total, ID_BITS, True))
        if (token < 0) & ~no_draw:
            token, value = draw_kept(row, unit, bound, log_min_p, noise_key, tl.where(top_k > 0, 0, _MAX_DRAWS))
    if KEPT:
        if no_draw:
            _, mass = reach(row, unit, bound, log_min_p)
            tl.store(row_floats + r * FLOATS + MASS, mass)
        store_bound(row_ints + r * INTS, bound)
    tl.store(tokens + r, token)
    tl.store(flags_out + r, row_flags)
    if logprobs is not None:
        if wants & (PROCESSED | ((flags & (HAS_MASK | HAS_OVERLAY)) == 0)):
            if (counted == 0) & ~no_draw:
                ahead, _ = reach(row, unit, key(value, token) + 1, -float("inf"))
            tl.store(ranks + r, ahead + 1)
            if PROCESSED:
                _, kept = reach(row, unit, bound, log_min_p)
                over = tl.log(kept)
                tl.store(logprobs + r, (value - best) / temperature - over)
                n_top = word(table, slot, N_TOP)
                for first in range(0, n_top, _REPORT_BLOCK):
                    at = first + tl.arange(0, _REPORT_BLOCK)
                    ids = tl.load(top_ids + r * n_columns + at, mask=at < n_top, other=-1)
                    found = _kept_logprobs(row, ids, unit, bound, log_min_p, over)
                    tl.store(top_logprobs + r * n_columns + at, found, mask=at < n_top)
                n_chosen = word(table, slot, N_CHOSEN)
                for first in range(0, n_chosen, _REPORT_BLOCK):
                    at = first + tl.arange(0, _REPORT_BLOCK)
                    ids = tl.load(table + slot * SLOT_WORDS + CHOSEN + at, mask=at < n_chosen, other=-1)
                    found = _kept_logprobs(row, ids, unit, bound, log_min_p, over)
                    tl.store(chosen_logprobs + r * c_columns + at, found, mask=at < n_chosen)
            else:
                report_best = tl.load(row_floats + r * FLOATS + REPORT_BEST)
                report_total = tl.load(row_floats + r * FLOATS + REPORT_TOTAL)
                tl.store(logprobs + r, (value - report_best) - tl.log(report_total))


@triton.jit
def _kept_logprobs(row, ids, unit, bound, log_min_p, over):
    """Returns processed log-probabilities f32 [N] of ids, -inf for removed ones and for those outside of [0, V)."""
    z = values_with_side(row, ids, 32)
    stays = (ids >= 0) & (ids < row.V) & _stays(z, ids, unit, bound, log_min_p)
    return tl.where(stays, (z - unit.best) / unit.temperature - over, -float("inf"))


def nucleus_fallback(rows: LogitRows, out: SampleOutput, *, kept: bool = False) -> None:
    """Completes the rows that `sample` left pending, after `nucleus_rejection` where a row waits for it.

    Args:
        rows: the rows, as `sample` took them.
        out: the step's outputs; tokens, flags, log-probabilities and ranks of these rows are written.
        kept: also stores what stays of the rows, which verification and drafts need.
    """
    work, vocab = rows.work, rows.logits.shape[1]
    _nucleus_fallback_kernel[(len(rows.logits),)](
        *rows.inputs,
        work.maxima,
        work.sums,
        rows.state.side_ids,
        rows.state.side_processed,
        work.side_len,
        work.ints,
        work.floats,
        work.draw_ids,
        work.draw_values,
        work.ahead_mass,
        work.ahead_count,
        out.tokens,
        out.flags,
        *out.reported,
        work.parts,
        vocab,
        work.groups,
        GROUPS=work.padded_groups,
        PLACES=triton.next_power_of_2(work.parts + PLACES_MORE),
        ID_BITS=max(1, (vocab - 1).bit_length()),
        SIDE=rows.side,
        PROCESSED=rows.processed,
        KEPT=kept,
        **pdl_options(),
        num_warps=8,
    )
