"""Measures the host's work for one engine step: a decode step of 256 rows, plain and streamed, and packing prompts.

    python -m benchmarks.engine.bench_step_host --out benchmarks/results
    git worktree add --detach ../before COMMIT
    python -m benchmarks.engine.bench_step_host --before ../before --out benchmarks/results

The model packs its steps and computes nothing (`benchmarks.engine.step_host_clock`). `processor_us` is the step
thread's own work for a step. `wall_us` has the readers of the same process in it, which take the interpreter from the
step thread. With `--before` the sources of another folder run first, in turn, and every row has the ratio to them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, publish

ROOT = Path(__file__).resolve().parents[2]


def measured(sources: Path) -> list[dict[str, Any]]:
    """Returns the rows of a process that runs the engine of a folder.

    Raises:
        subprocess.CalledProcessError: it fails.
    """
    path = os.pathsep.join(map(str, dict.fromkeys((sources, ROOT))))
    environment = os.environ | {"PYTHONPATH": path, "ASSAY_TEST_FAULTS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.engine.step_host_clock"]
    done = subprocess.run(command, cwd=sources, env=environment, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians(runs: Sequence[list[dict[str, Any]]]) -> list[Row]:
    """Returns the median of each figure over the runs."""
    rows: list[Row] = []
    for same in zip(*runs, strict=True):
        figures = {key: statistics.median(row[key] for row in same) for key in same[0] if key != "case"}
        rows.append({"case": same[0]["case"], **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with the sources of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folders = {"before": given.before.resolve()} if given.before else {}
    folders["now"] = ROOT
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in folders}
    for _ in range(given.rounds):
        for name, folder in folders.items():
            runs[name].append(measured(folder))
    found = {name: medians(own) for name, own in runs.items()}
    rows: list[Row] = []
    for index, row in enumerate(found["now"]):
        before = found["before"][index] if given.before else {}
        columns = {f"{key}_before": value for key, value in before.items() if key in ("processor_us", "wall_us")}
        rows.append({**row, **columns})
    publish(
        "step-host", rows, given.out, notes=f"median of {given.rounds} runs; a model that packs and computes nothing"
    )


if __name__ == "__main__":
    main()
