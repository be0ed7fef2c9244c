"""Tracks what one process knows about the replicas that it calls: which exist, and how much each has to do."""

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.request_cost import TenantQueues
from engine.requests import Load, TenantTokens

Listener = Callable[[frozenset[str], frozenset[str]], None]
MAX_LEFT = 1024
LEFT_S = 0.3
UNKNOWN_RATE_S = 1.0  # a queue of unknown speed is taken for done after this long
TREND_S = 0.3  # over which it is learnt how fast a queue shrinks while others fill it too
MIN_SHRINK = 1 / 8  # of the speed: a queue that is never asked after must not seem full for ever
SILENT_S = 0.5  # a replica that owes answers is silent after so long without a report, or later; one call asks it then
PATIENCE = 4  # times the longest time between two of its reports of late
FADING = 0.9  # of that time, from one report to the next


class QueueEstimate(NamedTuple):
    """Holds a replica's queue, or what of it is served before a request, as this process believes it to be."""

    tokens: float
    tokens_per_s: float  # worked off; 0 while unknown
    max_tokens: int  # a request with more before its end is not taken; 0 while unknown
    tenants: int = 0  # whose queues are not empty


class ReplicaLoads(NamedTuple):
    """Holds the names of R replicas, the `load` of each [R], and its tokens a second [R], 0 while unknown."""

    names: tuple[str, ...]
    tokens: npt.NDArray[np.float64]
    tokens_per_s: npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class _Replica:
    """Holds the tokens waiting at `when`, and how fast they become fewer.

    Between two reports the replica works its queue off while other processes fill it. By how much less it became,
    beside the tokens that this process sent, is learnt from one report to the next, as a part of the replica's speed.
    """

    when: float = 0.0
    queues: TenantQueues = field(default_factory=TenantQueues)
    rate: float = 0.0
    max_tokens: int = 0
    drain: float = 0.0
    reports: int = 0
    reported: float = 0.0  # tokens, by the last report
    reported_at: float = 0.0
    sent: float = 0.0  # tokens, since then, by this process
    shrink: float = 1.0  # part of the speed
    held: TenantQueues = field(default_factory=TenantQueues)  # tokens that wait in this process for their micro-batch
    latest: Load | None = None  # report
    owed: int = 0  # calls of this process that are under way there
    sent_at: float = 0.0  # the last of them
    heard: float = 0.0  # when the last report came, or the first of these calls was sent
    pause: float = 0.0  # the longest between two reports, of late

    def load(self, now: float) -> float:
        return max(0.0, self.queues.total - self.drain * (now - self.when)) + self.held.total

    def waiting(self, now: float) -> TenantQueues:
        """Returns what waits, to be read only."""
        self._work_off(now)
        if not len(self.held):
            return self.queues
        found = self.queues.copy()
        found.add_all(self.held)
        return found

    @property
    def silent_at(self) -> float:
        """When it is silent, unless a report comes before."""
        return self.heard + max(SILENT_S, PATIENCE * self.pause) if self.owed else math.inf

    def add(self, work: TenantTokens, now: float) -> None:
        self._work_off(now)
        self.queues.add(*work)
        self.sent += work.tokens
        if not self.owed:
            self.heard = now
        self.owed += 1
        self.sent_at = now

    def take_back(self, work: TenantTokens, now: float) -> None:
        self._work_off(now)
        self.queues.take_back(work)
        self.sent -= work.tokens

    def _work_off(self, now: float) -> None:
        self.queues.work_off(self.drain * (now - self.when))
        self.when = now

    def report(self, load: Load, now: float) -> None:
        self.latest = load
        self.pause, self.heard = max(now - self.heard, FADING * self.pause), now
        elapsed = now - self.reported_at
        if self.reports and elapsed > 0 and load.tokens_per_s > 0:
            shrunk = (self.reported + self.sent - load.queued_tokens) / (elapsed * load.tokens_per_s)
            self.shrink += min(1.0, elapsed / TREND_S) * (min(1.0, max(-1.0, shrunk)) - self.shrink)
        self.reported, self.reported_at, self.sent = load.queued_tokens, now, 0.0
        self.when = now
        self.queues = TenantQueues.reported(load.queued_tokens, load.tenants, load.other_queues)
        self.rate, self.max_tokens = load.tokens_per_s, load.max_queued_tokens
        known = self.rate * max(MIN_SHRINK, self.shrink)
        self.drain = known if self.rate > 0 else self.queues.total / UNKNOWN_RATE_S
        self.reports += 1


