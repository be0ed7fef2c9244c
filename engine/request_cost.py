"""Computes what requests cost, for admission, for the engine's queue and for metering, and counts what waits by tenant.

The unit is a token to be read. A generated token counts as `Costs.decode_token_cost` of them. Costs are computed as if
nothing were cached.

`TenantQueues` says how many of the waiting tokens are served before a request. A replica counts its queue so, and an
ingress what it believes of one. `engine.scheduler.fair_queue` serves the tenants of a priority in equal shares, so a
request waits for its own tenant's tokens, for as many of each other tenant, and for everything of an earlier priority.
Admission judges that wait: what one tenant queues is no reason to refuse another.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from engine.config import Costs
from engine.requests import (
    EngineRequest,
    GenerateRequest,
    LikelihoodRequest,
    PoolingRequest,
    ScoreRequest,
    TenantTokens,
)


def request_cost(request: EngineRequest, costs: Costs) -> int:
    """Returns the cost of a request whose arrays have the right shapes; their values need not be checked yet."""
    match request:
        case ScoreRequest(prefix=prefix, ids=ids, starts=starts):  # an empty row computes one token
            empty = not len(ids) if len(starts) == 2 else np.count_nonzero(starts[1:] == starts[:-1])
            return len(prefix) + len(ids) + int(empty)
        case PoolingRequest(prefix=prefix, ids=ids):
            return len(prefix) + len(ids)
        case LikelihoodRequest(prefix=prefix, ids=ids, wanted=wanted):  # a row's last token is not computed
            return len(prefix) + len(ids) - len(wanted)
        case GenerateRequest(prompt=prompt, params=params):
            emitted = [len(branch) for branch in request.emitted] or [0] * params.n
            answers = 0 if request.prompt_only else sum(answer_cost(request, count, costs) for count in emitted)
            return len(prompt) + sum(emitted) + answers
    raise TypeError(f"`request` must be a request of engine.requests. Given: a {type(request).__name__}.")


def answer_cost(request: GenerateRequest, emitted: int, costs: Costs) -> int:
    """Returns the expected cost of the tokens that a branch with `emitted` tokens still generates."""
    return int(costs.decode_token_cost * min(request.params.max_tokens - emitted, costs.expected_tokens))


K = TypeVar("K", bound=Any)  # keys have an order
MAX_LEVELS = 8  # priorities whose queues are kept in order
BLOCK = 256  # entries of a block at first; one of twice as many is cut


class SizeIndex(Generic[K]):
    """Keeps a positive size for each of n keys, in sorted blocks with their sums.

    A change or a sum reads one block and the sums of all: 10,000 keys cost a few times as much as one. Not thread-safe.
    """

    def __init__(self, sizes: Mapping[K, float]) -> None:
        """Copies the sizes, all above 0."""
        self._sizes = dict(sizes)
        entries = sorted((size, key) for key, size in sizes.items())
        self._blocks = [entries[at : at + BLOCK] for at in range(0, len(entries), BLOCK)]
        self._sums = [sum(size for size, _ in block) for block in self._blocks]

    def __len__(self) -> int:
        return len(self._sizes)

    def get(self, key: K) -> float:
        """Returns the size of a key, 0 where it has none."""
        size: float = self._sizes.get(key, 0)
        return size

    def set(self, key: K, size: float) -> None:
        """Gives a key its size; one that is not above 0 removes it."""
        before = self._sizes.get(key, 0)
        if before:
            self._remove((before, key))
        if size > 0:
            self._sizes[key] = size
            self._insert((size, key))
        elif before:
            del self._sizes[key]

    def capped_sum(self, cap: float) -> float:
        """Returns the sum of `min(size, cap)` over all keys."""
        whole = bisect_right(self._blocks, cap, key=_largest_size)  # blocks without a size above the cap
        total, below = sum(self._sums[:whole]), sum(map(len, self._blocks[:whole]))
        if whole < len(self._blocks):
            block = self._blocks[whole]
            count = bisect_right(block, cap, key=_size)
            total, below = total + sum(size for size, _ in block[:count]), below + count
        return total + cap * (len(self._sizes) - below)

    def descending(self) -> Iterator[tuple[float, K]]:
        """Yields sizes with their keys, the largest first."""
        for block in reversed(self._blocks):
            yield from reversed(block)

    def _insert(self, entry: tuple[float, K]) -> None:
        at = min(bisect_left(self._blocks, entry, key=_last), len(self._blocks) - 1)
        if at < 0:
            self._blocks, self._sums = [[entry]], [entry[0]]
            return
        block = self._blocks[at]
        insort(block, entry)
        self._sums[at] += entry[0]
        if len(block) >= 2 * BLOCK:
            parts = [block[:BLOCK], block[BLOCK:]]
            self._blocks[at : at + 1] = parts
            self._sums[at : at + 1] = [sum(size for size, _ in part) for part in parts]

    def _remove(self, entry: tuple[float, K]) -> None:
        at = bisect_left(self._blocks, entry, key=_last)
        block = self._blocks[at]
        del block[bisect_left(block, entry)]
        self._sums[at] -= entry[0]
        if not block:
            del self._blocks[at], self._sums[at]


class TenantQueues:
    """Counts waiting tokens. Not thread-safe.

    Once it was asked what is before a request, or for the largest queues, it keeps the answers' order up to date: the
    cost of a request hardly grows with the tenants. It does so for the MAX_LEVELS priorities that were asked for last,
    since each costs every change.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.unlisted = 0.0  # tokens of `total` whose tenants are not known
        self.unlisted_queues = 0  # that they are of; 0: not known, and then they are all before everything
        self._hold({})

    def _hold(self, queues: dict[tuple[int, str], float]) -> None:
        """Takes other queues in place of its own."""
        self._queues = queues  # by priority and tenant; none is empty
        self._tenants: dict[str, float] = {}  # tokens at all priorities
        for (_, tenant), tokens in queues.items():
            self._tenants[tenant] = self._tenants.get(tenant, 0) + tokens
        self._order: SizeIndex[tuple[int, str]] | None = None  # of `_queues`
        self._levels: dict[int, SizeIndex[str]] = {}  # by priority: what each tenant has at this one or a later one
        self._earlier: dict[int, float] = {}  # by priority: tokens at earlier ones

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
        found._hold(self._queues.copy())
        return found

    def add(self, tenant: str, priority: int, tokens: float) -> None:
        """Adds tokens to a queue, or takes them away: at most those that it holds."""
        key = priority, tenant
        before = self._queues.get(key, 0)
        after = max(0, before + tokens)
        change = after - before
        self.total = max(0, self.total + change)
        if after:
            self._queues[key] = after
            self._tenants[tenant] = self._tenants.get(tenant, 0) + change
        elif before:
            self._remove(key, change)
            if not self._queues:
                return
        if self._order is not None:
            self._order.set(key, after)
        for start, level in self._levels.items():
            if priority < start:
                self._earlier[start] += change
            else:
                level.set(tenant, level.get(tenant) + change)

    def _remove(self, key: tuple[int, str], change: float) -> None:
        """Takes a queue out that has become empty by `change`."""
        del self._queues[key]
        left = self._tenants[key[1]] + change
        if left > 0:
            self._tenants[key[1]] = left
        else:
            del self._tenants[key[1]]
        if not self._queues:
            self._hold({})

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
        level = self._levels.pop(priority, None)
        if level is None:
            level = self._begin_level(priority)
        self._levels[priority] = level  # the last one
        share = self._tenants.get(tenant, 0) + cost  # that each other tenant has been served when the request ends
        unlisted = min(self.unlisted, self.unlisted_queues * share) if self.unlisted_queues else self.unlisted
        return self._earlier[priority] + level.capped_sum(share) + unlisted

    def _begin_level(self, priority: int) -> SizeIndex[str]:
        """Returns what is before requests of a priority, in place of the one that was asked for longest ago."""
        if len(self._levels) >= MAX_LEVELS:
            oldest = next(iter(self._levels))
            del self._levels[oldest], self._earlier[oldest]
        sizes: dict[str, float] = {}
        earlier = 0.0
        for (queued, tenant), tokens in self._queues.items():
            if queued < priority:
                earlier += tokens
            else:
                sizes[tenant] = sizes.get(tenant, 0) + tokens
        self._earlier[priority] = earlier
        return SizeIndex(sizes)

    def work_off(self, tokens: float) -> None:
        """Takes away tokens that were computed, in equal shares of the queues."""
        if tokens <= 0 or self.total <= 0:
            return
        if tokens >= self.total:
            self.total, self.unlisted, self.unlisted_queues = 0.0, 0.0, 0
            self._hold({})
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
        self._hold({key: size - served for key, size in self._queues.items() if size > served})
        self.unlisted = max(0.0, self.unlisted - served * unlisted)
        self.total -= tokens

    def largest(self, count: int) -> tuple[TenantTokens, ...]:
        """Returns the `count` largest queues."""
        if self._order is None:
            self._order = SizeIndex(self._queues)
        found = islice(self._order.descending(), count)
        return tuple(TenantTokens(tenant, priority, int(tokens)) for tokens, (priority, tenant) in found)


def _last(block: list[tuple[float, K]]) -> tuple[float, K]:
    return block[-1]


def _size(entry: tuple[float, K]) -> float:
    return entry[0]


def _largest_size(block: list[tuple[float, K]]) -> float:
    return block[-1][0]
