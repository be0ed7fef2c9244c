"""StepTimeModel: how long steps take, and so how many tokens a step may have.

The model is a line for each kind of step: a part that is the same for every step, and a part a token.
"""

import torch

from engine.batch.input_batch import StepKind
from engine.config import EngineConfig

DECAY = 0.9  # weight that a step keeps with each later one
OUTLIER_FACTOR = 2.0  # times longer or shorter than expected
MIN_KNOWN_STEPS = 3  # steps after which an outlier is passed over
MIN_SPREAD = 0.05  # of the mean size: steps that are all alike do not tell the two parts apart


class StepTimeFit:
    """Fits a line through the times of the latest steps of one kind by least squares.

    While the steps are all alike the slope stays as it was.

    A delay that counted would make the steps that follow small, and small steps tell little about larger ones: they
    would stay small. So a step that takes far longer than expected is passed over, and so is one that takes far
    shorter, as the next one does where that one was only read late. The line begins again at a second outlier on the
    same side, with no expected step between them, and at the first that is far shorter than the very first steps, which
    are slow for reasons of their own.
    """

    def __init__(self) -> None:
        self.largest = 0.0  # tokens of the largest of the latest steps
        self._passed = set[int]()  # outliers since the last step that counted: 1 longer, -1 shorter
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._weight = self._n = self._s = self._nn = self._ns = 0.0
        self._slope: float | None = None  # seconds a token

    def add(self, tokens: int, seconds: float) -> None:
        """Takes a step of `tokens` tokens that took `seconds`."""
        outlier, known = self._outlier(tokens, seconds), self._steps >= MIN_KNOWN_STEPS
        if outlier and known and outlier not in self._passed:
            self._passed.add(outlier)
            return
        if outlier < 0 or (outlier and known):
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
        if spread > (MIN_SPREAD * n) ** 2:
            self._slope = (self._ns / self._weight - n * s) / spread

    def tokens_within(self, seconds: float) -> float:
        """Returns the tokens of a step that takes `seconds`, or twice its fixed part if that is longer.

        Where the fixed part is most of a step, shorter ones would not end much sooner, and would do far less. The
        result is infinite while nothing is known.
        """
        if not self._steps:
            return float("inf")
        fixed, each = self._parts()
        return float("inf") if each <= 0 else max(seconds - fixed, fixed) / each

    def _parts(self) -> tuple[float, float]:
        """Returns the seconds of a step, and of each token. A line steeper than the mean would begin below 0."""
        mean = self._s / self._n
        each = mean if self._slope is None else min(self._slope, mean)
        return (self._s - each * self._n) / self._weight, each

    def _outlier(self, tokens: int, seconds: float) -> int:
        """Returns 1 for a step far longer than expected, -1 for one far shorter, else, or while nothing is known, 0."""
        if not self._steps:
            return 0
        fixed, each = self._parts()
        expected = fixed + each * tokens
        return int(seconds > OUTLIER_FACTOR * expected) - int(seconds < expected / OUTLIER_FACTOR)


MIN_BUDGET = {"cpu": 32, "cuda": 256}  # tokens of a step, however slow the machine seems
MIN_MEASURED = 32  # tokens of a step that tells how fast it is
UNKNOWN_BUDGET = 512  # tokens of a step beside running rows, before any time is known
REACH = 2  # times the largest of the latest steps: beyond that the line is a guess, and running rows would wait for it
STEP_S = {"cpu": 0.1, "cuda": 0.4}  # a large model's matrix products lose a twentieth in shorter steps of a GPU


class StepTimeModel:
    """Predicts the time of prefill and score steps, and bounds their tokens by it."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._token_budget, self._decode_gap_s = config.token_budget, config.decode_gap_s
        self._min_budget = MIN_BUDGET[device.type]
        self._step_s = STEP_S[device.type] if config.max_step_s is None else config.max_step_s
        self._fits = {kind: StepTimeFit() for kind in StepKind}

    def max_tokens(self, kind: StepKind, *, decoding: bool) -> int:
        """Returns the most tokens that a step may have.

        Args:
            kind: the kind of the step.
            decoding: whether running rows wait for the step to end.
        """
        fit = self._fits[kind]
        if decoding:
            within = min(fit.tokens_within(self._decode_gap_s), max(UNKNOWN_BUDGET, REACH * fit.largest))
        else:
            within = fit.tokens_within(self._step_s)
        return int(min(self._token_budget, max(self._min_budget, within)))

    def add(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """Learns from a step that has ended."""
        if seconds > 0 and tokens >= MIN_MEASURED:
            self._fits[kind].add(tokens, seconds)
