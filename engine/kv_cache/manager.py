"""The KV pool's slots as the step loop sees them: allocator and tree, and what must wait for a step in flight."""

from collections import deque
from collections.abc import Callable

from engine.kv_cache.prefix_cache import PrefixCache, SlotAllocator
from engine.requests import Int32s

EVICTED_PART = 256  # of the pool is evicted at once: a few leaves at a time would cost each of those who come as much


class KVCacheManager:
    """`take` evicts what nobody holds. `later` delays a release until no step in flight can name what it frees."""

    def __init__(self, num_slots: int, on_give: Callable[[Int32s], None] | None = None) -> None:
        self.allocator = SlotAllocator(num_slots, on_give)
        self.prefix_cache = PrefixCache()
        self.on_pressure: Callable[[], None] = lambda: None  # lets idle holders release what can be computed again
        self._limbo: deque[tuple[int, Callable[[], None]]] = deque()
        self._launched = 0
        self._finished = 0

    @property
    def in_flight(self) -> bool:
        return self._launched > self._finished

    @property
    def settled(self) -> bool:
        return not self._limbo and not self.in_flight

    @property
    def used(self) -> int:
        """Slots that are neither free nor the tree's."""
        return self.allocator.num_slots - 1 - self.allocator.num_free - self.prefix_cache.size

    def allocate(self, n: int) -> Int32s | None:
        """`n` slots i32 [n], or None if they cannot be had without taking a running row's."""
        if n > self.allocator.num_free:
            self._evict(n - self.allocator.num_free)
        if n > self.allocator.num_free:
            self.on_pressure()
            self._evict(n - self.allocator.num_free)
        return self.allocator.allocate(n)

    def free(self, slots: Int32s) -> None:
        self.allocator.release(slots)

    def free_later(self, release: Callable[[], None]) -> None:
        """Runs `release` now if no step is in flight, else when the newest of them has finished."""
        if self.in_flight:
            self._limbo.append((self._launched, release))
        else:
            release()

    def launch(self) -> None:
        self._launched += 1

    def finish(self) -> None:
        """The oldest step in flight has finished."""
        self._finished += 1
        while self._limbo and self._limbo[0][0] <= self._finished:
            self._limbo.popleft()[1]()

    def check(self, owned: int) -> None:
        """RuntimeError unless free + tree + owned by live jobs = all, each part being sound in itself."""
        self.allocator.check()
        self.prefix_cache.check()
        if self.used != owned:
            raise RuntimeError(f"{self.used} slots are in use and {owned} are owned")

    def _evict(self, n: int) -> None:
        """At least `n` slots, if they can be had: where the tree fills the pool everyone who comes takes from it."""
        if n > 0:
            self.allocator.release(self.prefix_cache.evict(max(n, self.allocator.num_slots // EVICTED_PART)))
