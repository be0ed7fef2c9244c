"""Gives the rows of a verify step slots of their own, and advances the requests' slots after it.

- `expand` writes the state of row i of each request as it will be when its first i drafts are drawn: position, overlay,
  last tokens. So every kernel of a plain step works on target rows unchanged. Where no row has an overlay or last
  tokens, `softmax_stats` does this beside its read (`expand_row`) and nothing waits for it.
- `conclude` completes log-probabilities of tokens that a row did not draw itself, and pads after the count.
- `advance`, a part of `rejection_sample`, moves positions, counts and last tokens of the slots by the emitted tokens.

Shape legend: B requests, K draft steps, R = B (K + 1) rows, S slots, W words of a slot, E entries of all slots.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import (
    FLAGS,
    GREEDY,
    HAS_MASK,
    HAS_OVERLAY,
    LOG_MIN_P,
    MASK_ROW,
    OVERLAY_START,
    POSITION,
    SLOT_WORDS,
    TEMPERATURE,
    WANTS_LOGPROBS,
    RowLogits,
    load_bound,
    number,
    side_extent,
    values_with_side,
    word,
)
from gpu_sampler.kernels.draft_probs import RowDistribution, chance, run_length
from gpu_sampler.kernels.logprobs import ReportOutputs, store_nothing
from gpu_sampler.kernels.token_counts import count, remember
from gpu_sampler.output import VerifyOutput
from gpu_sampler.spec_decode import RULES, Rule, VerifyRules
from gpu_sampler.state.device_state import DeviceState, VerifyState
from gpu_sampler.state.host_state import SlotFlag
from gpu_sampler.state.layout import BAD_WORD_WORDS, Word
from gpu_sampler.workspace import (
    BEST,
    FLOATS,
    INTS,
    MASS,
    NO_DRAW,
    RANKING,
    REPORT_BEST,
    REPORT_TOTAL,
    VALUE,
    LogitRows,
    Workspace,
)

EXPLICIT_SEED: tl.constexpr = tl.constexpr(int(SlotFlag.EXPLICIT_SEED))
COUNTS: tl.constexpr = tl.constexpr(int(SlotFlag.COUNTS))
REMEMBERS: tl.constexpr = tl.constexpr(int(SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS))
STRICT: tl.constexpr = tl.constexpr(RULES.index("strict"))
STANDARD: tl.constexpr = tl.constexpr(RULES.index("standard"))
BLOCK: tl.constexpr = tl.constexpr(RULES.index("block"))
SYNTHETIC: tl.constexpr = tl.constexpr(RULES.index("synthetic"))
_OVERLAY_LEN: tl.constexpr = tl.constexpr(int(Word.OVERLAY_LEN))
_STOPS_START: tl.constexpr = tl.constexpr(int(Word.STOPS_START))
_WORDS_START: tl.constexpr = tl.constexpr(int(Word.WORDS_START))
_N_WORDS: tl.constexpr = tl.constexpr(int(Word.N_WORDS))
_BAD_WORD_STRIDE: tl.constexpr = tl.constexpr(BAD_WORD_WORDS)
_LAST: tl.constexpr = tl.constexpr(int(Word.LAST))
_WORDS: tl.constexpr = tl.constexpr(256)  # at least those of a slot
_ENTRIES: tl.constexpr = tl.constexpr(1024)
_WARPS = 4


@triton.jit
def rule_of(flags, RULE: tl.constexpr, SEEDED: tl.constexpr):
    """Returns the rule of a slot, greedy or not."""
    return tl.where((flags & EXPLICIT_SEED) != 0, SEEDED, RULE)


@triton.jit
def of_step(x, step):
    """Returns the element of x at one step of a run; 0 where there is none."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == step, x, 0), axis=0)


@triton.jit
def expand_row(
    r, step, drafts, slot, flags, table, to_table, to_slots, row_ints, E, RULE: tl.constexpr, SEEDED: tl.constexpr
):  # fmt: skip
    """Writes the words of row r, `step` of a run, and NO_DRAW, whether verification needs its distribution alone."""
    exists = step <= drafts  # else it is padding: greedy, without any feature
    rule = rule_of(flags, RULE, SEEDED)
    no_draw = ((flags & GREEDY) == 0) & (step < drafts) & ((rule == STANDARD) | (rule == BLOCK))
    tl.store(row_ints + r * INTS + NO_DRAW, no_draw.to(tl.int32))
    tl.store(to_slots + r, tl.where(exists, r + 1, 0))
    own = to_table + (r + 1).to(tl.int64) * SLOT_WORDS
    at = tl.arange(0, _WORDS)
    words = tl.load(table + slot * SLOT_WORDS + at, mask=at < SLOT_WORDS, other=0)
    moved = (at == OVERLAY_START) | (at == _STOPS_START) | (at == _WORDS_START)
    words = tl.where(at == POSITION, words + step, tl.where(moved, words + step * E, words))
    tl.store(own + at, words, mask=at < tl.where(exists, SLOT_WORDS, 0))


