"""bench_fleet as it is run: one and two replicas over HTTP and past it, and one of them killed under load."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.served import CHOSEN_LINK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
WORDS = ("--random-weights", "--ingresses", "2", "--clients", "2", "--seconds", "3", "--at-once", "4", "--limit", "600")


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def run(out: Path, *words: str, **sections: Any) -> list[dict[str, Any]]:
    """The rows of a run; `sections` are options of the application."""
    (model := out / "small").mkdir()
    config = json.loads((ROOT / "benchmarks" / "models" / "qwen3-0.6b" / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | SMALL), "utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "benchmarks.fleet.bench_fleet", "--model", str(model), *WORDS]
    done = subprocess.run(
        [*command, *words, "--args", json.dumps(CHOSEN_LINK | sections), "--out", str(out)],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=800,
    )
    assert done.returncode == 0
    rows: list[dict[str, Any]] = json.loads((out / "fleet-small.json").read_text("utf-8"))["rows"]
    return rows


def test_every_step_is_measured_and_a_death_fails_no_request(tmp_path: Path) -> None:
    rows = run(tmp_path, "--workloads", "long-query,classify", "--prefix-trace", "4")
    measured = {(row["case"], row["path"], row["replicas"]): row for row in rows if "items_s" in row}
    assert len(measured) == 8
    assert all(row["items_s"] > 0 and row["failed"] == 0 for row in measured.values())
    traced = {row["policy"]: row for row in rows if row["case"] == "prefix trace"}
    assert len(traced) == 5
    assert traced["the fleet"]["failed"] == 0 and traced["the fleet"]["hit_rate"] > 0
    death = rows[-1]
    assert death["sent"] > 0 and death["in_flight"] > 0 and death["retried"] > 0
    assert death["failed"] == 0
    assert death["whole_again_s"] is not None


def test_mixed_load_loses_no_answer_and_no_token_whatever_happens_to_a_replica(tmp_path: Path) -> None:
    rows = run(
        tmp_path, "--workloads", "plain-4,streams-8,mixed-1-8", "--paths", "http", "--replicas", "2",
        "--faults", "killed,frozen,drained", "--kill-limit", "120",
    )  # fmt: skip
    measured = {row["case"]: row for row in rows if "path" in row}
    assert {"plain-4", "streams-8", "mixed-1-8"} < measured.keys()
    assert all(row["tokens_s"] > 0 for row in measured.values() if "tokens_s" in row)
    for fault in ("killed", "frozen", "drained"):
        row = measured[f"mixed-1-8, one replica {fault}"]
        assert row["sent"] > 0 and row["in_flight"] > 0
        assert (row["failed"], row["lost_or_doubled_tokens"]) == (0, 0)
        assert row["whole_again_s"] is not None and row["degraded_tokens_ratio"] > 0


def test_without_retries_the_same_death_is_seen_to_fail_requests(tmp_path: Path) -> None:
    """The planted counterpart."""
    rows = run(tmp_path, "--workloads", "long-query", "--paths", "http", "--replicas", "2", retry={"max_attempts": 1})
    assert rows[-1]["failed"] > 0
