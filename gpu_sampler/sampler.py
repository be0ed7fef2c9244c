"""Sampler: rows of logits and the slots they belong to give tokens and what was asked about them.

On the CPU, and with backend `numpy`, every row goes through the reference (`host_sampler`). With backend `torch` rows
that the torch sampler of the device can serve stay there, grouped by branch, and the others are copied to the host.
Which way a row goes is a function of its own parameters.
Shape legend: R rows, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.host_sampler import LogprobsMode, branches_of, sample_on_host
from gpu_sampler.output import LaunchPlan, RowFlag, SampleOutput
from gpu_sampler.params import SamplingLimits, SamplingParams
from gpu_sampler.state import PADDING_SLOT, SamplingState, SlotFlag

Backend = Literal["auto", "numpy", "torch"]
Ids = npt.NDArray[np.integer] | Sequence[int]
Int64s = npt.NDArray[np.int64]


class SamplerStats(NamedTuple):
    """Counts since the start."""

    rows: dict[str, int]  # by branch of the plan
    flags: dict[str, int]  # rows by RowFlag, in lower case


class Fetched(NamedTuple):
    """A result that is on the host already."""

    output: SampleOutput

    def result(self) -> SampleOutput:
        """Numpy arrays."""
        return self.output


class Sampler:
    """State by slot, one token a row and call. Called by one thread; `num_slots` includes the padding slot 0.

    `sample` owns the logits: the caller never reads them again. Equal logits, parameters, seed, branch and position
    give the same token and the same floats, whatever the other rows, the slot and the history of the sampler.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        logprobs_mode: LogprobsMode = "raw_logprobs",
        backend: Backend = "auto",
        overlay_entries: int = 1 << 20,
        limits: SamplingLimits = SamplingLimits(),
    ) -> None:
        self.device = torch.device(device)
        self.logprobs_mode = logprobs_mode
        self.limits = limits
        self.state = SamplingState(num_slots, vocab_size, overlay_entries)
        self._rows: Counter[str] = Counter()
        self._flags: Counter[str] = Counter()

    def admit(
        self, slot: int, params: SamplingParams, prompt_ids: Ids, *, seed: int, branch: int = 0, output_ids: Ids = ()
    ) -> None:
        """Gives a free slot to a request. `output_ids` are the tokens it already has, of a resumed row: it goes on at
        their number as if it had never stopped. Raises ParamError | OverlayFull, and changes nothing then."""
        self.state.admit(slot, params, prompt_ids, seed=seed, branch=branch, output_ids=output_ids, limits=self.limits)

    def release(self, slot: int) -> None:
        self.state.release(slot)

    def plan_rows(self, slots: Ids) -> LaunchPlan:
        """Which branch each row takes: a pure function of the mirror."""
        return LaunchPlan(tuple(branches_of(self.state, self._checked(slots)).items()))

    def sample(self, logits: Any, slots: Ids) -> SampleOutput:
        """One token for each row of logits [R, V] (torch or numpy, fp32, bf16 or fp16, any row stride). Raises
        ValueError for shapes and slots that do not fit, nothing for what the logits hold."""
        slots_R = self._checked(slots)
        if logits.ndim != 2 or tuple(logits.shape) != (len(slots_R), self.state.vocab_size):
            raise ValueError(f"got logits {tuple(logits.shape)}, expected {(len(slots_R), self.state.vocab_size)}")
        plan = self.plan_rows(slots_R)
        self.state.apply()
        output = sample_on_host(self.state, _host(logits), slots_R, dict(plan.branches), self.logprobs_mode)
        for name, rows in plan.branches:
            self._rows[name] += len(rows)
        self._count_flags(output.flags)
        return output

    def fetch(self, output: SampleOutput) -> Fetched:
        return Fetched(output)

    def stats(self) -> SamplerStats:
        return SamplerStats(dict(self._rows), dict(self._flags))

    def _checked(self, slots: Ids) -> Int64s:
        slots_R = np.asarray(slots, np.int64)
        if slots_R.ndim != 1 or not ((slots_R >= 0) & (slots_R < self.state.num_slots)).all():
            raise ValueError(f"got slots {slots_R.tolist()}, expected a list of 0 to {self.state.num_slots - 1}")
        idle = ~self.state.has(slots_R, SlotFlag.ACTIVE) & (slots_R != PADDING_SLOT)
        if idle.any():
            raise ValueError(f"got slots {slots_R[idle].tolist()}, expected admitted ones")
        return slots_R

    def _count_flags(self, flags_R: npt.NDArray[np.uint32]) -> None:
        for flag in RowFlag:
            if count := int(np.count_nonzero(flags_R & np.uint32(flag))):
                self._flags[str(flag.name).lower()] += count


def _host(logits: Any) -> npt.NDArray[np.float32]:
    if isinstance(logits, torch.Tensor):
        array: npt.NDArray[np.float32] = logits.detach().to("cpu", torch.float32).numpy()
        return array
    return np.asarray(logits, np.float32)
