"""Collects the metrics of every process of the application as one text, from whichever ingress is scraped."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from deployments.broadcast import Broadcast
from deployments.config.sections import MetricsArgs
from deployments.observability.exposition import Snapshot, merge
from deployments.observability.ingress_metrics import IngressMetrics


class MetricsScraper:
    """Runs at most one collection at a time and serves its result again for `metrics.cache_s`.

    Args:
        replicas: broadcasts to all replicas.
        ingresses: broadcasts to all ingresses.
        own: returns this process's metrics.
        metrics: counts processes that did not answer.
        args: the section `metrics`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        replicas: Broadcast,
        ingresses: Broadcast,
        own: Callable[[], Awaitable[Snapshot]],
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
        self._running: asyncio.Task[list[bytes]] | None = None
        self._last: tuple[float, list[bytes]] = (-float("inf"), [])

    async def text(self) -> list[bytes]:
        """Returns the exposition of all processes, in pieces."""
        made, text = self._last
        if self._clock() - made < self._args.cache_s:
            return text
        if self._running is None:
            self._running = asyncio.create_task(self._scrape())
            self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)  # a client that disconnects must not cancel it for the others

    def _ended(self, task: "asyncio.Task[list[bytes]]") -> None:
        self._running = None
        if not task.cancelled() and task.exception() is None:
            self._last = (self._clock(), task.result())

    async def _scrape(self) -> list[bytes]:
        answers = await asyncio.gather(
            self._replicas("collect", self._args.timeout_s), self._ingresses("collect", self._args.timeout_s)
        )
        found = [answer for group in answers for answer in group if isinstance(answer, Snapshot)]
        self._metrics.missing(sum(map(len, answers)) - len(found))
        own = await self._own()  # newer than this process's broadcast answer, and there even if the broadcast failed
        rest = [snapshot for snapshot in found if snapshot.replica != own.replica]
        return await merge([own, *sorted(rest, key=lambda snapshot: (snapshot.deployment, snapshot.replica))])
