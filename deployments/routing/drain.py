"""Drain: how an ingress learns that it is to stop, and what becomes of its streams.

Serve calls nothing when it begins to stop a replica, but it leaves it out of the set of replicas at once: an ingress
that its own deployment no longer names goes on with what it has, says so at /readyz, and may end its streams after a
while.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from deployments.broadcast import Broadcast
from deployments.config.sections import DrainArgs
from deployments.routing.health_monitor import Board

log = logging.getLogger("ray.serve")
PERIOD_S = 1.0
NAMES_S = 2.0
# The names of this deployment's replicas; None where somebody did not answer.
Names = Callable[[], Awaitable[Sequence[str] | None]]


class Drain:
    """`start`ed with the ingress. Never to be believed without having been seen among the others."""

    def __init__(self, own: str, names: Names, board: Board, cut: Callable[[], None], drain: DrainArgs) -> None:
        self._own = own
        self._names = names
        self._board = board
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
            except Exception:  # the loop must outlive whatever one round meets
                log.exception("The look for this ingress among its own failed.")
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        names = await self._names()
        if names is None:
            return
        self._seen = self._seen or self._own in names
        leaving = self._seen and self._own not in names
        if leaving == self._board.leaving:
            return
        log.info("This ingress is %s.", "told to stop" if leaving else "back")
        self._board.leaving = leaving
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if leaving and self._grace_s is not None:
            self._ending = asyncio.get_running_loop().call_later(self._grace_s, self._cut)


def names_of(siblings: Broadcast) -> Names:
    async def names() -> Sequence[str] | None:
        found = await siblings("name", NAMES_S)
        told = [name for name in found if isinstance(name, str)]
        return told if len(told) == len(found) else None

    return names
