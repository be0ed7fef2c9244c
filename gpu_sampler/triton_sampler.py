"""Launches the kernels of a sampling step, a verify step or a draft in order, for rows whose state lies on the device.

    state of the rows   expand                      of a verify step or a draft: as it is after each row's drafts
    logits processors   apply_logits_processors     bias, bans and penalties, where some row has an overlay
    statistics          softmax_stats               reads the logits once, at each row's temperature, under its mask
    filters and draw    sample                      top-k, top-p and min-p from a list of the first tokens; the draw
                        [FlashInfer]                draws the rows that it was chosen for
                        nucleus_rejection           judges draws of a nucleus that may be wider than a list
                        nucleus_fallback            completes rows that keep more tokens than a list holds
    drafts              rejection_sample            accepts drafts, draws the token after them, moves the slots;
                                                    before it dense_totals, where a proposal is dense
                        draft_sample                in place of it: draws a draft
    log-probabilities   report                      raw ones of rows that draw from other values
                        conclude                    those of a verify step's tokens
                        token_rank                  ranks that no list shows
    state               update_token_counts         where drawn tokens change penalties or bad words

`report` runs inside the launch of `sample` (`sample_with_report`) unless FlashInfer draws or the step verifies drafts.
In a verify step whose rows have no overlay, mask or last tokens `softmax_stats` does the work of `expand` too. The
host's mirror of the state says which launches a step needs, so nothing waits for the device, and a CUDA graph can
capture the step.

Shape legend: R rows, B requests, K draft steps, R = B (K + 1) in a verify step, V vocabulary, S slots.
"""

from collections.abc import Iterator
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.flashinfer_sampler import FlashInferRows
from gpu_sampler.kernel_cache import fix_keys
from gpu_sampler.kernels.draft_probs import dense_totals
from gpu_sampler.kernels.draft_sample import draft_sample
from gpu_sampler.kernels.logits_processors import apply_logits_processors
from gpu_sampler.kernels.nucleus_fallback import nucleus_fallback
from gpu_sampler.kernels.nucleus_rejection import nucleus_rejection
from gpu_sampler.kernels.rejection_sample import FEW_REQUESTS, DraftProbs, rejection_sample
from gpu_sampler.kernels.sample import report, sample
from gpu_sampler.kernels.softmax_stats import softmax_stats
from gpu_sampler.kernels.token_counts import update_token_counts
from gpu_sampler.kernels.token_rank import token_rank
from gpu_sampler.kernels.verify_rows import VerifyRuns, conclude, expand
from gpu_sampler.output import LaunchPlan, OutputWords, SampleOutput, VerifyOutput, VerifyWords
from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.reference.sample import branch
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import DRAFT_METHODS, MAX_DRAFTS, PROPOSAL_IDS, Draft, DraftMethod, Proposal, VerifyRules
from gpu_sampler.startup_progress import StartupProgress, timed
from gpu_sampler.state.device_state import DeviceState, SlotState, VerifyState
from gpu_sampler.state.host_state import SamplingState, SlotFlag
from gpu_sampler.workspace import LogitRows, Workspace


class LaunchFlags(IntFlag):
    """Names what a slot's rows need beside `softmax_stats` and `sample`."""

    OVERLAY = 1
    NUCLEUS_REJECTION = 2
    NUCLEUS_FALLBACK = 4
    REPORT = 8
    TOKEN_RANK = 16
    TOKEN_COUNTS = 32
    MASK = 64
    FLASHINFER = 128
    TOP_N = 256  # the first tokens of the order, for a filter or to report them


