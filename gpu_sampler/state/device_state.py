"""Keeps the sampling state on a device, and copies what changed there.

`DeviceState` holds all slots, `VerifyState` the rows of a verify step, and `StatelessRows` stands for rows without a
slot. Kernels take each of them in the same way.

Shape legend: S slots, W words of a slot, E entries of all slots together, M allow masks, V vocabulary, B requests, K
draft steps, R = B (K + 1) rows.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.state.host_state import SamplingState, SlotFlag
from gpu_sampler.state.layout import Word
from gpu_sampler.state.overlay import Ids
from gpu_sampler.state.upload_kernel import RUN_WORDS, scatter_state

SCORING_ROWS = 4096  # rows whose slots are allocated beforehand


class StatelessRows(NamedTuple):
    """Stands for the state of rows that have none: one slot at T = 1 that reports and draws nothing."""

    table: torch.Tensor  # i32 [1, W]
    masks: torch.Tensor  # i32 [1, 1], not read
    side_ids: torch.Tensor  # [1], not read, as the others
    side_raw: torch.Tensor
    side_processed: torch.Tensor
    slots: torch.Tensor  # i32 [SCORING_ROWS], zeros: each row's slot

    @classmethod
    @lru_cache(maxsize=16)
    def on(cls, device: torch.device) -> "StatelessRows":
        """Returns the read-only one of a device. The first call allocates it, which a graph capture must not do."""
        table = torch.zeros(1, int(Word.SLOT_WORDS), dtype=torch.int32)
        numbers = table.view(torch.float32)
        numbers[0, [Word.TEMPERATURE, Word.TOP_P]] = 1.0
        numbers[0, Word.LOG_MIN_P] = -torch.inf
        table[0, Word.FLAGS] = int(SlotFlag.WANTS_LOGPROBS)
        table[0, Word.MASK_ROW] = -1
        floats = torch.zeros(1, device=device)
        ints = torch.zeros(1, dtype=torch.int32, device=device)
        slots = torch.zeros(SCORING_ROWS, dtype=torch.int32, device=device)
        return cls(table.to(device, non_blocking=True), ints[:, None], ints, floats, floats, slots)


_ALIGNED: Final = 32  # words: a part of the buffer begins at a multiple of 128 bytes
_BUFFERS: Final = 2


class _WordRun(NamedTuple):
    """Names words of the host that go to one place of the buffer."""

    start: int
    words: Ids


class DeviceState:
    """Mirrors the host's state on a device, for one thread.

    `apply` copies what `admit` and `stage` changed, and nothing else: positions, overlay counts and last tokens advance
    on the device alone, and only a new `admit` sets them. One DeviceState keeps step with one SamplingState.

    Kernels read its tensors: `table` i32 [S, W]; `entry_ids`, `entry_counts` i32 [E] and `entry_bias` f32 [E], where
    each slot has an extent; `masks` i32 [M, ceil(V / 32)], bit b of word w for id 32 w + b. `side_ids` i32 [E],
    `side_raw` and `side_processed` f32 [E] hold the side lists of one step, which `apply_logits_processors` writes: a
    slot's list begins where its extent does.
    """

    def __init__(self, state: SamplingState, device: torch.device | str) -> None:
        """Allocates `nbytes`. The first `apply` copies slots that are in use already.

        Raises:
            ValueError: the buffer would have more words than an i32 counts.
        """
        self.vocab_size = state.vocab_size
        self.uploads = 0  # copies to the device that `apply` has made
        entries, mask_words = len(state.entry_ids), -(-state.vocab_size // 32)
        sizes = (state.table.size, entries, entries, entries, state.mask_rows * mask_words)
        aligned = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        if sum(aligned) >= 2**31:
            raise ValueError(f"got {sum(aligned)} words of state, expected fewer than 2^31: take fewer overlay entries")
        self.words = torch.zeros(sum(aligned), dtype=torch.int32, device=device)
        self.device = self.words.device  # with its index, as the tensors of the other launchers' arguments name it
        self._starts = list(accumulate(aligned, initial=0))
        table, self.entry_ids, self.entry_counts, bias, masks = (
            self.words[start : start + size] for start, size in zip(self._starts, sizes, strict=False)
        )
        self.table = table.view(state.num_slots, Word.SLOT_WORDS)
        self.entry_bias = bias.view(torch.float32)
        self.masks = masks.view(state.mask_rows, mask_words)
        self.side_ids = torch.zeros(entries, dtype=torch.int32, device=self.device)
        self.side_raw = torch.zeros(entries, dtype=torch.float32, device=self.device)
        self.side_processed = torch.zeros(entries, dtype=torch.float32, device=self.device)
        self._state = state
        self._pinned = _PinnedBuffers(self.device)
        self.table.copy_(torch.from_numpy(state.table))
        state.touch()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of device memory, without those of a copy under way."""
        return sum(x.nbytes for x in (self.words, self.side_ids, self.side_raw, self.side_processed))

    def apply(self) -> None:
        """Copies changed slots, by one copy and one kernel on the current stream; does nothing where nothing changed.

        Raises:
            RuntimeError: a graph is being captured, which would replay the copy. The slots stay changed.
        """
        if not self._state.dirty:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph would replay changes of the sampling state: apply them before its capture")
        dirty = self._state.take_dirty()
        runs = [run for slot in dirty.admitted for run in self._admitted(slot) if len(run.words)]
        runs += [run for slot in dirty.staged for run in self._staged(slot)]
        sources = accumulate((len(run.words) for run in runs), initial=0)
        header = [(run.start, source, len(run.words)) for run, source in zip(runs, sources, strict=False)]
        packed = self._pinned.copied([np.array(header, np.int32).reshape(-1), *(run.words for run in runs)])
        scatter_state(self.words, packed, runs=len(runs), longest=max(len(run.words) for run in runs))
        self.uploads += 1

    def warm_up(self) -> None:
        """Compiles the kernel of `apply`: it writes nothing."""
        nothing = torch.zeros(RUN_WORDS + 1, dtype=torch.int32, device=self.device)
        scatter_state(self.words, nothing, runs=1, longest=1)

    def _admitted(self, slot: int) -> Iterator[_WordRun]:
        """Yields all that a slot has: its words, its entries, the lists after them, its mask."""
        state = self._state
        table, ids, counts, bias, masks = self._starts[:5]
        yield _WordRun(table + slot * Word.SLOT_WORDS, state.table[slot])
        first, entries = int(state.overlay_start[slot]), state.overlay(slot)
        yield _WordRun(ids + first, entries.ids)
        yield _WordRun(counts + first, entries.counts)
        yield _WordRun(bias + first, entries.bias.view(np.int32))
        yield _WordRun(ids + int(state.stops_start[slot]), state.lists(slot))
        if slot in state.masks:
            yield _WordRun(masks + int(state.mask_row[slot]) * self.masks.shape[1], self._mask_words(state.masks[slot]))

    def _staged(self, slot: int) -> Iterator[_WordRun]:
        """Yields the numbers that `stage` changes."""
        words, row = self._starts[0] + slot * Word.SLOT_WORDS, self._state.table[slot]
        for first, last in ((Word.TEMPERATURE, Word.FLAGS), (Word.LOG_MIN_P, Word.LOG_MIN_P)):
            yield _WordRun(words + first, row[first : last + 1])

    def _mask_words(self, mask: npt.NDArray[np.uint8]) -> Ids:
        padded = np.zeros(4 * self.masks.shape[1], np.uint8)
        padded[: len(mask)] = mask
        return padded.view(np.int32)


