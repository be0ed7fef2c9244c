"""A Ray cluster of nodes in network namespaces of their own, where one is killed and one drained under load.

Run by test_three_nodes.py inside `unshare -rnm`, and by hand as docs/guides/cluster.md shows:
`unshare -rnm python tests/chaos/three_nodes.py`. It prints what it did, and last a line of JSON.

Every node has an address on a bridge, a folder for Ray and processes of its own, so that nodes share nothing but the
bridge: a replica's Unix socket is out of reach of another node's ingress, and links go over TCP.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from deployments.auth.api_keys import digest_of
from deployments.cli.launch.ray_env import INLINE, PROXY_CALLBACK
from tests.served import CHOSEN_LINK

ROOT = Path(__file__).resolve().parents[2]
NET, PORT, GCS = "10.77.0", 8000, 6379
SECRET = "assay-Sbv3ZpLk8QyR2mXw7TfN4dHc9GjA6eUo1iVrB5tYqEs"
START_S, SETTLE_S, DRAIN_S = 400.0, 200.0, 240.0
CLIENTS = 6
SCORE = {"query": "Is this about the sea? ", "items": ["a ship", "a tree", "a wave"], "labels": [" yes", " no"]}
COMPLETION = {"prompt": "The tide came in and", "max_tokens": 48, "temperature": 0, "return_token_ids": True}
SAMPLED = COMPLETION | {"temperature": 1.0, "seed": 11, "ignore_eos": True}
CLOSE = 1e-3  # probabilities depend on what shares a step, in the last bits


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Node:
    """A host of the cluster: a network namespace with an address, and a Ray of its own."""

    def __init__(self, index: int, environment: dict[str, str]) -> None:
        self.address = f"{NET}.{index}"
        self.environment = environment
        start = "mount -t tmpfs none /tmp/ray && ip link set lo up && echo up && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "-n", "-m", "sh", "-c", start], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        pid = str(self._holder.pid)
        run("ip", "link", "add", f"hub{index}", "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", f"hub{index}", "master", "hub", "up")
        run(*self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0"))
        run(*self.inside("ip", "link", "set", "eth0", "up"))
        self._ray: subprocess.Popen[bytes] | None = None

    def inside(self, *command: str) -> list[str]:
        """Returns the command as it runs on this node."""
        return ["nsenter", "-t", str(self._holder.pid), "-n", "-m", *command]

    def start_ray(self, *options: str) -> None:
        command = [tool("ray"), "start", "--block", f"--node-ip-address={self.address}", "--disable-usage-stats"]
        command += ["--object-store-memory=80000000", *options]
        self._ray = subprocess.Popen(
            self.inside(*command), env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Returns the node's processes whose command has the word."""
        found = []
        parents = [self._ray.pid] if self._ray is not None else []
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in psutil.Process(parent).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if word in " ".join(one.cmdline()):
                            found.append(one)
        return found

    def kill(self) -> None:
        """Ends everything on the node as if its power had failed, its network first."""
        run(*self.inside("ip", "link", "set", "eth0", "down"))
        for one in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.close()

    def close(self) -> None:
        for process in (self._ray, self._holder):
            if process is not None:
                process.kill()
                process.wait()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def config(folder: Path) -> Path:
    """Writes the shipped configuration for the cluster: two ingresses on the head, two replicas on other nodes."""
    found = yaml.safe_load((ROOT / "deployments/configs/cpu.yaml").read_text())
    found["http_options"] |= {"host": f"{NET}.1", "port": PORT}
    (application,) = found["applications"]
    key = {"name": "team", "sha256": digest_of(SECRET.encode()).hex(), "scopes": ["inference", "metrics"]}
    application["args"] |= {
        "auth": {"mode": "keys", "keys": [key]},
        "drain": {"handoff_s": 5, "grace_s": 10},
        "health": {"min_replicas": 1},
        **CHOSEN_LINK,
    }
    application["deployments"] = [
        {"name": "Ingress", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1, "resources": {"front": 1}}},
        {"name": "Replica", "num_replicas": 2, "ray_actor_options": {"num_cpus": 1, "resources": {"model": 1}}},
    ]
    application["args"]["ingress"] = {"count": 2}
    application["args"]["replica"] = {"count": 2, "num_cpus": 1}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(found))
    return file


