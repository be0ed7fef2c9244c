"""Pace: when a generation's tokens came, and where its time went."""

import time
from collections.abc import Callable, Sequence

from deployments.messages import PromptChunk
from deployments.telemetry.observer import Observer
from engine.jobs import GenerateChunk


class Pace:
    """Of one request. Branches and prompts run side by side: the longest of each span counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: dict[tuple[int, int], tuple[float, int]] = {}  # by prompt and branch: first arrival, tokens since
        self._last = 0.0
        self._queue_s = self._prefill_s = self._compute_s = 0.0

    def came(self, chunks: Sequence[PromptChunk]) -> None:
        """What one message brought."""
        now = self._clock()
        for prompt, chunk in chunks:
            if not isinstance(chunk, GenerateChunk):
                continue
            self._queue_s = max(self._queue_s, chunk.queue_s)
            self._prefill_s = max(self._prefill_s, chunk.prefill_s)
            self._compute_s = max(self._compute_s, chunk.compute_s)
            key = prompt, chunk.branch
            began, tokens = self._began.get(key, (now, -len(chunk.tokens)))
            self._began[key] = began, tokens + len(chunk.tokens)
            self._last = now

    def tell(self, observer: Observer, route: str, *, streamed: bool) -> None:
        """Stages as the replica measured them; the time between tokens as they came here, which only a stream shows."""
        if not self._began:
            return
        observer.stage("queue", self._queue_s)
        observer.stage("prefill", self._prefill_s)
        observer.stage("decode", max(0.0, self._compute_s - self._prefill_s))
        began, tokens = max(self._began.values(), key=lambda one: one[1])
        if streamed and tokens:
            observer.token_gap(route, (self._last - began) / tokens)
