"""Plain numbers about one engine: what its step thread counts, what an exporter reads, and how fast a queue goes."""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch

from engine.batch.input_batch import StepKind
from engine.requests import Int64s
from gpu_sampler.spec_decode import MAX_DRAFTS

MEMORY_S = 5.0  # seconds after which a second weighs 1/e
MIN_S = 0.25  # seconds of steps with work behind them, before the rate is reported
MIN_STEPS = 8

Number = TypeVar("Number", int, float)


class Throughput:
    """Learns how fast a queue is worked off, while there is one. The step thread writes, any thread reads.

    A machine that is not full says little about what it can do: one lone row decodes at a hundredth of the rate of a
    full batch, also while a small request waits for that step to end. So the rate is learnt only from steps that had
    more work behind them than steps hold (`Scheduler`).

    It is never lower, however, than what has been done since, idle time included. Otherwise a machine that stood still
    for some seconds, with a queue, would pass for a slow one without end: its queue's bound would be so low that no
    step ever had more work behind it, and nothing would teach otherwise.
    """

    def __init__(self, decode_token_cost: float = 1.0) -> None:
        self.tokens_per_s = 0.0  # in tokens of cost (engine.scheduler.request_state); 0 while unknown
        self._decode_token_cost = decode_token_cost
        self._full = _Rate()  # while there was more work than steps hold
        self._since = _Rate()  # all time since
        self._waited: float | None = None  # when the last step ended, if it left work waiting
        self._ended: float | None = None  # when the last step ended
        self._seconds = 0.0
        self._steps = 0

    def step(self, tokens: int, began: float, ended: float, *, decoded: bool, waiting: bool) -> None:
        """Learns from a step.

        While work waits, the time between two steps counts as time in which nothing was done.

        Args:
            tokens: tokens that the step read or decoded.
            began: when it began, seconds.
            ended: when it ended, seconds.
            decoded: whether it decoded.
            waiting: whether it left work waiting.
        """
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
        if self._seconds >= MIN_S and self._steps >= MIN_STEPS:
            self.tokens_per_s = self._full.mean

    def idle(self) -> None:
        """Notes that no request is left: the callers that waited have gone."""
        self._waited = None


