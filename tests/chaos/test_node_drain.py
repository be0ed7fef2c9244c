"""A node that is emptied, as by `kubectl drain`: what the preStop hook of k8s/base does loses no request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.mark.risk("R8")
def test_an_emptied_node_loses_no_request() -> None:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, str(Path(__file__).with_name("drained_node.py")), str(port)]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert answer.returncode == 0, answer.stderr[-4000:]
    found = json.loads(answer.stdout.strip().splitlines()[-1])
    print(f"\n{found}")
    assert found["before"] and not found["left"]
    assert found["answered"] > 20 and not found["failed"]
