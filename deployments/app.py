"""Builds the Serve application: `deployments.app:build` is the import path of every config file.

Ray reads the annotation of `build` without resolving it: no `from __future__ import annotations` in this file.
"""

import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from deployments import standby
from deployments.api.app import build_api
from deployments.auth.authenticator import Authenticator, refuse_open
from deployments.auth.key_reloader import KeyReloader
from deployments.auth.settings import UserConfig
from deployments.broadcast import broadcast_of
from deployments.config.app_args import AppArgs
from deployments.config.settings import SamplingDefaults
from deployments.garbage_collection import collect_rarely, paused
from deployments.malloc import give_back_memory
from deployments.observability.exposition import Snapshot, snapshot
from deployments.observability.ingress_metrics import IngressMetrics, LoopLagMonitor
from deployments.observability.scrape import MetricsScraper
from deployments.observability.serve_log import log_with_serve
from deployments.observability.versions import package_versions
from deployments.protocol import ReplicaTransport
from deployments.quarantine import Quarantine
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.drain import DrainWatcher, names_of
from deployments.routing.frozen_replica_watch import FrozenReplicaWatch
from deployments.routing.handle_transport import HandleTransport
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.link_transport import LinkTransport
from deployments.routing.load_tracker import load_tracker_of
from deployments.routing.quarantine_broadcast import QuarantineBroadcast
from deployments.start_failure import StartFailure, failure_of
from engine.model.file_digests import verify_files
from engine.model.model_folder import find_folder
from engine.tokenizer.library import import_without_torch
from engine.tokenizer.tokenizer import load_tokenizer

INGRESS_ONGOING_FACTOR = 2  # times the connection limit, so that a request is refused and does not wait in Ray's queue
REPLICA_ONGOING = 1024
MAX_QUEUED = 2048  # of a caller's queue: reached only if the connection limit and ingress admission both fail
FIRST_PASS_S = 10.0  # an ingress that starts together with its replicas then says that they are starting
PACKAGES = ("ray", "fastapi", "pydantic", "transformers")
REPLICA = "deployments.replica.deployment.Replica"  # Serve imports it where a replica runs, and nowhere else
ROUTER = "deployments.routing.replica_selection.TokenRouter"
SCALING_POLICY = "deployments.autoscaling:TokenPolicy"
SWITCH_S = 5e-4  # until an event loop that wakes has the interpreter beside a thread that computes: 5 ms by default
FULL = BackpressureConfig(status_code=429, retry_after_s=1)
PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
log = logging.getLogger("assay.http")


