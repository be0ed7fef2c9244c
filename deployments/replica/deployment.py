"""Runs a `ReplicaServer` as a Serve deployment. Serve imports it by its name, in the processes of replicas alone: the
one that builds an application and each ingress start seconds earlier without torch."""

from ray import serve
from ray.serve.context import ReplicaContext
from ray.util import get_node_ip_address

from deployments.config.app_args import AppArgs
from deployments.garbage_collection import paused
from deployments.observability.serve_log import log_with_serve
from deployments.replica.weights_registry import WeightsPeers

with paused():  # torch and the model library
    from deployments.replica.replica import ReplicaServer


class Replica(ReplicaServer):
    """Runs a `ReplicaServer` as a Serve deployment."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]  # Serve awaits constructors
        log_with_serve()
        context = serve.get_replica_context()
        replica = context.replica_id.unique_id
        peers = WeightsPeers(context.app_name, replica) if may_have_peers(context) else None
        super().__init__(args, replica, context.deployment, host=get_node_ip_address(), peers=peers)
        await self.start()

    async def __del__(self) -> None:
        if hasattr(self, "engine"):
            await self.drain(self._args.drain.handoff_s)
            await self.leave()
            self.stop()


def may_have_peers(context: ReplicaContext) -> bool:
    """Returns whether the application may have several replicas at a time, by its arguments or by `deployments:`."""
    config = context._deployment_config
    return config.autoscaling_config is not None or (config.num_replicas or 1) > 1
