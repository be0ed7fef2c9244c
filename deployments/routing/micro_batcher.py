"""Sends small scoring requests for the same replica in one call (a micro-batch).

A call costs the replica's process about as much as everything else that it does for a small request. While calls with
small requests are under way to a replica, two by default, later ones wait here for one to return, and leave in one
call. A replica computes one step after another, so they would have waited there: the batch costs them the way there and
back. Where fewer calls are under way, a request leaves immediately and alone.

Calls over a link need no micro-batches: what an ingress sends in one turn of its event loop travels together.

A micro-batch is a way to travel and nothing else: each request keeps its own ticket, deadline, answer and failure.
Where a replica has no room for all of them, those without room are refused immediately and the others are sent again.
All requests that are computed are answered when the last is done. Replicas serve the requests of a key and priority in
the order in which they would end if served equally, so that requests of one size that arrive in one call end at the
same time: only such requests share a micro-batch. A request whose client leaves while the call is under way is computed
to its end, unless all have left.
"""

import asyncio
import contextvars
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from deployments.config.sections import FanoutArgs
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import PendingReply, ReplicaTransport, Route, RowsCall
from deployments.routing.replica_call import ReplicaCaller, unexpected
from engine.requests import ScoreRequest

SIZES = 4  # classes of size between one and its double: the largest of a class is 19 % over the smallest


class BatchKey(NamedTuple):
    """Holds what the requests of a micro-batch have in common."""

    kind: type
    replica: str
    tenant: str
    priority: int
    size: int
    raw_logits: bool  # computed in steps of their own

    @classmethod
    def of(cls, request: RowsCall, replica: str) -> "BatchKey":
        size = math.floor(SIZES * math.log2(max(1, _tokens(request))))
        raw_logits = isinstance(request, ScoreRequest) and request.raw_logits
        return cls(type(request), replica, request.tenant, request.priority, size, raw_logits)


class MicroBatcher:
    """Forms the micro-batches of one process. It belongs to the running event loop."""

    def __init__(
        self, transport: ReplicaTransport, caller: ReplicaCaller, fanout: FanoutArgs, metrics: IngressMetrics
    ) -> None:
        self._transport = transport
        self._caller = caller
        self._fanout = fanout
        self._metrics = metrics
        self._forming: dict[BatchKey, MicroBatch] = {}
        self._under_way: Counter[str] = Counter()  # calls with small requests, by replica
        # Serve ends the calls of a request whose client has gone, and finds them by context: a batch has its own.
        self._context = contextvars.copy_context()

    async def send(self, request: RowsCall, route: Route) -> object:
        """Sends the request, alone or in a micro-batch, and returns its reply. Raises as `ReplicaCaller.call`."""
        if not self._is_small(request, route):
            self._metrics.called(1)
            return await self._caller.call(self._transport, request, route)
        replica = route.replicas[0]
        if self._under_way[replica] >= self._fanout.micro_batch_calls:
            return await self._caller.reply(self._join(request, route), request, route)
        self._metrics.called(1)
        self._begin(replica)
        try:
            return await self._caller.call(self._transport, request, route)
        finally:
            self._end(replica)

    def _is_small(self, request: RowsCall, route: Route) -> bool:
        """Returns whether the request may share a call. One that was admitted before may not be refused with others."""
        if request.isolated or request.already_admitted or not route.replicas:
            return False
        if self._transport.is_direct(route.replicas[0]):
            return False
        return self._fanout.micro_batch_calls > 0 and _tokens(request) <= self._fanout.micro_batch_request_tokens

    def _begin(self, replica: str) -> None:
        self._under_way[replica] += 1

    def _end(self, replica: str) -> None:
        """Notes that a call has returned, and sends the micro-batches that have waited for it."""
        self._under_way[replica] -= 1
        if not self._under_way[replica]:
            del self._under_way[replica]
        if self._under_way[replica] < self._fanout.micro_batch_calls:
            for key in [key for key in self._forming if key.replica == replica]:
                self._start(key, self._forming[key])

    def _join(self, request: RowsCall, route: Route) -> "PendingItem":
        key = BatchKey.of(request, route.replicas[0])
        batch = self._forming.get(key)
        if batch is None:
            batch = self._forming[key] = MicroBatch(self._call)
            loop, wait_s = asyncio.get_running_loop(), self._fanout.micro_batch_max_wait_s
            batch.timer = loop.call_later(wait_s, self._start, key, batch)
        item = batch.add(request, route)
        self._caller.loads.hold(route.ticket)
        if len(batch.items) >= self._fanout.micro_batch_max_requests or batch.tokens >= self._max_tokens(key.replica):
            self._start(key, batch)
        return item

    def _max_tokens(self, replica: str) -> float:
        """Returns the bound of a micro-batch: computing it takes the replica no longer than a request may wait."""
        fanout, rate = self._fanout, self._caller.loads.queue(replica).tokens_per_s
        if rate <= 0:
            return fanout.micro_batch_max_tokens
        return min(fanout.micro_batch_max_tokens, fanout.micro_batch_max_wait_s * rate)

    def _start(self, key: BatchKey, batch: "MicroBatch") -> None:
        if self._forming.get(key) is batch:
            del self._forming[key]
        call = self._context.copy().run(batch.start)
        if call is not None:
            self._begin(key.replica)
            call.add_done_callback(lambda _: self._end(key.replica))

    def _call(self, items: "Sequence[PendingItem]") -> PendingReply:
        for item in items:
            self._caller.loads.release(item.route.ticket)
        self._metrics.called(len(items))
        first, *others = items
        if not others:
            return self._transport.call(first.request, first.route)
        route = first.route._replace(more=tuple(item.route.ticket for item in others))
        return self._transport.batch(tuple(item.request for item in items), route)


