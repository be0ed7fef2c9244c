"""One step's work as flat arrays.

Shape legend: S sequences (runs) of the step, T new tokens together (padding included), A attended tokens together,
R rows whose logits are wanted.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import torch

from engine.batch.shared_prefix import Cascade, cascade_of
from engine.batch.transfer import gathered
from engine.requests import Int32s, Int64s

MIN_TOKENS = 2  # no step of one token: a compiled layer would be specialised on it
ONE_ROW = np.zeros(1, np.int32)


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    SCORE = "score"


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: `len(write)` new tokens after `context`, at positions len(context), ... .

    A context may name pool slots that an earlier run of the same step writes: attention writes before it attends.
    Neighbours that give the very same array as their context may be attended to it together.
    """

    slot: int  # request slot; 0 for score rows, which have none
    context: Int32s  # [C] pool slots of the tokens before, in order
    write: Int32s  # [n] pool slots of the new tokens
    ids: Int32s | None  # [n] the new tokens; None: read on the device from token_table[slot, len(context):][:n]
    rows: Int32s  # [*] which of the n new tokens' logits are wanted, ascending; a repeated one is given again


class StepSize(NamedTuple):
    """How large a step is, or may be."""

    tokens: int  # new ones
    sequences: int
    attended: int  # tokens that the runs attend to, their new ones included; a shared context counts once a run


def size_of(sequences: Sequence[ScheduledSequence]) -> StepSize:
    tokens = sum(len(run.write) for run in sequences)
    return StepSize(tokens, len(sequences), tokens + sum(len(run.context) for run in sequences))


class DecodeSequences(Sequence[ScheduledSequence]):
    """The runs of a decode step: of each row the last token, which is read on the device and whose logits are wanted.

    `pack` takes them as arrays; a Run is made only where somebody looks at one. They name the pool slots as they stand
    when the step is packed.
    """

    def __init__(self, slots: Int64s, places: Int64s, pool_slots: Int32s, rows: Sequence[Int32s]) -> None:
        """Request slots and the tokens' positions, both [S]; pool slots [request slots, position], and its rows."""
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
        """[S], the pool slots of the tokens."""
        found: Int32s = self._pool_slots[self.slots, self.places]
        return found

    def attended(self) -> list[Int32s]:
        """Each row's pool slots, that of its last token included."""
        ends = zip(self.slots.tolist(), (self.places + 1).tolist(), strict=True)
        return [self._rows[slot][:end] for slot, end in ends]


class InputBatch(NamedTuple):
    """What `pack` makes of the runs. Padding is one-token sequences at the end, over slot 0; its rows are not kept."""

    kind: StepKind
    ids: torch.Tensor  # i64 [T]
    positions: torch.Tensor  # i64 [T]
    write_slots: torch.Tensor  # i64 [T]
    write_slots_i32: torch.Tensor  # i32 [T], the same
    keep_rows: torch.Tensor  # i64 [R], never falling: which tokens' logits are wanted
    kv_indices: torch.Tensor  # i32 [A], the slots each sequence attends to, its new tokens included
    qo_indptr: torch.Tensor  # i32 [S + 1] on the host (pinned for CUDA)
    kv_indptr: torch.Tensor  # i32 [S + 1] on the host (pinned for CUDA)
    single: bool  # every sequence has one new token
    whole: bool  # and those that are no padding are all wanted, once
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
        """i64 [3 T]: ids, positions and write slots, which lie behind each other in memory."""
        return self.ids.as_strided((3 * self.num_tokens,), (1,))


class _Parts(NamedTuple):
    """The arrays that, behind each other, are the step, and what is counted of them.

    Order: ids, positions, write slots, kept rows, then which tokens, of which request slot and place, are read on the
    device, kv_indices, qo_indptr, kv_indptr. Where all tokens but padding are read there, it is not said which.
    """

    arrays: list[Int32s]
    tokens: int  # T
    wanted: int  # R
    named: int  # tokens said to be read on the device
    read: int  # tokens read on the device
    attended: int  # A
    sequences: int  # S, padding included
    whole: bool  # see `Batch`


def pack(
    kind: StepKind,
    sequences: Sequence[ScheduledSequence],
    token_table: torch.Tensor,
    device: torch.device,
    pad_to: int = MIN_TOKENS,
    *,
    cascade_ratio: float | None = None,
) -> InputBatch:
    """The step of `runs` on `device`, padded to at least `pad_to` tokens. `token_table` is i32 [slots, length] there.

    One host array, one copy, then slices: nothing is looped over but the runs, and nothing waits for the device. With
    `cascades` (a ratio, see `cascade.groups`) contexts that runs have in common are named once more, in arrays of
    their own.
    """
    if not sequences:
        raise ValueError("`runs` must hold at least one run. Given: none.")
    new = len(sequences) if isinstance(sequences, DecodeSequences) else sum(len(run.write) for run in sequences)
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
        cascade=None if cascade_ratio is None else _cascade(sequences, pads, device, cascade_ratio),
    )


