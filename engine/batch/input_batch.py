"""Packs the sequences of one step into flat arrays.

Shape legend: S sequences of the step, T new tokens of all (padding included), A attended tokens of all, R wanted rows:
tokens whose logits are read.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import torch

from engine.requests import Int32s, Int64s

MIN_TOKENS = 2  # no step of one token: a compiled layer would be specialised on it
ONE_ROW = np.zeros(1, np.int32)
NO_TOKENS = np.empty(0, np.int32)


class StepKind(StrEnum):
    """Says what a step does: a step is of one kind."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    SCORE = "score"


class ScheduledSequence(NamedTuple):
    """Holds a request's part of one step: its new tokens, what they attend to, and which of their logits it needs.

    The new tokens stand at positions len(context), len(context) + 1, ... A context may name slots that an earlier
    sequence of the same step writes: attention writes before it attends. Neighbours whose context is the same array may
    attend to it in one pass (`engine.batch.shared_prefix`).
    """

    slot: int  # the request slot; 0 for score rows, which have none
    context: Int32s  # [C] storage slots of the tokens before, in order
    write: Int32s  # [n] storage slots of the new tokens
    ids: Int32s | None  # [n] the new tokens; None: read on the device from token_table[slot, len(context):][:n]
    rows: Int32s  # [*] the new tokens whose logits are wanted, ascending; one may be repeated
    first_segment: int | None = None  # tokens before the second segment of a row that an encoder reads; None: no second


class StepSize(NamedTuple):
    """Says how large a step is, or may be."""

    tokens: int  # new
    sequences: int
    attended: int  # tokens that they attend to, their new ones included; a shared context counts for each


StepSequences = Sequence[ScheduledSequence]


def size_of(sequences: StepSequences) -> StepSize:
    """Returns the size of a step."""
    tokens = sum(len(sequence.write) for sequence in sequences)
    return StepSize(tokens, len(sequences), tokens + sum(len(sequence.context) for sequence in sequences))


class DecodeSequences(Sequence[ScheduledSequence]):
    """Holds the sequences of a decode step as arrays: each row's last token, which is read on the device.

    `pack` takes the arrays; a `ScheduledSequence` is made only when an element is read. The storage slots are those
    at the time of packing.
    """

    def __init__(self, slots: Int64s, places: Int64s, pool_slots: Int32s, rows: Sequence[Int32s]) -> None:
        """
        Args:
            slots: [S] request slots.
            places: [S] positions of the tokens.
            pool_slots: [request slots, length] storage slots.
            rows: Its rows.
        """
        self.slots, self.places = slots, places
        self._pool_slots, self._rows = pool_slots, rows

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, index: int) -> ScheduledSequence: ...

    @overload
    def __getitem__(self, index: slice) -> "DecodeSequences": ...

    def __getitem__(self, index: int | slice) -> "ScheduledSequence | DecodeSequences":
        if isinstance(index, slice):
            return DecodeSequences(self.slots[index], self.places[index], self._pool_slots, self._rows)
        slot, place = int(self.slots[index]), int(self.places[index])
        row = self._rows[slot]
        return ScheduledSequence(slot, row[:place], row[place : place + 1], None, ONE_ROW)

    def writes(self) -> Int32s:
        """Returns the storage slots of the tokens, [S]."""
        found: Int32s = self._pool_slots[self.slots, self.places]
        return found

    def attended(self) -> list[Int32s]:
        """Returns each row's storage slots, that of its last token included."""
        ends = zip(self.slots.tolist(), (self.places + 1).tolist(), strict=True)
        return [self._rows[slot][:end] for slot, end in ends]


class Cascade(NamedTuple):
    """Holds a step in two levels. Level 1: spans of its tokens, a group's over the group's context and others over
    nothing. Level 2: each sequence over the rest of what it attends to."""

    query_indptr: torch.Tensor  # i32 [G + 1] on the host (pinned for CUDA), like the other indptrs
    context_indptr: torch.Tensor  # i32 [G + 1]
    context_indices: torch.Tensor  # i32, storage slots of level 1
    own_indptr: torch.Tensor  # i32 [S + 1]
    own_indices: torch.Tensor  # i32, storage slots of level 2
    merged: torch.Tensor  # bool [T], tokens that have both parts


