"""EngineStats: plain numbers about one engine, for whoever exports them.

Throughput: how fast a queue is worked off, learnt while there is one.

A machine that is not full says little of what it can do: one lone row decodes at a hundredth of the rate of a full
batch, also while a small job waits for that step to end. So a rate is learnt only from steps that had more work behind
them than steps hold (`Scheduler`).

But it is never lower than what has been done since, idle time included. A machine that stood still for some seconds,
with a queue, would else pass for a slow one for good: its queue's bound would be so low that no step ever had more work
behind it, and nothing would teach otherwise.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.batch.input_batch import StepKind
from engine.requests import Int64s
from gpu_sampler.spec_decode import MAX_DRAFTS

MEMORY_S = 5.0  # seconds after which a second weighs 1/e
LEAST_S = 0.25  # of steps with work behind them, before the rate is told
LEAST_STEPS = 8


class Throughput:
    """Written by the step thread, read by any."""

    def __init__(self, decode_token_cost: float = 1.0) -> None:
        self.tokens_per_s = 0.0  # in tokens of cost (engine.scheduler.request_state); 0 while unknown
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


# Upper bounds of what steps are sorted into; one count more for what is above them all.
STEP_SECONDS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2.5, 5))[:-2]
STEP_TOKENS = tuple(4**power for power in range(11))
STEP_ROWS = tuple(2**power for power in range(13))
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since start-up unless the name says otherwise. Dictionaries are keyed by `StepKind` values."""

    steps: dict[str, int]
    step_tokens: dict[str, int]
    step_seconds: dict[str, float]
    step_rows: dict[str, int]  # sequences that steps were made of
    steps_by_seconds: dict[str, Counts]  # steps in each of STEP_SECONDS, and above
    steps_by_tokens: dict[str, Counts]
    steps_by_rows: dict[str, Counts]
    plans: int  # steps planned
    plan_seconds: float
    head_seconds: float  # part of the score steps': from the last layer to the rows' answers
    graph_replays: int
    failed_steps: int
    hand_overs: int  # calls into asyncio
    prompt_tokens: int  # of prompts, prefixes and items accepted
    cached_tokens: int  # found in the prefix tree, or shared with another row of the job
    computed_tokens: int  # new tokens of all steps
    generated_tokens: int  # handed to callers
    wasted_tokens: int  # rows computed for requests that had ended
    padding_tokens: int
    queued_tokens: int  # now: accepted and not yet computed
    queued_requests: int  # now: jobs none of whose tokens was computed
    live_requests: int  # now: jobs
    live_rows: int  # now: rows that hold a request slot
    kv_slots_used: int  # now
    kv_slots_cached: int  # now: the tree's
    kv_slots_free: int  # now
    tree_locks: int  # now
    evictions: int  # tokens
    preemptions: int
    nonfinite_rows: int
    drafts: int  # runs of at least one drafted token
    drafts_reached: tuple[int, ...]  # by position: drafted tokens all of whose forerunners were accepted
    drafts_accepted: tuple[int, ...]  # by position
    drafted_tokens: int
    drafts_missing_q: int  # runs drawn from a distribution that is not known, and verified as if certain
    draft_seconds: float  # part of the decode and verify steps' seconds
    verify_seconds: float  # the rest of the verify steps'
    heartbeat_age_s: float
    tokens_per_s: float  # computed, smoothed over steps
    drain_per_s: float  # tokens of cost, while work waits; 0 while unknown
    sampler: Any  # the sampler's own statistics
    healthy: bool
    draining: bool


class Queue(NamedTuple):
    """What waits, in tokens of cost (engine.scheduler.request_state)."""

    tokens: int
    per_s: float  # worked off; 0 while unknown
    most: int  # a fuller one takes nothing more


def _buckets(bounds: Sequence[float]) -> dict[str, list[int]]:
    return {kind.value: [0] * (len(bounds) + 1) for kind in StepKind}


@dataclass(slots=True, kw_only=True)
class Counters:
    """What the step thread counts."""

    steps: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in StepKind})
    step_tokens: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in StepKind})
    step_seconds: dict[str, float] = field(default_factory=lambda: {kind.value: 0.0 for kind in StepKind})
    step_rows: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in StepKind})
    by_seconds: dict[str, list[int]] = field(default_factory=lambda: _buckets(STEP_SECONDS))
    by_tokens: dict[str, list[int]] = field(default_factory=lambda: _buckets(STEP_TOKENS))
    by_rows: dict[str, list[int]] = field(default_factory=lambda: _buckets(STEP_ROWS))
    plans: int = 0
    plan_seconds: float = 0.0
    head_seconds: float = 0.0
    failed_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    nonfinite_rows: int = 0
    drafts: int = 0
    drafts_reached: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    drafts_accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    drafted_tokens: int = 0
    drafts_missing_q: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    tokens_per_s: float = 0.0
    throughput: Throughput = field(default_factory=Throughput)

    def planned(self, seconds: float) -> None:
        self.plans += 1
        self.plan_seconds += seconds

    def step(self, kind: StepKind, rows: int, tokens: int, seconds: float) -> None:
        self.steps[kind.value] += 1
        self.step_tokens[kind.value] += tokens
        self.step_seconds[kind.value] += seconds
        self.step_rows[kind.value] += rows
        self.by_seconds[kind.value][bisect_left(STEP_SECONDS, seconds)] += 1
        self.by_tokens[kind.value][bisect_left(STEP_TOKENS, tokens)] += 1
        self.by_rows[kind.value][bisect_left(STEP_ROWS, rows)] += 1
        if seconds > 0:
            rate = tokens / seconds
            self.tokens_per_s = rate if not self.tokens_per_s else 0.95 * self.tokens_per_s + 0.05 * rate

    def drafting(self, seconds: float, step_seconds: float) -> None:
        """Seconds of drafting, and of the verify step that they were part of; 0 where nothing was drafted."""
        self.draft_seconds += seconds
        self.verify_seconds += max(0.0, step_seconds - seconds)

    def verified(self, drafts: Int64s, accepted: Int64s, missing_q: int) -> None:
        """A verify step: by row, the tokens drafted and how many of them were accepted."""
        self.drafts += int(np.count_nonzero(drafts))
        self.drafted_tokens += int(drafts.sum())
        self.drafts_missing_q += missing_q
        place = np.arange(int(drafts.max(initial=0)))
        reached = ((drafts[:, None] > place) & (accepted[:, None] >= place)).sum(0).tolist()
        for position, stood in enumerate((accepted[:, None] > place).sum(0).tolist()):
            self.drafts_reached[position] += reached[position]
            self.drafts_accepted[position] += stood
