"""Moves requests away from a replica that answers no canary, before Serve calls its process dead.

A process that is frozen keeps its connections: its callers learn nothing until Serve has given it up, which takes three
failed health checks. Its requests need no such proof, since whatever another replica answers is the same.
"""

from collections.abc import Callable, Collection

from deployments.periodic import PeriodicTask
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker

PERIOD_S = 0.5


class FrozenReplicaWatch(PeriodicTask):
    """Reports each replica once when it becomes suspect while another one is not."""

    period_s = PERIOD_S

    def __init__(self, health: HealthMonitor, loads: LoadTracker, leave: Callable[[Collection[str]], None]) -> None:
        """Keeps what a round needs.

        Args:
            health: Knows which replicas have not passed a canary for two periods.
            loads: Knows which replicas run.
            leave: Moves the requests that are under way at the replicas which it is called with.
        """
        super().__init__()
        self._health = health
        self._loads = loads
        self._leave = leave
        self._known: frozenset[str] = frozenset()

    async def look(self) -> None:
        """Runs one round. If no replica has passed, this process was late and not all of them."""
        running = self._loads.replicas
        suspects = frozenset(self._health.suspects(running))
        if len(suspects) == len(running):
            self._known &= suspects
            return
        fresh, self._known = suspects - self._known, suspects
        if fresh:
            self._leave(fresh)
