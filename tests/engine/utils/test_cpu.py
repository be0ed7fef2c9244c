"""A CPU engine that lets others have the cores first: its step thread and what that starts, and no other."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.requests import ScoreRequest
from engine.utils import cpu

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a class of Linux")


async def classes(make_rig: Callable[..., Any], score_job: Callable[..., ScoreRequest], **config: Any) -> set[int]:
    """The scheduling classes of a step's thread and of a thread that it starts."""
    found: set[int] = set()

    def ask(step: object = None) -> None:
        found.add(os.sched_getscheduler(0))

    def look(step: object) -> None:
        ask()
        compute = threading.Thread(target=ask)
        compute.start()
        compute.join()

    rig = make_rig(before_step=look, **config)
    await rig.engine.score(score_job([1, 2], [[3]], (5, 6)))
    return found


async def test_steps_are_computed_on_what_cores_are_left(
    make_rig: Callable[..., Any], score_job: Callable[..., ScoreRequest]
) -> None:
    assert await classes(make_rig, score_job, cpu_priority="idle") == {os.SCHED_IDLE}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the event loop's thread stays as it was"
    assert await classes(make_rig, score_job) == {os.SCHED_OTHER}


def test_a_thread_that_feeds_a_gpu_is_not_late() -> None:
    idle = EngineConfig(cpu_priority="idle")
    assert cpu.yields_cores(idle, "cpu")
    assert not cpu.yields_cores(idle, "cuda")
    assert not cpu.yields_cores(EngineConfig(), "cpu")


async def test_a_system_that_refuses_it_serves_all_the_same(
    make_rig: Callable[..., Any],
    score_job: Callable[..., ScoreRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert await classes(make_rig, score_job, cpu_priority="idle") == {os.SCHED_OTHER}
    assert "`engine.cpu_priority` is idle, but this system does not do it: not here" in caplog.text


LEFT_BEHIND = """
import concurrent.futures, os, sys, time, torch
from engine.utils.cpu import run_apart

def compute() -> float:
    return float(torch.ones(1 << 20).mul_(2).sum())

def threads() -> int:
    return len(os.listdir("/proc/self/task"))

before, end = threads(), time.monotonic() + 2
kept = concurrent.futures.ThreadPoolExecutor(1)
assert (run_apart(compute) if sys.argv[1] == "apart" else kept.submit(compute).result()) == 2 << 20
while threads() > before and time.monotonic() < end:
    pass  # the system takes a moment to end them
print(threads() - before)
"""


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("planted", [False, True])
def test_work_apart_leaves_no_thread_behind(planted: bool) -> None:
    """Planted: the thread stays, as a pool's does, and with it those that torch has started for it."""
    command = [sys.executable, "-c", LEFT_BEHIND, "in a pool" if planted else "apart"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) == (2 if planted else 0)


def test_work_apart_raises_what_it_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        cpu.run_apart(lambda: 1 // 0)


FAULTS = """
import resource, sys, threading, torch
from engine.utils.cpu import keep_memory

def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step(size: int) -> None:
    keys, values = torch.empty(size), torch.empty(size)
    keys.fill_(1.0), values.fill_(1.0)

def steps() -> None:
    step(1 << 20)
    before = faults()
    for _ in range(50):
        step(1 << 20)
    print(faults() - before)

if sys.argv[1] == "kept":
    keep_memory()
steps()
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's")
def test_steps_find_their_memory_again() -> None:
    """Two blocks of 4 MiB, 50 times, where such blocks are mapped. Planted: the pages are cleared each time."""
    found = {}
    for how in ("kept", "as it comes"):
        command = [sys.executable, "-c", FAULTS, how]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}  # else the library moves it by itself
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        found[how] = int(done.stdout)
    assert found["kept"] < 20_000 and found["as it comes"] > 90_000
