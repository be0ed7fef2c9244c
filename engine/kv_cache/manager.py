"""Allocates the KV storage's slots for the step loop: free slots, the prefix cache, and releases that must wait."""

from collections import deque
from collections.abc import Callable

from engine.kv_cache.prefix_cache import PrefixCache, SlotAllocator
from engine.requests import Int32s

EVICTED_PART = 256  # an eviction frees this part of the slots: a few leaves at a time would make each request pay


class KVCacheManager:
    """Allocates and frees slots. `allocate` evicts prefixes that no request holds; `free_later` delays a release until
    no step in flight names its slots."""

    def __init__(self, num_slots: int, on_free: Callable[[Int32s], None] | None = None) -> None:
        self.allocator = SlotAllocator(num_slots, on_free)
        self.prefix_cache = PrefixCache()
        self.on_pressure: Callable[[], None] = lambda: None  # idle holders release what can be computed again
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._launched = 0
        self._finished = 0

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and has not finished."""
        return self._launched > self._finished

    @property
    def settled(self) -> bool:
        """Whether no step is in flight and no release waits."""
        return not self._waiting and not self.in_flight

    @property
    def used(self) -> int:
        """Slots that are neither free nor the prefix cache's."""
        return self.allocator.num_slots - 1 - self.allocator.num_free - self.prefix_cache.size

    def allocate(self, n: int) -> Int32s | None:
        """Returns `n` slots, i32 [n]; None if there are not as many without those of running rows."""
        if n > self.allocator.num_free:
            self._evict(n - self.allocator.num_free)
        if n > self.allocator.num_free:
            self.on_pressure()
            self._evict(n - self.allocator.num_free)
        return self.allocator.allocate(n)

    def free(self, slots: Int32s) -> None:
        self.allocator.release(slots)

    def free_later(self, release: Callable[[], None]) -> None:
        """Runs `release` now if no step is in flight, else when the newest step has finished."""
        if self.in_flight:
            self._waiting.append((self._launched, release))
        else:
            release()

    def launch(self) -> None:
        """Counts a step as launched."""
        self._launched += 1

    def finish(self) -> None:
        """Counts the oldest step in flight as finished, and runs the releases that waited for it."""
        self._finished += 1
        while self._waiting and self._waiting[0][0] <= self._finished:
            self._waiting.popleft()[1]()

    def check(self, owned: int) -> None:
        """Checks the slots' accounts.

        Raises:
            RuntimeError: A slot is not exactly one of free, the prefix cache's, or one of `owned` slots of requests.
        """
        self.allocator.check()
        self.prefix_cache.check()
        if self.used != owned:
            raise RuntimeError(f"{self.used} slots are in use and {owned} are owned")

    def _evict(self, n: int) -> None:
        """Frees at least `n` slots of the prefix cache, if there are as many without a lock."""
        if n > 0:
            self.allocator.release(self.prefix_cache.evict(max(n, self.allocator.num_slots // EVICTED_PART)))
