"""Processes that wait, the launcher that hands them a worker's program, and the pool that keeps them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import standby
from deployments.cli.launch.local_serve import CannotServe, LocalService
from deployments.standby import launcher, pool, process
from deployments.standby.pool import StandbyPool, wanted
from tests.support.standby_fitness import fit_after

QUICK = "tests.support.quick_standby"
REPORT = """
import json, os, sys
print("to stderr", file=sys.stderr)
variables = [os.environ.get(name) for name in ("GIVEN", "OMP_NUM_THREADS")]
print(json.dumps([sys.argv, *variables, os.getcwd(), "torch" in sys.modules]))
print(os.getpid(), flush=True)
"""
WAIT_S = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(REPORT)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[[int], StandbyPool]]:
    """Makes pools of processes with few imports."""
    monkeypatch.setattr(pool, "MODULE", QUICK)
    made = list[StandbyPool]()

    def make(count: int) -> StandbyPool:
        made.append(StandbyPool(folder, count))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def launched(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = (sys.executable, "-I", "-S", launcher.__file__, str(folder), str(folder / "program.py"), *arguments)
    given = {name: value for name, value in os.environ.items() if name != pool.THREADS_VARIABLE}
    return subprocess.Popen(
        command, env=given | environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def reported(one: "subprocess.Popen[str]") -> tuple[list[Any], int]:
    out, errors = one.communicate(timeout=WAIT_S)
    assert "to stderr" in errors
    found, pid = out.splitlines()
    return json.loads(found), int(pid)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_waits_becomes_what_the_launcher_was_to_run(
    quick: Callable[[int], StandbyPool], folder: Path
) -> None:
    waiting = quick(1)
    (one,) = waiting._waiting.values()
    until(lambda: list(folder.glob("*.sock")))
    launcher_process = launched(folder, "--a", "b", GIVEN='it\'s a "value"')
    found, pid = reported(launcher_process)
    assert found == [[str(folder / "program.py"), "--a", "b"], 'it\'s a "value"', None, "/", True]
    assert pid == one.pid != launcher_process.pid
    assert launcher_process.returncode == 0
    until(lambda: not waiting._waiting)
    assert one.wait(WAIT_S) == 0
    assert not list(folder.glob("*.sock"))


def test_without_a_process_that_waits_the_launcher_runs_the_program(folder: Path) -> None:
    one = launched(folder, "x", GIVEN="1")
    found, pid = reported(one)
    assert found == [[str(folder / "program.py"), "x"], "1", None, "/", False]
    assert pid == one.pid


def test_of_several_launchers_one_takes_the_process(quick: Callable[[int], StandbyPool], folder: Path) -> None:
    waiting = quick(1)
    (one,) = waiting._waiting.values()
    until(lambda: list(folder.glob("*.sock")))
    launchers = [launched(folder) for _ in range(3)]
    pids = [reported(each)[1] for each in launchers]
    assert pids.count(one.pid) == 1
    assert len(set(pids)) == 3


def test_a_process_that_is_unfit_takes_nothing(folder: Path) -> None:
    """Ray reads its environment when it is imported: a worker that had another one would end, or be another's."""
    path = folder / f"0{launcher.SUFFIX}"
    with subprocess.Popen([sys.executable, "-m", QUICK, path, "ray"], stdin=subprocess.PIPE) as unfit:
        until(path.exists)
        one = launched(folder)
        assert reported(one)[1] == one.pid
        assert unfit.wait(WAIT_S) == 0
    assert not path.exists()


@pytest.mark.full
def test_a_pool_keeps_one_spare_and_stops_it(quick: Callable[[int], StandbyPool], folder: Path) -> None:
    waiting = quick(2)
    until(lambda: len(list(folder.glob("*.sock"))) == 2)
    reported(launched(folder))
    until(lambda: len(waiting._waiting) == 1)
    waiting.keep_spare()
    assert list(waiting._waiting) == [1]  # it is the spare
    reported(launched(folder))
    until(lambda: list(waiting._waiting) == [2])
    until(lambda: list(folder.glob("*.sock")))
    spare = waiting._waiting[2]
    waiting.stop()
    until(lambda: spare.poll() is not None)
    until(lambda: not waiting._waiting)


