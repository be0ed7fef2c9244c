"""Throughput: how fast a queue is worked off, learnt only while there is one.

A machine that is not full says little of what it can do: one lone row decodes at a hundredth of the rate of a full
batch, also while a small job waits for that step to end. Only steps that had more work behind them than steps hold are
counted (`Scheduler`).
"""

import math

MEMORY_S = 5.0  # seconds of such steps after which one weighs 1/e
LEAST_S = 0.25  # of them before the rate is told
LEAST_STEPS = 8


class Throughput:
    """Written by the step thread, read by any."""

    def __init__(self, decode_token_cost: float = 1.0) -> None:
        self.tokens_per_s = 0.0  # in tokens of cost (engine.intake); 0 while unknown
        self._decode_token_cost = decode_token_cost
        self._tokens = 0.0
        self._since: float | None = None  # when the last step ended, if it left work waiting
        self._seconds = 0.0
        self._steps = 0

    def step(self, tokens: int, began: float, ended: float, *, decoded: bool, waiting: bool) -> None:
        """A step that read or decoded `tokens` tokens, and left work `waiting` or not. What passes between two steps
        is time in which nothing was done."""
        since, self._since = self._since, ended if waiting else None
        if not waiting:
            return
        seconds = ended - (began if since is None else since)
        kept = math.exp(-seconds / MEMORY_S)
        self._tokens = kept * self._tokens + tokens * (self._decode_token_cost if decoded else 1)
        self._seconds = kept * self._seconds + seconds
        self._steps += 1
        if self._seconds >= LEAST_S and self._steps >= LEAST_STEPS:
            self.tokens_per_s = self._tokens / self._seconds