@dataclass(slots=True, kw_only=True)
class _Ticket:
    replica: str
    work: TenantTokens
    reports: int  # of its replica when it was sent: a later report counts it already
    held: bool = False  # it has not been sent


class _LoadTable:
    """Repeats in arrays what `_Replica.load` computes from, so that the loads of all replicas are read together.

    Numbers of a replica that has changed are copied when the table is read: a call changes them three times.
    """

    def __init__(self, replicas: dict[str, _Replica]) -> None:
        self.names = tuple(sorted(replicas))
        self._places = {name: place for place, name in enumerate(self.names)}
        self._total, self._drain, self._when, self._held, self._rate = np.zeros((5, len(self.names)))
        self._silent_at, self._sent_at = np.zeros((2, len(self.names)))
        self._changed = dict(replicas)

    def changed(self, name: str, replica: _Replica) -> None:
        """Notes that a replica has changed."""
        self._changed[name] = replica

    def _update(self) -> None:
        for name, replica in self._changed.items():
            place = self._places[name]
            self._total[place], self._held[place] = replica.queues.total, replica.held.total
            self._drain[place], self._when[place], self._rate[place] = replica.drain, replica.when, replica.rate
            self._silent_at[place], self._sent_at[place] = replica.silent_at, replica.sent_at
        self._changed.clear()

    def silent(self, now: float) -> list[str]:
        self._update()
        silent = (self._silent_at < now) & (self._sent_at > now - SILENT_S)
        return [self.names[place] for place in silent.nonzero()[0]] if silent.any() else []

    def rates(self) -> npt.NDArray[np.float64]:
        self._update()
        return self._rate.copy()

    def loads(self, now: float) -> npt.NDArray[np.float64]:
        self._update()
        left = now - self._when
        left *= self._drain
        np.subtract(self._total, left, out=left)
        np.maximum(left, 0.0, out=left)
        left += self._held
        return left


