"""The plugin that spreads tests over the GPUs of a machine, asked on a machine of two that are only listed."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import gpus
from tests.outcomes import Outcome, Outcomes, digest_of, passed_in

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
LISTS_TWO = """#!/bin/sh
echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"
echo "  MIG 1g.18gb Device 0: (UUID: MIG-1)"
echo "GPU 1: NVIDIA H200 (UUID: GPU-2)"
"""
TORCH = """import os
seen_at_import = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
class cuda:
    @staticmethod
    def device_count():
        return {seen}
"""
ONE_OF_THEM = "len(seen_at_import)"
TESTS = """import os, pytest, torch
@pytest.mark.parametrize("n", range(6))
def test_one_gpu(n):
    worker, (seen,) = os.environ["PYTEST_XDIST_WORKER"], torch.seen_at_import
    assert int(worker.removeprefix("gw")) % 2 == int(seen)
"""
OTHERS = """import os, pathlib, pytest
@pytest.mark.skip(reason="no such chip")
def test_skipped(): pass
def test_failing(): assert pathlib.Path("mended").exists()
def test_crashing(): pathlib.Path("mended").exists() or os._exit(1)
@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")
def test_broken_afterwards(broken): pass
"""


class Machine(NamedTuple):
    """A folder with tests, and what is on the PATH there."""

    folder: Path

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    def run(self, *arguments: str, **more: str) -> tuple[int, str]:
        """Exit status and output of pytest with the plugin."""
        dropped = ("PYTEST_", "CUDA_")  # of a run that this one is part of
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        path = os.pathsep.join((str(self.folder / "bin"), os.environ["PATH"]))
        python_path = os.pathsep.join((str(ROOT), str(self.folder)))
        own = {"PATH": path, "PYTHONPATH": python_path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = (sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-p", "tests.gpus")
        done = subprocess.run(
            (*command, "-p", "no:cacheprovider", *arguments),
            cwd=self.folder,
            env=kept | own | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    def outcomes(self) -> dict[str, dict[str, Any]]:
        lines = (self.folder / "outcomes.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines if line]
        return {one["test"].partition("::")[2]: one for one in told if "test" in one}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    listing = tmp_path / "bin" / "nvidia-smi"
    listing.write_text(LISTS_TWO)
    listing.chmod(listing.stat().st_mode | stat.S_IXUSR)
    made = Machine(tmp_path)
    made.write(torch=TORCH.format(seen=ONE_OF_THEM), test_ones=TESTS)
    return made


def test_each_worker_has_one_gpu_before_torch_is_imported(machine: Machine) -> None:
    status, output = machine.run("-n", "3", "--dist", "load", "--outcomes", "outcomes.jsonl")
    assert status == 0, output
    assert "On GPU 0,1: 6 passed, 0 skipped, 0 failed, 0 not run; " in output
    told = machine.outcomes().values()
    assert len(told) == 6 and {one["outcome"] for one in told} == {"passed"}
    assert {one["worker"] for one in told} == {"gw0", "gw1", "gw2"}


def test_a_worker_that_sees_all_gpus_is_noticed(machine: Machine) -> None:
    machine.write(torch=TORCH.format(seen=2))
    status, output = machine.run("-n", "2")
    assert status == 1, output
    assert output.splitlines()[-1].startswith("On GPU 0,1: 0 passed, 0 skipped, 6 failed, 0 not run; ")
    assert "gw0 sees 2 GPUs, expected GPU 0 alone" in output


def test_what_failed_skipped_and_crashed_is_reported_and_runs_again(machine: Machine) -> None:
    machine.write(test_others=OTHERS)
    kept = ("--outcomes", "outcomes.jsonl")
    status, output = machine.run("-n", "2", *kept)
    assert status == 1, output
    assert "On GPU 0,1: 6 passed, 1 skipped, 3 failed, 0 not run; " in output
    assert "1 skipped: no such chip" in output
    found = {name: one for name, one in machine.outcomes().items() if one["outcome"] != "passed"}
    reasons = {name: one["reason"] for name, one in found.items()}
    assert reasons.keys() == {"test_failing", "test_crashing", "test_broken_afterwards", "test_skipped"}
    assert "crashed" in reasons["test_crashing"] and reasons["test_broken_afterwards"] == "ValueError: left behind"

    (machine.folder / "mended").touch()
    again = ("-n", "1", *kept, "--resume", "outcomes.jsonl")
    status, output = machine.run(*again, "--deselect", "test_others.py::test_broken_afterwards")
    assert status == 1, "a test that is skipped did not pass"
    assert "On GPU 0,1: 2 passed, 6 had passed before, 1 skipped, 0 failed, 0 not run; " in output
    status, output = machine.run(*again, "-k", "one_gpu or failing or crashing")
    assert status == 0, output
    assert "On GPU 0,1: 0 passed, 8 had passed before, 0 skipped, 0 failed, 0 not run; " in output


def test_what_is_stopped_is_reported_as_not_run(machine: Machine) -> None:
    machine.write(test_others="import time\ndef test_failing(): time.sleep(0.5); assert False\n")
    status, output = machine.run("-n", "1", "-x", "test_others.py", "test_ones.py")
    assert status != 0
    assert re.search(r"0 skipped, 1 failed, [1-9] not run; ", output), output


def test_a_file_that_cannot_be_read_is_no_success(machine: Machine) -> None:
    machine.write(test_others="import no_such_module\n")
    status, output = machine.run("-n", "1", "--continue-on-collection-errors")
    assert status != 0
    assert "On GPU 0,1: 6 passed, 0 skipped, 0 failed, 0 not run, 1 files not read; " in output


def test_without_workers_nothing_runs(machine: Machine) -> None:
    status, output = machine.run()
    assert status == pytest.ExitCode.USAGE_ERROR and "Expected -n auto" in output


def test_without_a_gpu_nothing_runs(machine: Machine) -> None:
    status, output = machine.run("-n", "2", CUDA_VISIBLE_DEVICES="")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "Tests on GPUs need a GPU" in output and "passed" not in output


@pytest.mark.parametrize(
    ("listed", "cores", "workers"), [("0", 64, 10), ("0,1,2,3", 64, 40), ("0,1,2,3", 16, 12), ("0", 2, 1)]
)
def test_workers_are_ten_a_gpu_as_far_as_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, listed: str, cores: int, workers: int
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, listed)
    monkeypatch.setattr(gpus, "cores", lambda: cores)
    assert gpus.pytest_xdist_auto_num_workers() == workers


def test_without_nvidia_smi_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "gpus")
    assert gpus.gpus() == []
    for address in ("0000:0f:00.0", "0000:1f:00.0", "0000:2f:00.0"):
        (tmp_path / "gpus" / address).mkdir(parents=True)
    assert gpus.gpus() == ["0", "1", "2"]


def test_only_the_last_outcome_on_the_same_sources_counts(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "outcomes.jsonl"
    runs = [("new", "a", "passed"), ("new", "b", "passed"), ("old", "c", "passed"), ("new", "b", "failed")]
    for sources, test, outcome in runs:
        kept = Outcomes(path, sources)
        kept.add(Outcome(test=test, outcome=outcome, seconds=1.0, worker="gw0", reason=""))  # type: ignore[arg-type]
        kept.close()
        with path.open("a") as file:
            file.write('{"test": "d", "outc')  # as if killed here
    assert passed_in(path, "new") == {"a"} and passed_in(path, "old") == {"c"}


def test_a_change_that_is_not_committed_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    source = tmp_path / "engine" / "loop.py"
    source.write_text("x = 1\n")
    first = digest_of(tmp_path)
    for elsewhere in (".venv/loop.py", "benchmarks/results/loop.json", "outcomes.jsonl"):
        (tmp_path / elsewhere).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / elsewhere).write_text("{}")
    assert digest_of(tmp_path) == first
    source.write_text("x = 2\n")
    assert digest_of(tmp_path) != first
    source.write_text("x = 1\n")
    source.rename(source.with_name("loops.py"))
    assert digest_of(tmp_path) != first


def test_every_gpu_test_stands_where_make_looks() -> None:
    (named,) = re.findall(r"^GPU_TESTS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    looked = [ROOT / name for name in named.split()]
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "gpu" in path.read_text("utf-8")]
    assert marked and all(any(folder in path.parents for folder in looked) for path in marked)
