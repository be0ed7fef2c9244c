"""Lets requests begin one after another, tenants in turn, as fast as an event loop can follow.

A loop runs what is ready in the order in which it came. Where one tenant sends hundreds of requests together, the first
thing that another one sends waits until the loop has begun all of them, and no queue behind it can make up for that.
Here the loop begins one request, goes round a few times, which is what the beginning of a request takes, and begins the
next one: the requests that wait are in queues by tenant.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable

ROUNDS = 4  # of the loop, between two requests that begin


class FairTurns:
    """Gives each request its turn. For one event loop at a time: another one begins anew."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first
        self._left = 0  # rounds until the next request may begin

    async def take(self, tenant: Hashable) -> None:
        """Returns when a request of a tenant may begin: immediately where none waits and the last one has begun."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._left = loop, 0
            self._queues.clear()
        if not self._left:
            self._left = ROUNDS
            loop.call_soon(self._go_round, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        await turn

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            return
        self._left -= 1
        if not self._left and self._begin_next():
            self._left = ROUNDS
        if self._left:
            loop.call_soon(self._go_round, loop)

    def _begin_next(self) -> bool:
        """Gives the next tenant's first request its turn. Returns whether there is one whose client still waits."""
        while self._queues:
            tenant, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind all others
            if not turn.done():  # else its client has left
                turn.set_result(None)
                return True
        return False
