"""TenantQueues: the tokens that wait, by tenant and priority, and how many of them are served before a request.

A replica counts its queue so, and an ingress what it believes of one. `engine.scheduler.fair_queue` serves the tenants
of a priority in equal shares, so a request waits for its own tenant's tokens, for as many of each other tenant, and for
everything of an earlier priority. Admission judges that wait: what one tenant queues is no reason to refuse another.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class TenantTokens(NamedTuple):
    """Holds the tokens that one tenant has waiting in one priority."""

    tenant: str
    priority: int  # lower is earlier
    tokens: int


class TenantQueues:
    """Counts waiting tokens. Not thread-safe."""

    def __init__(self) -> None:
        self.total = 0.0
        self.unlisted = 0.0  # tokens of `total` whose tenants are not known
        self.unlisted_queues = 0  # that they are of; 0: not known, and then they are all before everything
        self._queues: dict[tuple[int, str], float] = {}  # by priority and tenant; none is empty

    @classmethod
    def reported(cls, total: int, largest: Iterable[TenantTokens], unlisted_queues: int) -> "TenantQueues":
        """Returns the queues of a report that names only the largest ones."""
        found = cls()
        for queue in largest:
            found.add(queue.tenant, queue.priority, queue.tokens)
        found.unlisted, found.unlisted_queues = max(0.0, total - found.total), max(0, unlisted_queues)
        found.total += found.unlisted
        return found

    def __len__(self) -> int:
        return len(self._queues) + self.unlisted_queues

    def copy(self) -> "TenantQueues":
        found = TenantQueues()
        found.total, found.unlisted, found.unlisted_queues = self.total, self.unlisted, self.unlisted_queues
        found._queues = self._queues.copy()
        return found

    def add(self, tenant: str, priority: int, tokens: float) -> None:
        """Adds tokens to a queue, or takes them away: at most those that it holds."""
        key = priority, tenant
        before = self._queues.get(key, 0)
        after = max(0, before + tokens)
        self.total = max(0, self.total + after - before)
        if after:
            self._queues[key] = after
        else:
            self._queues.pop(key, None)

    def take_back(self, work: TenantTokens) -> None:
        """Takes away work that was added. The tokens of it that were worked off were other queues' then."""
        held = self._queues.get((work.priority, work.tenant), 0)
        self.add(work.tenant, work.priority, -work.tokens)
        self.work_off(work.tokens - held)

    def add_all(self, other: "TenantQueues") -> None:
        """Adds the listed queues of another count."""
        for (priority, tenant), tokens in other._queues.items():
            self.add(tenant, priority, tokens)

    def before(self, tenant: str, priority: int, cost: float) -> float:
        """Returns the waiting tokens that are served before the end of a request of `cost` tokens that comes now."""
        own = sum(tokens for (_, name), tokens in self._queues.items() if name == tenant)
        share = own + cost  # that each other tenant has been served when the request ends
        earlier, level = dict[str, float](), dict[str, float]()
        for (queued, name), tokens in self._queues.items():
            if name != tenant:
                kind = earlier if queued < priority else level
                kind[name] = kind.get(name, 0) + tokens
        others = sum(earlier.values()) + sum(min(tokens, share) for tokens in level.values())
        unlisted = min(self.unlisted, self.unlisted_queues * share) if self.unlisted_queues else self.unlisted
        return own + others + unlisted

    def work_off(self, tokens: float) -> None:
        """Takes away tokens that were computed, in equal shares of the queues."""
        if tokens >= self.total:
            self._queues, self.total, self.unlisted, self.unlisted_queues = {}, 0.0, 0.0, 0
            return
        if tokens <= 0:
            return
        unlisted = max(1, self.unlisted_queues)
        sizes = [(size, 1) for size in self._queues.values()] + [(self.unlisted / unlisted, unlisted)]
        open_queues, served = len(self._queues) + unlisted, 0.0  # `served`: of each open queue
        left = tokens
        for size, count in sorted(sizes):
            if (size - served) * open_queues >= left:
                served += left / open_queues
                break
            left -= (size - served) * open_queues
            served, open_queues = size, open_queues - count
        self._queues = {key: size - served for key, size in self._queues.items() if size > served}
        self.unlisted = max(0.0, self.unlisted - served * unlisted)
        self.total -= tokens

    def largest(self, count: int) -> tuple[TenantTokens, ...]:
        """Returns the `count` largest queues."""
        found = heapq.nlargest(count, ((tokens, *key) for key, tokens in self._queues.items()))
        return tuple(TenantTokens(tenant, priority, int(tokens)) for tokens, priority, tenant in found)
