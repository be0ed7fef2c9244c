"""ActiveTenants: tells whether requests of several tenants come, so that steps must be short."""

from collections import Counter

MEMORY_S = 1.0  # between two requests of a tenant that keeps coming: the next one would find a long step under way


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
