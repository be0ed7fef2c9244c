"""FairQueue: shares the tokens of steps among tenants and requests; ActiveTenants tells when steps must be short.

Among tenants: deficit round robin by tokens (Shreedhar and Varghese 1996), in the form where a flow may overdraw its
deficit and then earns it back (surplus round robin), because score items cannot be cut at will. Rounds are counted in
tokens: steps of any length share alike. Among the requests of a tenant: the one comes first that would end first if all
were served equally and at the same time (the fair sojourn protocol of Friedman and Henderson 2003). So small requests
do not wait for large ones, none ends later than under equal shares, and equal ones end one after another where equal
shares would end them all together.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engine.scheduler.request_state import RequestState

R = TypeVar("R", bound=RequestState)
STOP = -1
MAX_STALE = 64  # entries of requests and tenants that have left, beside as many as there are
MEMORY_S = 1.0  # between two requests of a tenant that keeps coming: the next one would find a long step under way
TURNS = 8  # in a step of one class
MIN_TURN = 8  # tokens, of a step that is shorter than its turns
MAX_FRUITLESS = 1024  # requests that can have nothing of a step, before it is closed: a plan does not read all queues


@dataclass(slots=True, kw_only=True)
class _Flow(Generic[R]):
    """Holds one tenant, whose requests share one deficit. All requests without a tenant are one flow.

    Under equal shares each request that was there from the start would have got `virtual` tokens by now; a request ends
    there when it has got as many more as its announced cost. One that leaves counts as served in full, whatever it
    took: else tokens that a cache spared, or that a caller gave up, would hold up the others without end.
    """

    deficit: int = 0
    due: int = 0  # when its last turn was, on the clock of its class
    earned: int = 0  # tokens, by its next turn
    ticket: int = 0  # of its place among the waiting tenants
    requests: dict[int, R] = field(default_factory=dict)  # by arrival
    order: list[tuple[float, int]] = field(default_factory=list)  # ends and arrivals, ascending
    virtual: float = 0.0
    unended: list[float] = field(
        default_factory=list
    )  # a heap of the ends behind `virtual`, those of requests that left included
    _ends: dict[int, float] = field(default_factory=dict)  # by arrival
    _unspent: dict[int, int] = field(default_factory=dict)  # tokens, by arrival

    def add(self, request: R) -> None:
        if request.arrival not in self.requests:
            end = self._ends[request.arrival] = self.virtual + request.queued
            self._unspent[request.arrival] = request.queued
            insort(self.order, (end, request.arrival))
            heapq.heappush(self.unended, end)
        self.requests[request.arrival] = request

    def remove(self, arrival: int) -> None:
        self.spend(arrival, self._unspent[arrival])
        del self.requests[arrival], self._unspent[arrival]
        del self.order[bisect_left(self.order, (self._ends.pop(arrival), arrival))]

    def spend(self, arrival: int, tokens: int) -> None:
        """Charges tokens to a request. Nothing happens for one that has left.

        Under equal shares the requests that had not ended would have shared these tokens.
        """
        spent = min(tokens, self._unspent.get(arrival, 0))
        if not spent:
            return
        self._unspent[arrival] -= spent
        left = float(spent)
        while self.unended and left > 0:
            until_next = (self.unended[0] - self.virtual) * len(self.unended)
            if until_next > left:
                self.virtual += left / len(self.unended)
                return
            self.virtual = heapq.heappop(self.unended)
            left -= until_next


class _Turn(NamedTuple):
    """Says what came of one tenant's turn."""

    used: int  # tokens, or STOP
    over: bool  # the tenant has had its share
    done: bool  # one of its requests needs nothing more


