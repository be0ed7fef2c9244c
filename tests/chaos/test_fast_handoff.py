"""Fast mode: a replica that has to stop hands its streams over, as by default."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANDOFF_S = "5"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def shrunk(taken: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.chaos.fast_handoff", HANDOFF_S, taken],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    print(f"\n{found}")
    return found


@pytest.mark.risk("R7")
def test_a_shrinking_fleet_cuts_no_stream_and_fails_no_request() -> None:
    found = shrunk("replica")
    assert found["replicas"] == [2, 1] and found["streams"] == 8
    assert found["handed_off"] > 0  # some were on the replica that went
    assert not found["wrong"] and not found["failed"]
    assert found["answered"] > 10


@pytest.mark.risk("R16", figure="0 of 8 streams cut where one of two ingresses is taken away in fast mode")
def test_an_ingress_that_is_taken_away_answers_what_it_has_begun() -> None:
    """Serve counts no request of an ingress in fast mode: its HTTP server is what it waits for."""
    found = shrunk("ingress")
    assert found == {"ingresses": [2, 1], "streams": 8, "wrong": 0}


@pytest.mark.risk("R16", planted=True)
def test_an_ingress_that_does_not_wait_would_be_seen() -> None:
    found = shrunk("killed ingress")
    assert found["ingresses"] == [2, 1] and found["wrong"] == 4
