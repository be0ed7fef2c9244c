"""Defines Serve's request router, which runs in every process that calls replicas.

The router obeys the `Route` of a call and publishes which replicas exist. `deployments.routing.replica_selection` makes
the choice. There is no central actor, tree or lock.

Serve pickles this module by value, so it may hold no state. Its imports are found by name in each process.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from deployments.protocol import Route
from deployments.routing.load_tracker import LoadTracker, load_tracker_of


class TokenRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks replicas in the order of the call's route: Serve takes the first that has room.

    Replicas that the route does not name come last, and a call without a route goes anywhere.
    """

    @property
    def _loads(self) -> LoadTracker:
        return load_tracker_of(self._deployment_id.app_name, self._deployment_id.name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        route = route_of(pending_request)
        named = () if route is None else route.replicas
        place = {name: index for index, name in enumerate(named)}
        known = sorted(
            (replica for replica in candidate_replicas if replica.replica_id.unique_id in place),
            key=lambda replica: place[replica.replica_id.unique_id],
        )
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in place]
        random.shuffle(others)
        return [*([replica] for replica in known), *([others] if others else ())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        route = route_of(pending_request)
        for ticket in () if route is None else (route.ticket, *route.more):
            self._loads.moved(ticket, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish(dead=replica_id.unique_id)

    def _publish(self, dead: str | None = None) -> None:
        self._loads.publish([replica_id.unique_id for replica_id in self.curr_replicas], dead=dead)

    # Serve matches a chosen replica with its request by an id that all calls of one HTTP request share, and forgets all
    # of them but one: the others would wait for ever. A call's metadata is an object of its own.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending_requests_by_id[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending_requests_by_id.pop(id(pending_request.metadata), None)

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        found = self._pending_requests_by_id.get(id(request_metadata))
        return None if found is None or found.future.done() else found


def route_of(pending_request: PendingRequest | None) -> Route | None:
    """Returns the call's argument `route`, if it has one."""
    route = pending_request.kwargs.get("route") if pending_request is not None else None
    return route if isinstance(route, Route) else None
