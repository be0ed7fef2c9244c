"""Convoys: small tasks for the same replica that go there in one call.

A call costs the replica's process about as much as all else that it does for a small task. So while calls with small
tasks are under way to a replica, two unless told otherwise, those that come after them wait here for one to return, and
go together. A replica computes one step after another, so that they would have waited there; what it costs them is the
way there and back. Where fewer calls are under way a task leaves at once and alone.

A convoy is a way to travel and nothing else: each task keeps its own place on the books, deadline, answer and failure.
Where a replica has no room for all of them, those without a place are told at once and the others come again. But all
who are computed together are answered when the last is done. Replicas serve the tasks of a key and priority in the
order in which they would end if served equally, so that those of one size that come together are done together: these
share a convoy. One that leaves the convoy on its way, since its client has gone, is computed to its end, unless all
have left.
"""

import asyncio
import contextvars
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from deployments.config.sections import FanoutArgs
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Convoy, LikelihoodTask, Route, ScoreTask
from deployments.routing.errors import unexpected
from deployments.routing.replica_call import Calls

Task = TypeVar("Task", ScoreTask, LikelihoodTask)
SIZES = 4  # classes of size between one and its double: the largest of a class is 19 % over the smallest


class Place(NamedTuple):
    """What the tasks of a convoy have in common."""

    kind: type
    replica: str
    tenant: str
    priority: int
    size: int

    @classmethod
    def of(cls, task: ScoreTask | LikelihoodTask, replica: str) -> "Place":
        size = math.floor(SIZES * math.log2(max(1, _tokens(task))))
        return cls(type(task), replica, task.tenant, task.priority, size)


class Convoys:
    """Those of one process. Belongs to the running event loop."""

    def __init__(self, handle: Any, calls: Calls, fanout: FanoutArgs, metrics: IngressMetrics) -> None:
        self._handle = handle
        self._calls = calls
        self._fanout = fanout
        self._metrics = metrics
        self._forming: dict[Place, _Party] = {}
        self._under_way: Counter[str] = Counter()  # calls with small tasks, by replica
        # Serve ends the calls of a request whose client has gone, and knows them by context: a convoy is nobody's.
        self._context = contextvars.copy_context()

    async def carry(self, method: Any, task: Task) -> object:
        """As `Calls.once`."""
        if not self._is_small(task):
            self._metrics.called(1)
            return await self._calls.once(method, task)
        assert task.route is not None
        replica = task.route.replicas[0]
        if self._under_way[replica] >= self._fanout.convoy_calls:
            return await self._calls.answer(self._seat(method, task), task)
        self._metrics.called(1)
        self._begin(replica)
        try:
            return await self._calls.once(method, task)
        finally:
            self._end(replica)

    def _is_small(self, task: ScoreTask | LikelihoodTask) -> bool:
        """Whether the task may have company."""
        if task.isolated or task.accepted or task.route is None or not task.route.replicas:
            return False  # what was accepted is let in, and may not be refused with its company
        return self._fanout.convoy_calls > 0 and _tokens(task) <= self._fanout.convoy_task_tokens

    def _begin(self, replica: str) -> None:
        self._under_way[replica] += 1

    def _end(self, replica: str) -> None:
        """A call has returned: those leave that have waited for it."""
        self._under_way[replica] -= 1
        if not self._under_way[replica]:
            del self._under_way[replica]
        if self._under_way[replica] < self._fanout.convoy_calls:
            for place in [place for place in self._forming if place.replica == replica]:
                self._depart(place, self._forming[place])

    def _seat(self, method: Any, task: ScoreTask | LikelihoodTask) -> "Seat":
        assert task.route is not None
        place = Place.of(task, task.route.replicas[0])
        party = self._forming.get(place)
        if party is None:
            party = self._forming[place] = _Party(lambda seats: self._send(method, seats))
            party.timer = asyncio.get_running_loop().call_later(self._fanout.convoy_most_s, self._depart, place, party)
        seat = party.seat(task)
        self._calls.loads.hold(task.route.ticket)
        if len(party.seats) >= self._fanout.convoy_tasks or party.tokens >= self._most_tokens(place.replica):
            self._depart(place, party)
        return seat

    def _most_tokens(self, replica: str) -> float:
        """Of a convoy: all are answered when the last is done, so it takes the replica no longer than they may wait."""
        fanout, per_s = self._fanout, self._calls.loads.waiting(replica).per_s
        return min(fanout.convoy_tokens, fanout.convoy_most_s * per_s) if per_s > 0 else fanout.convoy_tokens

    def _depart(self, place: Place, party: "_Party") -> None:
        if self._forming.get(place) is party:
            del self._forming[place]
        call = self._context.copy().run(party.depart)
        if call is not None:
            self._begin(place.replica)
            call.add_done_callback(lambda _: self._end(place.replica))

    def _send(self, method: Any, seats: "Sequence[Seat]") -> Any:
        tasks = tuple(seat.task for seat in seats)
        for task in tasks:
            assert task.route is not None
            self._calls.loads.let_go(task.route.ticket)
        self._metrics.called(len(tasks))
        if len(tasks) == 1:
            return method.remote(tasks[0])
        first, *others = (task.route for task in tasks if task.route is not None)
        route = Route(first.replicas, first.ticket, tuple(other.ticket for other in others))
        return self._handle.together.remote(Convoy(tasks=tasks, route=route))