class InputBatch(NamedTuple):
    """Holds a packed step. Padding is sequences of one token at the end, over slot 0, without wanted rows."""

    kind: StepKind
    ids: torch.Tensor  # i64 [T]
    positions: torch.Tensor  # i64 [T]
    write_slots: torch.Tensor  # i64 [T]
    write_slots_i32: torch.Tensor  # i32 [T], the same
    keep_rows: torch.Tensor  # i64 [R], ascending: the wanted rows
    kv_indices: torch.Tensor  # i32 [A], the slots each sequence attends to, its new tokens included
    qo_indptr: torch.Tensor  # i32 [S + 1] on the host (pinned for CUDA)
    kv_indptr: torch.Tensor  # i32 [S + 1] on the host (pinned for CUDA)
    single: bool  # every sequence has one new token
    whole: bool  # each has one new token, and is wanted once, but for padding
    padding: int = 0  # of the T tokens
    cascade: Cascade | None = None  # where sequences have contexts in common

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.keep_rows.shape[0]

    @property
    def front(self) -> torch.Tensor:
        """Ids, positions and write slots, which lie one after another in memory: i64 [3 T]."""
        return self.ids.as_strided((3 * self.num_tokens,), (1,))


class _Parts(NamedTuple):
    """Holds the arrays that make up the step, one after another, and their counts.

    Order: ids, positions, write slots, wanted rows; then the tokens that are read on the device, with their request
    slots and places; then kv_indices, qo_indptr, kv_indptr. Where all tokens but padding are read there, the tokens are
    not named.
    """

    arrays: list[Int32s]
    tokens: int  # T
    wanted: int  # R
    named: int  # tokens that are named as read on the device
    read: int  # tokens read on the device
    attended: int  # A
    sequences: int  # S, padding included
    whole: bool  # see `Batch`


def pack(
    kind: StepKind,
    sequences: StepSequences,
    token_table: torch.Tensor,
    device: torch.device,
    pad_to: int = MIN_TOKENS,
) -> InputBatch:
    """Packs a step: one host array, one copy, then slices. It waits for nothing on the device.

    Args:
        kind: The step's kind.
        sequences: At least one, each with a new token or more.
        token_table: i32 [request slots, length] on the device.
        device: The model's.
        pad_to: Tokens that the step has at least.

    Raises:
        ValueError: There is no sequence, or one without new tokens.
    """
    if not sequences:
        raise ValueError("`sequences` must hold at least one sequence. Given: none.")
    new = (
        len(sequences) if isinstance(sequences, DecodeSequences) else sum(len(sequence.write) for sequence in sequences)
    )
    pads = max(0, pad_to - new)
    parts = _last_parts(sequences, pads) if isinstance(sequences, DecodeSequences) else _parts(sequences, pads)
    host = gathered(parts.arrays, device)
    tokens, read = parts.tokens, parts.read
    split = 3 * tokens + parts.wanted + parts.named + 2 * read
    ends, indptrs = split + parts.attended, parts.sequences + 1
    moved = host[:ends].to(device, non_blocking=True)
    sizes = [tokens] * 3 + [parts.wanted, parts.named] + [read] * 2
    ids, positions, writes, keep, at, slots, places = moved[:split].long().split_with_sizes(sizes)
    if parts.named:
        ids[at] = token_table[slots, places].long()
    elif read:
        ids[:read] = token_table[slots, places]
    return InputBatch(
        kind=kind,
        ids=ids,
        positions=positions,
        write_slots=writes,
        write_slots_i32=moved[2 * tokens : 3 * tokens],
        keep_rows=keep,
        kv_indices=moved[split:],
        qo_indptr=host[ends : ends + indptrs],
        kv_indptr=host[ends + indptrs :],
        single=tokens == parts.sequences,
        whole=parts.whole,
        padding=pads,
    )


