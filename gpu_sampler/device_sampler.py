"""DeviceSampler: the kernels of one step in order, for rows whose state lies on the device.

    patch_rows -> row_stats -> select -> [judge_draws -> settle] -> [report] -> [rank_drawn] -> [count_tokens]

`patch_rows` runs if some row has an overlay, `judge_draws` and `settle` if some row may keep more tokens than a list
holds, the second `select` (`report`) for raw log-probabilities of rows that were drawn from other values, `rank_drawn`
where a rank may not be known from a list, `count_tokens` where drawn tokens change penalties or bad words. Which of them
a step needs is known from the host's mirror, so nothing waits for the device and the step can be part of a CUDA graph.
"""

from collections.abc import Callable
from enum import IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backends import Choice
from gpu_sampler.device_image import DeviceImage
from gpu_sampler.kernels.count_ahead import judge_draws, rank_drawn
from gpu_sampler.kernels.count_tokens import count_tokens
from gpu_sampler.kernels.patch_rows import patch_rows
from gpu_sampler.kernels.row_stats import row_stats
from gpu_sampler.kernels.select import select
from gpu_sampler.kernels.settle import settle
from gpu_sampler.output import LaunchPlan, OutputWords, SampleOutput
from gpu_sampler.reference.sample import branch
from gpu_sampler.reference.select import CANDIDATES
from gpu_sampler.state import SamplingState, SlotFlag
from gpu_sampler.workspace import Workspace

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class Need(IntFlag):
    """What a slot's rows need beside `row_stats` and `select`."""

    SIDE = 1
    JUDGE = 2
    SETTLE = 4
    REPORT = 8
    RANK = 16
    COUNT = 32
    MASK = 64


def needs(state: SamplingState, slot: int, processed: bool) -> Need:
    """A function of the slot's own numbers."""
    flags, route = SlotFlag(int(state.flags[slot])), branch(state, slot)
    found = Need(0)
    if flags & SlotFlag.HAS_OVERLAY:
        found |= Need.SIDE
    if flags & SlotFlag.HAS_MASK:
        found |= Need.MASK
    if flags & (SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS):
        found |= Need.COUNT
    judged = route == "nucleus" and state.top_p[slot] < 1
    if judged:
        found |= Need.JUDGE
    if route == "nucleus" or (route == "candidates" and state.top_k[slot] > CANDIDATES):
        found |= Need.SETTLE
    if flags & SlotFlag.WANTS_LOGPROBS:
        moved = bool(flags & (SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK))
        if moved and not processed:
            found |= Need.REPORT | Need.RANK
        if route == "plain" or (route == "nucleus" and not judged):
            found |= Need.RANK
    return found


def kernels_of(need: Need) -> tuple[str, ...]:
    """The launches of a step whose rows together need `need`."""
    steps = (
        (Need.SIDE, "patch_rows"),
        (None, "row_stats"),
        (None, "select"),
        (Need.JUDGE, "judge_draws"),
        (Need.SETTLE, "settle"),
        (Need.REPORT, "report"),
        (Need.RANK, "rank_drawn"),
        (Need.COUNT, "count_tokens"),
    )
    return tuple(name for wanted, name in steps if wanted is None or need & wanted)