class Load:
    """Clients that send scores, completions and streams one after the other, and compare each answer."""

    def __init__(self) -> None:
        self.url = f"http://{NET}.1:{PORT}"
        self.answered = self.streams = 0
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self._reference: dict[str, Any] = {}
        self._ended = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self.http = httpx.AsyncClient(timeout=180, trust_env=False, headers={"authorization": f"Bearer {SECRET}"})

    async def one(self, kind: str) -> Any:
        """Sends one request and returns what must be equal each time: token ids, or probabilities."""
        if kind == "score":
            answer = await self.http.post(f"{self.url}/generative_scoring", json=SCORE)
            return [row["probabilities"] for row in good(answer)["data"]]
        body = SAMPLED if kind == "sampled stream" else COMPLETION
        if "stream" not in kind:
            answer = await self.http.post(f"{self.url}/v1/completions", json=body)
            return good(answer)["choices"][0]["token_ids"]
        ids: list[int] = []
        done = False
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    part = json.loads(line.removeprefix("data: "))
                    if "error" in part:
                        raise RuntimeError(str(part["error"]))
                    ids += part["choices"][0]["token_ids"]
        if not done:
            raise RuntimeError("a stream was cut")
        return ids

    async def begin(self) -> None:
        for kind in ("score", "completion", "stream", "sampled stream"):
            self._reference[kind] = await self.one(kind)
        self._clients = [asyncio.create_task(self._client(n)) for n in range(CLIENTS)]

    async def _client(self, number: int) -> None:
        kinds = list(self._reference)
        while not self._ended.is_set():
            kind = kinds[number % len(kinds)]
            number += 1
            try:
                found = await self.one(kind)
            except (httpx.HTTPError, RuntimeError) as error:
                self.failed.append(f"{kind}: {error!r}"[:300])
                await asyncio.sleep(0.2)
                continue
            self.answered += 1
            self.streams += "stream" in kind
            if not same(found, self._reference[kind]):
                self.wrong.append(f"{kind}: {found} in place of {self._reference[kind]}"[:600])

    async def end(self) -> None:
        self._ended.set()
        await asyncio.gather(*self._clients)

    async def metrics(self) -> dict[str, float]:
        """Returns the sums of the families that say which way calls went."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in ("assay_handle_calls_total", "assay_link_calls_total", "assay_links", "assay_resumes_total"):
                key = f"{name} {'Ingress' if 'Ingress' in line else 'Replica'}"
                found[key] = found.get(key, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    async def until_ready(self, replicas: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                found = (await self.http.get(f"{self.url}/readyz", timeout=10)).json()
                if found.get("replicas_ready", 0) >= replicas:
                    return
            await asyncio.sleep(1)
        raise TimeoutError(f"{replicas} replicas were not ready within {seconds:g} s")


def good(answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code} {answer.text[:200]}")
    return answer.json()


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected[0], list):
        pairs = zip((v for row in found for v in row), (v for row in expected for v in row), strict=True)
        return all(abs(one - other) < CLOSE for one, other in pairs)
    return bool(found == expected)


def node_id(head: Node, address: str) -> str:
    script = (
        f"import ray; ray.init(address='{NET}.1:{GCS}', _node_ip_address='{NET}.1', log_to_driver=False);"
        f"print([n['NodeID'] for n in ray.nodes() if n['Alive'] and n['NodeManagerAddress'] == '{address}'][0])"
    )
    out = subprocess.run(
        head.inside(sys.executable, "-c", script), env=head.environment, check=True, capture_output=True, text=True
    )
    return out.stdout.split()[-1]


async def until(done: Any, seconds: float) -> float:
    began = time.monotonic()
    while not done() and time.monotonic() - began < seconds:
        await asyncio.sleep(0.5)
    return time.monotonic() - began


async def story(nodes: list[Node], add: Any) -> dict[str, Any]:
    """Kills one node and drains another under load. Returns what happened."""
    head, first, second = nodes
    load = Load()
    await load.until_ready(2, START_S)
    placed = {node.address: [len(node.processes(f":{name}")) for name in ("Ingress", "Replica")] for node in nodes}
    say(f"ready; ingresses and replicas by node: {placed}")
    await load.begin()
    await asyncio.sleep(5)
    found: dict[str, Any] = {"placed": placed, "before": await load.metrics()}
    say(f"load runs: {found['before']}")

    say(f"kill node {first.address}")
    await asyncio.to_thread(first.kill)
    await asyncio.sleep(2)
    seconds = await until(lambda: len(second.processes(":Replica")) >= 2, SETTLE_S)
    await load.until_ready(2, SETTLE_S)
    found["killed"] = {"replaced_s": seconds, "answered": load.answered, "failed": len(load.failed)}
    say(f"node killed: {found['killed']}")

    third = await asyncio.to_thread(add)
    await asyncio.to_thread(drain, head, node_id(head, second.address))
    say(f"drain node {second.address}")
    seconds = await until(lambda: not second.processes(":Replica"), DRAIN_S)
    found["drained"] = {"seconds": seconds, "left": len(second.processes(":Replica"))}
    await load.until_ready(2, SETTLE_S)
    await asyncio.to_thread(second.kill)
    await asyncio.sleep(5)
    say(f"node drained and gone: {found['drained']}; replicas on the new node: {len(third.processes(':Replica'))}")

    found["after"] = await load.metrics()
    await load.end()
    return found | {
        "answered": load.answered,
        "streams": load.streams,
        "failed": load.failed,
        "wrong": load.wrong,
    }


def drain(head: Node, identity: str) -> None:
    command = [tool("ray"), "drain-node", "--address", f"{NET}.1:{GCS}", "--node-id", identity]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
    command += ["--deadline-remaining-seconds", "900"]
    subprocess.run(head.inside(*command), env=head.environment, check=True, timeout=120, capture_output=True)


def environment(token: str) -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        **PROXY_CALLBACK,
        **INLINE,
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_worker_niceness": "0",
        "no_proxy": "*",
    }


def main() -> None:
    Path("/tmp/ray").mkdir(exist_ok=True)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "hub", "type", "bridge")
    run("ip", "addr", "add", f"{NET}.254/24", "dev", "hub")
    run("ip", "link", "set", "hub", "up")
    variables = environment(secrets.token_hex(32))
    nodes = [Node(index, variables) for index in (1, 2, 3)]

    def add() -> Node:
        node = Node(len(nodes) + 1, variables)
        nodes.append(node)
        start_worker(node)
        return node

    def start_worker(node: Node) -> None:
        node.start_ray(f"--address={NET}.1:{GCS}", "--num-cpus=2", '--resources={"model": 2}')

    serve = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            head = nodes[0]
            head.start_ray(
                "--head", f"--port={GCS}", "--num-cpus=1", '--resources={"front": 2}', "--include-dashboard=false"
            )
            time.sleep(10)
            for node in nodes[1:]:
                start_worker(node)
            time.sleep(10)
            log = (Path(folder) / "serve.log").open("w+")
            serve = subprocess.Popen(
                head.inside(tool("serve"), "run", "--address", f"{NET}.1:{GCS}", str(config(Path(folder)))),
                env=variables,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
            try:
                found = asyncio.run(story(nodes[:3], add))
            except BaseException:
                log.seek(0)
                say(log.read()[-6000:])
                raise
            print(json.dumps(found))
        finally:
            if serve is not None:
                serve.kill()
                serve.wait()
            for node in nodes:
                with contextlib.suppress(subprocess.CalledProcessError):
                    node.kill()


if __name__ == "__main__":
    main()
