"""Counts what one ingress does, as Prometheus metrics in a registry of its own.

The values of every label are a closed set.
"""

import asyncio
import time
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric

from deployments.auth.api_keys import NEEDS
from deployments.auth.authenticator import Reason
from deployments.errors import ERROR_KINDS
from deployments.observability.exposition import SECONDS, LoopHistogram, collected
from deployments.observability.link_figures import LinkFigures
from deployments.periodic import PeriodicTask

Stage = Literal["parse", "tokenize", "admit", "route", "queue", "prefill", "head", "decode", "gather", "encode"]
Phase = Literal["queued", "prefill", "stream", "last"]
OTHER = "other"
# Between tokens, and of delays.
GAP_SECONDS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2.5, 5))[:-2]
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
CANARY_FAILURES = frozenset(("timeout", "mismatch", "error"))
PERIOD_S = 0.05


def known(value: object, allowed: frozenset[str]) -> str:
    """Returns the label value, or "other" for one outside the closed set."""
    text = str(value)
    return text if text in allowed else OTHER


class LoopLagMonitor(PeriodicTask):
    """Measures how late an event loop runs a task that is due; whatever blocks the loop shows here.

    Args:
        observe: receives the delay in seconds, `1 / period_s` times a second while the loop is free.
        period_s: time between two measurements.
    """

    def __init__(self, observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
        self._observe = observe
        self._period = period_s

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + self._period
            await asyncio.sleep(self._period)
            self._observe(max(0.0, clock() - due))


class StageTimer:
    """Counts the time of a `with` block as a stage of a request, unless the block raises."""

    __slots__ = ("_observe", "_stage", "_started")

    def __init__(self, observe: Callable[[float, str], None], stage: Stage) -> None:
        self._observe = observe
        self._stage = stage

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._observe(time.perf_counter() - self._started, self._stage)


class IngressMetrics:
    """Holds the metrics of one ingress process.

    Its methods run on the event loop and do not block. `route` is a declared path or "other", never text of a client.
    Series of small label sets exist from the start with the value 0, so that a rate sees the first event too.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.links = LinkFigures()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(LoopHistogram, registry)
        # Requests.
        requests = counter("assay_requests", "Answered requests.", ("route", "status", "code"))
        self._request_of = cache(requests.labels)  # of values that `known` has let through
        about = "Time from a request's first byte to the last of its answer."
        self._seconds = histogram("assay_request_seconds", about, SECONDS, "route")
        self._stages = histogram("assay_stage_seconds", "Time of the stages of requests.", SECONDS, "stage")
        for stage in sorted(STAGES):
            self._stages.add_series(stage)
        self._inflight = self._body_bytes = 0  # plain numbers: prometheus_client's own take a lock for each change
        about = "Requests that are being answered."
        gauge("assay_inflight_requests", about).set_function(lambda: self._inflight)
        about = "Bytes of the bodies of these requests, until they are parsed."
        gauge("assay_inflight_body_bytes", about).set_function(lambda: self._body_bytes)
        self._streams = gauge("assay_open_streams", "Streams that are being written.")
        self._shards = histogram("assay_fanout_shards", "Shards of a scoring request.", SHARDS)
        about = "Scoring requests, or shards, of one call to a replica."
        self._batched = histogram("assay_micro_batch_requests", about, SHARDS)
        about = "Calls to replicas that went through Ray, where links are on."
        self._handle_calls = counter("assay_handle_calls", about)
        # Tokens and items.
        about = "Time to the first token of completions."
        self._first = histogram("assay_time_to_first_token_seconds", about, SECONDS, "route")
        about = "Mean time between the tokens of a request, one value a request."
        self._gaps = histogram("assay_mean_inter_token_seconds", about, GAP_SECONDS, "route")
        self._items_of = cache(counter("assay_items", "Scored items.", ("route",)).labels)
        truncated = counter("assay_truncated_items", "Scored items that were truncated.", ("route",))
        self._truncated_of = cache(truncated.labels)
        self._mass = histogram("assay_label_mass", "Probability of all labels of an item together.", MASS, "route")
        # Faults.
        self._rejected = counter("assay_rejected", "Refused requests.", ("reason",))
        self._disconnects = counter("assay_disconnects", "Clients that disconnected.", ("phase",))
        self._auth = counter("assay_auth_failures", "Requests without a valid key.", ("reason",))
        self._retries = counter("assay_retries", "Requests, or shards, that were sent again.", ("cause",))
        self._resumes = counter("assay_resumes", "Streams that another replica continued.", ("cause",))
        about = "Retries that were not made because the retry budget was spent."
        self._budget = counter("assay_retry_budget_exhausted", about, ("cause",))
        self._quarantine = gauge("assay_quarantine_entries", "Requests that are in quarantine.")
        # Health.
        self._missing = counter("assay_scrape_missing", "Processes that did not answer a scrape.")
        about = "Canaries that failed, as this ingress saw them."
        self._canaries = counter("assay_canary_failures", about, ("reason",))
        self._canary_seconds = histogram("assay_canary_seconds", "Time of canaries that passed.", SECONDS)
        about = "How late the event loop ran what was due."
        self._lag = histogram("assay_event_loop_lag_seconds", about, GAP_SECONDS)
        self._ready = gauge("assay_ready_replicas", "Replicas that passed their canary within two periods.")
        self._required = gauge("assay_required_replicas", "Ready replicas that /readyz requires.")
        for metric, values in (
            (self._rejected, frozenset(REJECTIONS.values())),
            (self._disconnects, PHASES),
            (self._auth, AUTH_REASONS),
            (self._retries, RETRY_CAUSES),
            (self._resumes, RETRY_CAUSES),
            (self._budget, RETRY_CAUSES),
            (self._canaries, CANARY_FAILURES),
        ):
            for value in sorted(values):
                metric.labels(value)

    # Reports of the HTTP layer.

    def request_started(self) -> None:
        """Counts the first byte of a request."""
        self._inflight += 1

    def request_ended(self, route: str, status: int, code: str, seconds: float) -> None:
        """Counts an answer. `code` is an error code or ""; status 499 is a client that disconnected."""
        self._inflight -= 1
        route = known(route, ROUTES)
        self._request_of(route, known(status, STATUSES), known(code, CODES)).inc()
        self._seconds.observe(seconds, route)
        if code in REJECTIONS:
            self._rejected.labels(REJECTIONS[code]).inc()

    def body(self, change: int) -> None:
        """Counts bytes of bodies that were read (positive) or freed (negative)."""
        self._body_bytes += change

    def stage(self, stage: Stage, seconds: float) -> None:
        """Counts the time of one part of a request."""
        self._stages.observe(seconds, stage)

    def timed(self, stage: Stage) -> "StageTimer":
        """Returns a block whose time counts as a stage, unless the block raises."""
        return StageTimer(self._stages.observe, stage)

    def first_token(self, route: str, seconds: float) -> None:
        """Counts the time to a request's first token."""
        self._first.observe(seconds, known(route, ROUTES))

    def token_gap(self, route: str, seconds: float) -> None:
        """Counts the mean time between a request's tokens, once, at its end."""
        self._gaps.observe(seconds, known(route, ROUTES))

    def streams(self, change: int) -> None:
        """Counts a stream that opens or closes."""
        self._streams.inc(change)

    def disconnected(self, phase: Phase) -> None:
        """Counts a client that disconnected before its answer was complete."""
        self._disconnects.labels(known(phase, PHASES)).inc()

    def items(self, route: str, count: int, truncated: int) -> None:
        """Counts how many items were scored, and how many of them were truncated."""
        route = known(route, ROUTES)
        self._items_of(route).inc(count)
        self._truncated_of(route).inc(truncated)

    def label_mass(self, route: str, masses: npt.NDArray[np.floating]) -> None:
        """Counts the probability of all labels together, [N], finite, for each scored item."""
        self._mass.observe_all(masses, known(route, ROUTES))

    def auth_failed(self, reason: Reason) -> None:
        """Counts a request without a valid key."""
        self._auth.labels(known(reason, AUTH_REASONS)).inc()

    # Reports of the dispatcher.

    def retried(self, cause: str) -> None:
        self._retries.labels(known(cause, RETRY_CAUSES)).inc()

    def resumed(self, cause: str) -> None:
        self._resumes.labels(known(cause, RETRY_CAUSES)).inc()

    def retry_budget_spent(self, cause: str) -> None:
        self._budget.labels(known(cause, RETRY_CAUSES)).inc()

    def quarantined(self, entries: int) -> None:
        """Sets how many requests are in quarantine now."""
        self._quarantine.set(entries)

    def fanned_out(self, shards: int) -> None:
        self._shards.observe(shards)

    def called(self, requests: int) -> None:
        """Counts one call to a replica by the number of its scoring requests."""
        self._batched.observe(requests)

    def sent_by_handle(self) -> None:
        """Counts a call to a replica that no link carried."""
        self._handle_calls.inc()

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

    def families(self) -> tuple[Metric, ...]:
        """Returns all metrics of this process."""
        return (*collected(self.registry), *self.links.families())