def gathered(pieces: Sequence[Int32s], device: torch.device) -> torch.Tensor:
    """Returns all pieces as one i32 array, pinned for CUDA, where a freed block is kept until copies have read it."""
    host = torch.empty(sum(map(len, pieces)), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(pieces, out=host.numpy())
    return host


def single_tokens(sequences: StepSequences) -> list[ScheduledSequence]:
    """Returns the same new tokens as sequences of one each, with the same wanted rows in the same order."""
    singles = []
    for slot, context, write, ids, rows, _ in sequences:
        slots, start = np.concatenate((context, write)), len(context)
        wanted = np.bincount(rows, minlength=len(write))
        for i in range(len(write)):
            at, own = start + i, None if ids is None else ids[i : i + 1]
            singles.append(ScheduledSequence(slot, slots[:at], slots[at : at + 1], own, np.zeros(wanted[i], np.int32)))
    return singles


def idle_sequences(tokens: int, longest: int) -> list[ScheduledSequence]:
    """Returns sequences of `tokens` tokens in all, up to `longest` each, over the padding slot alone, for warm-up."""
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    none = np.zeros(0, np.int32)
    return [
        ScheduledSequence(0, none, np.zeros(n, np.int32), np.zeros(n, np.int32), np.full(1, n - 1, np.int32))
        for n in lengths
    ]


def _parts(sequences: StepSequences, pads: int) -> _Parts:
    slots, contexts, writes, ids, rows, _ = zip(*sequences, strict=True)
    lengths = lengths_of(writes)
    if not lengths.all():
        raise ValueError("`write` must name at least one slot a sequence. Given: an empty one.")
    before = lengths_of(contexts)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    padding, total = np.zeros(pads, np.int32), int(lengths.sum())
    positions = np.arange(total, dtype=np.int32) - np.repeat(starts - before, lengths)
    wanted = lengths_of(rows)
    keep = np.concatenate(rows) + np.repeat(starts, wanted)
    known: Sequence[Int32s] = ids
    at = read_slots = NO_TOKENS
    if unknown := [index for index, own in enumerate(ids) if own is None]:
        blank = np.zeros(total, np.int32)
        known = [blank[:n] if own is None else own for n, own in zip(lengths, ids, strict=True)]
        counts = lengths[unknown]
        at = np.repeat(starts[unknown], counts) + _count_up(counts)
        read_slots = np.repeat(np.array(slots, np.int32)[unknown], counts)
    named = at if len(at) < total else at[:0]
    written = np.concatenate(writes)
    arrays = [*known, padding, positions, padding, written, padding, keep.astype(np.int32, copy=False)]
    arrays += [named, read_slots, positions[at]]
    arrays += chain.from_iterable(zip(contexts, writes, strict=True)) if before.any() else (written,)
    arrays += [padding, _indptr(lengths, pads), _indptr(lengths + before, pads)]
    attended = total + int(before.sum()) + pads
    whole = total == len(lengths) and bool((wanted == 1).all())
    return _Parts(arrays, total + pads, len(keep), len(named), len(at), attended, len(lengths) + pads, whole)


def _last_parts(sequences: DecodeSequences, pads: int) -> _Parts:
    """Does the same for a decode step, in a few operations on arrays."""
    count, padding = len(sequences), np.zeros(pads, np.int32)
    slots, places = sequences.slots.astype(np.int32), sequences.places.astype(np.int32)
    lengths = places + 1
    arrays = [np.zeros(count + pads, np.int32), places, padding, sequences.writes(), padding]
    arrays += [np.arange(count, dtype=np.int32), slots, places, *sequences.attended(), padding]
    arrays += [np.arange(count + pads + 1, dtype=np.int32), _indptr(lengths, pads)]
    attended = int(lengths.sum()) + pads
    return _Parts(arrays, count + pads, count, 0, count, attended, count + pads, True)


def lengths_of(arrays: Sequence[Int32s]) -> Int32s:
    """Returns the length of each array, i32."""
    return np.fromiter(map(len, arrays), np.int32, len(arrays))


def _count_up(counts: Int32s) -> Int32s:
    """Returns 0 .. n - 1 for each n of `counts`, one after another."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(ends - counts, counts)


def _indptr(counts: Int32s, pads: int) -> Int32s:
    out = np.zeros(len(counts) + pads + 1, np.int32)
    np.cumsum(counts, out=out[1 : len(counts) + 1])
    out[len(counts) + 1 :] = out[len(counts)] + np.arange(1, pads + 1, dtype=np.int32)
    return out
