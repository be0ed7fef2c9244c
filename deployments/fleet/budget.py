"""Budget: how many retries an ingress may send, so that trouble is not multiplied."""

import statistics
import time
from collections import deque
from collections.abc import Callable

from deployments.config import RetryArgs

LATEST = 63  # service times that the median is of


class Budget:
    """Retries over a sliding window, as a share of the requests in it."""

    def __init__(self, retry: RetryArgs, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry = retry
        self._clock = clock
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        self._requests.append(self._clock())
        self._forget()

    def take(self) -> bool:
        """Whether one more retry may be sent; it is counted if so."""
        self._forget()
        allowed = self._retry.spare + self._retry.share * len(self._requests)
        if len(self._retries) + 1 > allowed:
            return False
        self._retries.append(self._clock())
        return True

    def _forget(self) -> None:
        since = self._clock() - self._retry.window_s
        for times in (self._requests, self._retries):
            while times and times[0] <= since:
                times.popleft()


class ServiceTimes:
    """The median of the latest service times, in seconds. 0 until there is one."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._median: float | None = 0.0

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self._median = None

    @property
    def median(self) -> float:
        if self._median is None:
            self._median = statistics.median(self._latest)
        return self._median
