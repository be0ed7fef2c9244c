"""Moves the tokens that bias, bans or penalties change out of the logits, into the row's side list.

    processed = min(pen(raw + bias) - count f - [count > 0] p, largest float32), in float64 and rounded once
    pen(x) = x / r for x > 0, else x r, where the prompt or the output holds the token, else x
    processed = -inf where the token is not allowed, or is banned at this position

r, f and p are the repetition, frequency and presence penalty (Keskar et al. 2019, "CTRL", for r).

Grid (R): a program does one row, and ends early for a row without an overlay. Bans go first: each banned token is read
and becomes -inf in the logits, so that the slot's entry of the same token, if it has one, finds -inf there, which no
bias or penalty changes. In the side list the entries come first. A token that stands there twice has its raw value
once, -inf beside the other, and no processed value but -inf. Bytes: 32 an entry, 20 a ban, 68 a bad word.

| pointer | shape, type | |
|---|---|---|
| logits | [R, V] bf16, fp16 or f32, any row stride | read, write -inf |
| slots | i32 [R] | read |
| table, masks | i32 [S, W], i32 [M, ceil(V / 32)] | read |
| entry_ids, entry_counts, entry_bias | i32, i32, f32 [E] | read |
| side_ids, side_raw, side_processed | i32, f32, f32 [E]: a row's list begins at its OVERLAY_START | write |
| side_len | i32 [R], the length of the row's list | write |
| side_bad | i32 [R], 1 where NaN or +inf was among the tokens moved out of the logits | write |
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import FLAGS, HAS_OVERLAY, MASK_ROW, OVERLAY_START, POSITION, SLOT_WORDS, number, word
from gpu_sampler.state.device_state import SlotState, check_ints
from gpu_sampler.state.host_state import COUNT
from gpu_sampler.state.layout import BAD_WORD_WORDS, Word

_REPETITION: tl.constexpr = tl.constexpr(int(Word.REPETITION))
_FREQUENCY: tl.constexpr = tl.constexpr(int(Word.FREQUENCY))
_PRESENCE: tl.constexpr = tl.constexpr(int(Word.PRESENCE))
_MIN_TOKENS: tl.constexpr = tl.constexpr(int(Word.MIN_TOKENS))
_OVERLAY_LEN: tl.constexpr = tl.constexpr(int(Word.OVERLAY_LEN))
_STOPS_START: tl.constexpr = tl.constexpr(int(Word.STOPS_START))
_N_STOPS: tl.constexpr = tl.constexpr(int(Word.N_STOPS))
_WORDS_START: tl.constexpr = tl.constexpr(int(Word.WORDS_START))
_N_WORDS: tl.constexpr = tl.constexpr(int(Word.N_WORDS))
_LAST: tl.constexpr = tl.constexpr(int(Word.LAST))
_COUNT: tl.constexpr = tl.constexpr(COUNT)
_BAD_WORD_STRIDE: tl.constexpr = tl.constexpr(BAD_WORD_WORDS)
_WORD_IDS: tl.constexpr = tl.constexpr(BAD_WORD_WORDS - 1)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_ENTRIES: tl.constexpr = tl.constexpr(512)  # processed together
_STOPS: tl.constexpr = tl.constexpr(128)
_WORDS: tl.constexpr = tl.constexpr(64)
_WARPS = 16
_REGISTERS = 40  # three programs a multiprocessor, each with an entry a thread
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _logits_processors_kernel(
    logits, row_stride, slots, table, masks, mask_words, entry_ids, entry_counts, entry_bias,
    side_ids, side_raw, side_processed, side_len, side_bad, S, V,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r)
    slot = tl.where((slot >= 0) & (slot < S), slot, 0)
    length = tl.zeros([], tl.int32)
    bad = tl.zeros([], tl.int32)
    flags = word(table, slot, FLAGS)
    start = word(table, slot, OVERLAY_START).to(tl.int64)  # these are under way while it is looked at
    entries = word(table, slot, _OVERLAY_LEN)
    if (flags & HAS_OVERLAY) != 0:
        row = logits + r * row_stride
        ids = side_ids + start
        raw = side_raw + start
        processed = side_processed + start
        length, stop_bad = _ban_stops(row, table, slot, entry_ids, ids, raw, processed, entries, V)
        length, word_bad = _ban_words(row, table, slot, entry_ids, ids, raw, processed, length, V)
        if length > entries:
            tl.debug_barrier()  # an entry of a banned token is to find -inf
        bad = _process_entries(
            row, table, slot, masks, mask_words, entry_ids + start, entry_counts + start, entry_bias + start,
            ids, raw, processed, entries, V,
        )  # fmt: skip
        bad = bad | stop_bad | word_bad
    tl.store(side_len + r, length)
    tl.store(side_bad + r, bad)


@triton.jit
def _ban_stops(row, table, slot, entry_ids, side_ids, side_raw, side_processed, length, V):
    """Bans stop ids before `min_tokens`; returns (length of the side list with them, 1 if a value was bad)."""
    bad = tl.zeros([_STOPS], tl.int32)
    early = word(table, slot, POSITION) < word(table, slot, _MIN_TOKENS)
    stops = tl.where(early, word(table, slot, _N_STOPS), 0)
    first = entry_ids + word(table, slot, _STOPS_START)
    for start in range(0, stops, _STOPS):
        at = start + tl.arange(0, _STOPS)
        ids = tl.load(first + at, mask=at < stops, other=-1)
        bad = bad | _ban(row, ids, at < stops, length + at, side_ids, side_raw, side_processed, V)
    return length + stops, tl.max(bad, axis=0)


@triton.jit
def _ban_words(row, table, slot, entry_ids, side_ids, side_raw, side_processed, length, V):
    """Bans the last tokens of bad words; returns (length of the side list with them, 1 if a value was bad).

    A word matches where its tokens before the last one are the slot's last tokens. `RequestOverlay` leaves no two words
    that match together and end alike.
    """
    bad = tl.zeros([_WORDS], tl.int32)
    words = word(table, slot, _N_WORDS)
    if words > 0:
        tl.debug_barrier()  # a stop id that ends a word is to be found as -inf
    place = tl.arange(0, _WORD_IDS)
    # A word's ids end at the last place: but for the last one, they stand one place before the history's.
    last = tl.load(table + slot * SLOT_WORDS + _LAST + 1 + place, mask=place < _WORD_IDS - 1, other=-1)
    first = entry_ids + word(table, slot, _WORDS_START)
    for start in range(0, words, _WORDS):
        at = start + tl.arange(0, _WORDS)
        inside = at < words
        tokens = tl.load(first + at * _BAD_WORD_STRIDE, mask=inside, other=0)
        ids = first + (at * _BAD_WORD_STRIDE + 1)[:, None] + place[None, :]
        compared = (place[None, :] >= _WORD_IDS - tokens[:, None]) & (place < _WORD_IDS - 1)[None, :]
        differs = tl.load(ids, mask=inside[:, None] & compared, other=-1) != last[None, :]
        banned = inside & (tl.sum((differs & compared).to(tl.int32), axis=1) == 0)
        ends = tl.load(first + at * _BAD_WORD_STRIDE + _WORD_IDS, mask=banned, other=-1)
        to = length + tl.cumsum(banned.to(tl.int32), axis=0) - 1
        bad = bad | _ban(row, ends, banned, to, side_ids, side_raw, side_processed, V)
        length += tl.sum(banned.to(tl.int32), axis=0)
    return length, tl.max(bad, axis=0)


@triton.jit
def _ban(row, ids, chosen, to, side_ids, side_raw, side_processed, V):
    """Moves banned tokens into the side list at `to`; returns i32, 1 where a value was bad."""
    raw, bad = _taken(row, ids, chosen, V)
    tl.store(side_ids + to, ids, mask=chosen)
    tl.store(side_raw + to, raw, mask=chosen)
    tl.store(side_processed + to, tl.full(ids.shape, -float("inf"), tl.float32), mask=chosen)
    return bad


@triton.jit
def _process_entries(
    row, table, slot, masks, mask_words, entry_ids, entry_counts, entry_bias,
    side_ids, side_raw, side_processed, entries, V,
):  # fmt: skip
    """Moves the slot's entries into the side list, from the pointers of its first entry; 1 if one was bad."""
    bad = tl.zeros([_ENTRIES], tl.int32)
    repetition = number(table, slot, _REPETITION).to(tl.float64)
    frequency = number(table, slot, _FREQUENCY).to(tl.float64)
    presence = number(table, slot, _PRESENCE).to(tl.float64)
    mask_row = word(table, slot, MASK_ROW)
    mask = masks + mask_row.to(tl.int64) * mask_words
    masked_ids = tl.where(mask_row >= 0, V, 0)
    for start in range(0, entries, _ENTRIES):
        at = start + tl.arange(0, _ENTRIES)
        inside = at < entries
        ids = tl.load(entry_ids + at, mask=inside, other=-1)
        counts = tl.load(entry_counts + at, mask=inside, other=0)
        bias = tl.load(entry_bias + at, mask=inside, other=0.0)
        masked = inside & (ids >= 0) & (ids < masked_ids)
        allowed = (tl.load(mask + (ids >> 5), mask=masked, other=-1) >> (ids & 31)) & 1
        raw, bad_here = _taken(row, ids, inside, V)
        processed = _penalised(raw, counts, bias, repetition, frequency, presence)
        tl.store(side_ids + at, ids, mask=inside)
        tl.store(side_raw + at, raw, mask=inside)
        tl.store(side_processed + at, tl.where(allowed != 0, processed, -float("inf")), mask=inside)
        bad = bad | bad_here
    return tl.max(bad, axis=0)


