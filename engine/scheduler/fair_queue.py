"""Who is served next.

Among tenants: deficit round robin by tokens (Shreedhar and Varghese 1996), in the form where a flow may overdraw its
deficit and then earns it back (surplus round robin), because score items cannot be cut at will. Among the jobs of a
tenant: whoever would end first if all were served at once and equally (the fair sojourn protocol of Friedman and
Henderson 2003). So small jobs do not wait for large ones, none ends later than if all took turns, and equal ones end
one after another where turns would end them all together.
"""

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engine.scheduler.request_state import Work

W = TypeVar("W", bound=Work)
STOP = -1
SWEPT = 64  # jobs that have left and may be noted beside as many as are there


@dataclass(slots=True, kw_only=True)
class _Flow(Generic[W]):
    """One tenant, whose jobs share one deficit; all jobs without a tenant are one.

    Jobs served at once and equally would each have got `virtual` tokens by now, had they come first; a job ends there
    when it has got as many more as it was said to cost. One that leaves has got all of them, whatever it took: else
    what a cache spared, or nobody waited for, would hold up the account of the others for ever.
    """

    deficit: int = 0
    jobs: dict[int, W] = field(default_factory=dict)  # by arrival
    order: list[tuple[float, int]] = field(default_factory=list)  # ends and arrivals, ascending
    virtual: float = 0.0
    unended: list[float] = field(default_factory=list)  # a heap of the ends behind `virtual`, of jobs that left, too
    _ends: dict[int, float] = field(default_factory=dict)  # by arrival
    _unspent: dict[int, int] = field(default_factory=dict)  # tokens, by arrival

    def add(self, job: W) -> None:
        if job.arrival not in self.jobs:
            end = self._ends[job.arrival] = self.virtual + job.queued
            self._unspent[job.arrival] = job.queued
            insort(self.order, (end, job.arrival))
            heapq.heappush(self.unended, end)
        self.jobs[job.arrival] = job

    def remove(self, arrival: int) -> None:
        self.spend(arrival, self._unspent[arrival])
        del self.jobs[arrival], self._unspent[arrival]
        del self.order[bisect_left(self.order, (self._ends.pop(arrival), arrival))]

    def spend(self, arrival: int, tokens: int) -> None:
        """On a job; nothing happens for one that has left. They would have been shared equally by the jobs that had not
        ended."""
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
    used: int  # tokens, or STOP
    more: bool  # another turn could do more
    over: bool  # the tenant has had its share
    done: bool  # one of its jobs needs nothing more


class FairQueue(Generic[W]):
    """Jobs with work of one kind, by priority class (a lower number is always served first), tenant and job."""

    def __init__(self, quantum: int) -> None:
        """`quantum`: tokens of one turn."""
        self._quantum = quantum
        self._classes: dict[int, OrderedDict[Hashable, _Flow[W]]] = {}
        self._order: list[tuple[int, int, W]] = []  # a heap by priority and arrival; some of them have left
        self._jobs: set[tuple[int, int]] = set()  # priority and arrival

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[W]:
        return (job for flows in self._classes.values() for flow in flows.values() for job in flow.jobs.values())

    def first(self) -> W:
        """Of the jobs of the first class the one that arrived first. KeyError of an empty queue."""
        while self._order and self._order[0][:2] not in self._jobs:
            heapq.heappop(self._order)
        if not self._order:
            raise KeyError("an empty queue has no first job")
        return self._order[0][2]

    def add(self, job: W) -> None:
        self._classes.setdefault(job.priority, OrderedDict()).setdefault(job.tenant, _Flow()).add(job)
        if (turn := (job.priority, job.arrival)) not in self._jobs:
            self._jobs.add(turn)
            self._note(job)

    def _note(self, job: W) -> None:
        """Those that have left are swept out once they are the most."""
        heapq.heappush(self._order, (job.priority, job.arrival, job))
        if len(self._order) > 2 * len(self._jobs) + SWEPT:
            self._order = [entry for entry in self._order if entry[:2] in self._jobs]
            heapq.heapify(self._order)

    def remove(self, job: W) -> None:
        """Nothing happens to a job that is not there."""
        turn = (job.priority, job.arrival)
        if turn not in self._jobs:
            return
        self._jobs.remove(turn)
        flows = self._classes[job.priority]
        flow = flows[job.tenant]
        flow.remove(job.arrival)
        if not flow.jobs:
            del flows[job.tenant]
        if not flows:
            del self._classes[job.priority]

    def serve(self, budget: int, give: Callable[[W, int, int], int]) -> int:
        """Shares out `budget` tokens; returns how many were used. `give(job, allowance, left)` spends about `allowance`
        and never more than `left` tokens on a job, may remove it from the queue, and returns what it spent; 0 means
        that nothing more can be done for this job in this step, STOP for any job. A tenant for whom nothing could be
        done keeps its place in front.

        Rounds go on while budget is left, but not once a job is done: its caller would wait for what is added to the
        step for the others."""
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
                    turn = self._turn(flow, left, stuck, give, alone=len(flows) == 1)
                    if turn.used == STOP:
                        return budget - left
                    left -= turn.used
                    more, done = more or turn.more, done or turn.done
                    if turn.over and tenant in flows:
                        flows.move_to_end(tenant)
            if done:
                break
        return budget - left

    def charge(self, job: W, tokens: int) -> None:
        """Tokens that the job's tenant costs beside those of its turns. Nothing happens for a job that is not there."""
        flow = self._classes.get(job.priority, OrderedDict()).get(job.tenant)
        if flow is not None:
            flow.deficit -= tokens
            flow.spend(job.arrival, tokens)

    def _turn(
        self, flow: _Flow[W], left: int, stuck: set[int], give: Callable[[W, int, int], int], *, alone: bool
    ) -> _Turn:
        """One tenant's turn. One that is `alone` needs no deficit: each of its jobs is served once, and may spend all
        that is left, but a quantum beside one that is done."""
        if alone:
            flow.deficit = 0
        elif flow.deficit <= 0:
            flow.deficit += self._quantum
        used, done, goes_on = 0, False, True
        while goes_on:
            before = used
            for _, arrival in flow.order.copy():
                if used >= left or not (alone or flow.deficit > 0):
                    break
                job = flow.jobs.get(arrival)
                if job is None or arrival in stuck:
                    continue
                most = flow.deficit if not alone else self._quantum if done else left
                spent = give(job, min(most, left - used), left - used)
                if spent == STOP:
                    return _Turn(used or STOP, False, False, done)
                if spent == 0:
                    stuck.add(arrival)
                    continue
                used += spent
                flow.spend(arrival, spent)
                flow.deficit -= 0 if alone else spent
                done = done or arrival not in flow.jobs
            goes_on = not alone and flow.deficit > 0 and before < used < left
        over = alone or flow.deficit <= 0
        return _Turn(used, any(arrival not in stuck for arrival in flow.jobs), over, done)