@serve.ingress()
class Ingress:
    """Serves the HTTP API and dispatches requests to replicas. Holds no queue."""

    async def __init__(self, args: AppArgs, replica: DeploymentHandle) -> None:  # type: ignore[misc]
        log_with_serve()
        give_back_memory()
        context = serve.get_replica_context()
        self._args = args
        self._loop = asyncio.get_running_loop()
        refuse_open(_listening_host(), args.auth.mode, args.auth.allow_open)
        if not os.environ.get(PROXY_CALLBACK):
            log.warning(
                "%s is not set: Serve reads the headers of requests unchecked (docs/guides/security.md).",
                PROXY_CALLBACK,
            )
        self._access = Authenticator()
        self._keys = KeyReloader(args.auth, self._access, args.ingress.count)
        self._who = (context.deployment, context.replica_id.unique_id)
        self._metrics = IngressMetrics()
        self._health = HealthMonitor(
            broadcast_of(replica), args.health, self._metrics, start_failure=partial(_start_failure, context.app_name)
        )
        siblings = serve.get_deployment_handle(context.deployment, context.app_name)
        scrape = MetricsScraper(
            broadcast_of(replica), broadcast_of(siblings), self.collect, self._metrics, args.metrics
        )
        loads = load_tracker_of(context.app_name, replica.deployment_name)
        quarantine = Quarantine()
        transport: ReplicaTransport = HandleTransport(replica)
        links: tuple[LinkTransport, ...] = ()
        if args.router.link != "off":
            links = (LinkTransport(transport, broadcast_of(replica), loads, self._metrics),)
            transport = links[0]
        self._backend = Dispatcher(transport, args, self._health, self._metrics, scrape, loads, quarantine)
        self._tasks = (
            DrainWatcher(self._who[1], names_of(siblings), self._health, self._backend.streams.cut, args.drain),
            QuarantineBroadcast(quarantine, broadcast_of(replica), loads, self._metrics.quarantined),
            LoopLagMonitor(self._metrics.loop_lagged),
            FrozenReplicaWatch(self._health, loads, self._backend.leave),
            self._health,
            self._keys,
            *links,
        )
        self._api = self._build_api()  # while replicas load their models, and before anything waits for the loop
        for task in self._tasks:
            task.start()
        # Serve sends requests from here on: one that replaces another process has to know of the replicas first.
        await self._health.first_pass(FIRST_PASS_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api

    @property
    def direct_application(self) -> FastAPI | None:
        """The application, for the HTTP server in this process; None where Serve runs it in a thread of its own."""
        return self._api if asyncio.get_running_loop() is self._loop else None

    def _build_api(self) -> FastAPI:
        model, folder = self._args.model, _model_folder(self._args)
        if folder is not None:
            verify_files(folder, weights=False)
            with paused():
                import_without_torch()
        tokenizer = load_tokenizer(_tokenizer_path(self._args), model.revision)
        defaults = SamplingDefaults() if folder is None else SamplingDefaults.from_folder(folder)
        settings = self._args.api_settings(defaults, package_versions(PACKAGES), folder)
        app = build_api(self._backend, tokenizer, settings, self._metrics, self._access)
        collect_rarely()
        sys.setswitchinterval(SWITCH_S)  # a request takes a dozen wakes, while threads read and write large ones
        return app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Applies the deployment's `user_config`. Serve calls it at the start and after each change."""
        auth = UserConfig.model_validate(user_config).auth or self._args.auth
        refuse_open(_listening_host(), auth.mode, auth.allow_open)
        self._keys.use(auth)

    async def collect(self) -> Snapshot:
        """Returns this process's metrics."""
        self._metrics.readiness(self._health.ready, self._args.health.min_replicas)
        return await snapshot(*self._who, self._metrics.families())

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            await task.stop()


def build(args: AppArgs) -> Application:
    """Builds the application, and derives what its deployments must agree on."""
    ingress, replica = args.ingress, args.replica
    replicas = serve.deployment(
        name="Replica",
        **_replicas(args),
        ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus, **standby.actor_options()},
        max_ongoing_requests=REPLICA_ONGOING,
        max_queued_requests=MAX_QUEUED,
        backpressure_config=FULL,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=args.drain.handoff_s + args.drain.grace_s,
        health_check_period_s=args.health.check_period_s,
        health_check_timeout_s=args.health.check_timeout_s,
    )(REPLICA).bind(args)
    return serve.deployment(
        Ingress,
        num_replicas=ingress.count,
        ray_actor_options={"num_cpus": ingress.num_cpus, "num_gpus": ingress.num_gpus},
        max_ongoing_requests=INGRESS_ONGOING_FACTOR * args.admission.max_inflight_requests,
        max_queued_requests=MAX_QUEUED,
        backpressure_config=FULL,
        graceful_shutdown_timeout_s=args.deadlines.max_s + args.drain.ingress_grace_s,
        health_check_period_s=args.health.check_period_s,
        health_check_timeout_s=args.health.check_timeout_s,
    ).bind(args, replicas)


def _replicas(args: AppArgs) -> dict[str, Any]:
    """Returns Serve's options for the number of replicas."""
    scaling = args.autoscaling
    if scaling.max_replicas is None:
        return {"num_replicas": args.replica.count}
    targets = {"target_drain_s": scaling.target_drain_s, "target_utilization": scaling.target_utilization}
    config = AutoscalingConfig(
        min_replicas=args.replica.count,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        look_back_period_s=scaling.look_back_period_s,
        policy=AutoscalingPolicy(policy_function=SCALING_POLICY, policy_kwargs=targets),
    )
    return {"autoscaling_config": config}


async def _start_failure(application: str) -> StartFailure | None:
    """Asks Serve's controller whether the application has failed to start."""
    found = (await asyncio.to_thread(serve.status)).applications.get(application)
    return None if found is None else failure_of(found)


def _listening_host() -> str | None:
    """Returns the address that Serve's proxies listen on; None if they do not. `build` does not see this option."""
    host: str | None = _get_global_client().http_config.host
    return host


def _tokenizer_path(args: AppArgs) -> str | Path:
    if args.model.tokenizer_path is not None:
        return args.model.tokenizer_path
    return args.model.path if args.model.path == "toy" else find_folder(args.model)


def _model_folder(args: AppArgs) -> Path | None:
    return None if args.model.path == "toy" else find_folder(args.model)