@triton.jit
def _taken(row, ids, chosen, V):
    """Leaves -inf in the logits; returns (f32 values, -inf for NaN and +inf; i32, 1 where that was so)."""
    inside = chosen & (ids >= 0) & (ids < V)
    z = tl.load(row + ids, mask=inside, other=-float("inf")).to(tl.float32)
    tl.store(row + ids, tl.full(ids.shape, -float("inf"), tl.float32), mask=inside)
    finite = z < float("inf")
    return tl.where(finite, z, -float("inf")), tl.where(finite, 0, 1)


@triton.jit
def _penalised(raw, counts, bias, repetition, frequency, presence):
    """Returns bias and penalties applied, by the float64 steps of `reference.logits_processors.penalised` in order."""
    times = counts & _COUNT
    x = raw.to(tl.float64) + bias.to(tl.float64)
    x = tl.where(counts != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    x = x - times.to(tl.float64) * frequency - tl.where(times > 0, presence, 0.0)
    return tl.minimum(x, _LARGEST).to(tl.float32)


def apply_logits_processors(
    logits_RV: torch.Tensor,
    state: SlotState,
    slots_R: torch.Tensor,
    side_len_R: torch.Tensor,
    side_bad_R: torch.Tensor,
) -> None:
    """Fills the side lists of R rows and writes -inf in their logits; see `gpu_sampler.reference.logits_processors`.

    It reads nothing back from the device, so that a CUDA graph can capture it.

    Args:
        logits_RV: [R, V] bf16, fp16 or f32 with contiguous rows.
        state: the state of the slots, whose side lists are written.
        slots_R: i32 [R]; a slot other than 0 stands there once, for two rows of one slot would share a side list.
        side_len_R, side_bad_R: i32 [R] outputs.

    Raises:
        ValueError: a tensor is of a wrong kind.
    """
    if logits_RV.ndim != 2 or logits_RV.dtype not in _FLOATS or logits_RV.stride(1) != 1:
        got = f"{logits_RV.dtype} {tuple(logits_RV.shape)} of strides {logits_RV.stride()}"
        raise ValueError(f"got logits {got}, expected bf16, fp16 or f32 (R, V) with contiguous rows")
    rows, vocab_size = logits_RV.shape
    if vocab_size != state.vocab_size or logits_RV.device != state.device:
        got = f"{tuple(logits_RV.shape)} on {logits_RV.device}"
        raise ValueError(f"got logits {got}, expected (R, {state.vocab_size}) on {state.device}")
    for name, tensor in (("slots", slots_R), ("side_len", side_len_R), ("side_bad", side_bad_R)):
        check_ints(name, tensor, rows, state.device)
    if rows:
        _logits_processors_kernel[(rows,)](
            logits_RV,
            logits_RV.stride(0),
            slots_R,
            state.table,
            state.masks,
            state.masks.shape[1],
            state.entry_ids,
            state.entry_counts,
            state.entry_bias,
            state.side_ids,
            state.side_raw,
            state.side_processed,
            side_len_R,
            side_bad_R,
            state.table.shape[0],
            vocab_size,
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
            enable_fp_fusion=False,  # each step of the arithmetic rounds, as the reference's does
        )
