"""The benchmarks' runner: what it leaves out, what it says of one that fails, and that its cases are there."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES, Case, chosen, run_all

ROOT = Path(__file__).resolve().parents[2]
THREE = (Case("a", "x", seconds=10), Case("b", "x", seconds=50, gpu=False), Case("c", "x", seconds=10))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_that_fails_does_not_end_the_others() -> None:
    clock, ran = Clock(), list[str]()

    def run(case: Case) -> int:
        ran.append(case.name)
        clock.now += case.seconds
        return 3 if case.name == "a" else 0

    rows = run_all(THREE, run, clock=clock)
    assert ran == ["a", "b", "c"]
    assert [(row["status"], row["seconds"]) for row in rows] == [("exit 3", 10), ("done", 50), ("done", 10)]


def test_what_would_not_end_in_time_is_left_out_and_what_fits_behind_it_runs() -> None:
    clock, ran = Clock(), list[str]()

    def run(case: Case) -> int:
        ran.append(case.name)
        clock.now += case.seconds
        return 0

    rows = run_all(THREE, run, 30, clock)
    assert ran == ["a", "c"]
    assert [row["status"] for row in rows] == ["done", "left out", "done"]


def test_cases_are_chosen_by_name_and_by_what_the_machine_has() -> None:
    assert chosen(THREE, "", gpu=True) == list(THREE)
    assert [case.name for case in chosen(THREE, "c,a", gpu=True)] == ["c", "a"]
    assert [case.name for case in chosen(THREE, "", gpu=False)] == ["b"]
    with pytest.raises(ValueError, match=r"`--only` must name some of a, b, c\. Given: d\."):
        chosen(THREE, "a,d", gpu=True)


def test_every_case_is_a_benchmark_with_models_that_are_there_and_a_place_of_its_own() -> None:
    for case in CASES:
        assert importlib.util.find_spec(f"benchmarks.{case.module}") is not None
        models = [part for part in case.arguments if part.startswith(("benchmarks/", "engine/"))]
        assert all((ROOT / model / "config.json").is_file() for model in models)
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({(case.module, case.arguments, case.folder) for case in CASES}) == len(CASES)


@pytest.mark.full
def test_an_unknown_name_is_said_on_the_command_line() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Given: nothing." in done.stderr
