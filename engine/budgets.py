"""Budgets: how many tokens a step may have, by how fast the machine has turned out to be."""

import torch

from engine.batch import StepKind
from engine.config import EngineConfig
from engine.step_times import StepTimes

LEAST_BUDGET = {"cpu": 32, "cuda": 256}  # tokens of a step, however slow the machine seems
LEAST_MEASURED = 32  # tokens of a step that tells how fast it is
UNKNOWN_BUDGET = 512  # tokens of a step beside running rows, before any time is known
REACH = 2  # times the largest of the latest steps: what these tell of longer ones is a guess, for which rows would wait
STEP_S = {"cpu": 0.1, "cuda": 0.4}  # a large model's matrix products lose a twentieth in shorter steps of a GPU


class Budgets:
    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._most, self._decode_gap_s = config.token_budget, config.decode_gap_s
        self._least = LEAST_BUDGET[device.type]
        self._step_s = STEP_S[device.type] if config.step_s is None else config.step_s
        self._times = {kind: StepTimes() for kind in StepKind}

    def most(self, kind: StepKind, *, decoding: bool) -> int:
        """Running rows wait for the step to end, and so does whoever arrives meanwhile."""
        times = self._times[kind]
        if decoding:
            within = min(times.tokens_within(self._decode_gap_s), max(UNKNOWN_BUDGET, REACH * times.largest))
        else:
            within = times.tokens_within(self._step_s)
        return int(min(self._most, max(self._least, within)))

    def took(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """A step of `kind` has ended."""
        if seconds > 0 and tokens >= LEAST_MEASURED:
            self._times[kind].add(tokens, seconds)
