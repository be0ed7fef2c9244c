"""Sends the quarantine of an ingress to the replicas that it calls."""

import asyncio
import contextlib
from collections.abc import Callable

from deployments.broadcast import Broadcast
from deployments.periodic import PeriodicTask
from deployments.quarantine import Quarantine
from deployments.routing.load_tracker import LoadTracker

SEND_TIMEOUT_S = 5.0


class QuarantineBroadcast(PeriodicTask):
    """Sends one ingress's quarantine to all replicas: when it grows, when replicas join, and every `period_s`."""

    period_s = 30.0

    def __init__(
        self, quarantine: Quarantine, replicas: Broadcast, loads: LoadTracker, report: Callable[[int], None]
    ) -> None:
        """`report` is called with the number of entries. The object belongs to the running event loop."""
        super().__init__()
        self._quarantine = quarantine
        self._replicas = replicas
        self._report = report
        loop = asyncio.get_running_loop()

        def joined(names: frozenset[str], left: frozenset[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self.wake)

        loads.listen(joined)
        quarantine.changed = self.wake

    async def look(self) -> None:
        """Sends the entries. A replica that does not receive them gets them with the next round."""
        entries = self._quarantine.entries()
        self._report(len(entries))
        if entries:
            await self._replicas("quarantine", SEND_TIMEOUT_S, entries)
