"""Counts what one ingress does, as Prometheus metrics in a registry of its own.

The values of every label are a closed set.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deployments.auth.api_keys import NEEDS
from deployments.auth.authenticator import Reason
from deployments.errors import ERROR_KINDS
from deployments.observability.exposition import SECONDS, Family, families_of, histogram, process_families
from deployments.observability.observer import Observer, Phase, Stage

OTHER = "other"
GAP_SECONDS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2.5, 5))[:-2]  # between tokens
LAG_SECONDS = GAP_SECONDS
SHARDS = (1, 2, 4, 8, 16, 32, 64)
MASS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
ROUTES = frozenset(NEEDS)
STATUSES = frozenset(str(kind.status) for kind in ERROR_KINDS.values()) | {"200", "499"}
CODES = frozenset(ERROR_KINDS) | {""}
STAGES = frozenset(get_args(Stage))
PHASES = frozenset(get_args(Phase))
AUTH_REASONS = frozenset(get_args(Reason))
REJECTIONS = {
    "overloaded": "overloaded",
    "quota_exceeded": "quota",
    "deadline_exceeded": "deadline",
    "draining": "draining",
    "not_ready": "not_ready",
    "no_replica": "not_ready",
    "request_too_large": "too_large",
    "body_too_large": "too_large",
    "quarantined_request": "quarantined",
}
RETRY_CAUSES = frozenset(("died", "unavailable", "busy", "step_failed", "handoff"))
RESUME_CAUSES = RETRY_CAUSES
CANARY_FAILURES = frozenset(("timeout", "mismatch", "error"))
PERIOD_S = 0.05


def known(value: object, allowed: frozenset[str]) -> str:
    """Returns the label value, or "other" for one outside the closed set."""
    text = str(value)
    return text if text in allowed else OTHER


class LoopLagMonitor:
    """Measures how late an event loop runs a task that is due; whatever blocks the loop shows here.

    Args:
        observe: receives the delay in seconds, `1 / period_s` times a second while the loop is free.
        period_s: time between two measurements.
    """

    def __init__(self, observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
        self._observe = observe
        self._period = period_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + self._period
            await asyncio.sleep(self._period)
            self._observe(max(0.0, clock() - due))


class ArrayHistogram:
    """Counts arrays of values in a histogram with one label: all values of one request cost one call."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], label: str) -> None:
        self._name, self._help, self._bounds, self._label = name, help, tuple(bounds), label
        self._totals: dict[str, tuple[npt.NDArray[np.int64], float]] = {}

    def observe(self, value: str, numbers: npt.NDArray[np.floating]) -> None:
        """Counts `numbers`, [N], all finite, under the label value `value`."""
        empty = np.zeros(len(self._bounds) + 1, np.int64)
        counts, total = self._totals.get(value, (empty, 0.0))
        found = np.bincount(np.searchsorted(self._bounds, numbers, "left"), minlength=len(empty))
        self._totals[value] = (counts + found, total + float(numbers.sum(dtype=np.float64)))

    def family(self) -> Family:
        totals = {value: (counts.tolist(), total) for value, (counts, total) in self._totals.items()}
        return histogram(self._name, self._help, self._bounds, totals, self._label)


