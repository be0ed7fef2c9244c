"""Renders the metrics of one process, and merges those of all processes into one exposition.

A `Snapshot` crosses between processes. Each process renders its own samples, in pieces between which its event loop
goes on, with the labels `deployment` and `replica`; the process that is scraped only joins them.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))[:-2]  # buckets of times
PIECE = 64  # samples that are rendered at a stroke: a family has as many as its labels have values
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class RenderedFamily(NamedTuple):
    """Holds one metric of one process in Prometheus' text format."""

    name: str
    head: bytes  # its help and its type
    samples: bytes  # a line each


class Snapshot(NamedTuple):
    """Holds all metrics of one process."""

    deployment: str
    replica: str  # unique: a restarted replica is a new series, so that sums stay right
    families: tuple[RenderedFamily, ...]


def collected(registry: CollectorRegistry) -> tuple[Metric, ...]:
    """Returns the metrics of a registry, without creation times, and this process's resident memory."""
    found = tuple(registry.collect())
    for metric in found:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    size = psutil.Process().memory_info().rss
    return (*found, GaugeMetricFamily("assay_process_resident_bytes", "Resident memory of the process.", size))


async def snapshot(deployment: str, replica: str, metrics: Sequence[Metric]) -> Snapshot:
    """Renders the metrics of a process, and lets its event loop go on after every PIECE samples."""
    families, labels = [], {"deployment": deployment, "replica": replica}
    for metric in metrics:
        pieces = []
        for start in range(0, max(1, len(metric.samples)), PIECE):
            pieces.append(render(metric, labels, start, start + PIECE))
            await asyncio.sleep(0)
        families.append(pieces[0]._replace(samples=b"".join(piece.samples for piece in pieces)))
    return Snapshot(deployment, replica, tuple(families))


def render(metric: Metric, labels: Mapping[str, str], start: int = 0, end: int | None = None) -> RenderedFamily:
    """Renders one metric, each sample with more labels; of its samples those from `start` to before `end`."""
    own = Metric(metric.name, metric.documentation, metric.type)
    own.samples = [sample._replace(labels={**sample.labels, **labels}) for sample in metric.samples[start:end]]
    about, kind, samples = generate_latest(_One(own)).split(b"\n", 2)
    return RenderedFamily(metric.name, about + b"\n" + kind + b"\n", samples)


class _One:
    """Gives generate_latest one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


async def merge(snapshots: Sequence[Snapshot]) -> list[bytes]:
    """Joins all snapshots, each metric under one name, and lets the event loop go on after each.

    The first snapshot that has a metric says what it is.

    Returns:
        The text of each metric: joining all of a hundred processes at a stroke would hold the loop for 12 ms.
    """
    parts: dict[str, list[bytes]] = {}
    for one in snapshots:
        for family in one.families:
            parts.setdefault(family.name, [family.head]).append(family.samples)
        await asyncio.sleep(0)
    pieces: list[bytes] = []
    for texts in parts.values():
        pieces.append(b"".join(texts))
        await asyncio.sleep(0)
    return pieces


class LoopHistogram(Collector):
    """Counts numbers in a histogram with at most one label, for one event loop, which also collects it.

    prometheus_client's own takes locks, and looks at each bucket: a request has ten numbers to count.
    """

    def __init__(
        self, registry: CollectorRegistry, name: str, help: str, bounds: Sequence[float], label: str = ""
    ) -> None:
        """Registers an empty histogram.

        Args:
            registry: Collects it.
            name: of the metric.
            help: The meaning of its numbers.
            bounds: Upper bounds of the buckets, ascending.
            label: The one label; empty: there is none, and the only series exists from the start.
        """
        self.name, self.label = name, label
        self._help, self._bounds = help, tuple(bounds)
        self._series: dict[str, list[float]] = {}  # by value of the label: the counts of its buckets, and their sum
        if not label:
            self.add_series("")
        registry.register(self)

    def add_series(self, value: str) -> list[float]:
        """Makes the series of a value of the label, if it is new; returns the counts of its buckets, and their sum."""
        return self._series.setdefault(value, [*[0] * (len(self._bounds) + 1), 0.0])

    def observe(self, number: float, value: str = "") -> None:
        """Counts a number under a value of the label."""
        series = self._series.get(value) or self.add_series(value)
        series[bisect_left(self._bounds, number)] += 1
        series[-1] += number

    def observe_all(self, numbers: npt.NDArray[np.floating], value: str = "") -> None:
        """Counts `numbers`, [N], all finite."""
        series = self.add_series(value)
        places = np.searchsorted(self._bounds, numbers, "left")
        for bucket, count in enumerate(np.bincount(places).tolist()):
            series[bucket] += count
        series[-1] += float(numbers.sum(dtype=np.float64))

    def collect(self) -> Iterator[Metric]:
        """Yields the metric."""
        totals = {value: (series[:-1], series[-1]) for value, series in self._series.items()}
        yield histogram(self.name, self._help, self._bounds, totals, self.label)


def histogram(
    name: str,
    help: str,
    bounds: Sequence[float],
    totals: Mapping[str, tuple[Sequence[float], float]],
    label: str,
) -> Metric:
    """Makes a histogram from counts that are kept elsewhere.

    Args:
        name: of the metric.
        help: what it measures.
        bounds: upper bounds of the buckets, ascending.
        totals: by value of `label`: counts of each bucket, with one more for what is above all bounds, and the sum.
        label: the one label; empty: there is none.
    """
    made = HistogramMetricFamily(name, help, labels=(label,) if label else ())
    limits = [*map(str, map(float, bounds)), "+Inf"]
    for value, (counts, total) in totals.items():
        made.add_metric((value,) if label else (), list(zip(limits, accumulate(counts), strict=True)), total)
    return made


def labelled(kind: Kind, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """Makes a metric with one label from totals by its value."""
    made = kind(name, help, labels=(label,))
    for value, total in values.items():
        made.add_metric((value,), total)
    return made
