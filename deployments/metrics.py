"""Metrics of one process in a private registry, and how those of all processes become one exposition.

A process collects to plain tuples (`Family`), which cross between processes; `merge` adds the labels `deployment` and
`replica` and renders. Label values come from closed sets: whatever is outside becomes "other".
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from deployments.observer import Phase, Stage
from deployments.wire.errors import KINDS

OTHER = "other"
SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))[:-2]
SHARDS = (1, 2, 4, 8, 16, 32, 64)
ROUTES = frozenset(
    (
        "/generative_scoring",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/decisions",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model_id:path}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/healthz",
        "/readyz",
        "/health",
        "/version",
        "/metrics",
        "/openapi.json",
    )
)
STATUSES = frozenset(str(kind.status) for kind in KINDS.values()) | {"200", "499"}
CODES = frozenset(KINDS) | {""}
STAGES = frozenset(get_args(Stage))
PHASES = frozenset(get_args(Phase))
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
RETRY_CAUSES = ("died", "unavailable", "busy", "step_failed", "handoff")


class Sample(NamedTuple):
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(NamedTuple):
    """One metric of one process."""

    name: str
    kind: str  # counter, gauge, histogram, summary
    help: str
    samples: tuple[Sample, ...]


class Snapshot(NamedTuple):
    """Everything one process has to tell."""

    deployment: str
    replica: str  # unique: a restarted replica is a new series, and sums stay true
    families: tuple[Family, ...]


def known(value: object, allowed: frozenset[str]) -> str:
    text = str(value)
    return text if text in allowed else OTHER


class IngressMetrics:
    """The HTTP layer's `Observer`, and what dispatch counts."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter("assay_requests", "Answered requests.", ["route", "status", "code"], registry=registry)
        self._seconds = Histogram(
            "assay_request_seconds", "From the first byte to the last.", ["route"], buckets=SECONDS, registry=registry
        )
        self._stages = Histogram(
            "assay_stage_seconds", "Parts of a request.", ["stage"], buckets=SECONDS, registry=registry
        )
        self._first = Histogram(
            "assay_time_to_first_token_seconds", "Of completions.", ["route"], buckets=SECONDS, registry=registry
        )
        self._inflight = Gauge("assay_inflight_requests", "Requests being answered.", registry=registry)
        self._streams = Gauge("assay_open_streams", "Streams being written.", registry=registry)
        self._rejected = Counter("assay_rejected", "Refused requests.", ["reason"], registry=registry)
        self._disconnects = Counter("assay_disconnects", "Clients that left.", ["phase"], registry=registry)
        self._items = Counter("assay_items", "Items scored.", ["route"], registry=registry)
        self._truncated = Counter("assay_truncated_items", "Items that were cut.", ["route"], registry=registry)
        self._retries = Counter("assay_retries", "Tasks sent again.", ["cause"], registry=registry)
        self._resumes = Counter("assay_resumes", "Streams that went on elsewhere.", ["cause"], registry=registry)
        self._spent = Counter(
            "assay_retry_budget_exhausted", "Retries that there was no budget for.", registry=registry
        )
        self._quarantined = Gauge("assay_quarantine_entries", "Requests that are refused.", registry=registry)
        self._blocks = Histogram(
            "assay_fanout_shards", "Blocks of a scoring request.", buckets=SHARDS, registry=registry
        )
        self._missing = Counter("assay_scrape_missing", "Processes that did not answer a scrape.", registry=registry)
        self._canaries = Counter(
            "assay_canary_failures", "Canaries that failed, as this ingress saw them.", ["reason"], registry=registry
        )
        self._canary_seconds = Histogram(
            "assay_canary_seconds", "Canaries that passed.", buckets=SECONDS, registry=registry
        )

    def request_started(self, body_bytes: int) -> None:
        self._inflight.inc()

    def request_ended(self, route: str, status: int, code: str, seconds: float, body_bytes: int) -> None:
        self._inflight.dec()
        route = known(route, ROUTES)
        self._requests.labels(route, known(status, STATUSES), known(code, CODES)).inc()
        self._seconds.labels(route).observe(seconds)
        if code in REJECTIONS:
            self._rejected.labels(REJECTIONS[code]).inc()

    def stage(self, stage: Stage, seconds: float) -> None:
        self._stages.labels(known(stage, STAGES)).observe(seconds)

    def first_token(self, route: str, seconds: float) -> None:
        self._first.labels(known(route, ROUTES)).observe(seconds)

    def streams(self, change: int) -> None:
        self._streams.inc(change)

    def disconnected(self, phase: Phase) -> None:
        self._disconnects.labels(known(phase, PHASES)).inc()

    def items(self, route: str, count: int, truncated: int) -> None:
        route = known(route, ROUTES)
        self._items.labels(route).inc(count)
        self._truncated.labels(route).inc(truncated)

    def retried(self, cause: str) -> None:
        self._retries.labels(known(cause, frozenset(RETRY_CAUSES))).inc()

    def resumed(self, cause: str) -> None:
        self._resumes.labels(known(cause, frozenset(RETRY_CAUSES))).inc()

    def budget_spent(self) -> None:
        self._spent.inc()

    def quarantined(self, entries: int) -> None:
        self._quarantined.set(entries)

    def fanned_out(self, blocks: int) -> None:
        self._blocks.observe(blocks)

    def missing(self, processes: int) -> None:
        self._missing.inc(processes)

    def canary(self, failure: str | None, seconds: float) -> None:
        """`failure` is None, "timeout", "mismatch" or "error"."""
        if failure is None:
            self._canary_seconds.observe(seconds)
        else:
            self._canaries.labels(known(failure, frozenset(("timeout", "mismatch", "error")))).inc()

    def families(self) -> tuple[Family, ...]:
        return families_of(self.registry.collect()) + process_families()