class LoadTracker:
    """Tracks the load of each replica. Thread-safe.

    The router's thread writes which replicas exist; the dispatcher writes what was sent and what came back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._table = _LoadTable({})
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._listeners: list[Listener] = []
        self._left: dict[str, float] = {}  # the latest that were stopped on purpose, and when

    def publish(self, names: Iterable[str], *, dead: str | None = None) -> None:
        """Takes the unique ids of the replicas that run now. `dead` is missing because its process is gone."""
        with self._lock:
            joined, left = self._take(names, dead)
        if joined or left:
            for listener in self._listeners:
                listener(joined, left)

    def died(self, name: str) -> None:
        """Takes out a replica whose process is gone. Runs in any thread: what is published meanwhile stays."""
        with self._lock:
            self._take([other for other in self._replicas if other != name], name)

    def _take(self, names: Iterable[str], dead: str | None) -> tuple[frozenset[str], frozenset[str]]:
        """Returns the replicas that joined and those that are stopping."""
        before = self._replicas.keys()
        self._replicas = {name: self._replicas.get(name, _Replica()) for name in names}
        self._table = _LoadTable(self._replicas)
        joined, left = self._replicas.keys() - before, before - self._replicas.keys() - {dead}
        self._left |= dict.fromkeys(left, self._clock())
        for name in [*joined, *list(self._left)[:-MAX_LEFT]]:
            self._left.pop(name, None)
        return frozenset(joined), frozenset(left)

    def has_left(self, name: str) -> bool:
        """Returns whether it was stopped on purpose. A replica that has just gone may be missing because it died."""
        with self._lock:
            return self._left.get(name, math.inf) <= self._clock() - LEFT_S

    def listen(self, listener: Listener) -> None:
        """Calls the listener, in the router's thread, with the replicas that joined and those that are stopping."""
        self._listeners.append(listener)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names in order: every process sees the same."""
        return self._table.names

    def loads(self) -> ReplicaLoads:
        """Returns the load of each replica. `names` is the same object while the fleet is the same."""
        with self._lock:
            return ReplicaLoads(self._table.names, self._table.loads(self._clock()), self._table.rates())

    def silent(self) -> Collection[str]:
        """Returns the replicas that owe this process answers, have reported nothing for longer than is their way, and
        have just been sent a call, which asks them.

        Their queues only seem to become shorter. One whose process is frozen would otherwise draw every call of the
        fleet before its canaries tell. One that computes a long answer and nothing else is heard when it is asked.
        """
        with self._lock:
            return self._table.silent(self._clock())

    def load(self, name: str) -> float:
        """Returns tokens: what the replica last reported, plus what was sent since, less what it has done since."""
        return self.queue(name).tokens

    def queue(self, name: str) -> QueueEstimate:
        """Returns the replica's queue; that of an unknown replica is empty."""
        with self._lock:
            found = self._replicas.get(name)
            if found is None:
                return QueueEstimate(0.0, 0.0, 0)
            load, tenants = found.load(self._clock()), len(found.queues)
            return QueueEstimate(load, found.rate, found.max_tokens, tenants)

    def queue_before(self, name: str, work: TenantTokens) -> QueueEstimate:
        """Returns what the replica serves before the end of a request that comes now."""
        with self._lock:
            found = self._replicas.get(name)
            if found is None:
                return QueueEstimate(0.0, 0.0, 0)
            queues = found.waiting(self._clock())
            self._table.changed(name, found)
            return QueueEstimate(queues.before(*work), found.rate, found.max_tokens, len(queues))

    def send(self, name: str, tokens: int, tenant: str = "", priority: int = 0) -> int:
        """Returns a ticket for work on its way to a replica: `close` it."""
        with self._lock:
            number = next(self._numbers)
            self._open(number, name, TenantTokens(tenant, priority, tokens))
            return number

    def hold(self, number: int) -> None:
        """Notes that the work waits here until `release`: what the replica reports meanwhile does not count it."""
        with self._lock:
            ticket = self._tickets[number]
            found = self._replicas.get(ticket.replica)
            if found is not None and not ticket.held:
                self._take_back(ticket)
                found.held.add(*ticket.work)
                self._table.changed(ticket.replica, found)
                ticket.held = True

    def release(self, number: int) -> None:
        """Notes that the ticket's work is on its way now. A closed ticket is ignored."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is not None and ticket.held:
                self._take_back(ticket)
                self._open(number, ticket.replica, ticket.work)

    def moved(self, number: int, name: str) -> None:
        """Notes that the router sent the work to another replica than the first. A closed ticket is ignored."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is not None and ticket.replica != name:
                self._take_back(ticket)
                self._open(number, name, ticket.work)

    def report(self, number: int, load: Load) -> None:
        """Takes what the ticket's replica reports about itself."""
        found = self._replica_of(number)
        if found is None or found.latest is load:  # one report of a whole frame
            return
        with self._lock:
            ticket, found = self._tickets.get(number), self._replica_of(number)
            if ticket is not None and found is not None:
                found.report(load, self._clock())
                self._table.changed(ticket.replica, found)

    def _replica_of(self, number: int) -> _Replica | None:
        ticket = self._tickets.get(number)
        return None if ticket is None else self._replicas.get(ticket.replica)

    def where(self, number: int) -> str:
        """Returns the replica of an open ticket: empty while the router has not chosen one."""
        with self._lock:
            return self._tickets[number].replica

    def close(self, number: int) -> str:
        """Closes the ticket and returns the replica that the work went to."""
        with self._lock:
            ticket = self._tickets.pop(number)
            self._take_back(ticket)
            return ticket.replica

    def _open(self, number: int, name: str, work: TenantTokens) -> None:
        found = self._replicas.get(name)
        self._tickets[number] = _Ticket(replica=name, work=work, reports=found.reports if found else 0)
        if found is not None:
            found.add(work, self._clock())
            self._table.changed(name, found)

    def _take_back(self, ticket: _Ticket) -> None:
        found = self._replicas.get(ticket.replica)
        if found is None:
            return
        if ticket.held:
            found.held.take_back(ticket.work)
        else:
            found.owed = max(0, found.owed - 1)  # it may have left and come back
            if found.reports == ticket.reports:
                found.take_back(ticket.work, self._clock())
        self._table.changed(ticket.replica, found)


@functools.cache
def load_tracker_of(app: str, deployment: str) -> LoadTracker:
    """Returns this process's only tracker of a deployment, which its router and its dispatcher share."""
    return LoadTracker()