class DeviceSampler:
    """One thread's sampler on one device. `launch` reads nothing of the host but its plan and allocates only its output,
    once `reserve` was called for as many rows."""

    def __init__(self, state: SamplingState, device: torch.device, *, choice: Choice, processed: bool) -> None:
        self.image = DeviceImage(state, device)
        self.processed = processed
        self._state = state
        self._device = device
        self._needs = np.zeros(state.num_slots, np.int32)  # Need, by slot
        self._work = Workspace(1, state.vocab_size, device)
        self._slots_host: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._slots: torch.Tensor = torch.empty(0, dtype=torch.int32, device=device)

    def note(self, slot: int) -> None:
        """Takes notice of what the host's mirror says of a slot."""
        self._needs[slot] = int(needs(self._state, slot, self.processed))

    def plan(self, rows: npt.NDArray[np.int64], plan: LaunchPlan) -> LaunchPlan:
        """The plan with the launches that its rows need."""
        need = Need(int(np.bitwise_or.reduce(self._needs[rows], initial=0)))
        return plan._replace(kernels=kernels_of(need), masked=Need.MASK in need)

    def apply(self) -> None:
        """Brings what was staged to the device, in stream order; nothing staged, nothing done."""
        self.image.apply()

    def warm_up(self, rows: int, progress: Callable[[str], None]) -> None:
        """Launches every kernel once on a few rows, and takes the memory of `rows`."""
        self.reserve(rows)
        logits = torch.zeros((2, self._state.vocab_size), dtype=torch.bfloat16, device=self._device)
        every = kernels_of(Need(sum(Need)))
        for kernels in (kernels_of(Need(0)), every):
            for n_top in (None, 1):
                progress(f"sampler: {', '.join(kernels)}{'' if n_top is None else ', with log-probabilities'}")
                slots_R = torch.zeros(2, dtype=torch.int32, device=self._device)
                self.launch(logits, slots_R, LaunchPlan((), kernels, n_top=n_top))

    def reserve(self, rows: int) -> Workspace:
        """The workspace, grown to hold `rows`."""
        if rows > self._work.rows:
            self._work = Workspace(rows, self._work.vocab_size, self._device)
        return self._work

    def slots(self, slots_R: npt.NDArray[np.int64]) -> torch.Tensor:
        """i32 [R] on the device; a batch with the rows of the last one copies nothing."""
        if not np.array_equal(slots_R, self._slots_host):
            host = torch.from_numpy(slots_R.astype(np.int32))
            if self._device.type == "cuda":
                host = host.pin_memory()
            self._slots = host.to(self._device, non_blocking=True)
            self._slots_host = slots_R.copy()
        return self._slots

    def launch(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, plan: LaunchPlan) -> OutputWords:
        """One step. Logits [R, V] of bf16, fp16 or f32 with any row stride; they belong to the sampler from here on,
        which overwrites those of rows with an overlay. `slots_R` i32 on the device, each slot but 0 once."""
        if logits_RV.dtype not in DTYPES:
            raise ValueError(f"`logits` are {logits_RV.dtype}, expected one of {', '.join(map(str, DTYPES))}")
        if logits_RV.stride(1) != 1 and logits_RV.shape[1] > 1:
            logits_RV = logits_RV.contiguous()
        rows = len(logits_RV)
        words = OutputWords.empty(rows, plan.n_top, plan.n_chosen, self._device)
        if rows:
            self._launch(logits_RV, slots_R, plan, words.split())
        return words

    def _launch(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, plan: LaunchPlan, out: SampleOutput) -> None:
        work, image, kernels = self.reserve(len(logits_RV)), self.image, plan.kernels
        side, processed, masked = "patch_rows" in kernels, self.processed, plan.masked
        if side:
            rows = len(logits_RV)  # the workspace may have more
            patch_rows(logits_RV, image, slots_R, work.side_len[:rows], work.side_bad[:rows])
        row_stats(logits_RV, slots_R, image.table, image.masks, work, processed=processed, masked=masked)
        select(logits_RV, slots_R, image, work, out, side=side, processed=processed, masked=masked)
        if "judge_draws" in kernels:
            judge_draws(logits_RV, slots_R, image, work, side=side, masked=masked)
        if "settle" in kernels:
            settle(logits_RV, slots_R, image, work, out, side=side, processed=processed, masked=masked)
        if "report" in kernels:
            select(logits_RV, slots_R, image, work, out, side=side, processed=processed, masked=masked, report=True)
        if "rank_drawn" in kernels:
            rank_drawn(logits_RV, slots_R, image, work, out, side=side, processed=processed, masked=masked)
        if "count_tokens" in kernels:
            count_tokens(image, slots_R, out.tokens)
