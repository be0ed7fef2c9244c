"""TokenPolicy: how many replicas the work needs, in tokens and time, not in requests. Serve adds delays and bounds.

Serve pickles this module by value and calls the policy in its controller: no state may stand in it, and it imports
nothing of ours.
"""

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

ROUNDING = 1e-6  # of a replica: three at 0.8 of a target of 0.8 are three, whatever floats make of it
Figures = Mapping[Any, float]


class TokenPolicy:
    """The larger of two counts, from what replicas report (`deployments.replica.utilization`) and Serve averages over
    its window:

    - those that do the queue in `target_drain_s` at the speed measured: sum(queued) / (target_drain_s * mean(rate))
    - those among which today's work is `target_utilization` of each: running * mean(busy) / target_utilization

    A replica that has not reported yet is taken for the mean of the others; while none has, the count stays.
    """

    def __init__(self, *, target_drain_s: float, target_utilization: float) -> None:
        self._target_drain_s = target_drain_s
        self._target_busy = target_utilization

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(replicas wanted, at least one; no state)."""
        figures: Mapping[str, Figures] = ctx.aggregated_metrics or {}
        busy = figures.get("busy", {})
        if not busy:
            return max(1, ctx.target_num_replicas), {}
        wanted = max(self._by_queue(figures), ctx.current_num_replicas * _mean(busy) / self._target_busy)
        return max(1, math.ceil(wanted - ROUNDING)), {}

    def _by_queue(self, figures: Mapping[str, Figures]) -> float:
        queued = sum(figures.get("queued_tokens", {}).values())
        rates = {name: rate for name, rate in figures.get("tokens_per_s", {}).items() if rate > 0}
        return queued / (self._target_drain_s * _mean(rates)) if rates else 0.0


def _mean(figures: Figures) -> float:
    return sum(figures.values()) / len(figures)