class Seat:
    """One task's part of a convoy: awaited and cancelled as the response to a call of its own."""

    def __init__(self, party: "_Party", task: ScoreTask | LikelihoodTask) -> None:
        self._party = party
        self.task = task
        self.reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, object]:
        return self.reply.__await__()

    def cancel(self) -> None:
        self._party.leave(self)


class _Party:
    """Tasks that form a convoy, and then the call of it; where the replica had room for some of them only, a second
    call for these."""

    def __init__(self, send: Callable[[Sequence[Seat]], Any]) -> None:
        self.seats: list[Seat] = []
        self.tokens = 0
        self.timer: asyncio.TimerHandle | None = None
        self._send = send
        self._aboard = 0
        self._call: asyncio.Task[None] | None = None

    def seat(self, task: ScoreTask | LikelihoodTask) -> Seat:
        seat = Seat(self, task)
        self.seats.append(seat)
        self.tokens += _tokens(task)
        self._aboard += 1
        return seat

    def leave(self, seat: Seat) -> None:
        """Whoever leaves before the departure is not sent; the last to leave ends the call."""
        self._aboard -= 1
        if self._call is None:
            self.seats.remove(seat)
            self.tokens -= _tokens(seat.task)
        elif not self._aboard:
            self._call.cancel()

    def depart(self) -> "asyncio.Task[None] | None":
        """The call, if there is one now that was not before: all may have left."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.seats or self._call is not None:
            return None
        self._call = asyncio.get_running_loop().create_task(self._travel())
        return self._call

    async def _travel(self) -> None:
        try:
            replies = await self._replies(self.seats)
            self._hand_out(self.seats, replies)
            left = [seat for seat, reply in zip(self.seats, replies, strict=True) if reply is None]
            left = [seat for seat in left if not seat.reply.done()]
            if left:
                full = next(reply for reply in replies if reply is not None)
                again = await self._replies(left)  # they may find the room taken
                self._hand_out(left, [full if reply is None else reply for reply in again])
        except asyncio.CancelledError:
            for seat in self.seats:
                seat.reply.cancel()
        except Exception as error:  # Ray raises what it likes: each task meets it as that of its own call
            for seat in self.seats:
                if not seat.reply.done():
                    seat.reply.set_exception(error)

    async def _replies(self, seats: Sequence[Seat]) -> Sequence[object]:
        """One a seat; None for those for whom there was room, where there was none for others."""
        response = self._send(seats)
        try:
            found: object = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        if len(seats) == 1:
            return (found,)
        if type(found) is not tuple or len(found) != len(seats):  # replies are tuples, too
            raise unexpected(found)
        if all(reply is None for reply in found):
            raise unexpected(None)
        return found

    @staticmethod
    def _hand_out(seats: Sequence[Seat], replies: Sequence[object]) -> None:
        for seat, reply in zip(seats, replies, strict=True):
            if reply is not None and not seat.reply.done():
                seat.reply.set_result(reply)


def _tokens(task: ScoreTask | LikelihoodTask) -> int:
    return len(task.prefix) + len(task.ids)
