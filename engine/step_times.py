"""How long steps of one kind take: a part that is the same for every step, and a part a token."""

DECAY = 0.9  # of a step's weight with each later one
KNOWN = 3  # steps after which one that takes twice what is expected is taken for a delay
LEAST_SPREAD = 0.05  # of the mean size: steps that are all alike do not tell the two parts apart


class StepTimes:
    """A line through the latest steps, by least squares. While they are all alike its slope stays what it was.

    A delay that counted would make the steps that follow small, and small steps tell little of how fast larger ones
    would be: they would stay small. So one slow step alone does not count. At a second one the line begins again, and
    at one of less than half of what is expected, which no delay can make.
    """

    def __init__(self) -> None:
        self.largest = 0.0  # of the latest steps, in tokens
        self._slow = False  # the last step was, and was not counted
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._weight = self._n = self._s = self._nn = self._ns = 0.0
        self._slope: float | None = None  # seconds a token

    def add(self, tokens: int, seconds: float) -> None:
        expected, slow_before = self._expected(tokens), self._slow
        slow = self._steps >= KNOWN and seconds > 2 * expected
        self._slow = slow and not slow_before
        if self._slow:
            return
        if slow or 2 * seconds < expected:
            self._begin()
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

    def _expected(self, tokens: int) -> float:
        """Seconds; 0 while nothing is known."""
        if not self._steps:
            return 0.0
        fixed, each = self._parts()
        return fixed + each * tokens
