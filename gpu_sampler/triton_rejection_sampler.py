"""DeviceVerifier: the kernels of a verify step, and of a draft, in order.

    [expand] -> [patch_rows] -> row_stats -> select -> [judge_draws] -> [settle]    as of a plain step, on all rows
        verify: [dense_totals] -> accept -> [[report] -> conclude -> rank_drawn]
        draft:  draft

`row_stats` is the one read of the logits. In a verify step whose rows have no overlay, mask or last tokens it does what
`expand` does. Nothing waits for the device, and what is launched depends on the host's mirror and on the shapes alone.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from gpu_sampler.kernels.draft_probs import dense_totals
from gpu_sampler.kernels.draft_sample import draft
from gpu_sampler.kernels.logits_processors import patch_rows
from gpu_sampler.kernels.nucleus_fallback import settle
from gpu_sampler.kernels.nucleus_rejection import judge_draws
from gpu_sampler.kernels.rejection_sample import FEW_REQUESTS, accept
from gpu_sampler.kernels.sample import select
from gpu_sampler.kernels.softmax_stats import Runs, row_stats
from gpu_sampler.kernels.token_rank import rank_drawn
from gpu_sampler.kernels.verify_rows import conclude, expand
from gpu_sampler.kernels.workspace import Workspace
from gpu_sampler.output import LaunchPlan, OutputWords, SampleOutput, VerifyOutput, VerifyWords
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import DRAFT_METHODS, MAX_DRAFTS, PROPOSAL_IDS, Draft, DraftMethod, Proposal, VerifyRules
from gpu_sampler.state.device_state import DeviceImage, RunImage

WARM_REQUESTS: Final = 2  # of warm-up's steps; a single one would be compiled for


class _Rows(NamedTuple):
    """What the kernels of a plain step are told of the rows."""

    side: bool
    plan: LaunchPlan


class DeviceVerifier:
    """For one `DeviceSampler`, whose image and thread it shares. Its memory grows with the largest step it has seen."""

    def __init__(self, image: DeviceImage, num_slots: int, *, processed: bool) -> None:
        self._image, self._processed, self._device = image, processed, image.device
        self._runs: RunImage | None = None
        self._draft_ids = torch.full((num_slots, MAX_DRAFTS), INVALID_TOKEN, dtype=torch.int32, device=self._device)
        self._ones = torch.ones(0, dtype=torch.uint8, device=self._device)
        self._rates: dict[tuple[float, ...], torch.Tensor] = {}

    def reserve(self, requests: int, steps: int) -> RunImage:
        """The image of the rows, grown to hold as many."""
        if self._runs is None or requests > self._runs.requests or steps > self._runs.steps:
            most = (0, 0) if self._runs is None else (self._runs.requests, self._runs.steps)
            self._runs = RunImage(self._image, max(requests, most[0]), max(steps, most[1]))
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
        """As `Sampler.verify`; `work` holds R rows and `proposal` lies on the device as `there` leaves it. `crowded`:
        by the code for many requests or for few; by their number if None."""
        requests, steps = proposal.draft_ids.shape
        words = VerifyWords.empty(requests, steps, plan.n_top, plan.n_chosen, self._device)
        out = words.split()
        if not requests:
            return out
        runs = self.reserve(requests, steps)
        expands = bool({"patch_rows", "count_tokens"} & {*plan.kernels}) or plan.masked
        if expands:
            expand(self._image, runs, slots_B, proposal.draft_ids, proposal.kind, work, rules)
        beside = None if expands else (slots_B, Runs(runs, proposal.draft_ids, proposal.kind, rules))
        drawn_R = torch.empty(len(logits_RV), dtype=torch.int32, device=self._device)
        rows = self._draw(logits_RV, runs, out.rows()._replace(tokens=drawn_R), plan, work, beside)
        q_best = q_total = work.floats  # stand where nothing is read
        if proposal.q_logits is not None:
            # Apart: half of one tensor begins at a multiple of 16 bytes or not, and each would be compiled for.
            q_best, q_total = (torch.empty((requests, max(1, steps)), device=self._device) for _ in range(2))
            ids, kinds = proposal.draft_ids, proposal.kind
            dense_totals(proposal.q_logits, ids, kinds, slots_B, self._image.table, q_best, q_total)
        accept(
            self._image, slots_B, logits_RV, runs, work, proposal, rules, self._rates_of(rules), q_best, q_total,
            drawn_R, out, side=rows.side, crowded=requests > FEW_REQUESTS if crowded is None else crowded,
        )  # fmt: skip
        if plan.n_top is not None:
            self._report(logits_RV, runs, drawn_R, out, rows, work)
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
        """As `Sampler.draft`; `work` holds B rows."""
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
        expand(self._image, runs, slots_B, before, self._ones, work, rules, last=True)
        drawn = OutputWords.empty(requests, None, 0, device).split()
        rows = self._draw(logits_BV, runs, drawn, plan._replace(n_top=None, n_chosen=0), work)
        draft(
            logits_BV, slots_B, runs, work, drawn, self._draft_ids, out, offset, method, rules, side=rows.side,
        )  # fmt: skip
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
        """A verify step by each plan and both ways to draft, on padding alone; the memory of `requests` runs."""
        self.reserve(requests, steps)
        vocab, device, few = self._image.vocab_size, self._device, WARM_REQUESTS
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

    def there(self, proposal: Proposal) -> Proposal:
        """On the device, of the types that the kernels read."""
        types = (torch.int32, torch.uint8, torch.int32, torch.float32, None)
        parts = (
            None if part is None else torch.as_tensor(part).to(self._device, kind, non_blocking=True).contiguous()
            for part, kind in zip(proposal, types, strict=True)
        )
        return Proposal(*parts)

    def _draw(
        self,
        logits: torch.Tensor,
        runs: RunImage,
        out: SampleOutput,
        plan: LaunchPlan,
        work: Workspace,
        beside: tuple[torch.Tensor, Runs] | None = None,
    ) -> _Rows:
        """A plain step on rows of `runs`: each row's own token, its law, and what is reported with them. `beside`: the
        requests' slots and runs, which are not in the image of the rows yet."""
        rows, processed = len(logits), self._processed
        if rows > work.rows:
            raise ValueError(f"got {rows} rows and a workspace of {work.rows}")
        slots, kernels = runs.slots[:rows], plan.kernels
        side = "patch_rows" in kernels or plan.masked
        if "patch_rows" in kernels:
            patch_rows(logits, runs, slots, work.side_len[:rows], work.side_bad[:rows])
        elif plan.masked:
            work.side_len.zero_()
            work.side_bad.zero_()
        if beside is None:
            row_stats(logits, slots, runs.table, runs.masks if plan.masked else None, work, processed=processed)
        else:
            row_stats(logits, beside[0], self._image.table, None, work, processed=processed, runs=beside[1])
        select(
            logits, slots, runs, work, out, side=side, processed=processed, lists=plan.lists, kept=True
        )  # fmt: skip
        if "judge_draws" in kernels:
            judge_draws(logits, slots, runs, work, side=side, count=plan.n_top is not None)
        if "settle" in kernels:
            settle(logits, slots, runs, work, out, side=side, processed=processed, kept=True)
        return _Rows(side, plan)

    def _report(
        self,
        logits_RV: torch.Tensor,
        runs: RunImage,
        drawn_R: torch.Tensor,
        out: VerifyOutput,
        rows: _Rows,
        work: Workspace,
    ) -> None:
        """Log-probabilities and ranks of the tokens emitted, and padding behind them."""
        slots, own, processed = runs.slots[: len(logits_RV)], out.rows(), self._processed
        side = rows.side
        if "report" in rows.plan.kernels:
            select(
                logits_RV, slots, runs, work, own, side=side, processed=processed, report=True
            )  # fmt: skip
        conclude(logits_RV, runs, work, drawn_R, out, side=side, processed=processed)
        rank_drawn(logits_RV, slots, runs, work, own, side=side, processed=processed)

    def _rates_of(self, rules: VerifyRules) -> torch.Tensor:
        """f32 [MAX_DRAFTS] of the synthetic rule."""
        if rules.synthetic not in self._rates:
            rates = [rules.rate(position) for position in range(MAX_DRAFTS)]
            self._rates[rules.synthetic] = torch.tensor(rates, device=self._device)
        return self._rates[rules.synthetic]
