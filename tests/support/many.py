"""Makes millions of draws by the kernels: a launch a step, rows whose positions advance, tokens kept on the device.

Shape legend: R rows, S steps, V vocabulary, N draws.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpu_sampler.output import LaunchPlan
from gpu_sampler.state.host_state import SamplingState
from gpu_sampler.triton_sampler import TritonSampler
from tests.support.draws import DISTRIBUTION_ALPHA, DrawRow, LawCase, logits_of
from tests.support.statistics import chi_square, mean_surprise, total_variation, total_variation_bound


class Batch:
    """Rows in slots 1 to R of kernels of their own.

    Until the first draw a test may change `state` behind the back of the distribution: so faults are planted. Drawn
    tokens are not counted, so that rows with penalties keep their distribution from step to step; positions advance."""

    def __init__(
        self, rows: Sequence[DrawRow], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cuda"
    ) -> None:
        there = torch.device(device)
        slots, vocab_size = len(rows) + 1, len(rows[0].case.logits_V)
        self.state = SamplingState(num_slots=slots, vocab_size=vocab_size, mask_rows=slots)
        for slot, (case, seed, branch) in enumerate(rows, start=1):
            self.state.admit(slot, case.params, case.prompt, seed=seed, branch=branch, output_ids=case.outputs)
        self._sampler = TritonSampler(self.state, there, processed=False)
        self._logits_RV = logits_of(rows, dtype).to(there)
        self._given_RV = self._logits_RV.clone()  # what a step may write into

    def draws(self, steps: int, *, replayed: bool = False) -> torch.Tensor:
        """i32 [S, R] tokens of consecutive positions. `replayed`: the first step is launched, the others are replays of
        one CUDA graph."""
        slots = np.arange(1, self.state.num_slots)
        for slot in slots.tolist():
            self._sampler.note(slot)
        plan = self._sampler.plan(slots, LaunchPlan(()))
        plan = plan._replace(kernels=tuple(name for name in plan.kernels if name != "update_token_counts"))
        self._sampler.apply()
        slots_R = self._sampler.slots(slots)
        tokens_SR = torch.empty(steps, len(slots), dtype=torch.int32, device=self._logits_RV.device)
        tokens_SR[0] = self._step(slots_R, plan)
        if replayed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                drawn_R = self._step(slots_R, plan)
        for tokens_R in tokens_SR[1:]:
            if replayed:
                graph.replay()
                tokens_R.copy_(drawn_R)
            else:
                tokens_R.copy_(self._step(slots_R, plan))
        return tokens_SR

    def _step(self, slots_R: torch.Tensor, plan: LaunchPlan) -> torch.Tensor:
        self._given_RV.copy_(self._logits_RV)
        found: torch.Tensor = self._sampler.launch(self._given_RV, slots_R, plan).tokens
        return found


class ManyCheck(NamedTuple):
    p_value: float  # the lesser of two tests
    distance: float  # total variation over its bound, at most 1 for a right sampler
    resolved: float  # any sampler whose distribution is further off than this total variation has a distance above 1

    @property
    def passes(self) -> bool:
        return self.p_value > DISTRIBUTION_ALPHA and self.distance < 1


def check_many(case: LawCase, tokens: torch.Tensor) -> ManyCheck:
    """Compares draws of any shape with the enumerated distribution of their case.

    It computes chi-square by token, the mean of the log-probability, and total variation, whose bound holds with
    probability 1 - DISTRIBUTION_ALPHA, as `resolved` does.
    """
    probs_V = case.distribution()
    bound = total_variation_bound(probs_V, tokens.numel(), DISTRIBUTION_ALPHA)
    counts_V = _counts(tokens, len(probs_V))
    if counts_V is None:
        return ManyCheck(0.0, float("inf"), 2 * bound)
    p_value = min(chi_square(counts_V, probs_V).p_value, mean_surprise(counts_V, probs_V))
    return ManyCheck(p_value, total_variation(counts_V, probs_V) / bound, 2 * bound)


def joint_p_value(case: LawCase, first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of pairs against the product of the distribution with itself; `first` and `second` of one shape, and
    no draw in two pairs."""
    probs_V = case.distribution()
    size = len(probs_V)
    if not bool(((first >= 0) & (first < size) & (second >= 0) & (second < size)).all()):
        return 0.0
    counts = _counts(first * size + second, size * size)
    return 0.0 if counts is None else chi_square(counts, np.outer(probs_V, probs_V)).p_value


def lagged(tokens_SR: torch.Tensor, lag: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of draws `lag` positions apart in which each draw stands once; S is a multiple of 2 `lag`."""
    blocks = tokens_SR.view(-1, 2, lag, tokens_SR.shape[1])
    return blocks[:, 0], blocks[:, 1]


def _counts(values: torch.Tensor, size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """How often each of 0 to size - 1 stands in `values`; None if anything else does."""
    flat = values.reshape(-1).to(torch.int64)
    if bool((flat < 0).any()) or bool((flat >= size).any()):
        return None
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = torch.bincount(flat, minlength=size).cpu().numpy()
    return found
