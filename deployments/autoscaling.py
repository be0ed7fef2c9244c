"""Decides how many replicas the work needs, from tokens and time. Serve applies delays and bounds.

Serve pickles this module by value and calls the policy in its controller, so it has no state and imports none of the
other modules.
"""

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

ROUNDING = 1e-6  # of a replica: three replicas at a target that they meet stay three despite rounding errors
Figures = Mapping[Any, float]


class TokenPolicy:
    """Takes the larger of two counts, from figures that replicas report and Serve averages over its window.

    - to compute the queue in `target_drain_s`: sum(queued) / (target_drain_s * mean(rate))
    - to reach `target_utilization`: running * mean(busy) / target_utilization

    A replica that has not reported yet counts as the mean of the others; while none has, the count stays.
    """

    def __init__(self, *, target_drain_s: float, target_utilization: float) -> None:
        self._target_drain_s = target_drain_s
        self._target_busy = target_utilization

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas, at least one, and no state."""
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