# Flags of the rows of a warm-up: together with no flag at all, every variant that a kernel has.
LISTED: Final = LaunchFlags.NUCLEUS_REJECTION | LaunchFlags.NUCLEUS_FALLBACK | LaunchFlags.TOKEN_RANK
WITH_OVERLAY: Final = LISTED | LaunchFlags.OVERLAY | LaunchFlags.REPORT | LaunchFlags.TOKEN_COUNTS
WITH_MASK: Final = WITH_OVERLAY | LaunchFlags.MASK
_REPORTS: Final = LaunchFlags.TOKEN_RANK | LaunchFlags.REPORT
_WITH_LISTS: Final = LaunchFlags.TOP_N | LaunchFlags.OVERLAY | LaunchFlags.MASK | LaunchFlags.FLASHINFER
WARM_REQUESTS: Final = 2  # of warm-up's steps: a single one would be compiled as a constant
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def launch_flags(state: SamplingState, slot: int, processed: bool) -> LaunchFlags:
    """Returns what a slot's rows need: a function of the slot's own numbers.

    Args:
        state: the host's mirror.
        slot: the slot.
        processed: log-probabilities are those after all filters.
    """
    flags, route = SlotFlag(int(state.flags[slot])), branch(state, slot)
    rejects = route == "nucleus" and state.top_p[slot] < 1
    wide = route == "nucleus" or (route == "candidates" and state.top_k[slot] > CANDIDATES)
    wants, moved = SlotFlag.WANTS_LOGPROBS in flags, flags & (SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK)
    needs = (
        (flags & SlotFlag.HAS_OVERLAY, LaunchFlags.OVERLAY),
        (flags & SlotFlag.HAS_MASK, LaunchFlags.MASK),
        (flags & (SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS), LaunchFlags.TOKEN_COUNTS),
        (rejects, LaunchFlags.NUCLEUS_REJECTION),
        (wide, LaunchFlags.NUCLEUS_FALLBACK),
        (route in ("nucleus", "candidates") or state.n_top[slot] > 0, LaunchFlags.TOP_N),
        (wants and moved and not processed, _REPORTS),
        (wants and (route == "plain" or (route == "nucleus" and not rejects)), LaunchFlags.TOKEN_RANK),
    )
    return reduce(or_, (flag for needed, flag in needs if needed), LaunchFlags(0))


def kernels_of(flags: LaunchFlags, *, apart: bool = False) -> tuple[str, ...]:
    """Returns the launches of a step, in order.

    Args:
        flags: what the rows of the step need together.
        apart: raw log-probabilities have a launch of their own, as in a verify step.
    """
    apart = apart or LaunchFlags.FLASHINFER in flags
    together = LaunchFlags.REPORT in flags and not apart
    steps = (
        (LaunchFlags.OVERLAY in flags, "apply_logits_processors"),
        (True, "softmax_stats"),
        (True, "sample_with_report" if together else "sample"),
        (LaunchFlags.FLASHINFER in flags, "flashinfer"),
        (LaunchFlags.NUCLEUS_REJECTION in flags, "nucleus_rejection"),
        (LaunchFlags.NUCLEUS_FALLBACK in flags, "nucleus_fallback"),
        (LaunchFlags.REPORT in flags and apart, "report"),
        (LaunchFlags.TOKEN_RANK in flags, "token_rank"),
        (LaunchFlags.TOKEN_COUNTS in flags, "update_token_counts"),
    )
    return tuple(name for needed, name in steps if needed)


def warm_up_plans(*needed: LaunchFlags, apart: bool = False) -> Iterator[LaunchPlan]:
    """Yields steps for rows with each of these flags, without and with log-probabilities; see `kernels_of`."""
    for flags in needed:
        for n_top in (None, 1):
            kernels = kernels_of(flags if n_top is not None else flags & ~_REPORTS, apart=apart)
            yield LaunchPlan((), kernels, masked=LaunchFlags.MASK in flags, lists=bool(flags), n_top=n_top)


