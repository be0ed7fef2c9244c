"""Counts what tenants hold of a room that they share, and keeps a part of it for the others."""

from collections import Counter

HELD_TO_FREE = 3  # a tenant gets more while it holds less than so many times what is free


class SharedRoom:
    """Counts places, or bytes, by tenant. For one event loop.

    Where several tenants share the room, one of them alone fills three quarters of it, two of them three sevenths each,
    and so on: however many fill their parts, another one finds room. A tenant without others may fill it all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()
        self.held = 0  # by all

    def has(self, tenant: str, more: int, own: int = 0, *, shared: bool) -> bool:
        """Says whether a tenant may hold more.

        Args:
            tenant: Who asks.
            more: The amount that it wants.
            own: The amount that the same request holds already. A request that has begun may fill what is free.
            shared: Whether there are other tenants.
        """
        free = self._size - self.held
        if more > free:
            return False
        others = self._held[tenant] - own
        return not shared or not others or others < HELD_TO_FREE * (free + own)

    def take(self, tenant: str, amount: int) -> None:
        """Notes what a tenant holds from now on, after `has`."""
        self._held[tenant] += amount
        self.held += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Notes what a tenant no longer holds."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        self.held -= amount
