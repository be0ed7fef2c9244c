"""S13, S7, S15 over real sockets: the service in a network namespace with nothing in it but itself."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.auth.api_keys import digest_of

pytestmark = pytest.mark.slow
PORT = 8123
SECRET = "assay-Sbv3ZpLk8QyR2mXw7TfN4dHc9GjA6eUo1iVrB5tYqEs"
WORLD = Path(__file__).with_name("network_world.py")
ISOLATED = ("unshare", "-rn")
OTHER = {"mode": "keys", "keys": [{"name": "other", "sha256": "0" * 64}]}  # until `user_config` says otherwise
ENTRY = {"name": "team", "sha256": digest_of(SECRET.encode()).hex(), "scopes": ["inference", "metrics"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy_args: dict[str, Any]) -> Callable[..., Any]:
    """`run(host, auth, *more)`: what `network_world.py` saw of a service with these."""
    if shutil.which("unshare") is None or subprocess.run([*ISOLATED, "true"], check=False).returncode:
        pytest.skip("this system gives no network namespace to its users")

    def go(host: str, auth: dict[str, Any], *more: str) -> Any:
        folder = tmp_path_factory.mktemp("world")
        keys = folder / "keys.yaml"
        keys.write_text(yaml.safe_dump({"keys": [ENTRY]}))
        if auth["mode"] == "keys":
            auth = auth | {"keys_file": str(keys), "reload_period_s": 0.5}
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": host, "port": PORT},
            "applications": [
                {
                    "name": "assay",
                    "route_prefix": "/",
                    "import_path": "deployments.app:build",
                    "args": toy_args | {"auth": auth if auth["mode"] == "disabled" else OTHER},
                    "deployments": [{"name": "Ingress", "user_config": {"auth": auth}}],
                }
            ],
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        path = os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
        done = subprocess.run(
            [*ISOLATED, sys.executable, str(WORLD), str(file), str(PORT), SECRET, str(keys), *more],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=700,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return go


@pytest.mark.risk("S13")
@pytest.mark.timeout(800)
def test_the_service_needs_no_network_and_lets_no_outsider_in(run: Callable[..., Any]) -> None:
    found = run("127.0.0.1", {"mode": "keys"})
    assert found["ready"] and not found["reachable"], found["output"][-3000:]
    print(json.dumps({name: found[name] for name in ("listeners", "routes", "raw")}, indent=1))
    assert found["routes"] == {path: [401, 401, 200] for path in found["routes"]} and found["after"] == 200
    for name, statuses in found["raw"].items():
        assert all(status == 0 or 400 <= status < 500 for status in statuses), (name, statuses)
    assert found["revoked"]
    ours = [listener for listener in found["listeners"] if listener.endswith(f" {PORT}")]
    assert ours == [f"127.0.0.1 {PORT}"]
    assert SECRET not in found["output"]


@pytest.mark.timeout(800)
def test_a_service_without_keys_does_not_start_where_the_world_could_reach_it(run: Callable[..., Any]) -> None:
    found = run("0.0.0.0", {"mode": "disabled"}, "bare")
    assert not found["ready"]
    assert "`auth.mode` must be keys" in found["output"]


@pytest.mark.timeout(800)
def test_our_own_command_refuses_it_before_anything_starts(run: Callable[..., Any]) -> None:
    found = run("0.0.0.0", {"mode": "disabled"})
    assert not found["ready"] and "may use the service without a key" in found["output"]