class IngressMetrics(Observer):
    """Holds the metrics of one ingress process.

    Series of small label sets exist from the start with the value 0, so that a rate sees the first event too.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_requests()
        self._make_tokens()
        self._make_faults()
        self._make_health()

    def _make_requests(self) -> None:
        self._requests = self._counter("assay_requests", "Answered requests.", ("route", "status", "code"))
        self._seconds = self._histogram(
            "assay_request_seconds", "Time from a request's first byte to the last of its answer.", SECONDS, ("route",)
        )
        self._stages = self._histogram("assay_stage_seconds", "Time of the stages of requests.", SECONDS, ("stage",))
        self._inflight = self._gauge("assay_inflight_requests", "Requests that are being answered.")
        self._body_bytes = self._gauge("assay_inflight_body_bytes", "Bytes of the bodies of these requests.")
        self._streams = self._gauge("assay_open_streams", "Streams that are being written.")
        self._shards = self._histogram("assay_fanout_shards", "Shards of a scoring request.", SHARDS)
        self._batched = self._histogram(
            "assay_micro_batch_requests", "Scoring requests, or shards, of one call to a replica.", SHARDS
        )

    def _make_tokens(self) -> None:
        self._first = self._histogram(
            "assay_time_to_first_token_seconds", "Time to the first token of completions.", SECONDS, ("route",)
        )
        self._gaps = self._histogram(
            "assay_mean_inter_token_seconds",
            "Mean time between the tokens of a request, one value a request.",
            GAP_SECONDS,
            ("route",),
        )
        self._items = self._counter("assay_items", "Scored items.", ("route",))
        self._truncated = self._counter("assay_truncated_items", "Scored items that were truncated.", ("route",))
        self._mass = ArrayHistogram("assay_label_mass", "Probability of all labels of an item together.", MASS, "route")

    def _make_faults(self) -> None:
        self._rejected = self._counter(
            "assay_rejected", "Refused requests.", ("reason",), frozenset(REJECTIONS.values())
        )
        self._disconnects = self._counter("assay_disconnects", "Clients that disconnected.", ("phase",), PHASES)
        self._auth = self._counter("assay_auth_failures", "Requests without a valid key.", ("reason",), AUTH_REASONS)
        self._retries = self._counter(
            "assay_retries", "Requests, or shards, that were sent again.", ("cause",), RETRY_CAUSES
        )
        self._resumes = self._counter(
            "assay_resumes", "Streams that another replica continued.", ("cause",), RESUME_CAUSES
        )
        self._budget = self._counter(
            "assay_retry_budget_exhausted", "Retries that were not made because the retry budget was spent."
        )
        self._quarantine = self._gauge("assay_quarantine_entries", "Requests that are in quarantine.")

    def _make_health(self) -> None:
        self._missing = self._counter("assay_scrape_missing", "Processes that did not answer a scrape.")
        self._canaries = self._counter(
            "assay_canary_failures", "Canaries that failed, as this ingress saw them.", ("reason",), CANARY_FAILURES
        )
        self._canary_seconds = self._histogram("assay_canary_seconds", "Time of canaries that passed.", SECONDS)
        self._lag = self._histogram(
            "assay_event_loop_lag_seconds", "How late the event loop ran what was due.", LAG_SECONDS
        )
        self._ready = self._gauge("assay_ready_replicas", "Replicas that passed their canary within two periods.")
        self._required = self._gauge("assay_required_replicas", "Ready replicas that /readyz requires.")

    def _counter(
        self, name: str, help: str, labels: Sequence[str] = (), values: frozenset[str] = frozenset()
    ) -> Counter:
        """Makes a counter, with a series at 0 for each of `values` of its one label."""
        made = Counter(name, help, labels, registry=self.registry)
        for value in sorted(values):
            made.labels(value)
        return made

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(name, help, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(name, help, labels, buckets=buckets, registry=self.registry)

    # Reports of the HTTP layer.

    def request_started(self, body_bytes: int) -> None:
        self._inflight.inc()

    def request_ended(self, route: str, status: int, code: str, seconds: float, body_bytes: int) -> None:
        self._inflight.dec()
        route = known(route, ROUTES)
        self._requests.labels(route, known(status, STATUSES), known(code, CODES)).inc()
        self._seconds.labels(route).observe(seconds)
        if code in REJECTIONS:
            self._rejected.labels(REJECTIONS[code]).inc()

    def body(self, change: int) -> None:
        self._body_bytes.inc(change)

    def stage(self, stage: Stage, seconds: float) -> None:
        self._stages.labels(known(stage, STAGES)).observe(seconds)

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Measures the time of a `with` block as a stage, unless the block raises."""
        started = time.perf_counter()
        yield
        self.stage(stage, time.perf_counter() - started)

    def first_token(self, route: str, seconds: float) -> None:
        self._first.labels(known(route, ROUTES)).observe(seconds)

    def token_gap(self, route: str, seconds: float) -> None:
        self._gaps.labels(known(route, ROUTES)).observe(seconds)

    def streams(self, change: int) -> None:
        self._streams.inc(change)

    def disconnected(self, phase: Phase) -> None:
        self._disconnects.labels(known(phase, PHASES)).inc()

    def items(self, route: str, count: int, truncated: int) -> None:
        route = known(route, ROUTES)
        self._items.labels(route).inc(count)
        self._truncated.labels(route).inc(truncated)

    def label_mass(self, route: str, masses: npt.NDArray[np.floating]) -> None:
        self._mass.observe(known(route, ROUTES), masses)

    def auth_failed(self, reason: Reason) -> None:
        self._auth.labels(known(reason, AUTH_REASONS)).inc()

    # Reports of the dispatcher.

    def retried(self, cause: str) -> None:
        self._retries.labels(known(cause, RETRY_CAUSES)).inc()

    def resumed(self, cause: str) -> None:
        self._resumes.labels(known(cause, RESUME_CAUSES)).inc()

    def retry_budget_spent(self) -> None:
        self._budget.inc()

    def quarantined(self, entries: int) -> None:
        """Sets how many requests are in quarantine now."""
        self._quarantine.set(entries)

    def fanned_out(self, shards: int) -> None:
        self._shards.observe(shards)

    def called(self, requests: int) -> None:
        """Counts one call to a replica by the number of its scoring requests."""
        self._batched.observe(requests)

    # Reports of health checks.

    def missing(self, processes: int) -> None:
        self._missing.inc(processes)

    def canary(self, failure: str | None, seconds: float) -> None:
        """Counts a canary. `failure` is None, "timeout", "mismatch" or "error"."""
        if failure is None:
            self._canary_seconds.observe(seconds)
        else:
            self._canaries.labels(known(failure, CANARY_FAILURES)).inc()

    def readiness(self, ready: int, required: int) -> None:
        """Sets how many replicas pass their canaries now, and how many /readyz requires."""
        self._ready.set(ready)
        self._required.set(required)

    def loop_lagged(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def families(self) -> tuple[Family, ...]:
        """Returns all metrics of this process."""
        return (*families_of(self.registry.collect()), self._mass.family(), *process_families())