def process_families() -> tuple[Family, ...]:
    """This process's resident memory, where the system tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return ()
    size = pages * os.sysconf("SC_PAGE_SIZE")
    return (gauge("assay_process_resident_bytes", "Memory of the process.", {(): size}),)


def families_of(metrics: Iterable[Metric]) -> tuple[Family, ...]:
    """Plain tuples of prometheus_client's objects, without the creation times that nobody asked for."""
    return tuple(
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            tuple(
                Sample(sample.name, tuple(sample.labels.items()), float(sample.value))
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ),
        )
        for metric in metrics
    )


class _Merged:
    """What generate_latest reads: families of all snapshots under one name each."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for snapshot in self._snapshots:
            own = {"deployment": snapshot.deployment, "replica": snapshot.replica}
            for family in snapshot.families:
                metric = merged.setdefault(family.name, Metric(family.name, family.help, family.kind))
                for sample in family.samples:
                    metric.add_sample(sample.name, dict(sample.labels) | own, sample.value)
        yield from merged.values()


def merge(snapshots: Sequence[Snapshot]) -> bytes:
    """Prometheus text of all snapshots."""
    return generate_latest(_Merged(snapshots))


def counter(name: str, help: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Family:
    """A counter from totals kept elsewhere; `values` is keyed by label values."""
    return _plain(name, "counter", help, values, labels, "_total")


def gauge(name: str, help: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Family:
    return _plain(name, "gauge", help, values, labels, "")


def summary(name: str, help: str, label: str, totals: Mapping[str, tuple[float, float]]) -> Family:
    """Count and sum by the values of `label`: exact means at no cost per event."""
    samples = []
    for value, (count, total) in totals.items():
        labels = ((label, value),)
        samples += [Sample(f"{name}_count", labels, count), Sample(f"{name}_sum", labels, total)]
    return Family(name, "summary", help, tuple(samples))


def _plain(
    name: str, kind: str, help: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str], suffix: str
) -> Family:
    samples = (Sample(name + suffix, tuple(zip(labels, key, strict=True)), value) for key, value in values.items())
    return Family(name, kind, help, tuple(samples))
