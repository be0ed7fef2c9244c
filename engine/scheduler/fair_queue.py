"""FairQueue: shares the tokens of steps among tenants and requests.

Among tenants: deficit round robin by tokens (Shreedhar and Varghese 1996), in the form where a flow may overdraw its
deficit and then earns it back (surplus round robin), because score items cannot be cut at will. Among the requests of a
tenant: the one comes first that would end first if all were served equally and at the same time (the fair sojourn
protocol of Friedman and Henderson 2003). So small requests do not wait for large ones, none ends later than under equal
shares, and equal ones end one after another where equal shares would end them all together.
"""

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engine.scheduler.request_state import RequestState

R = TypeVar("R", bound=RequestState)
STOP = -1
MAX_STALE = 64  # entries of requests that have left, beside as many as there are requests


@dataclass(slots=True, kw_only=True)
class _Flow(Generic[R]):
    """Holds one tenant, whose requests share one deficit. All requests without a tenant are one flow.

    Under equal shares each request that was there from the start would have got `virtual` tokens by now; a request ends
    there when it has got as many more as its announced cost. One that leaves counts as served in full, whatever it
    took: else tokens that a cache spared, or that a caller gave up, would hold up the others without end.
    """

    deficit: int = 0
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
    more: bool  # another turn could do more
    over: bool  # the tenant has had its share
    done: bool  # one of its requests needs nothing more


class FairQueue(Generic[R]):
    """Orders requests with work of one kind by priority (a lower number is always served first), tenant and request."""

    def __init__(self, quantum: int) -> None:
        """Makes an empty queue. `quantum`: tokens of one turn."""
        self._quantum = quantum
        self._classes: dict[int, OrderedDict[Hashable, _Flow[R]]] = {}
        self._order: list[tuple[int, int, R]] = []  # a heap by priority and arrival; some have left
        self._requests: set[tuple[int, int]] = set()  # priority and arrival

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[R]:
        return (
            request for flows in self._classes.values() for flow in flows.values() for request in flow.requests.values()
        )

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
        self._classes.setdefault(request.priority, OrderedDict()).setdefault(request.tenant, _Flow()).add(request)
        if (turn := (request.priority, request.arrival)) not in self._requests:
            self._requests.add(turn)
            self._note(request)

    def _note(self, request: R) -> None:
        """Notes the arrival. Requests that have left are swept out once they are the majority."""
        heapq.heappush(self._order, (request.priority, request.arrival, request))
        if len(self._order) > 2 * len(self._requests) + MAX_STALE:
            self._order = [entry for entry in self._order if entry[:2] in self._requests]
            heapq.heapify(self._order)

    def remove(self, request: R) -> None:
        """Removes a request. Nothing happens for one that is not there."""
        turn = (request.priority, request.arrival)
        if turn not in self._requests:
            return
        self._requests.remove(turn)
        flows = self._classes[request.priority]
        flow = flows[request.tenant]
        flow.remove(request.arrival)
        if not flow.requests:
            del flows[request.tenant]
        if not flows:
            del self._classes[request.priority]

    def serve(self, budget: int, give: Callable[[R, int, int], int]) -> int:
        """Shares out the tokens of one step.

        A tenant for which nothing could be done keeps its place in front. Rounds go on while tokens are left, but not
        once a request is done: its caller would wait for what is added to the step for the others.

        Args:
            budget: tokens of the step.
            give: `give(request, allowance, left)` spends about `allowance` and never more than `left` tokens on a
                request, may remove it from the queue, and returns what it spent. 0 means that nothing more can be done
                for this request in this step, STOP the same for any request.

        Returns:
            The tokens used.
        """
        left = budget
        for priority in sorted(self._classes):
            flows = self._classes.get(priority, OrderedDict())
            stuck: set[int] = set()
            more, done = True, False
            while more and not done and left > 0:
                more = False
                for tenant in list(flows):
                    flow = flows.get(tenant)
                    if left <= 0:
                        break
                    if flow is None:
                        continue
                    turn = self._turn(flow, left, stuck, give, only_flow=len(flows) == 1)
                    if turn.used == STOP:
                        return budget - left
                    left -= turn.used
                    more, done = more or turn.more, done or turn.done
                    if turn.over and tenant in flows:
                        flows.move_to_end(tenant)
            if done:
                break
        return budget - left

    def charge(self, request: R, tokens: int) -> None:
        """Charges a tenant tokens beside those of its turns. Nothing happens for a request that is not there."""
        flow = self._classes.get(request.priority, OrderedDict()).get(request.tenant)
        if flow is not None:
            flow.deficit -= tokens
            flow.spend(request.arrival, tokens)

    def _turn(
        self, flow: _Flow[R], left: int, stuck: set[int], give: Callable[[R, int, int], int], *, only_flow: bool
    ) -> _Turn:
        """Serves one tenant.

        The only flow of its class needs no deficit: each of its requests is served once, and may spend all that is
        left, but a quantum beside one that is done.
        """
        if only_flow:
            flow.deficit = 0
        elif flow.deficit <= 0:
            flow.deficit += self._quantum
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
                spent = give(request, min(limit, left - used), left - used)
                if spent == STOP:
                    return _Turn(used or STOP, False, False, done)
                if spent == 0:
                    stuck.add(arrival)
                    continue
                used += spent
                flow.spend(arrival, spent)
                flow.deficit -= 0 if only_flow else spent
                done = done or arrival not in flow.requests
            goes_on = not only_flow and flow.deficit > 0 and before < used < left
        over = only_flow or flow.deficit <= 0
        return _Turn(used, any(arrival not in stuck for arrival in flow.requests), over, done)
