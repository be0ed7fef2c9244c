"""Sends the quarantine of an ingress to the replicas that it calls."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from deployments.broadcast import Broadcast
from deployments.quarantine import Entries, Quarantine
from deployments.routing.load_tracker import LoadTracker

log = logging.getLogger("ray.serve")
PERIOD_S = 30.0
SEND_TIMEOUT_S = 5.0


class QuarantineBroadcast:
    """Sends one ingress's quarantine to all replicas: when it grows, when replicas join, and every PERIOD_S."""

    def __init__(
        self, quarantine: Quarantine, replicas: Broadcast, loads: LoadTracker, report: Callable[[int], None]
    ) -> None:
        """`report` is called with the number of entries. The object belongs to the running event loop."""
        self._quarantine = quarantine
        self._replicas = replicas
        self._report = report
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def joined(names: frozenset[str], left: frozenset[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._news.set)

        loads.listen(joined)
        quarantine.changed = self._news.set
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._news.wait()
            self._news.clear()
            entries = self._quarantine.entries()
            self._report(len(entries))
            if entries:
                await self._send(entries)

    async def _send(self, entries: Entries) -> None:
        """Sends the entries. A replica that does not receive them gets them with the next round."""
        try:
            await self._replicas("quarantine", SEND_TIMEOUT_S, entries)
        except Exception:  # the loop must outlive whatever one round meets
            log.exception("The quarantine could not be sent to the replicas.")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