class _Rate:
    """Averages tokens over time; the latest weigh the most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Adds `tokens` that were done evenly within `seconds`."""
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
        """Returns tokens a second; 0 where no time has passed."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def within_memory(self) -> float:
        """Returns the same as if nothing was done before the first."""
        return self._tokens / MEMORY_S


# Upper bounds of the buckets that steps are sorted into; one bucket more holds what is above them all.
STEP_SECONDS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2.5, 5))[:-2]
STEP_TOKENS = tuple(4**power for power in range(11))
STEP_ROWS = tuple(2**power for power in range(13))


def _by_kind(zero: Number) -> dict[str, Number]:
    return {kind.value: zero for kind in StepKind}


def _buckets(bounds: Sequence[float]) -> dict[str, list[int]]:
    return {kind.value: [0] * (len(bounds) + 1) for kind in StepKind}


@dataclass(slots=True, kw_only=True)
class EngineTotals:
    """Holds what the step thread counts from start-up on. Dictionaries are keyed by `StepKind` values."""

    steps: dict[str, int] = field(default_factory=lambda: _by_kind(0))
    step_tokens: dict[str, int] = field(default_factory=lambda: _by_kind(0))
    step_seconds: dict[str, float] = field(default_factory=lambda: _by_kind(0.0))
    step_rows: dict[str, int] = field(default_factory=lambda: _by_kind(0))  # sequences that steps were made of
    steps_by_seconds: dict[str, list[int]] = field(default_factory=lambda: _buckets(STEP_SECONDS))
    steps_by_tokens: dict[str, list[int]] = field(default_factory=lambda: _buckets(STEP_TOKENS))
    steps_by_rows: dict[str, list[int]] = field(default_factory=lambda: _buckets(STEP_ROWS))
    plans: int = 0  # steps planned
    plan_seconds: float = 0.0
    head_seconds: float = 0.0  # part of the score steps': from the last layer to the rows' answers
    failed_steps: int = 0
    prompt_tokens: int = 0  # of prompts, prefixes and items accepted
    cached_tokens: int = 0  # found in the prefix tree, or shared with another row of the request
    generated_tokens: int = 0  # handed to callers
    wasted_tokens: int = 0  # rows computed for requests that had ended
    nonfinite_rows: int = 0
    drafts: int = 0  # runs of at least one drafted token
    drafts_reached: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # by position: all before it accepted
    drafts_accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # by position
    drafted_tokens: int = 0
    drafts_missing_q: int = 0  # runs drawn from a distribution that is not known, and verified as if certain
    draft_seconds: float = 0.0  # part of the decode and verify steps' seconds
    verify_seconds: float = 0.0  # the rest of the verify steps'
    tokens_per_s: float = 0.0  # computed, smoothed over steps; a gauge

    @property
    def computed_tokens(self) -> int:
        """Returns the new tokens of all steps."""
        return sum(self.step_tokens.values())


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineTotals):
    """Adds to a copy of the totals what is true at the moment of reading."""

    graph_replays: int
    hand_overs: int  # calls into asyncio
    padding_tokens: int
    queued_tokens: int  # accepted and not yet computed
    queued_requests: int  # requests none of whose tokens was computed
    live_requests: int
    live_rows: int  # rows that hold a request slot
    kv_slots_used: int
    kv_slots_cached: int  # the tree's
    kv_slots_free: int
    tree_locks: int
    evictions: int  # tokens since start-up
    preemptions: int  # since start-up
    heartbeat_age_s: float
    drain_per_s: float  # tokens of cost, while work waits; 0 while unknown
    sampler: Any  # the sampler's own statistics
    healthy: bool
    draining: bool


class StepRecorder(EngineTotals):
    """Counts steps and their tokens. The step thread writes, any thread reads."""

    def __init__(self, throughput: Throughput) -> None:
        super().__init__()
        self.throughput = throughput

    def totals(self) -> dict[str, Any]:
        """Returns a copy of all totals by name."""
        return {one.name: _copied(getattr(self, one.name)) for one in fields(EngineTotals)}

    def plan(self, seconds: float) -> None:
        """Counts a planned step."""
        self.plans += 1
        self.plan_seconds += seconds

    def step(self, kind: StepKind, rows: int, tokens: int, seconds: float) -> None:
        """Counts a step that was read."""
        self.steps[kind.value] += 1
        self.step_tokens[kind.value] += tokens
        self.step_seconds[kind.value] += seconds
        self.step_rows[kind.value] += rows
        self.steps_by_seconds[kind.value][bisect_left(STEP_SECONDS, seconds)] += 1
        self.steps_by_tokens[kind.value][bisect_left(STEP_TOKENS, tokens)] += 1
        self.steps_by_rows[kind.value][bisect_left(STEP_ROWS, rows)] += 1
        if seconds > 0:
            rate = tokens / seconds
            self.tokens_per_s = rate if not self.tokens_per_s else 0.95 * self.tokens_per_s + 0.05 * rate

    def drafting(self, seconds: float, step_seconds: float) -> None:
        """Counts seconds of drafting, and of the verify step that they were part of; 0 where nothing was drafted."""
        self.draft_seconds += seconds
        self.verify_seconds += max(0.0, step_seconds - seconds)

    def verified(self, drafts: Int64s, accepted: Int64s, missing_q: int) -> None:
        """Counts a verify step.

        Args:
            drafts: i64 [B], tokens drafted for each row.
            accepted: i64 [B], how many of them were accepted.
            missing_q: rows drafted from a distribution that is not known.
        """
        self.drafts += int(np.count_nonzero(drafts))
        self.drafted_tokens += int(drafts.sum())
        self.drafts_missing_q += missing_q
        place = np.arange(int(drafts.max(initial=0)))
        reached = ((drafts[:, None] > place) & (accepted[:, None] >= place)).sum(0).tolist()
        for position, stood in enumerate((accepted[:, None] > place).sum(0).tolist()):
            self.drafts_reached[position] += reached[position]
            self.drafts_accepted[position] += stood


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


class Stopwatch:
    """Measures from its making to `stop`; on CUDA both are events on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._events: Any = None
        self._start = time.perf_counter()
        self._seconds = 0.0
        if device.type == "cuda":
            cuda: Any = torch.cuda
            self._events = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        """Ends the measurement."""
        self._seconds = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the seconds. On CUDA, wait first for something behind `stop` on the same stream."""
        if self._events is None:
            return self._seconds
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
