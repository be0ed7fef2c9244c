"""A cluster of three nodes: links over TCP with authentication, a node that dies and a node that is drained."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served import CHOSEN_LINK

ROOT = Path(__file__).resolve().parents[2]
ISOLATED = ("unshare", "-rnm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.risk("R8", figure="a node of three killed and one drained under load: 0 wrong, 0 lost")
def test_a_cluster_loses_nothing_with_a_node() -> None:
    if shutil.which("unshare") is None or subprocess.run([*ISOLATED, "true"], check=False).returncode:
        pytest.skip("this system gives no network namespace to its users")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [*ISOLATED, sys.executable, str(Path(__file__).with_name("three_nodes.py"))]
    answer = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False
    )
    assert answer.returncode == 0, answer.stderr[-6000:]
    found = json.loads(answer.stdout.strip().splitlines()[-1])
    print(f"\n{json.dumps(found, indent=1)}")
    assert [replicas for _, replicas in found["placed"].values()] == [0, 1, 1], "ingresses and replicas share no node"
    for when in ("before", "after"):
        links, calls = (found[when][f"assay_{name} Ingress"] for name in ("links", "link_calls_total"))
        assert (links == calls == 0) if CHOSEN_LINK else (links >= 2 and calls > 20)
    assert found["before"]["assay_handle_calls_total Ingress"] == 0, "every call went over a link"
    assert found["drained"]["left"] == 0
    assert found["answered"] > 100 and found["streams"] > 40
    assert not found["failed"]
    assert not found["wrong"]