class TritonSampler:
    """Samples on one device, for one thread.

    `launch` and `launch_draft` read nothing of the host but their plan. Once they ran, or were warmed up, for as many
    rows, they allocate only their output. The memory of verify steps grows with the largest one.
    """

    def __init__(
        self, state: SamplingState, device: torch.device, *, processed: bool, flashinfer: bool = False
    ) -> None:
        """Allocates the device's state.

        Args:
            state: the host's mirror.
            device: where the logits lie.
            processed: log-probabilities are those after all filters.
            flashinfer: FlashInfer draws the rows that it may.
        """
        fix_keys()
        self.device_state = DeviceState(state, device)
        self.processed = processed
        self._state = state
        self._device = device
        self._flashinfer = FlashInferRows(state, device, processed=processed) if flashinfer else None
        self._runs: VerifyState | None = None
        self._draft_ids = torch.full((state.num_slots, MAX_DRAFTS), INVALID_TOKEN, dtype=torch.int32, device=device)
        self._ones = torch.ones(0, dtype=torch.uint8, device=device)  # kinds of drafts under way
        self._rates: dict[tuple[float, ...], torch.Tensor] = {}  # f32 [MAX_DRAFTS] of the synthetic rule
        self._flags = np.zeros(state.num_slots, np.int32)  # LaunchFlags, by slot
        self._work = Workspace(1, state.vocab_size, device)
        self._slots_host: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._slots: torch.Tensor = torch.empty(0, dtype=torch.int32, device=device)

    def note(self, slot: int) -> None:
        """Reads what the host's mirror says of a slot that changed."""
        self._flags[slot] = int(launch_flags(self._state, slot, self.processed))
        if self._flashinfer is not None:
            self._flashinfer.note(slot)

    def plan(self, rows: npt.NDArray[np.int64], plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan with the launches that its rows need; `rows` i64 [R] are slots."""
        flags = self._flags_of(rows)
        if self._flashinfer is not None and (away := self._flashinfer.taken(rows, plan.branches)) is not None:
            taken, left = away
            flags |= LaunchFlags.FLASHINFER
            if plan.n_top is not None and not self.processed:  # a processed row that reports is never FlashInfer's
                flags |= _REPORTS
            plan = plan._replace(branches=left, elsewhere=taken)
        lists = bool(flags & _WITH_LISTS)  # few variants to compile
        return plan._replace(kernels=kernels_of(flags), masked=LaunchFlags.MASK in flags, lists=lists)

    def _flags_of(self, slots_R: npt.NDArray[np.int64]) -> LaunchFlags:
        return LaunchFlags(int(np.bitwise_or.reduce(self._flags[slots_R], initial=0)))

    def verify(
        self,
        logits_RV: torch.Tensor,
        slots_B: npt.NDArray[np.int64],
        proposal: Proposal,
        rules: VerifyRules,
        plan: LaunchPlan,
    ) -> VerifyOutput:
        """See `Sampler.verify`. FlashInfer draws no rows of a verify step."""
        plan, slots = self._without_flashinfer(slots_B, plan), self.slots(slots_B)
        types = (torch.int32, torch.uint8, torch.int32, torch.float32, None)
        parts = (
            None if part is None else torch.as_tensor(part).to(self._device, kind, non_blocking=True).contiguous()
            for part, kind in zip(proposal, types, strict=True)
        )
        return self._verify(_readable(logits_RV), slots, Proposal(*parts), rules, plan, len(slots_B) > FEW_REQUESTS)

    def draft(
        self,
        logits_BV: torch.Tensor,
        slots_B: npt.NDArray[np.int64],
        offset: int,
        method: DraftMethod,
        rules: VerifyRules,
    ) -> Draft:
        """See `Sampler.draft`."""
        plan = self._without_flashinfer(slots_B, LaunchPlan(()))
        return self._draft(_readable(logits_BV), self.slots(slots_B), offset, method, rules, plan)

    def bare(self, slots_B: npt.NDArray[np.int64]) -> bool:
        """Returns whether `launch_draft` serves these rows: none has an overlay or a mask."""
        return not self._flags_of(slots_B) & (LaunchFlags.OVERLAY | LaunchFlags.MASK)

    def launch_draft(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft:
        """See `Sampler.launch_draft`. One plan serves all rows: a launch that a row does not need leaves it alone."""
        flags = LaunchFlags.NUCLEUS_REJECTION | LaunchFlags.NUCLEUS_FALLBACK | LaunchFlags.TOP_N
        plan = LaunchPlan((), kernels_of(flags), lists=True)
        return self._draft(_readable(logits_BV), slots_B, offset, method, rules, plan)

    def _without_flashinfer(self, rows: npt.NDArray[np.int64], plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan with the launches that its rows need of our kernels alone."""
        flags = self._flags_of(rows)
        kernels, lists = kernels_of(flags, apart=True), bool(flags & _WITH_LISTS)
        return plan._replace(kernels=kernels, masked=LaunchFlags.MASK in flags, lists=lists, elsewhere=None)

    def apply(self) -> None:
        """Copies staged changes to the device, in stream order; does nothing where nothing is staged."""
        self.device_state.apply()

    def warm_up(self, rows: int, dtype: torch.dtype, progress: StartupProgress) -> None:
        """Launches every kernel once on a few rows of logits of `dtype`, and takes the memory of `rows`."""
        self.reserve(rows)
        self.device_state.warm_up()
        if self._flashinfer is not None:
            self._flashinfer.warm_up(progress)
        logits = torch.zeros((2, self._state.vocab_size), dtype=dtype, device=self._device)
        slots_R = torch.zeros(2, dtype=torch.int32, device=self._device)
        for plan in warm_up_plans(LaunchFlags(0), LISTED, WITH_OVERLAY, WITH_MASK):
            reported = "" if plan.n_top is None else ", with log-probabilities"
            with timed(f"sampler: {', '.join(plan.kernels)}{reported}", progress):
                self.launch(logits, slots_R, plan)

    def warm_up_verify(
        self,
        rows: int,
        dtype: torch.dtype,
        drafts: int,
        rules: VerifyRules,
        progress: StartupProgress,
        *,
        dense: bool,
    ) -> None:
        """Runs verify steps and drafts of each kind once, on padding, and takes the memory of `rows` runs."""
        plans = list(warm_up_plans(LaunchFlags(0), LISTED, WITH_MASK, apart=True))
        requests, few, vocab, device = max(rows, WARM_REQUESTS), WARM_REQUESTS, self._state.vocab_size, self._device
        self.reserve(requests * (drafts + 1))
        self._runs_of(requests, drafts)
        logits = torch.zeros((few * (drafts + 1), vocab), dtype=dtype, device=device)
        slots_B = torch.zeros(few, dtype=torch.int32, device=device)
        q_ids = torch.full((few, drafts, PROPOSAL_IDS), INVALID_TOKEN, dtype=torch.int32, device=device)
        q_logits = torch.zeros((few, drafts, vocab), dtype=dtype, device=device) if dense else None
        ids = torch.full((few, drafts), INVALID_TOKEN, dtype=torch.int32, device=device)
        proposal = Proposal(ids, self._ones.new_zeros(few), q_ids, torch.zeros(q_ids.shape, device=device), q_logits)
        for plan in plans:
            with timed(f"sampler: verify, {', '.join(plan.kernels)}", progress):
                for crowded in {False, requests > FEW_REQUESTS}:
                    self._verify(logits, slots_B, proposal, rules, plan, crowded)
        for plan in (plan for plan in plans if plan.n_top is None):
            for method in DRAFT_METHODS:
                with timed(f"sampler: draft, {method}, {', '.join(plan.kernels)}", progress):
                    self._draft(logits[:few], slots_B, 0, method, rules, plan)

    def reserve(self, rows: int) -> Workspace:
        """Returns the workspace, grown to hold `rows`."""
        if rows > self._work.rows:
            self._work = Workspace(rows, self._work.vocab_size, self._device)
        return self._work

    def slots(self, slots_R: npt.NDArray[np.int64]) -> torch.Tensor:
        """Returns i32 [R] on the device; a batch with the rows of the last one copies nothing."""
        if not np.array_equal(slots_R, self._slots_host):
            host = torch.from_numpy(slots_R.astype(np.int32))
            if self._device.type == "cuda":
                host = host.pin_memory()
            self._slots = host.to(self._device, non_blocking=True)
            self._slots_host = slots_R.copy()
        return self._slots

    def launch(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, plan: LaunchPlan) -> SampleOutput:
        """Runs one step.

        Args:
            logits_RV: [R, V] bf16, fp16 or f32 with any row stride. The sampler owns them from here on: it overwrites
                those of rows with an overlay.
            slots_R: i32 [R] on the device, each slot but 0 once.
            plan: the launches.

        Returns:
            The output, tensors on the device.

        Raises:
            ValueError: the logits are of another type.
        """
        logits_RV, kernels = _readable(logits_RV), plan.kernels
        out = OutputWords.empty(len(logits_RV), plan.n_top, plan.n_chosen, self._device).split()
        if not len(logits_RV):
            return out
        rows, away_R = self._draw(logits_RV, slots_R, self.device_state, plan, out)
        if "report" in kernels:
            report(rows, out, away_R)
        if "token_rank" in kernels:
            token_rank(rows, out)
        if "update_token_counts" in kernels:
            update_token_counts(self.device_state, slots_R, out.tokens)
        return out

    def _draw(
        self,
        logits_RV: torch.Tensor,
        slots_R: torch.Tensor,
        state: SlotState,
        plan: LaunchPlan,
        out: SampleOutput,
        *,
        kept: bool = False,
        beside: tuple[torch.Tensor, VerifyRuns] | None = None,
    ) -> tuple[LogitRows, torch.Tensor | None]:
        """Draws a token of each row.

        Args:
            logits_RV: the rows, which it may overwrite.
            slots_R: i32 [R], each row's slot in `state`.
            state: the state of the rows.
            plan: the launches.
            out: receives the tokens, the flags and what one read of the statistics tells.
            kept: also stores what each row keeps, for verification.
            beside: the requests' slots and runs, where the state of verify rows is not filled yet.

        Returns:
            The rows, and i32 [R], 1 for those that FlashInfer drew; None if it drew none.
        """
        count, kernels = len(logits_RV), plan.kernels
        work = self.reserve(count)
        # Kernels come in two variants, with side lists and masks or without either: few to compile.
        side = "apply_logits_processors" in kernels or plan.masked
        rows = LogitRows(logits_RV, slots_R, state, work, side, self.processed)
        if "apply_logits_processors" in kernels:
            apply_logits_processors(logits_RV, state, slots_R, work.side_len[:count], work.side_bad[:count])
        elif plan.masked:
            work.clear_side_lists()
        if beside is None:
            softmax_stats(rows, masked=plan.masked)
        else:
            softmax_stats(rows._replace(slots=beside[0], state=self.device_state), masked=False, runs=beside[1])
        away = None if plan.elsewhere is None else self._flashinfer_rows().prepare(plan.elsewhere, count)
        away_R = None if away is None else away.flags_R
        together = "sample_with_report" in kernels
        sample(rows, out, lists=plan.lists, elsewhere_R=away_R, with_report=together, kept=kept)
        if away is not None:
            side_len = work.side_len if side else work.nothing
            self._flashinfer_rows().draw(away, logits_RV, slots_R, self.device_state, side_len, out)
        if "nucleus_rejection" in kernels:
            nucleus_rejection(rows, count=plan.n_top is not None)
        if "nucleus_fallback" in kernels:
            nucleus_fallback(rows, out, kept=kept)
        return rows, away_R

    def _verify(
        self,
        logits_RV: torch.Tensor,
        slots_B: torch.Tensor,
        proposal: Proposal,
        rules: VerifyRules,
        plan: LaunchPlan,
        crowded: bool,
    ) -> VerifyOutput:
        """Runs a verify step of slots i32 [B] and a proposal on the device.

        `plan` has the launches of a plain step on the rows. `crowded` takes the code for many requests.
        """
        requests, steps = proposal.draft_ids.shape
        out = VerifyWords.empty(requests, steps, plan.n_top, plan.n_chosen, self._device).split()
        if not requests:
            return out
        state, work = self.device_state, self.reserve(len(logits_RV))
        runs = VerifyRuns(self._runs_of(requests, steps), proposal.draft_ids, proposal.kind, rules)
        expands = plan.masked or bool({"apply_logits_processors", "update_token_counts"} & {*plan.kernels})
        if expands:
            expand(state, slots_B, runs, work)
        drawn_R = torch.empty(len(logits_RV), dtype=torch.int32, device=self._device)
        own = out.rows()._replace(tokens=drawn_R)
        beside, slots_R = None if expands else (slots_B, runs), runs.state.slots[: len(logits_RV)]
        rows, _ = self._draw(logits_RV, slots_R, runs.state, plan, own, kept=True, beside=beside)
        q_best = q_total = work.floats  # stand where nothing is read
        if proposal.q_logits is not None:
            q_best, q_total = dense_totals(proposal, slots_B, state.table)
        drafts = DraftProbs(proposal, q_best, q_total, rules, self._rates_of(rules))
        rejection_sample(state, slots_B, rows, drafts, drawn_R, out, crowded=crowded)
        if plan.n_top is not None:
            reported = out.rows()
            if "report" in plan.kernels:
                report(rows, reported)
            conclude(rows, drawn_R, out)
            token_rank(rows, reported)
        return out

    def _draft(
        self,
        logits_BV: torch.Tensor,
        slots_B: torch.Tensor,
        offset: int,
        method: DraftMethod,
        rules: VerifyRules,
        plan: LaunchPlan,
    ) -> Draft:
        """Runs a draft of slots i32 [B] on the device; `plan` has the launches of a plain step on the rows."""
        requests, device = len(slots_B), self._device
        out = Draft(
            torch.empty(requests, dtype=torch.int32, device=device),
            torch.empty((requests, PROPOSAL_IDS), dtype=torch.int32, device=device),
            torch.empty((requests, PROPOSAL_IDS), device=device),
        )
        if not requests:
            return out
        runs, work = self._runs_of(requests, offset), self.reserve(requests)
        before = self._draft_ids[:, :offset].index_select(0, slots_B)
        expand(self.device_state, slots_B, VerifyRuns(runs, before, self._ones, rules), work, last=True)
        drawn, plan = OutputWords.empty(requests, None, 0, device).split(), plan._replace(n_top=None, n_chosen=0)
        rows, _ = self._draw(logits_BV, runs.slots[:requests], runs, plan, drawn, kept=True)
        draft_sample(rows, drawn, slots_B, self._draft_ids, out, offset, method, rules)
        return out

    def _runs_of(self, requests: int, steps: int) -> VerifyState:
        """Returns the state of verify rows, grown to hold as many."""
        if self._runs is None or requests > self._runs.requests or steps > self._runs.steps:
            largest = (0, 0) if self._runs is None else (self._runs.requests, self._runs.steps)
            self._runs = VerifyState(self.device_state, max(requests, largest[0]), max(steps, largest[1]))
            self._ones = torch.ones(self._runs.requests, dtype=torch.uint8, device=self._device)
        return self._runs

    def _rates_of(self, rules: VerifyRules) -> torch.Tensor:
        if rules.synthetic not in self._rates:
            rates = [rules.rate(position) for position in range(MAX_DRAFTS)]
            self._rates[rules.synthetic] = torch.tensor(rates, device=self._device)
        return self._rates[rules.synthetic]

    def _flashinfer_rows(self) -> FlashInferRows:
        if self._flashinfer is None:
            raise ValueError("the plan names rows for FlashInfer, which was not chosen")
        return self._flashinfer


def _readable(logits_RV: torch.Tensor) -> torch.Tensor:
    """Returns rows that the kernels read; ValueError for a type that they do not."""
    if logits_RV.dtype not in DTYPES:
        raise ValueError(f"`logits` are {logits_RV.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    return logits_RV.contiguous() if logits_RV.stride(1) != 1 and logits_RV.shape[1] > 1 else logits_RV
