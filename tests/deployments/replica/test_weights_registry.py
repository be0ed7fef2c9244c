"""Two replicas with different weights never both become ready."""

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private.config import DeploymentConfig

from deployments import app
from deployments.config.app_args import AppArgs
from deployments.replica.deployment import may_have_peers
from deployments.replica.replica import ReplicaServer
from deployments.replica.weights_registry import NAMESPACE, OtherWeights, WeightsPeers, WeightsRegistry
from tests.support.toy_model import ToyModel


class Alive:
    """Says which handles are those of living replicas."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    async def __call__(self, handle: Any) -> bool:
        await asyncio.sleep(0)
        return handle not in self.dead


async def test_the_first_replica_decides_and_others_join_or_are_refused_by_its_name() -> None:
    alive = Alive()
    registry = WeightsRegistry(alive)
    assert await registry.join("m", "a", "1", "A") is None
    assert await registry.join("m", "b", "1", "B") is None
    assert await registry.join("m", "c", "2", "C") == "a"
    assert await registry.join("other", "c", "2", "C") is None  # a rollout to another model
    alive.dead = {"A"}
    assert await registry.join("m", "d", "2", "D") == "b"
    alive.dead = {"A", "B"}
    assert await registry.join("m", "d", "2", "D") is None
    assert await registry.join("m", "a", "1", "A2") == "d"
    assert await registry.leave("d") and not await registry.leave("c")


@pytest.mark.parametrize("replicas", [2, 7])
async def test_of_replicas_that_join_together_one_kind_is_let_in(replicas: int) -> None:
    registry = WeightsRegistry(Alive())
    joins = [registry.join("m", f"{index}", f"{index % 2}", index) for index in range(replicas)]
    refused = [found is not None for found in await asyncio.gather(*joins)]
    assert refused == [index % 2 == 1 for index in range(replicas)]


async def test_a_registry_that_was_lost_lets_the_older_replicas_decide() -> None:
    """A new replica with other weights is the first to join the registry that starts again."""
    registry = WeightsRegistry(Alive())
    assert await registry.join("m", "new", "2", "N") is None
    assert await registry.join("m", "a", "1", "A", 60.0) is None
    assert await registry.join("m", "new", "2", "N", 5.0) == "a"
    assert await registry.join("m", "b", "1", "B", 30.0) is None
    assert await registry.join("m", "newer", "2", "M") in ("a", "b")
    for name in "ab":
        await registry.leave(name)
    assert await registry.join("m", "new", "2", "N", 15.0) is None


class Peers(WeightsPeers):
    """Calls a registry of this process in place of a Ray actor."""

    def __init__(self, replica: str, registry: WeightsRegistry) -> None:
        super().__init__("registry-test", replica)
        self.registry = registry

    async def _call(self, method: str, *args: Any) -> Any:
        return await getattr(self.registry, method)(*args)

    def _actor(self) -> Any:
        return self.registry


async def test_a_replica_that_is_refused_later_fails_its_health_check_and_its_canaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="handle"))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    before, after = WeightsRegistry(Alive()), WeightsRegistry(Alive())
    old, new = Peers("old", before), Peers("new", after)
    args = AppArgs.model_validate({"model": {"path": "toy"}, "router": {"link": "off"}})
    server = ReplicaServer(args, "new", peers=new)
    await old.join(f"{args.model!r} {args.speculation!r}", "1" * 64)
    try:
        await server.start(ToyModel())
        server.check_health()
        old.registry = after  # it has started again, and the new replica has joined first
        await old.look()
        await new.look()
        with pytest.raises(OtherWeights, match="replica old"):
            server.check_health()
        assert (await server.canary()).failure == "mismatch"
        await old.leave()
        await new.look()
        server.check_health()
        assert (await server.canary()).failure is None
    finally:
        await server.leave()
        server.stop()


class Process:
    """A process that starts replicas of the toy model, one after another, as Serve's own do."""

    async def start(self, name: str, spread: float) -> str | None:
        """Returns why the replica does not become ready."""
        os.environ["ASSAY_TEST_FAULTS"] = "1"
        args = AppArgs.model_validate({"model": {"path": "toy"}, "router": {"link": "off"}})
        self._peers = WeightsPeers("registry-test", name)
        self._server = ReplicaServer(args, name, peers=self._peers)
        try:
            await self._server.start(ToyModel(spread=spread))
        except OtherWeights as refused:
            return str(refused)
        return None

    async def join_again(self) -> str | None:
        await self._peers.look()
        return None if self._peers.refusal is None else str(self._peers.refusal)

    async def stop(self) -> None:
        await self._server.leave()
        self._server.stop()


@pytest.mark.full
def test_replicas_of_ray_with_other_weights_are_never_both_ready(cluster: Callable[..., str]) -> None:
    def registry_exists() -> bool:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return {"name": "assay-weights-registry-test", "namespace": NAMESPACE} in actors

    first, second, third = (ray.remote(Process).options(num_cpus=0).remote() for _ in range(3))
    ready = ray.get([first.start.remote("first", 2.5), third.start.remote("third", 1.5)], timeout=300)
    assert sorted(one is None for one in ready) == [False, True]
    other = "first" if ready[0] is None else "third"
    message = ready[1] or ready[0]
    assert f"replica {other}" in message and "model.path" in message
    same = ray.get(second.start.remote("second", 2.5), timeout=300)
    assert (same is None) == (other == "first")
    ray.get([process.stop.remote() for process in (first, second, third)], timeout=300)
    assert not registry_exists()
    assert ray.get(first.start.remote("fourth", 1.5), timeout=300) is None

    assert registry_exists()
    ray.kill(ray.get_actor("assay-weights-registry-test", NAMESPACE), no_restart=False)
    ray.get(second.start.remote("fifth", 2.5), timeout=300)  # refused, or the first of a registry that is empty
    assert ray.get(first.join_again.remote(), timeout=300) is None
    assert "replica fourth" in ray.get(second.join_again.remote(), timeout=300)
    ray.get([process.stop.remote() for process in (first, second)], timeout=300)
    assert not registry_exists()


@pytest.mark.parametrize(
    ("args", "of_serve", "found"),
    [
        ({}, {}, False),
        ({"replica": {"count": 2}}, {}, True),
        ({"autoscaling": {"max_replicas": 2}}, {}, True),
        ({}, {"num_replicas": 3}, True),  # by `deployments:` of the application
        ({}, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}, True),
    ],
)
def test_replicas_are_compared_whatever_says_how_many_there_are(
    args: dict[str, Any], of_serve: dict[str, Any], found: bool
) -> None:
    of_args = app._replicas(AppArgs.model_validate(args))
    context: Any = SimpleNamespace(_deployment_config=DeploymentConfig(**(of_serve or of_args)))
    assert may_have_peers(context) is found
