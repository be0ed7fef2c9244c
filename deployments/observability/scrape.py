"""Scrape: the metrics of every process of the application as one text, whichever ingress is asked."""

import asyncio
import time
from collections.abc import Callable

from deployments.broadcast import Collect
from deployments.config.app_args import MetricsArgs
from deployments.observability.exposition import Snapshot, merge
from deployments.observability.ingress_metrics import IngressMetrics


class Scrape:
    """Single flight: who asks while one is under way gets that one's answer; who asks soon after gets it again."""

    def __init__(
        self,
        replicas: Collect,
        ingresses: Collect,
        own: Callable[[], Snapshot],
        metrics: IngressMetrics,
        args: MetricsArgs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._ingresses = ingresses
        self._own = own
        self._metrics = metrics
        self._args = args
        self._clock = clock
        self._flight: asyncio.Task[bytes] | None = None
        self._last = (-float("inf"), b"")

    async def text(self) -> bytes:
        made, text = self._last
        if self._clock() - made < self._args.cache_s:
            return text
        if self._flight is None:
            self._flight = asyncio.create_task(self._scrape())
            self._flight.add_done_callback(self._landed)
        return await asyncio.shield(self._flight)  # a client that leaves must not take it from the others

    def _landed(self, flight: "asyncio.Task[bytes]") -> None:
        self._flight = None
        if not flight.cancelled() and flight.exception() is None:
            self._last = (self._clock(), flight.result())

    async def _scrape(self) -> bytes:
        answers = await asyncio.gather(
            self._replicas("collect", self._args.timeout_s), self._ingresses("collect", self._args.timeout_s)
        )
        found = [answer for group in answers for answer in group if isinstance(answer, Snapshot)]
        self._metrics.missing(sum(map(len, answers)) - len(found))
        own = self._own()  # newer than what the broadcast brought of this process, and there even if that failed
        rest = [snapshot for snapshot in found if snapshot.replica != own.replica]
        return merge([own, *sorted(rest, key=lambda snapshot: (snapshot.deployment, snapshot.replica))])
