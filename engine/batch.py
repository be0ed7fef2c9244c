"""One step's work as flat arrays.

Shape legend: S sequences (runs) of the step, T new tokens together (padding included), A attended tokens together,
R rows whose logits are wanted.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from engine.cascade import Cascade, cascade_of
from engine.jobs import Int32s
from engine.transfer import gathered

MIN_TOKENS = 2  # no step of one token: a compiled layer would be specialised on it
PADDING = np.zeros(1, np.int32)  # token 0 at position 0 in slot 0: one padding sequence


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    SCORE = "score"


class Run(NamedTuple):
    """One sequence's part of a step: `len(write)` new tokens after `context`, at positions len(context), ... .

    A context may name pool slots that an earlier run of the same step writes: attention writes before it attends.
    Neighbours that give the very same array as their context may be attended to it together.
    """

    slot: int  # request slot; 0 for score rows, which have none
    context: Int32s  # [C] pool slots of the tokens before, in order
    write: Int32s  # [n] pool slots of the new tokens
    ids: Int32s | None  # [n] the new tokens; None: read on the device from token_table[slot, len(context):][:n]
    rows: Int32s  # [*] which of the n new tokens' logits are wanted, ascending; a repeated one is given again


class Batch(NamedTuple):
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


class _Layout(NamedTuple):
    """The runs' fields side by side, and what is counted of them."""

    slots: Sequence[int]
    contexts: Sequence[Int32s]
    writes: Sequence[Int32s]
    ids: Sequence[Int32s | None]
    rows: Sequence[Int32s]
    lengths: Int32s  # [S] new tokens
    before: Int32s  # [S] tokens before
    starts: Int32s  # [S] first token in the packed order


def pack(
    kind: StepKind,
    runs: Sequence[Run],
    token_table: torch.Tensor,
    device: torch.device,
    pad_to: int = MIN_TOKENS,
    *,
    cascades: float | None = None,
) -> Batch:
    """The step of `runs` on `device`, padded to at least `pad_to` tokens. `token_table` is i32 [slots, length] there.

    One host array, one copy, then slices: nothing is looped over but the runs, and nothing waits for the device. With
    `cascades` (a ratio, see `cascade.groups`) contexts that runs have in common are named once more, in arrays of
    their own.
    """
    if not runs:
        raise ValueError("`runs` must hold at least one run. Given: none.")
    layout = _lay_out(runs)
    pads = max(0, pad_to - int(layout.lengths.sum()))
    pieces, sizes, indptrs = _pieces(layout, pads)
    host = gathered(pieces, device)
    tokens, wanted, gathers, attended = sizes
    split = 3 * tokens + wanted + 3 * gathers
    moved = host[: split + attended].to(device, non_blocking=True)
    wide = moved[:split].long()
    ids, positions, writes, keep, at, slots, places = torch.split(wide, [tokens] * 3 + [wanted] + [gathers] * 3)
    if gathers:
        ids[at] = token_table[slots, places].long()
    return Batch(
        kind=kind,
        ids=ids,
        positions=positions,
        write_slots=writes,
        write_slots_i32=moved[2 * tokens : 3 * tokens],
        keep_rows=keep,
        kv_indices=moved[split:],
        qo_indptr=host[split + attended : split + attended + indptrs],
        kv_indptr=host[split + attended + indptrs :],
        single=tokens == indptrs - 1,
        padding=pads,
        cascade=None
        if cascades is None
        else cascade_of(layout.contexts, layout.writes, layout.lengths, pads, device, cascades),
    )


def single_tokens(runs: Sequence[Run]) -> list[Run]:
    """The same new tokens as runs of one each, with the same wanted rows in the same order."""
    singles = []
    for slot, context, write, ids, rows in runs:
        slots, start = np.concatenate((context, write)), len(context)
        wanted = np.bincount(rows, minlength=len(write))
        for i in range(len(write)):
            at, own = start + i, None if ids is None else ids[i : i + 1]
            singles.append(Run(slot, slots[:at], slots[at : at + 1], own, np.zeros(wanted[i], np.int32)))
    return singles


def idle_runs(tokens: int, longest: int) -> list[Run]:
    """Runs of `tokens` tokens together, none longer than `longest`, that touch only the padding slot: for warm-up."""
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    none = np.zeros(0, np.int32)
    return [Run(0, none, np.zeros(n, np.int32), np.zeros(n, np.int32), np.full(1, n - 1, np.int32)) for n in lengths]


def _lay_out(runs: Sequence[Run]) -> _Layout:
    slots, contexts, writes, ids, rows = zip(*runs, strict=True)
    lengths = np.array([len(write) for write in writes], np.int32)
    if not lengths.all():
        raise ValueError("`write` must name at least one slot a run. Given: an empty one.")
    before = np.array([len(context) for context in contexts], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    return _Layout(slots, contexts, writes, ids, rows, lengths, before, starts)


def _pieces(layout: _Layout, pads: int) -> tuple[list[Int32s], tuple[int, int, int, int], int]:
    """The arrays that, behind each other, are the step; (T, R, tokens read from the table, A); length of an indptr.

    Order: ids, positions, write slots, kept rows, then where, from which slot and place ids are read on the device,
    kv_indices, qo_indptr, kv_indptr.
    """
    lengths, before, starts = layout.lengths, layout.before, layout.starts
    padding = [PADDING] * pads
    total = int(lengths.sum())
    positions = np.arange(total, dtype=np.int32) - np.repeat(starts - before, lengths)
    rows = np.concatenate(layout.rows)
    rows = rows + np.repeat(starts, [len(one) for one in layout.rows])
    unknown = [index for index, ids in enumerate(layout.ids) if ids is None]
    if len(unknown) == len(lengths):
        pieces = [np.zeros(total, np.int32)]
    else:
        pieces = [np.zeros(n, np.int32) if ids is None else ids for n, ids in zip(lengths, layout.ids, strict=True)]
    pieces += [*padding, positions, *padding, *layout.writes, *padding, rows.astype(np.int32, copy=False)]
    counts, slots = lengths[unknown], np.array(layout.slots, np.int32)
    at = np.repeat(starts[unknown], counts) + _count_up(counts)
    pieces += [at, np.repeat(slots[unknown], counts), positions[at]]
    pieces += chain.from_iterable(zip(layout.contexts, layout.writes, strict=True))
    pieces += padding
    pieces += [_indptr(lengths, pads), _indptr(lengths + before, pads)]
    sizes = (total + pads, len(rows), len(at), total + int(before.sum()) + pads)
    return pieces, sizes, len(lengths) + pads + 1


def _count_up(counts: Int32s) -> Int32s:
    """0 .. n - 1 for each n of `counts`, behind each other."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(ends - counts, counts)


def _indptr(counts: Int32s, pads: int) -> Int32s:
    out = np.zeros(len(counts) + pads + 1, np.int32)
    np.cumsum(counts, out=out[1 : len(counts) + 1])
    out[len(counts) + 1 :] = out[len(counts)] + np.arange(1, pads + 1, dtype=np.int32)
    return out