@dataclass(slots=True, kw_only=True)
class _PriorityClass(Generic[R]):
    """Holds the tenants of one priority: those that have a turn now, in order, and those that wait for one.

    The clock counts the tokens that a tenant earns in all. A tenant has its next turn once it has earned what it owes
    and a quantum. The clock passes over times at which no tenant has a turn, so the work of a step does not grow with
    what tenants owe.
    """

    quantum: int = 0  # tokens of a turn, in the step that is being shared out
    flows: dict[str, _Flow[R]] = field(default_factory=dict)
    turns: dict[str, _Flow[R]] = field(default_factory=dict)  # their deficits are above 0, or were
    clock: int = 0  # tokens
    _new: dict[str, None] = field(default_factory=dict)  # tenants that have come since the last step
    _times: list[int] = field(default_factory=list)  # a heap of those at which tenants have turns
    _waiting: dict[int, list[tuple[int, str]]] = field(default_factory=dict)  # tickets and tenants, by time
    _tickets: int = 0
    _entries: int = 0  # of all times

    def flow(self, tenant: str) -> _Flow[R]:
        """Returns the flow of a tenant."""
        found = self.flows.get(tenant)
        if found is None:
            found = self.flows[tenant] = _Flow()
            self._new[tenant] = None
        return found

    def begin(self, quantum: int) -> None:
        """Begins a step whose turns are of `quantum` tokens. New tenants wait for their first one."""
        self.quantum = quantum
        for tenant in self._new:
            self.flows[tenant].due = self.clock
            self.wait(tenant)
        self._new.clear()

    def wait(self, tenant: str) -> None:
        """Makes a tenant wait until it owes nothing. Entries of tenants that left are swept out once they are most.

        It earns from the time at which its turn was due, one step ago at most: requests that are not cut may have had
        to wait for a new step.
        """
        flow = self.flows[tenant]
        self.turns.pop(tenant, None)
        self._tickets += 1
        flow.ticket, flow.earned = self._tickets, self.quantum + max(0, -flow.deficit)
        since = max(flow.due, self.clock - TURNS * self.quantum)
        self._enter(since + flow.earned, (flow.ticket, tenant))
        if self._entries > 2 * len(self.flows) + MAX_STALE:
            waiting, self._waiting, self._times, self._entries = self._waiting, {}, [], 0
            for when, entries in waiting.items():
                for entry in filter(self._is_there, entries):
                    self._enter(when, entry)

    def _enter(self, when: int, entry: tuple[int, str]) -> None:
        if when not in self._waiting:
            self._waiting[when] = []
            heapq.heappush(self._times, when)
        self._waiting[when].append(entry)
        self._entries += 1

    def remove(self, tenant: str) -> None:
        del self.flows[tenant]
        self.turns.pop(tenant, None)
        self._new.pop(tenant, None)

    def next_turns(self, last: int | None = None) -> list[str]:
        """Goes on to the next time at which tenants have a turn, if it is not after `last`; returns them."""
        while self._times and (last is None or self._times[0] <= last):
            due = heapq.heappop(self._times)
            self.clock = max(self.clock, due)
            entries = self._waiting.pop(due)
            self._entries -= len(entries)
            tenants = [entry[1] for entry in entries if self._is_there(entry)]
            for tenant in tenants:
                flow = self.turns[tenant] = self.flows[tenant]
                flow.deficit += flow.earned
                flow.due, flow.ticket = due, 0
            if tenants:
                return tenants
        return []

    def _is_there(self, entry: tuple[int, str]) -> bool:
        flow = self.flows.get(entry[1])
        return flow is not None and flow.ticket == entry[0]


@dataclass(slots=True, kw_only=True)
class _Serving:
    """Holds how far one step's tokens are shared out."""

    left: int  # tokens
    quantum: int  # tokens of a turn
    stuck: set[int] = field(default_factory=set)  # arrivals of the requests that can have nothing more
    done: bool = False  # a request needs nothing more: no second turn of a tenant
    stopped: bool = False


