"""DeviceSampler: the kernels of one step in order, for rows whose state lies on the device.

    [patch_rows] -> row_stats -> select -> [flashinfer] -> [judge_draws -> settle] -> [report] -> [rank_drawn]
        -> [count_tokens]

`patch_rows` runs if some row has an overlay, `flashinfer` if it was chosen for some row, `judge_draws` and `settle` if
some row may keep more tokens than a list holds, `rank_drawn` where a rank may not be known from a list, `count_tokens`
where drawn tokens change penalties or bad words. Raw log-probabilities of rows that were drawn from other values take a
second pass of `select`: in the same launch (`select_with_report`), or in one of its own (`report`) behind FlashInfer's
draws and in a verify step. Which of them a step needs is known from the host's mirror, so nothing waits for the device
and the step can be part of a CUDA graph.

Needs: which launches a step is made of, from what the host's mirror says of its rows' slots.
"""

from collections.abc import Callable, Iterator
from enum import IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backend import Choice
from gpu_sampler.flashinfer_sampler import FlashInferRows
from gpu_sampler.kernel_cache import fix_keys
from gpu_sampler.kernels.logits_processors import patch_rows
from gpu_sampler.kernels.nucleus_fallback import settle
from gpu_sampler.kernels.nucleus_rejection import judge_draws
from gpu_sampler.kernels.sample import select
from gpu_sampler.kernels.softmax_stats import row_stats
from gpu_sampler.kernels.token_counts import count_tokens
from gpu_sampler.kernels.token_rank import rank_drawn
from gpu_sampler.kernels.workspace import Workspace
from gpu_sampler.output import LaunchPlan, OutputWords, SampleOutput, VerifyOutput
from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.reference.sample import branch
from gpu_sampler.spec_decode import Draft, DraftMethod, Proposal, VerifyRules
from gpu_sampler.state.device_state import DeviceImage
from gpu_sampler.state.host_state import SamplingState, SlotFlag
from gpu_sampler.triton_rejection_sampler import WARM_REQUESTS, DeviceVerifier


class Need(IntFlag):
    """What a slot's rows need beside `row_stats` and `select`."""

    SIDE = 1
    JUDGE = 2
    SETTLE = 4
    REPORT = 8
    RANK = 16
    COUNT = 32
    MASK = 64
    ELSEWHERE = 128
    LIST = 256


# What the rows of a warm-up need: together with nothing at all, every variant that a kernel has.
LISTED: Final = Need.JUDGE | Need.SETTLE | Need.RANK
PATCHED: Final = LISTED | Need.SIDE | Need.REPORT | Need.COUNT
MASKED: Final = PATCHED | Need.MASK


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
    if route in ("nucleus", "candidates") or state.n_top[slot] > 0:
        found |= Need.LIST
    if flags & SlotFlag.WANTS_LOGPROBS:
        moved = bool(flags & (SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK))
        if moved and not processed:
            found |= Need.REPORT | Need.RANK
        if route == "plain" or (route == "nucleus" and not judged):
            found |= Need.RANK
    return found


def kernels_of(need: Need, *, apart: bool = False) -> tuple[str, ...]:
    """The launches of a step whose rows together need `need`. `apart`: what is reported is not drawn by `select`."""
    apart = apart or Need.ELSEWHERE in need
    together = Need.REPORT in need and not apart
    steps = (
        (Need.SIDE in need, "patch_rows"),
        (True, "row_stats"),
        (True, "select_with_report" if together else "select"),
        (Need.ELSEWHERE in need, "flashinfer"),
        (Need.JUDGE in need, "judge_draws"),
        (Need.SETTLE in need, "settle"),
        (Need.REPORT in need and apart, "report"),
        (Need.RANK in need, "rank_drawn"),
        (Need.COUNT in need, "count_tokens"),
    )
    return tuple(name for wanted, name in steps if wanted)


def warm_up_plans(*wanted: Need, apart: bool = False) -> Iterator[LaunchPlan]:
    """A step of rows that need each of these, without and with log-probabilities; `apart` as in `kernels_of`."""
    for need in wanted:
        for n_top in (None, 1):
            kernels = kernels_of(need if n_top is not None else need & ~(Need.RANK | Need.REPORT), apart=apart)
            yield LaunchPlan((), kernels, masked=Need.MASK in need, lists=bool(need), n_top=n_top)


DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class DeviceSampler:
    """One thread's sampler on one device. `launch` reads nothing of the host but its plan, and once `reserve` was
    called for as many rows it allocates only its output."""

    def __init__(self, state: SamplingState, device: torch.device, *, choice: Choice, processed: bool) -> None:
        fix_keys()
        self.image = DeviceImage(state, device)
        self.processed = processed
        self._state = state
        self._device = device
        never = choice.flashinfer == "never"
        self._flashinfer = None if never else FlashInferRows(state, choice, device, processed=processed)
        self._made_verifier: DeviceVerifier | None = None
        self._needs = np.zeros(state.num_slots, np.int32)  # Need, by slot
        self._work = Workspace(1, state.vocab_size, device)
        self._slots_host: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._slots: torch.Tensor = torch.empty(0, dtype=torch.int32, device=device)

    def note(self, slot: int) -> None:
        """Takes notice of what the host's mirror says of a slot."""
        self._needs[slot] = int(needs(self._state, slot, self.processed))
        if self._flashinfer is not None:
            self._flashinfer.note(slot)

    def plan(self, rows: npt.NDArray[np.int64], plan: LaunchPlan) -> LaunchPlan:
        """The plan with the launches that its rows need."""
        need = Need(int(np.bitwise_or.reduce(self._needs[rows], initial=0)))
        if self._flashinfer is not None and (away := self._flashinfer.taken(rows, plan.branches)) is not None:
            taken, left = away
            need |= Need.ELSEWHERE
            if plan.n_top is not None:
                need |= Need.REPORT | Need.RANK
            plan = plan._replace(branches=left, elsewhere=taken)
        lists = bool(need & (Need.LIST | Need.SIDE | Need.MASK | Need.ELSEWHERE))  # few variants to compile
        return plan._replace(kernels=kernels_of(need), masked=Need.MASK in need, lists=lists)

    def verify(
        self,
        logits_RV: torch.Tensor,
        slots_B: npt.NDArray[np.int64],
        proposal: Proposal,
        rules: VerifyRules,
        plan: LaunchPlan,
    ) -> VerifyOutput:
        """See `Sampler.verify`. Rows of a verify step are never FlashInfer's."""
        logits_RV, verifier = _rows_of(logits_RV), self._verifier()
        work = self.reserve(len(logits_RV))
        slots = self.slots(slots_B)
        return verifier.verify(logits_RV, slots, verifier.there(proposal), rules, self._at_home(slots_B, plan), work)

    def draft(
        self,
        logits_BV: torch.Tensor,
        slots_B: npt.NDArray[np.int64],
        offset: int,
        method: DraftMethod,
        rules: VerifyRules,
    ) -> Draft:
        """See `Sampler.draft`."""
        logits_BV, verifier = _rows_of(logits_BV), self._verifier()
        plan, work = self._at_home(slots_B, LaunchPlan(())), self.reserve(len(logits_BV))
        return verifier.draft(logits_BV, self.slots(slots_B), offset, method, rules, plan, work)

    def bare(self, slots_B: npt.NDArray[np.int64]) -> bool:
        """Whether `launch_draft` serves these rows."""
        return not int(np.bitwise_or.reduce(self._needs[slots_B], initial=0)) & (Need.SIDE | Need.MASK)

    def launch_draft(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft:
        """See `Sampler.launch_draft`. One plan for all rows: what a row does not need does nothing to it."""
        logits_BV, need = _rows_of(logits_BV), Need.JUDGE | Need.SETTLE | Need.LIST
        plan, work = LaunchPlan((), kernels_of(need), lists=True), self.reserve(len(logits_BV))
        return self._verifier().draft(logits_BV, slots_B, offset, method, rules, plan, work)

    def _verifier(self) -> DeviceVerifier:
        """Made when the first verify step or draft asks for it: it takes memory."""
        if self._made_verifier is None:
            self._made_verifier = DeviceVerifier(self.image, self._state.num_slots, processed=self.processed)
        return self._made_verifier

    def _at_home(self, rows: npt.NDArray[np.int64], plan: LaunchPlan) -> LaunchPlan:
        """The plan with the launches that its rows need of our kernels alone."""
        need = Need(int(np.bitwise_or.reduce(self._needs[rows], initial=0)))
        lists = bool(need & (Need.LIST | Need.SIDE | Need.MASK))
        kernels = kernels_of(need, apart=True)
        return plan._replace(kernels=kernels, masked=Need.MASK in need, lists=lists, elsewhere=None)

    def apply(self) -> None:
        """Brings what was staged to the device, in stream order; nothing staged, nothing done."""
        self.image.apply()

    def warm_up(self, rows: int, dtype: torch.dtype, progress: Callable[[str], None]) -> None:
        """Launches every kernel once on a few rows of logits of `dtype`, and takes the memory of `rows`."""
        self.reserve(rows)
        self.image.warm_up()
        if self._flashinfer is not None:
            self._flashinfer.warm_up(progress)
        logits = torch.zeros((2, self._state.vocab_size), dtype=dtype, device=self._device)
        slots_R = torch.zeros(2, dtype=torch.int32, device=self._device)
        for plan in warm_up_plans(Need(0), LISTED, PATCHED, MASKED):
            told = "" if plan.n_top is None else ", with log-probabilities"
            progress(f"sampler: {', '.join(plan.kernels)}{told}")
            self.launch(logits, slots_R, plan)

    def warm_up_verify(
        self,
        rows: int,
        dtype: torch.dtype,
        drafts: int,
        rules: VerifyRules,
        progress: Callable[[str], None],
        *,
        dense: bool,
    ) -> None:
        """Launches every kernel of verify steps and drafts once, on padding, and takes the memory of `rows` runs."""
        plans = list(warm_up_plans(Need(0), LISTED, MASKED, apart=True))
        rows = max(rows, WARM_REQUESTS)
        work = self.reserve(rows * (drafts + 1))
        self._verifier().warm_up(rows, dtype, drafts, rules, plans, work, progress, dense=dense)

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

    def launch(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, plan: LaunchPlan) -> SampleOutput:
        """One step. Logits [R, V] of bf16, fp16 or f32 with any row stride; they belong to the sampler from here on,
        which overwrites those of rows with an overlay. `slots_R` i32 on the device, each slot but 0 once."""
        logits_RV = _rows_of(logits_RV)
        rows = len(logits_RV)
        out = OutputWords.empty(rows, plan.n_top, plan.n_chosen, self._device).split()
        if rows:
            self._launch(logits_RV, slots_R, plan, out)
        return out

    def _launch(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, plan: LaunchPlan, out: SampleOutput) -> None:
        rows = len(logits_RV)
        work, image, kernels = self.reserve(rows), self.image, plan.kernels
        processed = self.processed
        if "patch_rows" in kernels:
            patch_rows(logits_RV, image, slots_R, work.side_len[:rows], work.side_bad[:rows])
        elif plan.masked:
            work.side_len.zero_()
            work.side_bad.zero_()
        # Kernels come in two variants, with side lists and masks or without either: few to compile.
        side = "patch_rows" in kernels or plan.masked
        row_stats(logits_RV, slots_R, image.table, image.masks if plan.masked else None, work, processed=processed)
        away = None if plan.elsewhere is None else self._others().prepare(plan.elsewhere, rows)
        away_R = None if away is None else away.flags_R
        select(
            logits_RV,
            slots_R,
            image,
            work,
            out,
            side=side,
            processed=processed,
            lists=plan.lists,
            elsewhere_R=away_R,
            with_report="select_with_report" in kernels,
        )
        if away is not None:
            self._others().draw(away, logits_RV, slots_R, image, work.side_len if side else work.nothing, out)
        if "judge_draws" in kernels:
            judge_draws(logits_RV, slots_R, image, work, side=side, count=plan.n_top is not None)
        if "settle" in kernels:
            settle(logits_RV, slots_R, image, work, out, side=side, processed=processed)
        if "report" in kernels:
            select(
                logits_RV,
                slots_R,
                image,
                work,
                out,
                side=side,
                processed=processed,
                elsewhere_R=away_R,
                report=True,
            )
        if "rank_drawn" in kernels:
            rank_drawn(logits_RV, slots_R, image, work, out, side=side, processed=processed)
        if "count_tokens" in kernels:
            count_tokens(image, slots_R, out.tokens)

    def _others(self) -> FlashInferRows:
        """Who draws the rows that a plan gives away."""
        if self._flashinfer is None:
            raise ValueError("the plan names rows for FlashInfer, which was not chosen")
        return self._flashinfer


def _rows_of(logits_RV: torch.Tensor) -> torch.Tensor:
    """Rows that the kernels read; ValueError for a type that they do not."""
    if logits_RV.dtype not in DTYPES:
        raise ValueError(f"`logits` are {logits_RV.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    return logits_RV.contiguous() if logits_RV.stride(1) != 1 and logits_RV.shape[1] > 1 else logits_RV
