"""How long steps of one kind take: a part that is the same for every step, and a part a token.

Budgets: how many tokens a step may have, by how fast the machine has turned out to be.
"""

import torch

from engine.batch.input_batch import StepKind
from engine.config import EngineConfig

DECAY = 0.9  # of a step's weight with each later one
FAR = 2.0  # times longer or shorter than expected
KNOWN = 3  # steps, after which one that takes far longer or shorter is passed over
LEAST_SPREAD = 0.05  # of the mean size: steps that are all alike do not tell the two parts apart


class StepTimes:
    """A line through the latest steps, by least squares. While they are all alike its slope stays what it was.

    A delay that counted would make the steps that follow small, and small steps tell little of how fast larger ones
    would be: they would stay small. So a step that takes far longer than expected is passed over, and so is one that
    takes far shorter, as the next one does where that one was only read late. At a second one of a kind, with none as
    expected between them, the line begins again; and at the first that is far shorter than the very first steps, which
    are slow for reasons of their own.
    """

    def __init__(self) -> None:
        self.largest = 0.0  # of the latest steps, in tokens
        self._passed = set[int]()  # of the steps since the last that counted: 1 longer, -1 shorter
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._weight = self._n = self._s = self._nn = self._ns = 0.0
        self._slope: float | None = None  # seconds a token

    def add(self, tokens: int, seconds: float) -> None:
        far, known = self._far(tokens, seconds), self._steps >= KNOWN
        if far and known and far not in self._passed:
            self._passed.add(far)
            return
        if far < 0 or (far and known):
            self._begin()
        self._passed.clear()
        self.largest = max(tokens, DECAY * self.largest)
        self._steps += 1
        self._weight = DECAY * self._weight + 1
        self._n = DECAY * self._n + tokens
        self._s = DECAY * self._s + seconds
        self._nn = DECAY * self._nn + tokens * tokens
        self._ns = DECAY * self._ns + tokens * seconds
        n, s = self._n / self._weight, self._s / self._weight
        spread = self._nn / self._weight - n * n
        if spread > (LEAST_SPREAD * n) ** 2:
            self._slope = (self._ns / self._weight - n * s) / spread

    def tokens_within(self, seconds: float) -> float:
        """Tokens of a step that takes so long, or twice its fixed part if that is longer: where the fixed part is most
        of a step, shorter ones would not end much sooner, and would do far less. Infinite while nothing is known."""
        if not self._steps:
            return float("inf")
        fixed, each = self._parts()
        return float("inf") if each <= 0 else max(seconds - fixed, fixed) / each

    def _parts(self) -> tuple[float, float]:
        """Seconds of a step, and of each of its tokens. A line steeper than the mean would begin below 0."""
        mean = self._s / self._n
        each = mean if self._slope is None else min(self._slope, mean)
        return (self._s - each * self._n) / self._weight, each

    def _far(self, tokens: int, seconds: float) -> int:
        """1: far longer than expected, -1: far shorter; else, and while nothing is known, 0."""
        if not self._steps:
            return 0
        fixed, each = self._parts()
        expected = fixed + each * tokens
        return int(seconds > FAR * expected) - int(seconds < expected / FAR)


LEAST_BUDGET = {"cpu": 32, "cuda": 256}  # tokens of a step, however slow the machine seems
LEAST_MEASURED = 32  # tokens of a step that tells how fast it is
UNKNOWN_BUDGET = 512  # tokens of a step beside running rows, before any time is known
REACH = 2  # times the largest of the latest steps: what these tell of longer ones is a guess, for which rows would wait
STEP_S = {"cpu": 0.1, "cuda": 0.4}  # a large model's matrix products lose a twentieth in shorter steps of a GPU


class Budgets:
    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._most, self._decode_gap_s = config.token_budget, config.decode_gap_s
        self._least = LEAST_BUDGET[device.type]
        self._step_s = STEP_S[device.type] if config.max_step_s is None else config.max_step_s
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
