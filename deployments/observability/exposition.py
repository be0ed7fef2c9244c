"""Builds the metrics of one process, and merges those of all processes into one exposition.

A `Snapshot` crosses between processes; `merge` adds the labels `deployment` and `replica`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))[:-2]  # buckets of times
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Snapshot(NamedTuple):
    """Holds all metrics of one process."""

    deployment: str
    replica: str  # unique: a restarted replica is a new series, so that sums stay right
    families: tuple[Metric, ...]


def collected(registry: CollectorRegistry) -> tuple[Metric, ...]:
    """Returns the metrics of a registry, without creation times, and this process's resident memory."""
    found = tuple(registry.collect())
    for metric in found:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    size = psutil.Process().memory_info().rss
    return (*found, GaugeMetricFamily("assay_process_resident_bytes", "Resident memory of the process.", size))


class _Merged:
    """Gives generate_latest the metrics of all snapshots, under one name each."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for snapshot in self._snapshots:
            own = {"deployment": snapshot.deployment, "replica": snapshot.replica}
            for metric in snapshot.families:
                into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                into.samples += [sample._replace(labels=sample.labels | own) for sample in metric.samples]
        yield from merged.values()


def merge(snapshots: Sequence[Snapshot]) -> bytes:
    """Renders all snapshots in Prometheus' text format."""
    return generate_latest(_Merged(snapshots))


def histogram(
    name: str,
    help: str,
    bounds: Sequence[float],
    totals: Mapping[str, tuple[Sequence[int], float]],
    label: str,
) -> Metric:
    """Makes a histogram from counts that are kept elsewhere.

    Args:
        name: of the metric.
        help: what it measures.
        bounds: upper bounds of the buckets, ascending.
        totals: by value of `label`: counts of each bucket, with one more for what is above all bounds, and the sum.
        label: the one label.
    """
    made = HistogramMetricFamily(name, help, labels=(label,))
    limits = [*map(str, map(float, bounds)), "+Inf"]
    for value, (counts, total) in totals.items():
        made.add_metric((value,), list(zip(limits, accumulate(counts), strict=True)), total)
    return made


def labelled(kind: Kind, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """Makes a metric with one label from totals by its value."""
    made = kind(name, help, labels=(label,))
    for value, total in values.items():
        made.add_metric((value,), total)
    return made
