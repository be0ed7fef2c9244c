"""How long steps of one kind take: a part that is the same for every step, and a part a token."""

DECAY = 0.9  # of a step's weight with each later one
LEAST_SPREAD = 0.05  # of the mean size: steps that are all alike do not tell the two parts apart


class StepTimes:
    """A line through the latest steps, by least squares. While they are all alike its slope stays what it was."""

    def __init__(self) -> None:
        self._weight = self._n = self._s = self._nn = self._ns = 0.0
        self._slope: float | None = None  # seconds a token

    def add(self, tokens: int, seconds: float) -> None:
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
        if not self._n:
            return float("inf")
        each = self._s / self._n if self._slope is None else self._slope
        if each <= 0:
            return float("inf")
        fixed = max(0.0, (self._s - each * self._n) / self._weight)
        return max(seconds - fixed, fixed) / each
