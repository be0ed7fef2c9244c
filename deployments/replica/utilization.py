"""Measures how much of a replica is in use, between one reading and the next."""

import time
from collections.abc import Callable

from engine.batch.input_batch import StepKind
from engine.metrics import EngineStats

FULL_STEPS = (StepKind.PREFILL, StepKind.SCORE)
ROW_STEPS = (StepKind.DECODE, StepKind.VERIFY)


class Utilization:
    """Measures what autoscaling decides by.

    The step thread's time alone would not do: a step that decodes one row takes about as long as one that decodes
    256. A single long answer would keep a replica's thread busy whatever the number of replicas, and each added replica
    would call for another. Time of decoding therefore counts by the rows in it.
    """

    def __init__(self, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._clock = clock
        self._when = clock()
        self._seconds = (0.0, 0.0)

    def read(self, stats: EngineStats) -> dict[str, float]:
        """Returns queued tokens, tokens a second, and `busy` in [0, 1]: the part in use of time or slots."""
        return {
            "queued_tokens": float(stats.queued_tokens),
            "tokens_per_s": float(stats.drain_per_s or stats.tokens_per_s),
            "busy": max(self._time_in_use(stats), _slots_in_use(stats)),
        }

    def _time_in_use(self, stats: EngineStats) -> float:
        """Returns the part of the time since the last reading in which a step ran; a decode step counts by its rows."""
        now = self._clock()
        seconds = tuple(sum(stats.step_seconds[kind] for kind in kinds) for kinds in (FULL_STEPS, ROW_STEPS))
        passed = max(now - self._when, 1e-9)
        full, rows = (max(0.0, new - old) for new, old in zip(seconds, self._seconds, strict=True))
        self._when, self._seconds = now, (seconds[0], seconds[1])
        return min(1.0, (full + rows * min(1.0, stats.live_rows / self._max_running)) / passed)


def _slots_in_use(stats: EngineStats) -> float:
    """Returns the part of the KV slots in use. Cached slots count as free, since the cache can evict them."""
    total = stats.kv_slots_used + stats.kv_slots_cached + stats.kv_slots_free
    return stats.kv_slots_used / total if total else 0.0
