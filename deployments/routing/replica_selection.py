"""Ranks the replicas for a call by cache affinity and load, and makes Serve send the call in that order.

Affinity is by consistent hashing (Karger et al. 1997). Every process builds the same ring from the same names, and a
replica that joins or leaves moves only its own keys. `TokenRouter` is Serve's router in every process that calls
replicas. There is no central actor, tree or lock.

Serve pickles `TokenRouter` by value, so this module may hold no state. Its imports are found by name in each
process.
"""

import bisect
import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from deployments.config.sections import RouterArgs
from deployments.protocol import AnyCall, Route, common
from deployments.routing.load_tracker import LoadTracker, load_tracker_of
from engine.requests import Int32s

VIRTUAL_NODES = 128  # of each replica: the busiest of 8 then owns about a sixth more than the mean


class HashRing:
    """Orders replicas by the distance of their virtual nodes from a key."""

    def __init__(self, names: Iterable[str]) -> None:
        nodes = sorted((point(f"{name}#{copy}".encode()), name) for name in set(names) for copy in range(VIRTUAL_NODES))
        self._points = [where for where, _ in nodes]
        self._names = [name for _, name in nodes]
        self._count = len(set(self._names))

    def walk(self, key: int) -> Iterator[str]:
        """Yields every replica once, in the order of the ring from the key on."""
        seen: set[str] = set()
        start = bisect.bisect_left(self._points, key)
        for step in range(len(self._names)):
            if len(seen) == self._count:
                return
            name = self._names[(start + step) % len(self._names)]
            if name not in seen:
                seen.add(name)
                yield name


def point(data: bytes) -> int:
    """Returns a place on the ring, in [0, 2^64): the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


MIN_KEY_TOKENS = 32  # a shorter prefix is no reason to prefer a replica
CACHE_WORTH = 2  # times the tokens that its cache may save, a replica's queue may be longer than the next one's
BALANCE = 1.25  # times the mean load: bounded-load consistent hashing (Mirrokni, Thorup and Zadimoghaddam 2018)


class ReplicaSelector:
    """Ranks replicas by the loads that the process tracks. It holds no state but the ring."""

    def __init__(
        self,
        loads: LoadTracker,
        router: RouterArgs,
        suspects: Callable[[Collection[str]], Collection[str]] = lambda running: (),
    ) -> None:
        """`suspects` names the running replicas that fail their canaries: they are used only if there is no other."""
        self._loads = loads
        self._router = router
        self._suspects = suspects
        self._ring = lru_cache(maxsize=4)(HashRing)

    def rank(self, key: int | None, exclude: Collection[str] = (), cacheable: int | None = None) -> tuple[str, ...]:
        """Ranks the replicas for a key.

        Args:
            key: From `key_of`.
            exclude: Replicas to leave out.
            cacheable: Tokens that the key's own replica may have cached. They are worth a longer queue than the next
                replica's, within a bound: a short query before long items is soon computed again.

        Returns:
            Names, best first; empty if none is known.
        """
        running = self._loads.replicas
        names = [name for name in running if name not in exclude]
        suspects = self._suspects(running)
        names = [name for name in names if name not in suspects] or names
        if not names:
            return ()
        loads = {name: self._loads.load(name) for name in names}
        bound = BALANCE * sum(loads.values()) / len(loads) + self._router.max_imbalance_tokens
        order = self._anywhere(loads) if key is None else [n for n in self._ring(running).walk(key) if n in loads]
        if key is not None and cacheable is not None and len(order) > 1:
            first, second = order[:2]
            if loads[first] > loads[second] + CACHE_WORTH * cacheable:
                order[:2] = second, first
        free = [name for name in order if loads[name] <= bound]
        return (*free, *sorted((name for name in order if loads[name] > bound), key=loads.__getitem__))

    @staticmethod
    def _anywhere(loads: dict[str, float]) -> list[str]:
        """Returns a random order with the less loaded of the first two in front: two choices are enough for balance."""
        order = random.sample(list(loads), len(loads))
        order[:2] = sorted(order[:2], key=loads.__getitem__)
        return order

    @staticmethod
    def cacheable(call: AnyCall) -> int:
        """Returns how many tokens of the call a cache may hold at most."""
        return len(_prefix(call))

    def key_of(self, call: AnyCall) -> int | None:
        """Returns the key of calls of one prefix-cache domain that begin alike.

        None if the prefix is too short to be worth a cache hit.
        """
        ids = _prefix(call)[: self._router.prefix_tokens]
        if len(ids) < MIN_KEY_TOKENS:
            return None
        return point(
            common(call).cache_salt.encode("utf-8", "surrogatepass") + b"\0" + np.ascontiguousarray(ids).tobytes()
        )


def _prefix(call: AnyCall) -> Int32s:
    return call[0].prompt if isinstance(call, tuple) else call.prefix


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