def test_a_pool_of_none_has_no_spare(quick: Callable[[int], StandbyPool]) -> None:
    waiting = quick(0)
    waiting.keep_spare()
    assert not waiting._waiting and not waiting.variables


def test_a_process_ends_with_the_one_that_started_it(folder: Path) -> None:
    path = folder / f"0{launcher.SUFFIX}"
    with subprocess.Popen([sys.executable, "-m", QUICK, path], stdin=subprocess.PIPE) as one:
        until(path.exists)
        assert one.stdin is not None
        one.stdin.close()
        assert one.wait(WAIT_S) == 0
    assert not path.exists()


@pytest.mark.full
def test_what_a_replica_imports_leaves_a_process_fit() -> None:
    assert fit_after("")


@pytest.mark.parametrize(("status", "started"), [(process.NOT_INITIALIZED, False), (0, True), (100, True)])
def test_the_driver_tells_whether_it_has_started(monkeypatch: pytest.MonkeyPatch, status: int, started: bool) -> None:
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: status)
    monkeypatch.setattr("ctypes.CDLL", {process.DRIVER: driver}.__getitem__)
    assert process.driver_has_started() is started


def test_without_a_driver_none_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DRIVER", "no-such-library.so")
    assert not process.driver_has_started()


def test_replicas_are_started_by_the_launcher_where_there_is_a_pool(
    monkeypatch: pytest.MonkeyPatch, quick: Callable[[int], StandbyPool], folder: Path
) -> None:
    monkeypatch.delenv(standby.COMMAND_VARIABLE, raising=False)
    assert standby.actor_options() == {}
    for name, value in quick(1).variables.items():
        monkeypatch.setenv(name, value)
    command = standby.actor_options()["runtime_env"]["py_executable"]
    out = subprocess.run(["bash", "-c", f"exec {command} {folder}/program.py"], capture_output=True, text=True)
    assert json.loads(out.stdout.splitlines()[0])[0] == [f"{folder}/program.py"]


def application(**more: Any) -> dict[str, Any]:
    return {"import_path": "deployments.app:build"} | more


@pytest.mark.parametrize(
    ("applications", "gpus", "count"),
    [
        ([application()], 1, 1),
        ([application()], 0, 0),
        ([application(args={"replica": {"count": 4}})], 8, 4),
        ([application(args={"replica": {"count": 4}})], 2, 2),
        ([application(args={"model": {"device": "cpu"}}), application(args={"model": {"device": "cuda"}})], 4, 1),
        ([application(runtime_env={"pip": ["x"]})], 4, 0),
        ([application(args={"replica": {"count": "many"}, "model": "builtin"})], 4, 0),
        ([None, "x", application(args=[])], 4, 3),
        ("none", 4, 0),
    ],
)
def test_one_process_waits_for_each_replica_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, applications: Any, gpus: int, count: int
) -> None:
    monkeypatch.delenv(standby.COUNT_VARIABLE, raising=False)
    monkeypatch.setattr(pool, "glob", lambda pattern: ["/dev/nvidia0"] * gpus)
    assert wanted({"applications": applications}) == count
    monkeypatch.setenv(standby.COUNT_VARIABLE, "0")
    assert wanted({"applications": applications}) == 0
    monkeypatch.setenv(standby.COUNT_VARIABLE, "3")
    assert wanted({"applications": applications}) == 3


@pytest.mark.parametrize("given", ["", "many", "-1", "65", "1.5"])
def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(standby.COUNT_VARIABLE, given)
    service = LocalService(config={}, name="cpu.yaml")
    with pytest.raises(CannotServe, match=rf"`ASSAY_STANDBY` must be in \[0, 64\]\. Given: {given}\."):
        service.refuse()


def test_a_pool_does_not_start_processes_that_are_unfit_again_and_again(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "MODULE", "tests.support.no_such_module")
    ended = StandbyPool(folder, 1)
    ended.keep_spare()
    until(lambda: not ended._waiting)
    ended.stop()
    assert ended._started in (1, 2)  # a spare, too, where the first had ended before
    assert len(caplog.records) == ended._started
    assert "has ended before a replica needed it" in caplog.text
