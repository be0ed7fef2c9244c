"""Throughput: how fast a queue is worked off, learnt while there is one.

A machine that is not full says little of what it can do: one lone row decodes at a hundredth of the rate of a full
batch, also while a small job waits for that step to end. So a rate is learnt only from steps that had more work behind
them than steps hold (`Scheduler`).

But it is never lower than what has been done since, idle time included. A machine that stood still for some seconds,
with a queue, would else pass for a slow one for good: its queue's bound would be so low that no step ever had more work
behind it, and nothing would teach otherwise.
"""

import math

MEMORY_S = 5.0  # seconds after which a second weighs 1/e
LEAST_S = 0.25  # of steps with work behind them, before the rate is told
LEAST_STEPS = 8


class Throughput:
    """Written by the step thread, read by any."""

    def __init__(self, decode_token_cost: float = 1.0) -> None:
        self.tokens_per_s = 0.0  # in tokens of cost (engine.intake); 0 while unknown
        self._decode_token_cost = decode_token_cost
        self._full = _Rate()  # of the time in which there was more work than steps hold
        self._since = _Rate()  # of all time since
        self._waited: float | None = None  # when the last step ended, if it left work waiting
        self._ended: float | None = None  # when the last step ended
        self._seconds = 0.0
        self._steps = 0

    def step(self, tokens: int, began: float, ended: float, *, decoded: bool, waiting: bool) -> None:
        """A step that read or decoded `tokens` tokens, and left work `waiting` or not. While work waits, what passes
        between two steps is time in which nothing was done."""
        cost = tokens * (self._decode_token_cost if decoded else 1)
        if waiting:
            seconds = ended - (began if self._waited is None else self._waited)
            self._full.add(cost, seconds)
            self._since = _Rate()
            self._seconds += seconds
            self._steps += 1
        else:
            if self._ended is not None:
                self._since.add(0, began - self._ended)
            self._since.add(cost, ended - began)
            self._full.raise_to(self._since.within_memory)
        self._waited, self._ended = ended if waiting else None, ended
        if self._seconds >= LEAST_S and self._steps >= LEAST_STEPS:
            self.tokens_per_s = self._full.mean

    def idle(self) -> None:
        """Nothing is there any more: who waited has gone."""
        self._waited = None


class _Rate:
    """An average over time, of which the latest weighs most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """`tokens` that were done evenly within `seconds`."""
        if seconds <= 0:
            self._tokens += tokens
            return
        kept = math.exp(-seconds / MEMORY_S)
        weight = MEMORY_S * (1 - kept)
        self._tokens = kept * self._tokens + tokens * weight / seconds
        self._seconds = kept * self._seconds + weight

    def raise_to(self, rate: float) -> None:
        self._tokens = max(self._tokens, rate * self._seconds)

    @property
    def mean(self) -> float:
        """Tokens a second; 0 of no time."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def within_memory(self) -> float:
        """The same, where nothing was done before the first."""
        return self._tokens / MEMORY_S
