"""Pace: whether drafting is worth its time, as measured: seconds for a token of a row, with drafts and without."""

PERIOD = 128  # steps, the first of which try both ways
TRIAL = 4  # steps of each way
SMOOTHING = 0.3


class Pace:
    """Asked before each step that may draft, and told what it took. Without `adaptive` it always says yes."""

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._steps = 0
        self._cost: dict[bool, float] = {}  # seconds a token of a row, smoothed, by whether the step drafted

    def drafts(self) -> bool:
        """Whether the next step drafts."""
        place = self._steps % PERIOD
        if not self._adaptive or place < TRIAL:
            return True
        if place < 2 * TRIAL:
            return False
        return self._cost[True] <= self._cost[False]

    def took(self, drafted: bool, rows: int, tokens: int, seconds: float) -> None:
        """A step of `rows` >= 1 rows has emitted `tokens` >= 1 tokens."""
        cost = seconds * rows / tokens
        known = self._cost.get(drafted, cost)
        self._cost[drafted] = known + SMOOTHING * (cost - known)
        self._steps += 1
