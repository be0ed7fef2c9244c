"""Who is served next: deficit round robin by tokens (Shreedhar and Varghese 1996), in the form where a flow may
overdraw its deficit and then earns it back (surplus round robin), because score items cannot be cut at will."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engine.requests import Work

W = TypeVar("W", bound=Work)
STOP = -1
SWEPT = 64  # jobs that have left and may be noted beside as many as are there


@dataclass(slots=True, kw_only=True)
class _Flow(Generic[W]):
    """One tenant: its jobs share one deficit and take turns within it."""

    deficit: int = 0
    jobs: "OrderedDict[int, W]" = field(default_factory=OrderedDict)


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
        flow = self._classes.setdefault(job.priority, OrderedDict()).setdefault(job.tenant, _Flow())
        flow.jobs[job.arrival] = job
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
        del flow.jobs[job.arrival]
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
                    turn = self._turn(flow, left, stuck, give)
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

    def _turn(self, flow: _Flow[W], left: int, stuck: set[int], give: Callable[[W, int, int], int]) -> _Turn:
        """One tenant's turn."""
        if flow.deficit <= 0:
            flow.deficit += self._quantum
        used, done = 0, False
        while flow.deficit > 0 and used < left:
            job = next((job for job in flow.jobs.values() if job.arrival not in stuck), None)
            if job is None:
                return _Turn(used, False, flow.deficit <= 0, done)
            spent = give(job, min(flow.deficit, left - used), left - used)
            if spent == STOP:
                return _Turn(used or STOP, False, False, done)
            if spent == 0:
                stuck.add(job.arrival)
                continue
            used += spent
            flow.deficit -= spent
            if job.arrival in flow.jobs:
                flow.jobs.move_to_end(job.arrival)
            else:
                done = True
        return _Turn(used, any(arrival not in stuck for arrival in flow.jobs), flow.deficit <= 0, done)
