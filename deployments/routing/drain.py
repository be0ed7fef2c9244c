"""Notices that an ingress is being stopped, and ends its streams after a grace period.

Serve calls nothing when it begins to stop a replica, but it removes it from the set of replicas immediately. An ingress
that its own deployment no longer names finishes what it has, says so at /readyz, and may end its streams after a while.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from deployments.config.sections import DrainArgs
from deployments.periodic import PeriodicTask
from deployments.routing.health_monitor import HealthMonitor

log = logging.getLogger("ray.serve")
Names = Callable[[], Sequence[str] | None]  # of this deployment's replicas; None while unknown


class DrainWatcher(PeriodicTask):
    """Looks for the ingress among its siblings. It counts as stopping only after it has been seen among them."""

    period_s = 1.0

    def __init__(
        self, own: str, names: Names, health: HealthMonitor, cut: Callable[[], None], drain: DrainArgs
    ) -> None:
        super().__init__()
        self._own = own
        self._names = names
        self._health = health
        self._cut = cut
        self._grace_s = drain.stream_grace_s
        self._seen = False
        self._ending: asyncio.TimerHandle | None = None

    async def stop(self) -> None:
        self._end_timer()
        await super().stop()

    async def look(self) -> None:
        names = self._names()
        if names is None:
            return
        self._seen = self._seen or self._own in names
        leaving = self._seen and self._own not in names
        if leaving == self._health.leaving:
            return
        log.info("This ingress is %s.", "being stopped" if leaving else "back")
        self._health.leaving = leaving
        self._end_timer()
        if leaving and self._grace_s is not None:
            self._ending = asyncio.get_running_loop().call_later(self._grace_s, self._cut)

    def _end_timer(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None


def names_of(siblings: Any) -> Names:
    """Returns what reads the replicas that a Serve handle would call.

    Serve keeps them up to date in every process and shows them to routers only. Asking each sibling for its name would
    cost calls by the square of their number.
    """
    router = siblings.options()._router._asyncio_router

    def names() -> Sequence[str] | None:
        known = router._request_router  # None until Serve has named its class
        return None if known is None else [replica.unique_id for replica in list(known.curr_replicas)]

    return names