@triton.jit(do_not_specialize=["K"])  # or runs of one draft would compile while serving
def _expand_kernel(
    slots, draft_ids, kinds, table, entry_ids, entry_counts, entry_bias, to_table, to_ids, to_counts, to_bias, to_slots,
    row_ints, K, V, E, RULE: tl.constexpr, SEEDED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Writes one row's state. Grid (R); with LAST, grid (B): the state of the row after all K drafts.

    table and entries are the slots' own, `to_*` those of the rows (VerifyState), draft_ids i32 [B, K], kinds u8 [B].
    """
    r = tl.program_id(0)
    request = r
    step = r * 0 + K
    drafts = step
    if not LAST:
        request = r // (K + 1)
        step = r - request * (K + 1)
        drafts = run_length(draft_ids, kinds, request, K)
    slot = tl.load(slots + request)
    flags = word(table, slot, FLAGS)
    expand_row(r, step, drafts, slot, flags, table, to_table, to_slots, row_ints, E, RULE, SEEDED)
    if step > drafts:
        return
    own = to_table + (r + 1).to(tl.int64) * SLOT_WORDS
    start = word(table, slot, OVERLAY_START).to(tl.int64)
    there = start + step.to(tl.int64) * E
    if (flags & HAS_OVERLAY) != 0:
        entries = word(table, slot, _OVERLAY_LEN)
        for first in range(0, entries, _ENTRIES):
            entry = first + tl.arange(0, _ENTRIES)
            inside = entry < entries
            tl.store(to_ids + there + entry, tl.load(entry_ids + start + entry, mask=inside), mask=inside)
            tl.store(to_counts + there + entry, tl.load(entry_counts + start + entry, mask=inside), mask=inside)
            tl.store(to_bias + there + entry, tl.load(entry_bias + start + entry, mask=inside), mask=inside)
        lists = word(table, slot, _STOPS_START)
        end = word(table, slot, _WORDS_START) + _BAD_WORD_STRIDE * word(table, slot, _N_WORDS)
        for first in range(lists, end, _ENTRIES):
            entry = first + tl.arange(0, _ENTRIES)
            inside = entry < end
            tl.store(to_ids + step.to(tl.int64) * E + entry, tl.load(entry_ids + entry, mask=inside), mask=inside)
    if (flags & REMEMBERS) != 0:
        for before in range(step):
            tl.debug_barrier()  # what the last one wrote is read
            token = tl.load(draft_ids + request * K + before)
            if (token >= 0) & (token < V):
                if (flags & COUNTS) != 0:
                    count(token, own, to_ids + there, to_counts + there, to_bias + there)
                remember(token, own + _LAST)


@triton.jit(do_not_specialize=["n_columns", "c_columns", "K"])
def _conclude_kernel(
    logits, row_stride, slots, table, masks, mask_words, side_ids, side, side_len, row_ints, row_floats, drawn, counts,
    tokens, logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, flags_out, K, V,
    SIDE: tl.constexpr, PROCESSED: tl.constexpr,
):  # fmt: skip
    """Reports one row's token, unless the row drew it itself and reported it already. Grid (R).

    Arguments are those of `_sample_kernel`, with drawn i32 [R] what each row drew, and counts i32 [B].
    """
    r = tl.program_id(0)
    report = ReportOutputs(logprobs, ranks, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns)
    request = r // (K + 1)
    if r - request * (K + 1) >= tl.load(counts + request):
        tl.store(flags_out + r, 0)
        tl.store(row_ints + r * INTS + RANKING, 0)
        store_nothing(r, report)
        return
    token = tl.load(tokens + r)
    slot = tl.load(slots + r)
    flags = word(table, slot, FLAGS)
    reported = (flags & WANTS_LOGPROBS) == 0
    if not PROCESSED:
        reported = reported | ((flags & (HAS_MASK | HAS_OVERLAY)) != 0)
    if reported | (token < 0) | (token == tl.load(drawn + r)):
        return
    start, length = side_extent(table, slot, side_len, r, SIDE)
    row = RowLogits(
        logits + r.to(tl.int64) * row_stride, side_ids + start, side + start if SIDE else None, length, masks,
        word(table, slot, MASK_ROW), mask_words, V,
    )  # fmt: skip
    one = tl.zeros([16], tl.int32) + token
    z_16 = values_with_side(row, one, 32)
    z = tl.max(z_16, axis=0)
    if PROCESSED:
        bound = load_bound(row_ints + r * INTS)
        best = tl.load(row_floats + r * FLOATS + BEST)
        temperature = number(table, slot, TEMPERATURE)
        mass = tl.load(row_floats + r * FLOATS + MASS)
        p_16 = chance(z_16, one, RowDistribution(bound, best, temperature, number(table, slot, LOG_MIN_P), mass))
        found = (z - best) / temperature - tl.log(mass)
        tl.store(logprobs + r, tl.where(tl.max(p_16, axis=0) > 0.0, found, -float("inf")))
    else:
        report_best = tl.load(row_floats + r * FLOATS + REPORT_BEST)
        tl.store(logprobs + r, (z - report_best) - tl.log(tl.load(row_floats + r * FLOATS + REPORT_TOTAL)))
    tl.store(ranks + r, 1)  # `token_rank` adds what it finds
    tl.store(row_floats + r * FLOATS + VALUE, z)
    tl.store(row_ints + r * INTS + RANKING, 1)


@triton.jit
def advance(
    slot, flags, said, emitted, position, table, entry_ids, entry_counts, entry_bias, V, COUNT: tl.constexpr
):  # fmt: skip
    """Moves a slot past the first `emitted` tokens of `said`. `COUNT`: some slot counts or remembers tokens."""
    if slot > 0:
        words = table + slot.to(tl.int64) * SLOT_WORDS
        tl.store(words + POSITION, position + emitted)
        if COUNT:
            if (flags & REMEMBERS) != 0:
                start = word(table, slot, OVERLAY_START).to(tl.int64)
                for step in range(emitted):
                    tl.debug_barrier()  # what the last one wrote is read
                    token = of_step(said, step)
                    if (token >= 0) & (token < V):
                        if (flags & COUNTS) != 0:
                            count(token, words, entry_ids + start, entry_counts + start, entry_bias + start)
                        remember(token, words + _LAST)


def code(rule: Rule) -> int:
    """Returns a rule as the kernels' constant."""
    return RULES.index(rule)


class VerifyRuns(NamedTuple):
    """Names the runs of a step, and the state of their rows, which is filled for them."""

    state: VerifyState
    draft_ids: torch.Tensor  # i32 [B, K]
    kinds: torch.Tensor  # u8 [B], ProposalKind
    rules: VerifyRules


def expand(state: DeviceState, slots_B: torch.Tensor, runs: VerifyRuns, work: Workspace, *, last: bool = False) -> None:
    """Fills the state of the rows of `runs`, and `work.ints`, from that of all slots.

    Args:
        state: the state of all slots.
        slots_B: i32 [B], the requests' slots.
        runs: the runs.
        work: the workspace of the rows.
        last: fills one row a request, the one after all its drafts, in which -1 stands for none.
    """
    to, ids, kinds, rules = runs
    requests, steps = ids.shape
    _expand_kernel[(requests if last else requests * (steps + 1),)](
        slots_B, ids, kinds, state.table, state.entry_ids, state.entry_counts, state.entry_bias, to.table,
        to.entry_ids, to.entry_counts, to.entry_bias, to.slots, work.ints, steps, state.vocab_size, to.entries,
        RULE=code(rules.rule), SEEDED=code(rules.seeded), LAST=last, num_warps=_WARPS,
    )  # fmt: skip


def conclude(rows: LogitRows, drawn_R: torch.Tensor, out: VerifyOutput) -> None:
    """Completes the log-probabilities of a verify step, but for the ranks, and pads behind the counts.

    Args:
        rows: the R = B (K + 1) rows of the step, with their VerifyState.
        drawn_R: i32 [R], the token that each row drew itself, which is reported already.
        out: the step's outputs with tokens and counts.

    Raises:
        ValueError: `out` has no log-probabilities.
    """
    if out.logprobs is None:
        raise ValueError("`out` has no log-probabilities")
    state, work = rows.state, rows.work
    _conclude_kernel[(len(rows.logits),)](
        *rows.inputs, state.side_ids, state.side_processed, work.side_len, work.ints, work.floats, drawn_R, out.counts,
        out.tokens, *out.rows().reported, out.flags, out.tokens.shape[1] - 1, rows.logits.shape[1], SIDE=rows.side,
        PROCESSED=rows.processed, num_warps=_WARPS,
    )  # fmt: skip
