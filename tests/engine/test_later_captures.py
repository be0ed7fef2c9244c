"""What a start-up leaves for later: the step thread captures graphs, at rest one after another and beside work now and
then, and shares contexts once the kernels for that are compiled."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from engine import core
from engine.requests import ErrorCode, GenerateRequest
from tests.support.toy_model import ToyModel

MakeRig = Callable[..., Any]
MakeJob = Callable[..., GenerateRequest]


class Captures:
    """Graphs that are left to capture, and what the engine was doing at each capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int, error: Exception | None = None) -> None:
        self.left, self.error = left, error
        self.times = list[float]()
        self.rig: Any = None
        monkeypatch.setattr(ToyModel, "capture_next", lambda model: self._capture())

    def _capture(self) -> bool:
        if not self.left:
            return False
        engine_core = self.rig.engine.core
        assert not engine_core._in_flight  # a step that is captured overwrites what one in flight reads
        self.times.append(engine_core._clock())
        if self.error is not None:
            raise self.error
        self.left -= 1
        return True

    async def done(self) -> None:
        while self.rig.engine.core._lacks_graphs:
            await asyncio.sleep(0.001)
        await self.rig.engine.core.passed()  # the last capture is logged after that


def started(make_rig: MakeRig, captures: Captures, **options: Any) -> Any:
    captures.rig = make_rig(start=False, **options)
    captures.rig.engine.start()
    return captures.rig


async def test_an_engine_at_rest_captures_all_that_is_left(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures(monkeypatch, left=5)
    with caplog.at_level(logging.INFO):
        rig = started(make_rig, captures)
        await asyncio.wait_for(captures.done(), 10)
    assert len(captures.times) == 5 and "5 further sizes" in caplog.text
    assert len((await rig.run(generate_job([3, 4]))).tokens) == 8


async def spaced_beside_work(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch, *, overlap: bool
) -> bool:
    """Tells whether the captures beside 350 steps were a period apart, as at least three must be. The clock is that of
    the steps: one every 10 ms."""
    now, period = [0.0], 1.0

    def step_begins(step: object) -> None:
        now[0] += 0.01

    captures = Captures(monkeypatch, left=5)
    captures.rig = rig = make_rig(
        start=False, overlap=overlap, clock=lambda: now[0], before_step=step_begins, max_model_len=512
    )
    tasks = [asyncio.create_task(rig.run(generate_job([n], max_tokens=350, timeout_s=60.0))) for n in range(2)]
    await rig.queued()
    rig.engine.start()
    results = await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert [len(one.tokens) for one in results] == [350, 350]
    beside = [time for time in captures.times if time < now[0]]
    assert len(beside) >= 3
    return all(b - a >= period for a, b in zip([0.0, *beside], beside, strict=False))


@pytest.mark.parametrize("overlap", [False, True])
async def test_beside_work_one_is_captured_a_second(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    assert await spaced_beside_work(make_rig, generate_job, monkeypatch, overlap=overlap)


async def test_captures_that_follow_each_other_beside_work_would_be_seen(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of the test above."""
    monkeypatch.setattr(core, "CAPTURE_PERIOD_S", 0.0)
    assert not await spaced_beside_work(make_rig, generate_job, monkeypatch, overlap=False)


async def test_an_engine_without_graphs_says_nothing_of_them(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures(monkeypatch, left=0)
    with caplog.at_level(logging.INFO):
        started(make_rig, captures)
        await asyncio.wait_for(captures.done(), 10)
    assert "graphs" not in caplog.text


async def test_a_capture_that_fails_is_the_last_and_costs_no_request(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures(monkeypatch, left=5, error=RuntimeError("out of memory"))
    with caplog.at_level(logging.WARNING):
        rig = started(make_rig, captures)
        await asyncio.wait_for(captures.done(), 10)
    assert len(captures.times) == 1 and "not captured" in caplog.text
    assert len((await rig.run(generate_job([3, 4]))).tokens) == 8


async def test_a_device_that_a_capture_loses_ends_the_engine(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    captures = Captures(monkeypatch, left=1, error=RuntimeError("illegal memory access"))
    captures.rig = rig = make_rig(start=False)
    rig.model.device = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.synchronize", lost)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    rig.engine.start()
    while rig.engine.healthy:
        await asyncio.sleep(0.001)
    assert rig.engine.core.fault == "RuntimeError"
    with pytest.raises(Exception) as caught:
        await rig.run(generate_job([1]))
    assert getattr(caught.value, "code", None) is ErrorCode.NOT_READY


async def test_contexts_are_shared_once_their_kernels_are_there(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered before, and the step thread itself changes how it attends."""
    threads = list[str]()
    monkeypatch.setattr(ToyModel, "share_contexts", lambda model: threads.append(threading.current_thread().name))
    rig = make_rig(start=False)
    rig.model.contexts_built = Future()
    rig.engine.start()
    assert len((await rig.run(generate_job([3, 4]))).tokens) == 8
    assert not threads
    rig.model.contexts_built.set_result([])
    await rig.engine.core.passed()
    assert threads == ["engine-steps"]


async def test_contexts_that_cannot_be_shared_cost_no_request(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(model: ToyModel) -> None:
        raise RuntimeError("contexts did not compile")

    monkeypatch.setattr(ToyModel, "share_contexts", fails)
    rig = make_rig(start=False)
    rig.model.contexts_built = Future()
    rig.model.contexts_built.set_result(["contexts"])  # before the start: it is looked at then
    with caplog.at_level(logging.WARNING):
        rig.engine.start()
        assert len((await rig.run(generate_job([3, 4]))).tokens) == 8
    assert "contexts did not compile" in caplog.text and rig.engine.healthy
