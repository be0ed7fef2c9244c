"""Budgets: how many tokens a step may have, by how fast the machine has turned out to be."""

import torch

from engine.batch import StepKind
from engine.config import EngineConfig
from engine.step_times import StepTimes

LEAST_BUDGET = 32  # tokens of a step beside running rows, however slow the machine
UNKNOWN_BUDGET = 512  # the same, before any rate is known
STEP_S = {"cpu": 0.1, "cuda": 0.4}  # a large model's matrix products lose a twentieth in shorter steps of a GPU


class Budgets:
    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._most, self._decode_gap_s = config.token_budget, config.decode_gap_s
        self._step_s = STEP_S[device.type] if config.step_s is None else config.step_s
        self._rates: dict[StepKind, float] = {}  # tokens per second, smoothed
        self._times = {kind: StepTimes() for kind in StepKind}

    def most(self, kind: StepKind, *, decoding: bool) -> int:
        """Running rows wait for the step to end, and so does whoever arrives meanwhile."""
        if not decoding:
            within = self._times[kind].tokens_within(self._step_s)
            return int(min(self._most, max(LEAST_BUDGET, within)))
        rate = self._rates.get(kind)
        beside = UNKNOWN_BUDGET if rate is None else max(LEAST_BUDGET, int(rate * self._decode_gap_s))
        return min(self._most, beside)

    def took(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """A step of `kind` has ended."""
        if seconds > 0 and tokens >= LEAST_BUDGET:
            rate = tokens / seconds
            self._times[kind].add(tokens, seconds)
            self._rates[kind] = 0.8 * self._rates[kind] + 0.2 * rate if kind in self._rates else rate
