"""Metrics of an ingress, in a private registry: the HTTP layer's `Observer`, and what dispatch counts.

LoopLag: how late an event loop runs what is due. Whatever blocks it shows here, whoever did it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deployments.auth.authenticator import Reason
from deployments.observability.exposition import Family, Tally, families_of, process_families
from deployments.observability.labels import (
    AUTH_REASONS,
    CANARY_FAILURES,
    CODES,
    GAP_SECONDS,
    LAG_SECONDS,
    MASS,
    PHASES,
    REJECTIONS,
    RESUME_CAUSES,
    RETRY_CAUSES,
    ROUTES,
    SECONDS,
    SHARDS,
    STAGES,
    STATUSES,
    known,
)
from deployments.observability.observer import Phase, Stage

PERIOD_S = 0.05


class LoopLag:
    """Tells `observe` seconds of delay, `1 / period_s` times a second while the loop is free."""

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


class IngressMetrics:
    """One process's counts. Series of small label sets stand at 0 from the start: a rate sees the first event too."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_requests(self.registry)
        self._make_tokens(self.registry)
        self._make_faults(self.registry)
        self._make_health(self.registry)

    def _make_requests(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("assay_requests", "Answered requests.", ["route", "status", "code"], registry=registry)
        self._seconds = Histogram(
            "assay_request_seconds", "From the first byte to the last.", ["route"], buckets=SECONDS, registry=registry
        )
        self._stages = Histogram(
            "assay_stage_seconds", "Parts of a request.", ["stage"], buckets=SECONDS, registry=registry
        )
        self._inflight = Gauge("assay_inflight_requests", "Requests being answered.", registry=registry)
        self._body_bytes = Gauge("assay_inflight_body_bytes", "Bodies of requests being answered.", registry=registry)
        self._streams = Gauge("assay_open_streams", "Streams being written.", registry=registry)
        self._blocks = Histogram(
            "assay_fanout_shards", "Blocks of a scoring request.", buckets=SHARDS, registry=registry
        )
        self._call_requests = Histogram(
            "assay_call_requests", "Scoring requests, or blocks, of one call.", buckets=SHARDS, registry=registry
        )

    def _make_tokens(self, registry: CollectorRegistry) -> None:
        self._first = Histogram(
            "assay_time_to_first_token_seconds", "Of completions.", ["route"], buckets=SECONDS, registry=registry
        )
        self._gaps = Histogram(
            "assay_mean_inter_token_seconds",
            "From the first to the last token over the tokens between, one value a request.",
            ["route"],
            buckets=GAP_SECONDS,
            registry=registry,
        )
        self._items = Counter("assay_items", "Items scored.", ["route"], registry=registry)
        self._truncated = Counter("assay_truncated_items", "Items that were cut.", ["route"], registry=registry)
        self._mass = Tally("assay_label_mass", "Probability of all labels of an item together.", MASS, "route")

    def _make_faults(self, registry: CollectorRegistry) -> None:
        self._rejected = Counter("assay_rejected", "Refused requests.", ["reason"], registry=registry)
        self._disconnects = Counter("assay_disconnects", "Clients that left.", ["phase"], registry=registry)
        self._auth = Counter("assay_auth_failures", "Requests without the right key.", ["reason"], registry=registry)
        self._retries = Counter("assay_retries", "Tasks sent again.", ["cause"], registry=registry)
        self._resumes = Counter("assay_resumes", "Streams continued elsewhere.", ["cause"], registry=registry)
        self._budget = Counter(
            "assay_retry_budget_exhausted", "Retries that were not made: too many of late.", registry=registry
        )
        self._quarantine = Gauge("assay_quarantine_entries", "Requests that are refused for good.", registry=registry)
        _stand(self._rejected, set(REJECTIONS.values()))
        _stand(self._disconnects, PHASES)
        _stand(self._auth, AUTH_REASONS)
        _stand(self._retries, RETRY_CAUSES)
        _stand(self._resumes, RESUME_CAUSES)

    def _make_health(self, registry: CollectorRegistry) -> None:
        self._missing = Counter("assay_scrape_missing", "Processes that did not answer a scrape.", registry=registry)
        self._canaries = Counter(
            "assay_canary_failures", "Canaries that failed, as this ingress saw them.", ["reason"], registry=registry
        )
        self._canary_seconds = Histogram(
            "assay_canary_seconds", "Canaries that passed.", buckets=SECONDS, registry=registry
        )
        self._lag = Histogram(
            "assay_event_loop_lag_seconds",
            "How late the event loop ran what was due.",
            buckets=LAG_SECONDS,
            registry=registry,
        )
        _stand(self._canaries, CANARY_FAILURES)
        self._ready = Gauge("assay_ready_replicas", "That passed their canary within two periods.", registry=registry)
        self._wanted = Gauge("assay_ready_replicas_wanted", "That /readyz asks for.", registry=registry)

    # The HTTP layer.

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
        """Counts the block's time as a stage, if it ends well."""
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

    # Calls of replicas.

    def retried(self, cause: str) -> None:
        self._retries.labels(known(cause, RETRY_CAUSES)).inc()

    def resumed(self, cause: str) -> None:
        self._resumes.labels(known(cause, RESUME_CAUSES)).inc()

    def retry_budget_spent(self) -> None:
        self._budget.inc()

    def quarantined(self, entries: int) -> None:
        """How many requests are in quarantine now."""
        self._quarantine.set(entries)

    def fanned_out(self, blocks: int) -> None:
        self._blocks.observe(blocks)

    def called(self, requests: int) -> None:
        """Counts a call of a replica that carries so many scoring requests."""
        self._call_requests.observe(requests)

    # Health.

    def missing(self, processes: int) -> None:
        self._missing.inc(processes)

    def canary(self, failure: str | None, seconds: float) -> None:
        """`failure` is None, "timeout", "mismatch" or "error"."""
        if failure is None:
            self._canary_seconds.observe(seconds)
        else:
            self._canaries.labels(known(failure, CANARY_FAILURES)).inc()

    def readiness(self, ready: int, wanted: int) -> None:
        """Replicas that pass their canaries now, and how many /readyz asks for."""
        self._ready.set(ready)
        self._wanted.set(wanted)

    def loop_lagged(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def families(self) -> tuple[Family, ...]:
        return (*families_of(self.registry.collect()), self._mass.family(), *process_families())


def _stand(counts: Counter, values: Iterable[str]) -> None:
    """Makes the series of these label values, at 0."""
    for value in sorted(values):
        counts.labels(value)