class FairQueue(Generic[R]):
    """Orders requests with work of one kind by priority (a lower number is always served first), tenant and request."""

    def __init__(self, quantum: int) -> None:
        """Makes an empty queue. `quantum`: most tokens of one turn."""
        self._quantum = quantum
        self._classes: dict[int, _PriorityClass[R]] = {}
        self._order: list[tuple[int, int, R]] = []  # a heap by priority and arrival; some have left
        self._requests: set[tuple[int, int]] = set()  # priority and arrival

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[R]:
        flows = (flow for group in self._classes.values() for flow in group.flows.values())
        return (request for flow in flows for request in flow.requests.values())

    def by_tenant(self) -> Iterator[tuple[str, int, Iterable[R]]]:
        """Returns each tenant's requests of one priority: (tenant, priority, requests in order of arrival)."""
        for priority, group in self._classes.items():
            for tenant, flow in group.flows.items():
                yield tenant, priority, flow.requests.values()

    def first(self) -> R:
        """Returns the request of the first priority class that arrived first.

        Raises:
            KeyError: the queue is empty.
        """
        while self._order and self._order[0][:2] not in self._requests:
            heapq.heappop(self._order)
        if not self._order:
            raise KeyError("an empty queue has no first request")
        return self._order[0][2]

    def add(self, request: R) -> None:
        """Adds a request. One that is there stays where it is."""
        group = self._classes.get(request.queue_priority)
        if group is None:
            group = self._classes[request.queue_priority] = _PriorityClass()
        group.flow(request.tenant).add(request)
        if (turn := (request.queue_priority, request.arrival)) not in self._requests:
            self._requests.add(turn)
            self._note(request)

    def _note(self, request: R) -> None:
        """Notes the arrival. Requests that have left are swept out once they are the majority."""
        heapq.heappush(self._order, (request.queue_priority, request.arrival, request))
        if len(self._order) > 2 * len(self._requests) + MAX_STALE:
            self._order = [entry for entry in self._order if entry[:2] in self._requests]
            heapq.heapify(self._order)

    def remove(self, request: R) -> None:
        """Removes a request. Nothing happens for one that is not there."""
        turn = (request.queue_priority, request.arrival)
        if turn not in self._requests:
            return
        self._requests.remove(turn)
        group = self._classes[request.queue_priority]
        flow = group.flows[request.tenant]
        flow.remove(request.arrival)
        if not flow.requests:
            group.remove(request.tenant)
        if not group.flows:
            del self._classes[request.queue_priority]

    def serve(self, budget: int, give: Callable[[R, int, int], int]) -> int:
        """Shares out the tokens of one step.

        A turn is a part of the step, however short that is: a tenant that comes waits for no long turn of another.
        A tenant for which nothing could be done keeps its place in front. Turns go on while tokens are left, but not
        once a request is done: its caller would wait for what is added to the step for the others. A step is closed
        once MAX_FRUITLESS requests could have nothing of it.

        Args:
            budget: tokens of the step.
            give: `give(request, allowance, left)` spends about `allowance` and never more than `left` tokens on a
                request, may remove it from the queue, and returns what it spent. 0 means that nothing more can be done
                for this request in this step, STOP the same for any request.

        Returns:
            The tokens used.
        """
        serving = _Serving(left=budget, quantum=min(self._quantum, max(MIN_TURN, budget // TURNS)))
        for priority in sorted(self._classes):
            group = self._classes.get(priority)
            if group is not None:
                self._serve_class(group, serving, give)
            if serving.done or serving.stopped or serving.left <= 0:
                break
        return budget - serving.left

    def _serve_class(self, group: _PriorityClass[R], serving: _Serving, give: Callable[[R, int, int], int]) -> None:
        """Gives the tenants of a class their turns. Once a request is done, each tenant has had one at most."""
        seen: set[str] = set()
        group.begin(serving.quantum)
        last = group.clock + serving.quantum
        tenants = list(group.turns)
        while True:
            for tenant in tenants:
                flow = group.turns.get(tenant)
                if flow is None or (serving.done and tenant in seen):
                    continue
                if serving.left <= 0:
                    return
                seen.add(tenant)
                turn = self._turn(flow, serving, give, only_flow=len(group.flows) == 1)
                if turn.used == STOP:
                    serving.stopped = True
                    return
                serving.left -= turn.used
                serving.done = serving.done or turn.done
                if turn.over and group.flows.get(tenant) is flow:
                    group.wait(tenant)
            if serving.left <= 0:
                return
            tenants = group.next_turns(last if serving.done else None)
            if not tenants:
                return

    def charge(self, request: R, tokens: int) -> None:
        """Charges a tenant tokens beside those of its turns. Nothing happens for a request that is not there."""
        group = self._classes.get(request.queue_priority)
        flow = None if group is None else group.flows.get(request.tenant)
        if flow is not None:
            flow.deficit -= tokens
            flow.spend(request.arrival, tokens)

    def _turn(self, flow: _Flow[R], serving: _Serving, give: Callable[[R, int, int], int], *, only_flow: bool) -> _Turn:
        """Serves one tenant.

        The only flow of its class needs no deficit: each of its requests is served once, and may spend all that is
        left, but a quantum beside one that is done. The rest of a turn that began in a larger step is no more than a
        turn of this one.
        """
        flow.deficit = self._quantum if only_flow else min(flow.deficit, serving.quantum)
        left, stuck = serving.left, serving.stuck
        used, done, goes_on = 0, False, True
        while goes_on:
            before = used
            for _, arrival in flow.order.copy():
                if used >= left or not (only_flow or flow.deficit > 0):
                    break
                request = flow.requests.get(arrival)
                if request is None or arrival in stuck:
                    continue
                limit = flow.deficit if not only_flow else self._quantum if done else left
                spent = STOP if len(stuck) >= MAX_FRUITLESS else give(request, min(limit, left - used), left - used)
                if spent == STOP:
                    return _Turn(used or STOP, False, done)
                if spent == 0:
                    stuck.add(arrival)
                    continue
                used += spent
                flow.spend(arrival, spent)
                flow.deficit -= 0 if only_flow else spent
                done = done or arrival not in flow.requests
            goes_on = not only_flow and flow.deficit > 0 and before < used < left
        if only_flow and used:
            flow.deficit = 0
        return _Turn(used, flow.deficit <= 0, done)


class ActiveTenants:
    """Counts the tenants that have requests, and those that had some a moment ago and keep coming.

    A tenant that comes once in a while, such as a health check, is active only as long as its request takes. The step
    thread alone uses the object.
    """

    def __init__(self) -> None:
        self._requests = Counter[str]()  # by tenant that has any
        self._returned = set[str]()  # those of them that had left a moment before
        self._once: dict[str, float] = {}  # when each tenant left that had come once, in order of time
        self._regular: dict[str, float] = {}  # the same of tenants that had returned

    def enter(self, tenant: str, now: float) -> None:
        """Counts a request that came at `now`, seconds."""
        if not self._requests[tenant]:
            self._forget(now)
            if self._once.pop(tenant, None) is not None or self._regular.pop(tenant, None) is not None:
                self._returned.add(tenant)
        self._requests[tenant] += 1

    def leave(self, tenant: str, now: float) -> None:
        """Counts a request out that ended at `now`, seconds."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            (self._regular if tenant in self._returned else self._once)[tenant] = now
            self._returned.discard(tenant)

    def several(self, now: float) -> bool:
        """Tells whether two tenants or more are active at `now`, seconds."""
        self._forget(now)
        return len(self._requests) + len(self._regular) > 1

    def _forget(self, now: float) -> None:
        for left in (self._once, self._regular):
            while left and now - next(iter(left.values())) > MEMORY_S:
                del left[next(iter(left))]
