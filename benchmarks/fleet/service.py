"""Starts the application on this machine as `assay serve` does, changes its number of replicas and stops one."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.client import APP, REPLICA
from deployments.cli.launch import local_serve
from deployments.cli.launch.listening_ports import descendants, listeners
from deployments.config.sections import HealthArgs
from deployments.standby.pool import StandbyPool, wanted

INGRESS = "Ingress"
DIRECT = range(30_000, 31_001)  # where ingresses listen themselves, in fast mode
POLL_S = 0.25
ATTEMPTS = 3  # at starting Ray: it gives itself 30 s, which a busy machine may need
MIN_CPUS = 8  # logical: a small machine must still place every actor
LOG_CHARS = 4000
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotWhole(RuntimeError):
    """Says that the application did not start in time, with the messages of Serve and the replicas' logs."""


def get(url: str, path: str) -> str:
    """Returns the body of an answer with any status. Raises OSError without an answer."""
    try:
        with OPENER.open(url + path, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as refused:
        return refused.read().decode("utf-8", "replace")


def _start_ray(gpus: int) -> None:
    import ray

    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                namespace="serve",
                include_dashboard=False,
                object_store_memory=local_serve.OBJECT_STORE_BYTES,
                num_cpus=max(MIN_CPUS, os.cpu_count() or 1),
                num_gpus=gpus,
                log_to_driver=False,
            )
            return
        except Exception as error:  # Ray has no better name for it
            ray.shutdown()
            if attempt == ATTEMPTS or "timed out during startup" not in str(error):
                raise


@dataclass(kw_only=True)
class Fleet:
    """Manages the application; `started` makes one. `args` are the application's."""

    args: dict[str, Any]
    gpus: int
    ingresses: int
    port: int
    fast: bool
    direct: bool  # ingresses are asked themselves: what HAProxy does, where there is none
    standby: StandbyPool  # as `assay serve` keeps one
    count: int = 0
    gcs: str = ""
    urls: tuple[str, ...] = field(default=())

    @classmethod
    @contextlib.contextmanager
    def started(cls, args: dict[str, Any], *, gpus: int, ingresses: int, fast: bool, direct: bool) -> "Iterator[Fleet]":
        """Starts Ray and Serve without an application, and ends them. Ray must not be imported before."""
        with socket.socket() as free:
            free.bind((local_serve.LOOPBACK, 0))
            port = free.getsockname()[1]
        # Where memory grows as it is used, Ray would take the machine for full and kill its replicas.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        config = {"applications": [{"args": args}]}
        service = local_serve.LocalService(config=config, name="fleet", fast=fast)
        with service.prepared() as folder, contextlib.ExitStack() as ending:
            path = os.pathsep.join((os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])))
            os.environ["PYTHONPATH"] = path
            standby = StandbyPool(folder, wanted(config))
            ending.callback(standby.stop)
            os.environ.update(standby.variables)
            import ray
            from ray import serve

            ending.callback(ray.shutdown)
            _start_ray(gpus)
            serve.start(proxy_location="HeadOnly", http_options={"host": local_serve.LOOPBACK, "port": port})
            gcs = ray.get_runtime_context().gcs_address
            yield cls(
                args=args,
                gpus=gpus,
                ingresses=ingresses,
                port=port,
                fast=fast,
                direct=direct,
                standby=standby,
                gcs=gcs,
            )

    @property
    def period_s(self) -> float:
        """Returns the time between two canaries."""
        return HealthArgs(**self.args.get("health", {})).period_s

    def deploy(self, count: int, limit_s: float) -> float:
        """Changes the number of replicas, and returns the seconds until all are ready. Running replicas are kept."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        self.count = count
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "deployments.app:build",
            "args": self.args,
            "deployments": [
                {"name": REPLICA, "num_replicas": count},
                {"name": INGRESS, "num_replicas": self.ingresses},
            ],
            "logging_config": {"enable_access_log": False},
        }
        http = {"host": local_serve.LOOPBACK, "port": self.port}
        config = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        started = time.monotonic()
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
        self.until_whole(limit_s)
        return time.monotonic() - started

    def until_whole(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not self.whole():
            if time.monotonic() > end:
                raise NotWhole(f"Not whole after {limit_s:g} s.\n{self.diagnostics()}")
            time.sleep(POLL_S)
        self.standby.keep_spare()

    def runs(self) -> bool:
        """Says whether Serve reports all as running."""
        found = self._status()
        if found is None:
            return False
        if str(found.status).endswith("DEPLOY_FAILED"):
            raise NotWhole(self.diagnostics())
        running = {name: one.replica_states for name, one in found.deployments.items()}
        return running == {INGRESS: {"RUNNING": self.ingresses}, REPLICA: {"RUNNING": self.count}}

    def whole(self) -> bool:
        """Says whether all run and every ingress has seen each replica pass a canary."""
        if not self.runs():
            return False
        proxy, own = (f"http://{local_serve.LOOPBACK}:{self.port}",), self._own_addresses()
        self.urls = own if self.direct and own else proxy
        return all(map(self._sees_all, own or proxy))

    def _status(self) -> Any:
        from ray import serve

        with contextlib.suppress(Exception):  # the controller may be busy: asked again
            return serve.status().applications.get(APP)
        return None

    def _own_addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which the ingresses themselves listen, in fast mode; none until all do."""
        ports = sorted({one.port for one in listeners(os.getpid()) if one.port in DIRECT}) if self.fast else []
        return tuple(f"http://{local_serve.LOOPBACK}:{port}" for port in ports if len(ports) == self.ingresses)

    def _sees_all(self, url: str) -> bool:
        try:
            said = json.loads(get(url, "/readyz"))
        except (OSError, ValueError):
            return False
        return bool(said.get("replicas_ready", 0) >= self.count == said.get("replicas_total"))

    def pids(self, deployment: str = REPLICA) -> Sequence[int]:
        """Returns the process ids of a deployment's replicas."""
        title = f"ray::ServeReplica:{APP}:{deployment}".encode()
        found = []
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                    found.append(pid)
        return sorted(found)

    def kill(self) -> int:
        """Kills one engine replica with SIGKILL."""
        pid = self.pids()[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def freeze(self) -> int:
        """Stops the process of one engine replica with SIGSTOP, and returns its id."""
        pid = self.pids()[0]
        os.kill(pid, signal.SIGSTOP)
        return pid

    def end_frozen(self, pid: int) -> None:
        """Kills a frozen process that Serve has not killed."""
        if pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def total(self, metric: str) -> float:
        """Returns a metric's sum over all running processes and labels."""
        lines = [line for line in get(self.urls[0], "/metrics").splitlines() if line.startswith((metric, metric + "{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def diagnostics(self) -> str:
        """Returns Serve's status of the application, and the ends of its logs."""
        found = self._status()
        said = [] if found is None else [found.message, *(one.message for one in found.deployments.values())]
        if "ray" in sys.modules:
            from ray._private.worker import global_worker

            node = global_worker.node
            folder = Path(node.get_session_dir_path() if node else "") / "logs" / "serve"
            for log in sorted(folder.glob(f"replica_{APP}_*")):
                said.append(f"{log.name}: ...{log.read_text('utf-8', 'replace')[-LOG_CHARS:]}")
        return "\n".join(filter(None, said))