class PendingItem:
    """Represents one request of a micro-batch: awaited and cancelled like the response to a call of its own."""

    def __init__(self, batch: "MicroBatch", request: RowsCall, route: Route) -> None:
        self._batch = batch
        self.request = request
        self.route = route
        self.reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, object]:
        return self.reply.__await__()

    def cancel(self) -> None:
        self._batch.remove(self)


class MicroBatch:
    """Collects requests, and then makes one call for them.

    Where the replica had room for some of them only, it makes a second call for these.
    """

    def __init__(self, send: Callable[[Sequence[PendingItem]], PendingReply]) -> None:
        self.items: list[PendingItem] = []
        self.tokens = 0
        self.timer: asyncio.TimerHandle | None = None
        self._send = send
        self._waiting = 0  # items without an answer whose clients have not left
        self._call: asyncio.Task[None] | None = None

    def add(self, request: RowsCall, route: Route) -> PendingItem:
        item = PendingItem(self, request, route)
        self.items.append(item)
        self.tokens += _tokens(request)
        self._waiting += 1
        return item

    def remove(self, item: PendingItem) -> None:
        """Removes an item. One that leaves before the call is not sent; the last to leave ends the call."""
        if item.reply.done() and not item.reply.cancelled():
            return
        self._waiting -= 1
        if self._call is None:
            self.items.remove(item)
            self.tokens -= _tokens(item.request)
        elif not self._waiting:
            self._call.cancel()

    def start(self) -> "asyncio.Task[None] | None":
        """Starts the call and returns it. None if it has started before or if all items have left."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.items or self._call is not None:
            return None
        self._call = asyncio.get_running_loop().create_task(self._run())
        return self._call

    async def _run(self) -> None:
        try:
            replies = await self._replies(self.items)
            self._deliver(self.items, replies)
            left = [item for item, reply in zip(self.items, replies, strict=True) if reply is None]
            left = [item for item in left if not item.reply.done()]
            if left:
                full = next(reply for reply in replies if reply is not None)
                again = await self._replies(left)  # the room may be taken by now
                self._deliver(left, [full if reply is None else reply for reply in again])
        except asyncio.CancelledError:
            for item in self.items:
                item.reply.cancel()
        except Exception as error:  # Ray raises any type: each request meets it as that of its own call
            for item in self.items:
                if not item.reply.done():
                    item.reply.set_exception(error)

    async def _replies(self, items: Sequence[PendingItem]) -> Sequence[object]:
        """Returns one reply an item; None for items that had room where others had none."""
        response = self._send(items)
        try:
            found: object = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        if len(items) == 1:
            return (found,)
        if type(found) is not tuple or len(found) != len(items):  # replies are tuples, too
            raise unexpected(found)
        if all(reply is None for reply in found):
            raise unexpected(None)
        return found

    def _deliver(self, items: Sequence[PendingItem], replies: Sequence[object]) -> None:
        for item, reply in zip(items, replies, strict=True):
            if reply is not None and not item.reply.done():
                item.reply.set_result(reply)
                self._waiting -= 1


def _tokens(request: RowsCall) -> int:
    return len(request.prefix) + len(request.ids)
