"""FlashInferRows: which rows of a step FlashInfer draws, and their tokens in the step's output.

Shape legend: R rows of the step, P of them FlashInfer's, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backends import Choice
from gpu_sampler.device_image import DeviceImage
from gpu_sampler.flashinfer_backend import FlashInferSampler, calls_of, eligible
from gpu_sampler.kernels.temper_rows import temper_rows
from gpu_sampler.output import Elsewhere, RowFlag, SampleOutput
from gpu_sampler.params import INVALID_TOKEN, SamplingParams
from gpu_sampler.state import SamplingState, SlotFlag

Branches = tuple[tuple[str, npt.NDArray[np.int64]], ...]


class FlashInferRows:
    def __init__(self, state: SamplingState, choice: Choice, device: torch.device, *, processed: bool) -> None:
        self._state = state
        self._choice = choice
        self._device = device
        self._processed = processed
        self._sampler = FlashInferSampler(device)
        self._eligible = np.zeros(state.num_slots, np.bool_)  # by slot
        self._prepared: Prepared | None = None

    def note(self, slot: int) -> None:
        """Takes notice of what the host's mirror says of a slot."""
        state = self._state
        params = SamplingParams(
            temperature=float(state.temperature[slot]),
            top_k=int(state.top_k[slot]),
            top_p=float(state.top_p[slot]),
            min_p=float(state.min_p[slot]),
        )
        self._eligible[slot] = eligible(params, SlotFlag(int(state.flags[slot])), processed=self._processed)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        self._sampler.warm_up(progress, by_number=False)

    def taken(self, slots: npt.NDArray[np.int64], branches: Branches) -> tuple[Elsewhere, Branches] | None:
        """What FlashInfer draws of a step, and the branches with these rows as one of their own; None if nothing."""
        taken, left = [], []
        for name, rows in branches:
            may = rows[self._eligible[slots[rows]]]
            if len(may) and self._choice.drawer(name, len(may)) == "flashinfer":
                taken.append(may)
                rows = np.setdiff1d(rows, may)
            if len(rows):
                left.append((name, rows))
        if not taken:
            return None
        rows = np.sort(np.concatenate(taken))
        at = slots[rows]
        away = Elsewhere(rows.astype(np.int32), self._state.top_k[at], self._state.top_p[at])
        return away, (*left, ("flashinfer", rows))

    def prepare(self, away: Elsewhere, rows: int) -> "Prepared":
        """The rows as FlashInfer takes them, of a step of so many; those of the last step copy nothing."""
        key = away.key + rows.to_bytes(4, "little")
        if self._prepared is None or self._prepared.key != key:
            flags = np.zeros(rows, np.int32)
            flags[away.rows] = 1
            there = self._there
            calls = tuple(
                _Call(
                    call.top_k, there(away.rows[call.rows]), there(away.top_k[call.rows]), there(away.top_p[call.rows])
                )
                for call in calls_of(away.top_k, self._state.vocab_size, by_number=False)
            )
            self._prepared = Prepared(key, there(flags), calls)
        return self._prepared

    def draw(
        self,
        prepared: "Prepared",
        logits_RV: torch.Tensor,
        slots_R: torch.Tensor,
        image: DeviceImage,
        side_len_R: torch.Tensor,
        out: SampleOutput,
    ) -> None:
        """Their tokens; rows without a finite value keep INVALID_TOKEN."""
        for call in prepared.calls:
            z = temper_rows(
                logits_RV,
                call.rows,
                slots_R,
                side_len_R,
                image.table,
                image.masks,
                image.side_ids,
                image.side_processed,
            )
            drawn = self._sampler.sample(z, call.top_k_P, call.top_p_P, call.top_k)
            at = call.rows.to(torch.int64)
            empty = (out.flags[at] & int(RowFlag.NO_TOKEN)) != 0
            out.tokens.index_copy_(0, at, drawn.to(torch.int32).masked_fill(empty, INVALID_TOKEN))

    def _there(self, array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(self._device, non_blocking=True)


class _Call(NamedTuple):
    top_k: int | None  # of all its rows, where FlashInfer is told a number
    rows: torch.Tensor  # i32 [P]
    top_k_P: torch.Tensor
    top_p_P: torch.Tensor


class Prepared(NamedTuple):
    key: bytes
    flags_R: torch.Tensor  # i32, 1 for a row that is FlashInfer's
    calls: tuple[_Call, ...]