def single_tokens(sequences: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """The same new tokens as runs of one each, with the same wanted rows in the same order."""
    singles = []
    for slot, context, write, ids, rows in sequences:
        slots, start = np.concatenate((context, write)), len(context)
        wanted = np.bincount(rows, minlength=len(write))
        for i in range(len(write)):
            at, own = start + i, None if ids is None else ids[i : i + 1]
            singles.append(ScheduledSequence(slot, slots[:at], slots[at : at + 1], own, np.zeros(wanted[i], np.int32)))
    return singles


def idle_sequences(tokens: int, longest: int) -> list[ScheduledSequence]:
    """Runs of `tokens` tokens together, none longer than `longest`, that touch only the padding slot: for warm-up."""
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    none = np.zeros(0, np.int32)
    return [
        ScheduledSequence(0, none, np.zeros(n, np.int32), np.zeros(n, np.int32), np.full(1, n - 1, np.int32))
        for n in lengths
    ]


def _parts(sequences: Sequence[ScheduledSequence], pads: int) -> _Parts:
    slots, contexts, writes, ids, rows = zip(*sequences, strict=True)
    lengths = _lengths(writes)
    if not lengths.all():
        raise ValueError("`write` must name at least one slot a run. Given: an empty one.")
    before = _lengths(contexts)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    padding, total = np.zeros(pads, np.int32), int(lengths.sum())
    positions = np.arange(total, dtype=np.int32) - np.repeat(starts - before, lengths)
    wanted = _lengths(rows)
    keep = np.concatenate(rows) + np.repeat(starts, wanted)
    blank = np.zeros(total, np.int32)
    known = [blank[:n] if own is None else own for n, own in zip(lengths, ids, strict=True)]
    unknown = [index for index, own in enumerate(ids) if own is None]
    counts = lengths[unknown]
    at = np.repeat(starts[unknown], counts) + _count_up(counts)
    named = at if len(at) < total else at[:0]
    arrays = [*known, padding, positions, padding, *writes, padding, keep.astype(np.int32, copy=False)]
    arrays += [named, np.repeat(np.array(slots, np.int32)[unknown], counts), positions[at]]
    arrays += chain.from_iterable(zip(contexts, writes, strict=True))
    arrays += [padding, _indptr(lengths, pads), _indptr(lengths + before, pads)]
    attended = total + int(before.sum()) + pads
    whole = total == len(lengths) and bool((wanted == 1).all())
    return _Parts(arrays, total + pads, len(keep), len(named), len(at), attended, len(lengths) + pads, whole)


def _last_parts(sequences: DecodeSequences, pads: int) -> _Parts:
    """Of a decode step: the same without a look at the single row, but for the slots that it attends to."""
    count, padding = len(sequences), np.zeros(pads, np.int32)
    slots, places = sequences.slots.astype(np.int32), sequences.places.astype(np.int32)
    lengths = places + 1
    arrays = [np.zeros(count + pads, np.int32), places, padding, sequences.writes(), padding]
    arrays += [np.arange(count, dtype=np.int32), slots, places, *sequences.attended(), padding]
    arrays += [np.arange(count + pads + 1, dtype=np.int32), _indptr(lengths, pads)]
    attended = int(lengths.sum()) + pads
    return _Parts(arrays, count + pads, count, 0, count, attended, count + pads, True)


def _cascade(sequences: Sequence[ScheduledSequence], pads: int, device: torch.device, ratio: float) -> Cascade | None:
    _, contexts, writes, _, _ = zip(*sequences, strict=True)
    return cascade_of(contexts, writes, _lengths(writes), pads, device, ratio)


def _lengths(arrays: Sequence[Int32s]) -> Int32s:
    return np.array([len(one) for one in arrays], np.int32)


def _count_up(counts: Int32s) -> Int32s:
    """0 .. n - 1 for each n of `counts`, behind each other."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(ends - counts, counts)


def _indptr(counts: Int32s, pads: int) -> Int32s:
    out = np.zeros(len(counts) + pads + 1, np.int32)
    np.cumsum(counts, out=out[1 : len(counts) + 1])
    out[len(counts) + 1 :] = out[len(counts)] + np.arange(1, pads + 1, dtype=np.int32)
    return out
