"""Counts what one process sends and receives over its links."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.observability.exposition import labelled

LOSSES = ("cut", "died", "unreachable", "behind", "invalid")


@dataclass(slots=True, kw_only=True)
class LinkFigures:
    """Holds the totals of all links of a process since its start. Its event loop alone writes them."""

    links: int = 0  # open ones
    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    calls: int = 0  # over links
    losses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0))

    def families(self) -> Iterator[Metric]:
        """Yields the totals as metrics."""
        yield GaugeMetricFamily("assay_links", "Open links to the other side.", self.links)
        yield CounterMetricFamily("assay_link_calls", "Calls that went over a link.", self.calls)
        counted = partial(labelled, CounterMetricFamily)
        frames = {"sent": self.frames_sent, "received": self.frames_received}
        yield counted("assay_link_frames", "Frames of links.", "direction", frames)
        sizes = {"sent": self.bytes_sent, "received": self.bytes_received}
        yield counted("assay_link_bytes", "Bytes of links.", "direction", sizes)
        yield counted("assay_link_losses", "Links that were lost, by cause.", "cause", self.losses)
