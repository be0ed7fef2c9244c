"""build(args: AppArgs) -> Application: the import path of every Serve config file.

Ray reads the annotation of `build` without resolving it: no `from __future__ import annotations` in this file.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.auth import Access, refuse_open
from deployments.board import Board, Broadcast
from deployments.config import AppArgs
from deployments.dispatch import Dispatch
from deployments.ingress import build_api
from deployments.keys_watch import KeysWatch
from deployments.loads import loads_of
from deployments.metrics import IngressMetrics, Snapshot
from deployments.replica import ReplicaServer, package_versions
from deployments.scrape import Scrape
from deployments.sections.auth import UserConfig
from deployments.settings import SamplingDefaults
from engine.loading import find_folder
from engine.tokenizer import load_tokenizer

log = logging.getLogger("ray.serve")
INGRESS_ONGOING_FACTOR = 2  # of gate 0, so that our refusal fires and not Ray's queue
REPLICA_ONGOING = 1024
MAX_QUEUED = 2048  # a caller's own queue: reached only when gate 0 and the token queue have both failed
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 5.0
PACKAGES = ("ray", "fastapi", "pydantic", "transformers")
ROUTER = "deployments.routing.TokenRouter"
FULL = BackpressureConfig(status_code=429, retry_after_s=1)


class Replica(ReplicaServer):
    """The replica deployment: `ReplicaServer` named and started by Serve."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]  # Serve awaits constructors
        context = serve.get_replica_context()
        super().__init__(args, context.replica_id.unique_id, context.deployment)
        await self.start()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.stop()


@serve.ingress()
class Ingress:
    """The HTTP deployment: the API of `build_api` over `Dispatch`. Holds no queue."""

    async def __init__(self, args: AppArgs, replica: DeploymentHandle) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._args = args
        refuse_open(_listening_host(), args.auth.mode, args.auth.allow_open)
        self._access = Access()
        self._keys = KeysWatch(args.auth, self._access, args.ingress.count)
        self._who = (context.deployment, context.replica_id.unique_id)
        self._metrics = IngressMetrics()
        self._board = Board(_broadcast(replica), args.health, self._metrics)
        siblings = serve.get_deployment_handle(context.deployment, context.app_name)
        scrape = Scrape(_broadcast(replica), _broadcast(siblings), self._snapshot, self._metrics, args.metrics)
        loads = loads_of(context.app_name, replica.deployment_name)
        self._backend = Dispatch(replica, args, self._board, self._metrics, scrape, loads)
        self._board.start()
        self._keys.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        model = self._args.model
        tokenizer = load_tokenizer(_tokenizer_path(self._args), model.revision)
        settings = self._args.api_settings(_sampling_defaults(self._args), package_versions(PACKAGES))
        return build_api(self._backend, tokenizer, settings, self._metrics, self._access)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with the deployment's `user_config` when it starts and whenever that changes."""
        given = UserConfig.model_validate(user_config).auth
        if given is not None:
            refuse_open(_listening_host(), given.mode, given.allow_open)
            self._keys.use(given)

    def _snapshot(self) -> Snapshot:
        return Snapshot(*self._who, self._metrics.families())

    async def collect(self) -> Snapshot:
        return self._snapshot()

    async def __del__(self) -> None:
        if hasattr(self, "_board"):
            await self._board.stop()
            await self._keys.stop()


def build(args: AppArgs) -> Application:
    """The application; whatever must agree between its deployments is derived here."""
    ingress, replica = args.ingress, args.replica
    replicas = serve.deployment(
        Replica,
        num_replicas=replica.count,
        ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus},
        max_ongoing_requests=REPLICA_ONGOING,
        max_queued_requests=MAX_QUEUED,
        backpressure_config=FULL,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=args.drain.handoff_s + args.drain.grace_s,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    ).bind(args)
    return serve.deployment(
        Ingress,
        num_replicas=ingress.count,
        ray_actor_options={"num_cpus": ingress.num_cpus, "num_gpus": ingress.num_gpus},
        max_ongoing_requests=INGRESS_ONGOING_FACTOR * args.admission.max_inflight_requests,
        max_queued_requests=MAX_QUEUED,
        backpressure_config=FULL,
        graceful_shutdown_timeout_s=args.deadlines.max_s + args.drain.ingress_grace_s,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    ).bind(args, replicas)


def _listening_host() -> str | None:
    """Where Serve's proxies listen; None if nowhere. A config file does not show it to `build`, but Serve tells."""
    host: str | None = _get_global_client().http_config.host
    return host


def _broadcast(handle: DeploymentHandle) -> Broadcast:
    async def call(method: str, timeout_s: float) -> Sequence[object]:
        try:
            found: list[Any] = await handle.broadcast(method).results_async(timeout_s=timeout_s, return_exceptions=True)
        except DeploymentUnavailableError:  # none has started yet, or none is left: /readyz says so
            return []
        except TimeoutError:
            log.warning("%s of %s: no answer within %.1f s.", method, handle.deployment_name, timeout_s)
            return []
        return found

    return call


def _tokenizer_path(args: AppArgs) -> str | Path:
    if args.model.tokenizer_path is not None:
        return args.model.tokenizer_path
    return args.model.path if args.model.path == "toy" else find_folder(args.model.config())


def _sampling_defaults(args: AppArgs) -> SamplingDefaults:
    if args.model.path == "toy":
        return SamplingDefaults()
    return SamplingDefaults.of_folder(find_folder(args.model.config()))
