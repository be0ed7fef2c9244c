"""A cluster of a head and two workers; one is emptied under load as its pod's preStop hook does it. Run by
test_node_drain.py in a process of its own; prints one line of JSON."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import build
from deployments.config.app_args import AppArgs
from tests.conftest import TOY_ARGS

FIELDS = {"query": "q" * 40, "items": ["a" * 20, "b" * 21, "c" * 22], "labels": ["y", "n"]}
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}
COUNTS = {"count": 2, "num_cpus": 0.1}


def replicas_of(node: Any) -> list[int]:
    """Pids of Serve's replicas on a node: what the hook looks for in /proc."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    found = []
    for one in raylet.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one
            if "ray::ServeReplica" in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def drain(address: str, node_id: str) -> None:
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is stopping"]
    subprocess.run([*command, "--deadline-remaining-seconds", "900"], check=True, timeout=60, capture_output=True)


async def load(url: str, ended: asyncio.Event, failed: list[str]) -> int:
    """Four clients; requests answered."""
    answered = 0

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal answered
        while not ended.is_set():
            try:
                answer = await http.post(f"{url}/generative_scoring", json=FIELDS)
            except httpx.HTTPError as error:
                failed.append(repr(error))
            else:
                if answer.status_code == 200:
                    answered += 1
                else:
                    failed.append(f"{answer.status_code} {answer.text[:200]}")
            await asyncio.sleep(0.05)

    async with httpx.AsyncClient(timeout=60, trust_env=False) as http, asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(one(http))
    return answered


async def emptied(cluster: Any, url: str) -> dict[str, Any]:
    node = max(cluster.worker_nodes, key=lambda one: len(replicas_of(one)))
    before = len(replicas_of(node))
    ended, failed = asyncio.Event(), list[str]()
    clients = asyncio.create_task(load(url, ended, failed))
    await asyncio.sleep(2)
    started = time.monotonic()
    await asyncio.to_thread(drain, cluster.address, node.node_id)
    while replicas_of(node) and time.monotonic() - started < 150:
        await asyncio.sleep(0.5)
    seconds, left = time.monotonic() - started, len(replicas_of(node))
    await asyncio.to_thread(cluster.remove_node, node)
    await asyncio.sleep(2)
    ended.set()
    answered = await clients
    return {"before": before, "left": left, "seconds": seconds, "answered": answered, "failed": failed[:5]}


def main() -> None:
    cluster = Cluster()
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster.add_node(**head)
    for _ in range(2):
        cluster.add_node(**NODE)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        args = TOY_ARGS | {"drain": {"handoff_s": 1, "grace_s": 9, "ingress_grace_s": -3590}}
        args |= {
            "replica": COUNTS,
            "health": {"min_replicas": 2, "period_s": 2.0, "timeout_s": 60.0},
        }
        serve.run(build(AppArgs.model_validate(args)), name="drained", route_prefix="/")
        url = f"http://127.0.0.1:{sys.argv[1]}"
        end = time.monotonic() + 120
        while httpx.get(f"{url}/readyz", trust_env=False).status_code != 200 and time.monotonic() < end:
            time.sleep(0.2)
        print(json.dumps(asyncio.run(emptied(cluster, url))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
