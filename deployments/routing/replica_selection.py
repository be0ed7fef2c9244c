"""Ranks the replicas for a call by cache affinity and load, and makes Serve send the call in that order.

Affinity is by rendezvous hashing. Every process gives a key the same order of the same names, and a replica that joins
or leaves moves only its own keys. `TokenRouter` is Serve's router in every process that calls
replicas. There is no central actor, tree or lock.

Serve pickles `TokenRouter` by value, so this module may hold no state. Its imports are found by name in each
process.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from deployments.config.sections import RouterArgs
from deployments.protocol import AnyCall, Route, common
from deployments.routing.load_tracker import LoadTracker, load_tracker_of
from engine.requests import Int32s


class RendezvousHash:
    """Orders replicas for a key by a hash of both, the highest first (Thaler and Ravishankar 1998).

    Every replica is first for an equal share of the keys, and one that joins or leaves moves only its own.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._points = np.array([point(name.encode()) for name in names], np.uint64)

    def order(self, key: int) -> npt.NDArray[np.intp]:
        """Returns the places of all replicas in `names`, the best for the key first."""
        mixed = self._points ^ np.uint64(key)
        for shift, factor in _MIX:
            mixed ^= mixed >> shift
            mixed *= factor
        return mixed.argsort()[::-1]


# The steps of the finaliser of MurmurHash3 whose result is compared from its highest bits on.
_MIX = ((np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)), (np.uint64(33), np.uint64(0xC4CEB9FE1A85EC53)))


def point(data: bytes) -> int:
    """Returns a hash in [0, 2^64): the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


MIN_KEY_TOKENS = 32  # a shorter prefix is no reason to prefer a replica
CACHE_WORTH = 2  # times the tokens that its cache may save, a replica's queue may be longer than another's
STEPS_S = 0.02  # of the steps under way when a request comes: two, which take about 10 ms however little they hold
MAX_SPREAD = 8  # first replicas of a key's order that share its requests: more would each compute its beginning
BALANCE = 1.25  # times the mean load: bounded-load consistent hashing (Mirrokni, Thorup and Zadimoghaddam 2018)


class ReplicaSelector:
    """Ranks replicas by the loads that the process tracks. It holds no state but their hashes."""

    def __init__(
        self,
        loads: LoadTracker,
        router: RouterArgs,
        suspects: Callable[[Collection[str]], Collection[str]] = lambda running: (),
    ) -> None:
        """`suspects` names the running replicas that fail their canaries: they are used only if there is no other, as
        are those that are silent."""
        self._loads = loads
        self._router = router
        self._suspects = suspects
        self._fleet = lru_cache(maxsize=4)(_Fleet)

    def rank_call(self, call: AnyCall, exclude: Collection[str] = ()) -> tuple[str, ...]:
        """Ranks the replicas for a call. See `rank`."""
        return self.rank(self.key_of(call), exclude, self.cacheable(call), self.steps_s(call))

    def rank(
        self,
        key: int | None,
        exclude: Collection[str] = (),
        cacheable: int | None = None,
        steps_s: float = 0.0,
    ) -> tuple[str, ...]:
        """Ranks the replicas for a key.

        Args:
            key: From `key_of`.
            exclude: Replicas to leave out.
            cacheable: Tokens that the key's own replica may have cached. They are worth a longer queue than those of
                the other replicas, within a bound: a short query before long items is soon computed again.
            steps_s: From `steps_s`.

        Returns:
            Names, best first; empty if none is known.
        """
        if len(self._loads.replicas) < 2:
            return tuple(name for name in self._loads.replicas if name not in exclude)
        running, loads, rates = self._loads.loads()
        fleet = self._fleet(running)
        order = fleet.hashes.order(random.getrandbits(64) if key is None else key)
        suspects = {*self._suspects(running), *self._loads.silent()}
        if exclude or suspects:
            order = _without(order, running, exclude, suspects)
        if not len(order):
            return ()
        ahead = loads[order]
        bound = BALANCE * float(ahead.sum()) / len(ahead) + self._router.max_imbalance_tokens
        waited_for = np.maximum(ahead - steps_s * rates[order], 0.0) if steps_s else ahead
        best = self._best(waited_for, key, cacheable)
        if best:
            for places in (order, ahead):
                places[: best + 1] = places[[best, *range(best)]]
        over = ahead > bound
        if over.any():
            busy = order[over]
            order = np.concatenate((order[~over], busy[ahead[over].argsort(kind="stable")]))
        return tuple(fleet.names[order].tolist())

    @staticmethod
    def _best(ahead: npt.NDArray[np.float64], key: int | None, cacheable: int | None) -> int:
        """Returns the place in an order of the replica to take, by the tokens ahead at each.

        Without a key the order is random, and two choices are enough for balance.
        """
        if key is None:
            return int(ahead[:2].argmin())
        if cacheable is None:
            return 0
        costs = ahead[:MAX_SPREAD] + CACHE_WORTH * cacheable
        costs[0] = ahead[0]
        return int(costs.argmin())

    @staticmethod
    def cacheable(call: AnyCall) -> int:
        """Returns how many tokens of the call a cache may hold at most."""
        return len(_prefix(call))

    @staticmethod
    def steps_s(call: AnyCall) -> float:
        """Returns the seconds of a replica's work that delay the call no further.

        A scoring call waits for the steps under way and shares the next one with what has queued meanwhile. A
        generation is a row more in every step, and goes where there are fewest.
        """
        return 0.0 if isinstance(call, tuple) else STEPS_S

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


class _Fleet:
    """Holds what is the same for all calls while the same replicas run."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = np.array(names, object)
        self.hashes = RendezvousHash(names)


def _without(
    order: npt.NDArray[np.intp], names: Sequence[str], exclude: Collection[str], suspects: Collection[str]
) -> npt.NDArray[np.intp]:
    """Leaves out the suspects if there are others, and those to exclude: if the others are all excluded, none is."""
    well = [place for place in order.tolist() if names[place] not in suspects]
    left = [place for place in well or order.tolist() if names[place] not in exclude]
    return np.array(left or (well if suspects else []), np.intp)


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
