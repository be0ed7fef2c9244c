"""Launches the kernels of a verify step, and of a draft, in order.

    [expand] -> [apply_logits_processors] -> softmax_stats -> sample -> [nucleus_rejection] -> [nucleus_fallback]
        verify: [dense_totals] -> rejection_sample -> [[report] -> conclude -> token_rank]
        draft:  draft_sample

The first line is a plain step on all rows. `softmax_stats` is the one read of the logits. In a verify step whose rows
have no overlay, mask or last tokens it does the work of `expand` too. Nothing waits for the device, and the launches
depend on the host's mirror of the state and on the shapes alone.

Shape legend: B requests, K draft steps, R = B (K + 1) rows, V vocabulary, S slots.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from gpu_sampler.kernels.draft_probs import dense_totals
from gpu_sampler.kernels.draft_sample import draft_sample
from gpu_sampler.kernels.logits_processors import apply_logits_processors
from gpu_sampler.kernels.nucleus_fallback import nucleus_fallback
from gpu_sampler.kernels.nucleus_rejection import nucleus_rejection
from gpu_sampler.kernels.rejection_sample import FEW_REQUESTS, DraftProbs, rejection_sample
from gpu_sampler.kernels.sample import report, sample
from gpu_sampler.kernels.softmax_stats import VerifyRuns, softmax_stats
from gpu_sampler.kernels.token_rank import token_rank
from gpu_sampler.kernels.verify_rows import conclude, expand
from gpu_sampler.output import LaunchPlan, OutputWords, SampleOutput, VerifyOutput, VerifyWords
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import DRAFT_METHODS, MAX_DRAFTS, PROPOSAL_IDS, Draft, DraftMethod, Proposal, VerifyRules
from gpu_sampler.state.device_state import DeviceState, VerifyState
from gpu_sampler.workspace import LogitRows, Workspace

WARM_REQUESTS: Final = 2  # of warm-up's steps: a single one would be compiled as a constant


class TritonRejectionSampler:
    """For one `TritonSampler`, whose image and thread it shares. Its memory grows with the largest step it has seen."""

    def __init__(self, device_state: DeviceState, num_slots: int, *, processed: bool) -> None:
        self._device_state, self._processed, self._device = device_state, processed, device_state.device
        self._runs: VerifyState | None = None
        self._draft_ids = torch.full((num_slots, MAX_DRAFTS), INVALID_TOKEN, dtype=torch.int32, device=self._device)
        self._ones = torch.ones(0, dtype=torch.uint8, device=self._device)
        self._rates: dict[tuple[float, ...], torch.Tensor] = {}

    def reserve(self, requests: int, steps: int) -> VerifyState:
        """The image of the rows, grown to hold as many."""
        if self._runs is None or requests > self._runs.requests or steps > self._runs.steps:
            largest = (0, 0) if self._runs is None else (self._runs.requests, self._runs.steps)
            self._runs = VerifyState(self._device_state, max(requests, largest[0]), max(steps, largest[1]))
            self._ones = torch.ones(self._runs.requests, dtype=torch.uint8, device=self._device)
        return self._runs

    def verify(
        self,
        logits_RV: torch.Tensor,
        slots_B: torch.Tensor,
        proposal: Proposal,
        rules: VerifyRules,
        plan: LaunchPlan,
        work: Workspace,
        *,
        crowded: bool | None = None,
    ) -> VerifyOutput:
        """Runs a verify step; see `Sampler.verify`.

        Args:
            logits_RV: [R, V] bf16, fp16 or f32 with contiguous rows.
            slots_B: i32 [B] on the device.
            proposal: the drafts as `to_device` leaves them.
            rules: which drafts are accepted.
            plan: the launches of a plain step on the rows.
            work: the workspace of R rows.
            crowded: takes the code for many requests or for few; None decides by their number.
        """
        requests, steps = proposal.draft_ids.shape
        words = VerifyWords.empty(requests, steps, plan.n_top, plan.n_chosen, self._device)
        out = words.split()
        if not requests:
            return out
        runs = self.reserve(requests, steps)
        expands = bool({"apply_logits_processors", "update_token_counts"} & {*plan.kernels}) or plan.masked
        if expands:
            expand(self._device_state, runs, slots_B, proposal.draft_ids, proposal.kind, work, rules)
        beside = None if expands else (slots_B, VerifyRuns(runs, proposal.draft_ids, proposal.kind, rules))
        drawn_R = torch.empty(len(logits_RV), dtype=torch.int32, device=self._device)
        rows = self._draw(logits_RV, runs, out.rows()._replace(tokens=drawn_R), plan, work, beside)
        q_best = q_total = work.floats  # stand where nothing is read
        if proposal.q_logits is not None:
            # Apart: half of one tensor begins at a multiple of 16 bytes or not, and each would be compiled for.
            q_best, q_total = (torch.empty((requests, max(1, steps)), device=self._device) for _ in range(2))
            ids, kinds = proposal.draft_ids, proposal.kind
            dense_totals(proposal.q_logits, ids, kinds, slots_B, self._device_state.table, q_best, q_total)
        drafts = DraftProbs(proposal, q_best, q_total, rules, self._rates_of(rules))
        crowded = requests > FEW_REQUESTS if crowded is None else crowded
        rejection_sample(self._device_state, slots_B, rows, drafts, drawn_R, out, crowded=crowded)
        if plan.n_top is not None:
            reported = out.rows()
            if "report" in plan.kernels:
                report(rows, reported)
            conclude(rows, drawn_R, out)
            token_rank(rows, reported)
        return out

    def draft(
        self,
        logits_BV: torch.Tensor,
        slots_B: torch.Tensor,
        offset: int,
        method: DraftMethod,
        rules: VerifyRules,
        plan: LaunchPlan,
        work: Workspace,
    ) -> Draft:
        """Runs a draft; see `Sampler.draft`. `work` holds B rows."""
        requests, device = len(slots_B), self._device
        out = Draft(
            torch.empty(requests, dtype=torch.int32, device=device),
            torch.empty((requests, PROPOSAL_IDS), dtype=torch.int32, device=device),
            torch.empty((requests, PROPOSAL_IDS), device=device),
        )
        if not requests:
            return out
        runs = self.reserve(requests, offset)
        before = self._draft_ids[:, :offset].index_select(0, slots_B)
        expand(self._device_state, runs, slots_B, before, self._ones, work, rules, last=True)
        drawn = OutputWords.empty(requests, None, 0, device).split()
        rows = self._draw(logits_BV, runs, drawn, plan._replace(n_top=None, n_chosen=0), work)
        draft_sample(rows, drawn, slots_B, self._draft_ids, out, offset, method, rules)
        return out

    def warm_up(
        self,
        requests: int,
        dtype: torch.dtype,
        steps: int,
        rules: VerifyRules,
        plans: Sequence[LaunchPlan],
        work: Workspace,
        progress: Callable[[str], None],
        *,
        dense: bool,
    ) -> None:
        """Runs a verify step by each plan and both ways to draft on padding, and takes the memory of all runs."""
        self.reserve(requests, steps)
        vocab, device, few = self._device_state.vocab_size, self._device, WARM_REQUESTS
        logits = torch.zeros((few * (steps + 1), vocab), dtype=dtype, device=device)
        slots_B = torch.zeros(few, dtype=torch.int32, device=device)
        q_ids = torch.full((few, steps, PROPOSAL_IDS), INVALID_TOKEN, dtype=torch.int32, device=device)
        q_logits = torch.zeros((few, steps, vocab), dtype=dtype, device=device) if dense else None
        ids = torch.full((few, steps), INVALID_TOKEN, dtype=torch.int32, device=device)
        proposal = Proposal(ids, self._ones.new_zeros(few), q_ids, torch.zeros(q_ids.shape, device=device), q_logits)
        for plan in plans:
            progress(f"sampler: verify, {', '.join(plan.kernels)}")
            for crowded in {False, requests > FEW_REQUESTS}:
                self.verify(logits, slots_B, proposal, rules, plan, work, crowded=crowded)
        for plan in (plan for plan in plans if plan.n_top is None):
            for method in DRAFT_METHODS:
                progress(f"sampler: draft, {method}, {', '.join(plan.kernels)}")
                self.draft(logits[:few], slots_B, 0, method, rules, plan, work)

    def to_device(self, proposal: Proposal) -> Proposal:
        """Returns the proposal on the device, of the types that the kernels read."""
        types = (torch.int32, torch.uint8, torch.int32, torch.float32, None)
        parts = (
            None if part is None else torch.as_tensor(part).to(self._device, kind, non_blocking=True).contiguous()
            for part, kind in zip(proposal, types, strict=True)
        )
        return Proposal(*parts)

    def _draw(
        self,
        logits: torch.Tensor,
        runs: VerifyState,
        out: SampleOutput,
        plan: LaunchPlan,
        work: Workspace,
        beside: tuple[torch.Tensor, VerifyRuns] | None = None,
    ) -> LogitRows:
        """Runs a plain step on rows of `runs`: draws each row's own token, and stores what the row keeps.

        `beside` are the requests' slots and runs, where the state of the rows is not filled yet.
        """
        count, kernels = len(logits), plan.kernels
        if count > work.rows:
            raise ValueError(f"got {count} rows and a workspace of {work.rows}")
        side = "apply_logits_processors" in kernels or plan.masked
        rows = LogitRows(logits, runs.slots[:count], runs, work, side, self._processed)
        if "apply_logits_processors" in kernels:
            apply_logits_processors(logits, runs, rows.slots, work.side_len[:count], work.side_bad[:count])
        elif plan.masked:
            work.clear_side_lists()
        if beside is None:
            softmax_stats(rows, masked=plan.masked)
        else:
            softmax_stats(rows._replace(slots=beside[0], state=self._device_state), masked=False, runs=beside[1])
        sample(rows, out, lists=plan.lists, kept=True)
        if "nucleus_rejection" in kernels:
            nucleus_rejection(rows, count=plan.n_top is not None)
        if "nucleus_fallback" in kernels:
            nucleus_fallback(rows, out, kept=True)
        return rows

    def _rates_of(self, rules: VerifyRules) -> torch.Tensor:
        """Returns the rates f32 [MAX_DRAFTS] of the synthetic rule."""
        if rules.synthetic not in self._rates:
            rates = [rules.rate(position) for position in range(MAX_DRAFTS)]
            self._rates[rules.synthetic] = torch.tensor(rates, device=self._device)
        return self._rates[rules.synthetic]