class _PinnedBuffers:
    """Alternates two i32 buffers of pinned memory.

    A buffer is written again only when its last copy has ended, so that the host packs a step while the copy of the
    previous step is under way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int32)] * _BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._turn = 0

    def copied(self, parts: Sequence[Ids]) -> torch.Tensor:
        """Returns the concatenated parts, i32 [*] on the device; on the CPU the buffer itself."""
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        event, size = self._copied[turn], sum(len(part) for part in parts)
        if event is not None:
            event.synchronize()
        on_cuda = self._device.type == "cuda"
        if len(self._buffers[turn]) < size:
            room = 1 << (size - 1).bit_length()
            self._buffers[turn] = torch.empty(room, dtype=torch.int32, pin_memory=on_cuda)
        packed = self._buffers[turn][:size]
        np.concatenate(parts, out=packed.numpy())
        there = packed.to(self._device, non_blocking=True)
        if on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[turn] = event
        return there


def check_ints(name: str, tensor: torch.Tensor, rows: int, device: torch.device) -> None:
    """Raises ValueError unless the tensor is contiguous int32 (R,) on `device`."""
    if tensor.dtype == torch.int32 and tensor.shape == (rows,) and tensor.device == device and tensor.is_contiguous():
        return
    got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    raise ValueError(f"got {name} {got}, expected contiguous int32 ({rows},) on {device}")


class VerifyState:
    """Holds the state of every row of verify steps of up to `requests` requests with `steps` drafts each.

    Row r has slot r + 1, and slot 0 is padding. Side lists and entries of row i of a request lie where those of its
    slot do, i x E places further. Memory: 24 (K + 1) bytes an entry.
    """

    def __init__(self, slots: DeviceState, requests: int, steps: int) -> None:
        """Allocates the tensors; ValueError where there would be more entries than an i32 counts."""
        self.requests, self.steps, self.entries = requests, steps, len(slots.entry_ids)
        self.vocab_size, self.device = slots.vocab_size, slots.device
        places, rows = self.entries * (steps + 1), requests * (steps + 1)
        if places >= 2**31:
            raise ValueError(
                f"got {places} entries of verify rows, expected fewer than 2^31: take fewer overlay entries"
            )
        self.table = slots.table[:1].repeat(rows + 1, 1)
        self.masks = slots.masks
        self.slots = torch.zeros(rows, dtype=torch.int32, device=self.device)
        ints = torch.zeros((3, places), dtype=torch.int32, device=self.device)
        floats = torch.zeros((3, places), device=self.device)
        self.entry_ids, self.entry_counts, self.side_ids = ints
        self.entry_bias, self.side_raw, self.side_processed = floats


SlotState = DeviceState | VerifyState
