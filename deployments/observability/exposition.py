"""Represents the metrics of one process as plain tuples, and merges those of all processes into one exposition.

A `Snapshot` crosses between processes; `merge` adds the labels `deployment` and `replica`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

Labels = tuple[tuple[str, str], ...]
SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))[:-2]  # buckets of times


class Sample(NamedTuple):
    """Holds one value of a metric, as a line of the exposition shows it."""

    name: str
    labels: Labels
    value: float


class Family(NamedTuple):
    """Holds one metric of one process."""

    name: str
    kind: str  # counter, gauge, histogram, summary
    help: str
    samples: tuple[Sample, ...]


class Snapshot(NamedTuple):
    """Holds all metrics of one process."""

    deployment: str
    replica: str  # unique: a restarted replica is a new series, so that sums stay right
    families: tuple[Family, ...]


def families_of(metrics: Iterable[Metric]) -> tuple[Family, ...]:
    """Converts prometheus_client's objects to plain tuples, without creation times."""
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
    """Gives generate_latest the families of all snapshots, under one name each."""

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
    """Renders all snapshots in Prometheus' text format."""
    return generate_latest(_Merged(snapshots))


def counter(name: str, help: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Family:
    """Makes a counter from totals that are kept elsewhere; `values` is keyed by label values."""
    return gauge(f"{name}_total", help, values, labels)._replace(name=name, kind="counter")


def gauge(name: str, help: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Family:
    """Makes a gauge; `values` is keyed by label values."""
    samples = (Sample(name, tuple(zip(labels, key, strict=True)), value) for key, value in values.items())
    return Family(name, "gauge", help, tuple(samples))


def summary(name: str, help: str, count: float, total: float) -> Family:
    """Makes a summary of count and sum, which gives exact means."""
    return Family(name, "summary", help, (Sample(f"{name}_count", (), count), Sample(f"{name}_sum", (), total)))


def histogram(
    name: str,
    help: str,
    bounds: Sequence[float],
    totals: Mapping[str, tuple[Sequence[int], float]],
    label: str,
) -> Family:
    """Makes a histogram from counts that are kept elsewhere.

    Args:
        name: of the metric.
        help: what it measures.
        bounds: upper bounds of the buckets, ascending.
        totals: by value of `label`: counts of each bucket, with one more for what is above all bounds, and the sum.
        label: the one label.
    """
    samples: list[Sample] = []
    for value, (counts, total) in totals.items():
        own, running = ((label, value),), 0
        for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), counts, strict=True):
            running += count
            samples.append(Sample(f"{name}_bucket", (*own, ("le", bound)), running))
        samples += [Sample(f"{name}_count", own, running), Sample(f"{name}_sum", own, total)]
    return Family(name, "histogram", help, tuple(samples))


def process_families() -> tuple[Family, ...]:
    """Returns this process's resident memory, where the system has /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return ()
    size = pages * os.sysconf("SC_PAGE_SIZE")
    return (gauge("assay_process_resident_bytes", "Resident memory of the process.", {(): size}),)
