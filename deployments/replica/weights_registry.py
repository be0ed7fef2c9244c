"""Lets the replicas of an application compare their weights before one becomes ready.

Answers of one application come from any of its replicas, and a request may be split over several. A replica joins the
application's registry, one Ray actor, with the digest of its weights (`engine.model.weights_digest`). It is refused
while another replica of the same configuration serves other weights.

A registry that is lost with its node starts again elsewhere and knows no member. So each replica joins again every few
seconds and says for how long it has been one: of two with different weights the younger is refused, though it may have
joined the new registry first.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError

from deployments.periodic import PeriodicTask

log = logging.getLogger("ray.serve")
NAMESPACE = "assay"
ALIVE_S = 2.0  # a member that does not answer within this time lives: it is busy
ATTEMPTS = 3
REJOIN_S = 10.0
REFUSAL = (
    "The weights of this replica (digest {digest}) are not those of replica {other}, which serves the same "
    "configuration: the files under `model.path` differ between machines, or were changed in place. Make them the same "
    "everywhere; to serve new files, deploy them under another path."
)


class OtherWeights(RuntimeError):
    """This replica's weights are not those that another replica of the application serves."""


class Member(NamedTuple):
    """Holds one replica that joined."""

    digest: str
    handle: Any  # of its Ray actor
    since: float  # when it first joined, on this process's monotonic clock


async def is_alive(handle: Any) -> bool:
    """Returns whether a Ray actor still runs."""
    try:
        async with asyncio.timeout(ALIVE_S):
            await handle.__ray_ready__.remote()
    except TimeoutError:
        return True
    except RayActorError:
        return False
    return True


class WeightsRegistry:
    """Remembers which weights the replicas of an application serve. The first replica of a configuration decides.

    A configuration is what the operator wrote in `model` and `speculation`: a rollout to another model is another one.
    """

    def __init__(self, alive: Callable[[Any], Awaitable[bool]] = is_alive) -> None:
        self._alive = alive
        self._members: dict[str, dict[str, Member]] = {}
        self._lock = asyncio.Lock()

    async def join(
        self, configuration: str, replica: str, digest: str, handle: Any, member_s: float = 0.0
    ) -> str | None:
        """Lets a replica join, or join again.

        Args:
            configuration: The options that decide which weights are right.
            replica: The replica's name.
            digest: The digest of its weights.
            handle: The replica's actor, which may end without leaving.
            member_s: The seconds since it first joined.

        Returns:
            The name of a living replica with other weights that joined before; None if there is none, and the replica
            has joined. Younger ones with other weights are members no more.
        """
        async with self._lock:
            since = time.monotonic() - member_s
            members = self._members.setdefault(configuration, {})
            for name, member in tuple(members.items()):
                if member.digest != digest and name != replica:
                    if member.since <= since and await self._alive(member.handle):
                        members.pop(replica, None)
                        return name
                    del members[name]
            members[replica] = Member(digest, handle, since)
            return None

    async def leave(self, replica: str) -> bool:
        """Forgets a replica that stops. Returns whether another one is left."""
        async with self._lock:
            for members in self._members.values():
                members.pop(replica, None)
            return any(self._members.values())


class WeightsPeers(PeriodicTask):
    """Joins the registry of an application from within one of its replicas, which is a Ray actor; again each period."""

    period_s = REJOIN_S

    def __init__(self, application: str, replica: str) -> None:
        super().__init__()
        self._name = f"assay-weights-{application}"
        self._replica = replica
        self._joined: float | None = None
        self.refusal: OtherWeights | None = None  # since an older replica with other weights has joined again

    async def join(self, configuration: str, digest: str) -> None:
        """Joins with the digest of this replica's weights.

        Raises:
            OtherWeights: Another replica serves other weights.
        """
        self._configuration, self._digest = configuration, digest
        await self.look()
        if self.refusal is not None:
            raise self.refusal
        self._joined = time.monotonic()
        self.start()

    async def look(self) -> None:
        """Joins, or joins again."""
        handle = ray.get_runtime_context().current_actor
        member_s = 0.0 if self._joined is None else time.monotonic() - self._joined
        other = await self._call("join", self._configuration, self._replica, self._digest, handle, member_s)
        self.refusal = None if other is None else OtherWeights(REFUSAL.format(digest=self._digest[:12], other=other))

    async def leave(self) -> None:
        """Leaves. The registry ends with its last member."""
        await self.stop()
        try:
            if not await self._call("leave", self._replica):
                ray.kill(self._actor())
        except RayActorError:
            log.info("The registry of weights has ended already.")

    async def _call(self, method: str, *args: Any) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                return await getattr(self._actor(), method).remote(*args)
            except RayActorError:  # it ended with its last member just now
                if attempt == ATTEMPTS - 1:
                    raise
        return None

    def _actor(self) -> Any:
        """Returns the registry of the application, which the first caller starts."""
        options = {"lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": -1}
        return ray.remote(WeightsRegistry).options(name=self._name, namespace=NAMESPACE, **options).remote()
