"""A CPU engine that lets others have the cores first: its step thread and what that starts, and no other."""

import os
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
