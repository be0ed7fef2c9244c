"""Notices that an ingress is being stopped, and ends its streams after a grace period.

Serve calls nothing when it begins to stop a replica, but it removes it from the set of replicas immediately. An ingress
that its own deployment no longer names finishes what it has, says so at /readyz, and may end its streams after a while.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from deployments.broadcast import Broadcast
from deployments.config.app_args import DrainArgs
from deployments.routing.health_monitor import HealthMonitor

log = logging.getLogger("ray.serve")
PERIOD_S = 1.0
NAMES_S = 2.0
# Returns the names of this deployment's replicas, or None where one did not answer.
Names = Callable[[], Awaitable[Sequence[str] | None]]


class DrainWatcher:
    """Looks for the ingress among its siblings. It counts as stopping only after it has been seen among them."""

    def __init__(
        self, own: str, names: Names, health: HealthMonitor, cut: Callable[[], None], drain: DrainArgs
    ) -> None:
        self._own = own
        self._names = names
        self._health = health
        self._cut = cut
        self._grace_s = drain.stream_grace_s
        self._seen = False
        self._ending: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # the loop must outlive a failed round
                log.exception("The search for this ingress among its siblings failed.")
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        names = await self._names()
        if names is None:
            return
        self._seen = self._seen or self._own in names
        leaving = self._seen and self._own not in names
        if leaving == self._health.leaving:
            return
        log.info("This ingress is %s.", "being stopped" if leaving else "back")
        self._health.leaving = leaving
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if leaving and self._grace_s is not None:
            self._ending = asyncio.get_running_loop().call_later(self._grace_s, self._cut)


def names_of(siblings: Broadcast) -> Names:
    async def names() -> Sequence[str] | None:
        found = await siblings("name", NAMES_S)
        answered = [name for name in found if isinstance(name, str)]
        return answered if len(answered) == len(found) else None

    return names
