"""What the torch sampler keeps of each slot: a table on the device, its mirror on the host, and the copy between.

Shape legend: S slots, R rows, W the words of a slot.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_sampler.params import SamplingParams

LEAST_TEMPERATURE = 1e-6
_WORDS = 8
_SEED_LOW, _SEED_HIGH, _BRANCH, _POSITION, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(_WORDS)
_BUFFERS = 2

Slots = Tensor | npt.NDArray[np.integer] | Sequence[int]


class DeviceRows(NamedTuple):
    """The parameters of R rows, gathered from their slots."""

    seeds_R: Tensor  # i64, the 64 bits of the seed
    positions_R: Tensor  # i32
    branches_R: Tensor  # i32
    temperatures_R1: Tensor  # f32 [R, 1], 0 on greedy rows
    top_k_R1: Tensor  # i32 [R, 1], 0 = off
    top_p_R1: Tensor  # f64 [R, 1], 1 = off; the fp32 value
    min_p_R1: Tensor  # f64 [R, 1], 0 = off; the fp32 value

    def select(self, rows: Tensor) -> "DeviceRows":
        return DeviceRows(*(field[rows] for field in self))


class DeviceState:
    """A table [S, 8] of int32 words. The host sets whole slots; only positions advance on the device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._num_slots = num_slots
        self._mirror_SW = np.zeros((num_slots, _WORDS), np.int32)
        self._table_SW = torch.zeros((num_slots, _WORDS), dtype=torch.int32, device=device)
        self._dirty: set[int] = set()
        pinned = device.type == "cuda"
        self._buffers = [
            torch.zeros((num_slots, _WORDS + 1), dtype=torch.int32, pin_memory=pinned) for _ in range(_BUFFERS)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._next = 0

    def stage(self, slot: int, params: SamplingParams, seed: int, branch: int, position: int) -> None:
        """Writes the mirror; `seed` is taken modulo 2^64."""
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"got slot {slot}, expected 0 to {self._num_slots - 1}")
        words = self._mirror_SW[slot]
        words[:2] = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
        words[_BRANCH], words[_POSITION] = branch, position
        temperature = max(params.temperature, LEAST_TEMPERATURE) if params.temperature > 0 else 0.0
        numbers = np.array([temperature, params.top_p, params.min_p], np.float32).view(np.int32)
        words[_TEMPERATURE], words[_TOP_P], words[_MIN_P] = numbers
        words[_TOP_K] = min(max(params.top_k, 0), 2**31 - 1)
        self._dirty.add(slot)

    def apply(self) -> None:
        """One copy and one scatter for all dirty slots. Two pinned buffers take turns, each guarded by an event."""
        if not self._dirty:
            return
        slots = np.array(sorted(self._dirty), np.int64)
        self._dirty.clear()
        turn, self._next = self._next, (self._next + 1) % _BUFFERS
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        packed = self._buffers[turn][: len(slots)]
        packed[:, 0] = torch.from_numpy(slots)
        packed[:, 1:] = torch.from_numpy(self._mirror_SW[slots])
        there = packed.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[turn] = event
        self._table_SW.index_copy_(0, there[:, 0].to(torch.int64), there[:, 1:])

    def slots(self, slots_R: Slots) -> Tensor:
        """i64 [R] on the device; a tensor that is there already is taken as it is."""
        if isinstance(slots_R, Tensor):
            return slots_R.to(self._device, torch.int64, non_blocking=True)
        host = torch.from_numpy(np.asarray(slots_R, np.int64))
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def rows(self, slots_R: Tensor) -> DeviceRows:
        words_RW = self._table_SW[slots_R]
        numbers_RW = words_RW.view(torch.float32)
        wide_RW = words_RW.to(torch.int64)
        return DeviceRows(
            seeds_R=(wide_RW[:, _SEED_HIGH] << 32) | (wide_RW[:, _SEED_LOW] & 0xFFFFFFFF),
            positions_R=words_RW[:, _POSITION],
            branches_R=words_RW[:, _BRANCH],
            temperatures_R1=numbers_RW[:, _TEMPERATURE, None],
            top_k_R1=words_RW[:, _TOP_K, None],
            top_p_R1=numbers_RW[:, _TOP_P, None].to(torch.float64),
            min_p_R1=numbers_RW[:, _MIN_P, None].to(torch.float64),
        )

    def advance(self, slots_R: Tensor) -> None:
        """The next draw of these slots is one position further."""
        self._table_SW[:, _POSITION].index_add_(0, slots_R, torch.ones_like(slots_R, dtype=torch.int32))

    def positions(self) -> Tensor:
        """i32 [S] on the device."""
        return self._table_SW[:, _POSITION]

    def largest_top_k(self, slots_R: Slots) -> int | None:
        """Of these rows, from the mirror; None where the slots are known to the device only."""
        if isinstance(slots_R, Tensor) and slots_R.device.type != "cpu":
            return None
        return int(self._mirror_SW[np.asarray(slots_R, np.int64), _TOP_K].max(initial=0))
