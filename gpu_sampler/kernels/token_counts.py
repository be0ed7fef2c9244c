"""Updates a slot's token counts and last tokens by its drawn token; `sample` advances the position.

Grid (R): a program does one row. Where the slot's penalties count, it compares the token with all entries, 1,024 at a
time, and counts it there or in a new entry. Where they count or bad words are matched, the last tokens move up by one.
Slot 0, which is padding, and rows without a token change nothing. Bytes: 4 an entry, and 128.

| pointer | shape, type | |
|---|---|---|
| slots, tokens | i32 [R] | read |
| table | i32 [S, W]: OVERLAY_LEN and LAST | read, write |
| entry_ids, entry_counts, entry_bias | i32, i32, f32 [E] | read, write |
"""

import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import FLAGS, OVERLAY_START, SLOT_WORDS, word
from gpu_sampler.state.device_state import DeviceState, check_ints
from gpu_sampler.state.host_state import SlotFlag
from gpu_sampler.state.layout import Word

_COUNTS: tl.constexpr = tl.constexpr(int(SlotFlag.COUNTS))
_REMEMBERS: tl.constexpr = tl.constexpr(int(SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS))
_OVERLAY_LEN: tl.constexpr = tl.constexpr(int(Word.OVERLAY_LEN))
_OVERLAY_CAP: tl.constexpr = tl.constexpr(int(Word.OVERLAY_CAP))
_LAST: tl.constexpr = tl.constexpr(int(Word.LAST))
_LAST_WORDS: tl.constexpr = tl.constexpr(16)
_ENTRIES: tl.constexpr = tl.constexpr(1024)
_WARPS = 4


@triton.jit
def _token_counts_kernel(slots, tokens, table, entry_ids, entry_counts, entry_bias, S, V):
    r = tl.program_id(0)
    slot = tl.load(slots + r)
    token = tl.load(tokens + r)
    if (slot > 0) & (slot < S) & (token >= 0) & (token < V):
        flags = word(table, slot, FLAGS)
        if (flags & _COUNTS) != 0:
            start = word(table, slot, OVERLAY_START).to(tl.int64)
            count(token, table + slot * SLOT_WORDS, entry_ids + start, entry_counts + start, entry_bias + start)
        if (flags & _REMEMBERS) != 0:
            remember(token, table + slot * SLOT_WORDS + _LAST)


@triton.jit
def count(token, words, entry_ids, entry_counts, entry_bias):
    """Counts a token in its entry or a new one, unless the extent is full: see `SamplingState.count`."""
    length = tl.load(words + _OVERLAY_LEN)
    place = _find(token, entry_ids, length)
    if place >= 0:
        tl.store(entry_counts + place, tl.load(entry_counts + place) + 1)
    elif length < tl.load(words + _OVERLAY_CAP):
        tl.store(entry_ids + length, token)
        tl.store(entry_counts + length, 1)
        tl.store(entry_bias + length, 0.0)
        tl.store(words + _OVERLAY_LEN, length + 1)


@triton.jit
def _find(token, entry_ids, length):
    """Returns the place of the token's entry, -1 if it has none."""
    found = tl.full([_ENTRIES], -1, tl.int32)
    for start in range(0, length, _ENTRIES):
        at = start + tl.arange(0, _ENTRIES)
        ids = tl.load(entry_ids + at, mask=at < length, other=-1)
        found = tl.where(ids == token, at, found)
    return tl.max(found, axis=0)


@triton.jit
def remember(token, last):
    """Appends the token to the slot's last tokens, and drops the oldest."""
    place = tl.arange(0, _LAST_WORDS)
    moved = tl.load(last + 1 + place, mask=place < _LAST_WORDS - 1, other=0)
    tl.debug_barrier()  # every word is read before its place is written
    tl.store(last + place, tl.where(place < _LAST_WORDS - 1, moved, token))


def update_token_counts(state: DeviceState, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    """Counts and remembers the tokens of R rows; see `gpu_sampler.reference.token_counts`.

    It reads nothing back from the device, so that a CUDA graph can capture it.

    Args:
        state: the state of the slots.
        slots_R: i32 [R]; a slot other than 0 stands there once.
        tokens_R: i32 [R], -1 for none.

    Raises:
        ValueError: a tensor is of a wrong kind.
    """
    rows = len(slots_R)
    check_ints("slots", slots_R, rows, state.device)
    check_ints("tokens", tokens_R, rows, state.device)
    if rows:
        _token_counts_kernel[(rows,)](
            slots_R,
            tokens_R,
            state.table,
            state.entry_ids,
            state.entry_counts,
            state.entry_bias,
            state.table.shape[0],
            state.vocab_size,
            num_warps=_WARPS,
        )
