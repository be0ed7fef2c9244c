"""A cluster that a test may break: deployed from a config, its processes found by name below our own."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.deployments.fleets import make_fleet as make_fleet
from tests.deployments.fleets import path as path
from tests.support.ports import free_port

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
READY_S = 900.0  # on a machine that does other things too
STEP_S = "0.005"  # of the toy model: requests then last long enough to be in the middle of something
ENVIRONMENT = {
    # A proxy that has died is replaced within seconds.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "2",
}


@dataclass
class Cluster:
    """Ray and Serve on this machine, and one application of it."""

    port: int
    args: dict[str, Any]
    release: int = 0
    count: int = 2
    deployed: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/chaos"

    def deploy(self, **overrides: Any) -> None:
        """Deploys like `serve deploy`. A new `release` is a rolling update; another `count` changes the scale alone."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        for name, value in overrides.items():
            setattr(self, name, value)
        environment = {
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
            "ASSAY_TEST_DELAY_STEP": STEP_S,
            "RELEASE": str(self.release),
        }
        application = {
            "name": "chaos",
            "route_prefix": "/chaos",
            "import_path": "deployments.app:build",
            "runtime_env": {"env_vars": environment},
            "args": self.args,
            "deployments": [{"name": "Replica", "num_replicas": self.count}],
        }
        http = {"host": "127.0.0.1", "port": self.port}
        config = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    async def whole(self, ingresses: int = 2) -> None:
        """Until Serve calls everything running and healthy, and every replica has passed a canary."""
        from ray import serve

        async with asyncio.timeout(READY_S), httpx.AsyncClient(timeout=10, trust_env=False) as http:
            while True:
                await asyncio.sleep(0.2)
                try:
                    status = (await asyncio.to_thread(serve.status)).applications["chaos"]
                    answer = await http.get(self.url + "/readyz")
                except Exception:  # the controller or the proxy is what was killed
                    continue
                running = {name: found.replica_states for name, found in status.deployments.items()}
                if (
                    status.status == "RUNNING"
                    and running == {"Ingress": {"RUNNING": ingresses}, "Replica": {"RUNNING": self.count}}
                    and answer.status_code == 200
                    and answer.json()["replicas_total"] == answer.json()["replicas_ready"] == self.count
                ):
                    return

    @staticmethod
    def pids(title: str) -> list[int]:
        """Processes below this one that Ray has given such a name."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def kill(self, title: str) -> int:
        """SIGKILL for the first process of that name."""
        pid = self.pids(title)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    async def total(self, name: str) -> float:
        """Over all ingresses that run now."""
        async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
            text = (await http.get(self.url + "/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.fixture(scope="session")
def breakable(toy_args: dict[str, Any]) -> Iterator[Callable[..., Cluster]]:
    """`breakable(**sections)`: the one cluster of the run, with the application deployed. Its processes are ended, and
    it is asserted that none is left."""
    import ray
    from ray import serve

    os.environ.update(ENVIRONMENT)
    port = free_port()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    ray.init(address="local", num_cpus=8, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def make(**sections: Any) -> Cluster:
        cluster = Cluster(port, toy_args | sections)
        cluster.deploy()
        asyncio.run(cluster.whole())
        return cluster

    yield make
    started = {process.pid for process in psutil.Process().children(recursive=True)} - before
    ray.shutdown()  # never `ray stop`: it would end every Ray process of the machine
    end = time.monotonic() + 60
    while left := [pid for pid in started if psutil.pid_exists(pid) and not _zombie(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def _zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="session")
def record() -> Callable[[str, object], None]:
    """Writes a result beside those of the benchmarks."""

    def write(name: str, body: object) -> None:
        (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    return write
