"""R9: a replica whose engine is lost leaves /readyz and the routing, and says so to Serve; and the detectors can fail.

In process; the whole service with its replacements is in tests/chaos/test_zombies.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from deployments.config.app_args import AppArgs
from deployments.health_probe import CanaryReply
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Failure, GenerateCall
from deployments.replica.replica import ReplicaServer
from deployments.routing.health_monitor import HealthMonitor
from engine.requests import ErrorCode, GenerateRequest
from gpu_sampler.sampling_params import SamplingParams
from tests.support import toy_model

PERIOD_S = 0.5
STALL_S = 0.6
FAULTS = {"hang": (toy_model.HANG,), "device": toy_model.LOSE_DEVICE, "thread": toy_model.END_THREAD}


class Found(NamedTuple):
    """Seconds from the fault to its discovery; None: never, in the time that is given to it."""

    unready: float | None
    suspected: float | None
    check_health: float | None


class Watched:
    """A replica and the board of an ingress that asks it."""

    def __init__(self, server: ReplicaServer, model: toy_model.ToyModel, health: Any) -> None:
        self.server, self.model = server, model
        self.metrics = IngressMetrics()
        self.board = HealthMonitor(self._broadcast, health, self.metrics)

    async def _broadcast(self, method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        answer = await getattr(self.server, method)()
        on_answer(answer)
        return [answer]

    async def ready(self) -> None:
        self.board.start()
        async with asyncio.timeout(10):
            while self.board.status != "ready" or self.board.suspects(["r1"]):
                await asyncio.sleep(0.005)

    async def struck(self, fault: Sequence[int]) -> "asyncio.Task[Any]":
        """The call that brings the fault; it has happened."""
        call = asyncio.create_task(self.server.generate(task(5, *fault)))
        async with asyncio.timeout(10):
            while not self.model.hanging.is_set() and self.server.engine.healthy:
                await asyncio.sleep(0.001)
        return call

    async def found(self) -> Found:
        """Looks for two periods and a half, and as long as a stall takes to be told."""
        began = time.monotonic()
        times: dict[str, float] = {}
        while len(times) < 3 and (now := time.monotonic() - began) < max(2.5 * PERIOD_S, 2 * STALL_S):
            if self.board.status != "ready":
                times.setdefault("unready", now)
            if self.board.suspects(["r1"]):
                times.setdefault("suspected", now)
            try:
                self.server.check_health()
            except RuntimeError:
                times.setdefault("check_health", now)
            await asyncio.sleep(0.01)
        return Found(times.get("unready"), times.get("suspected"), times.get("check_health"))


class Counted(ReplicaServer):
    """A replica whose canaries are counted."""

    ran = 0

    async def start(self, model: Any = None) -> None:
        await super().start(model)
        run = self._canary.run

        async def counted(timeout_s: float) -> Any:
            self.ran += 1
            return await run(timeout_s)

        self._canary.run = counted  # type: ignore[method-assign]


async def canaries(server: Any, ingresses: int) -> int:
    """Returns how many canaries ran while so many ingresses sent one each, half together and half one after another."""
    server.ran = 0
    together = await asyncio.gather(*(server.canary() for _ in range(ingresses // 2)))
    later = [await server.canary() for _ in range(ingresses // 2)]
    assert {reply.failure for reply in (*together, *later)} == {None}
    return int(server.ran)


async def test_ingresses_share_the_canaries_of_a_replica(
    watched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await watched(Counted)
    await one.board.stop()
    monkeypatch.setattr("deployments.replica.replica.SHARED_CANARY", 1e6)
    assert await canaries(one.server, 20) <= 1
    one.server._canary._passed = None
    assert await canaries(one.server, 20) == 1


async def test_without_sharing_each_ingress_would_cost_a_canary(
    watched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted counterpart: a pass is good for one answer."""
    one = await watched(Counted)
    await one.board.stop()
    monkeypatch.setattr("deployments.replica.replica.SHARED_CANARY", 0.0)
    assert await canaries(one.server, 20) >= 10


def task(*prompt: int) -> GenerateCall:
    params = SamplingParams(max_tokens=5)
    return (GenerateRequest(request_id="g", prompt=np.array(prompt, np.int32), params=params, seed=17),)


@pytest.fixture
async def watched(toy_args: dict[str, Any]) -> AsyncIterator[Callable[..., Any]]:
    made: list[Watched] = []

    async def make(kind: type[ReplicaServer] = ReplicaServer) -> Watched:
        health = {"period_s": PERIOD_S, "timeout_s": PERIOD_S, "step_timeout_s": STALL_S}
        args = AppArgs.model_validate(toy_args | {"health": health})
        server, model = kind(args, "r1"), toy_model.ToyModel(num_slots=512)
        await server.start(model)
        made.append(Watched(server, model, args.health))
        await made[-1].ready()
        return made[-1]

    yield make
    for one in made:
        await one.board.stop()
        one.model.released.set()
        one.server.stop()


@pytest.mark.full(keep=1)
@pytest.mark.risk(
    "R9",
    figure="out of /readyz and the routing after 8.3 s (hang), 9.2 s (device, thread) and 9.3 s (frozen); replaced "
    "after 28.1 s (hang), 19.2 s (device, thread) and 29.3 s (frozen, which Serve drops after 15.9 s), 10 to "
    "14 s of them the start of another on 2 cores; beside other work a hang 34.3 s, 19 of them the start; 0 "
    "of 3,231 requests failed, longest 16.5 s; frozen beside other work 33.5 s, 18 of them the start, 0 of 1,259 "
    "requests failed, longest 8.9 s",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_lost_engine_is_found_within_two_periods_and_answers_who_waits(
    watched: Callable[..., Any], fault: str
) -> None:
    service = await watched()
    call = await service.struck(FAULTS[fault])
    found = await service.found()
    print(f"R9 {fault}, period {PERIOD_S} s, stall {STALL_S} s:", found)
    assert None not in found
    assert max(found.unready, found.suspected) < 2 * PERIOD_S + 0.2  # of a loop that others load, too
    reply = await asyncio.wait_for(call, 10)
    assert isinstance(reply, Failure) and reply.code == ErrorCode.LOST
    refused = await asyncio.wait_for(service.server.generate(task(1, 2)), 10)
    assert isinstance(refused, Failure) and refused.code == ErrorCode.NOT_READY


@pytest.mark.risk("R9", planted=True)
async def test_a_canary_that_always_says_yes_would_be_seen(watched: Callable[..., Any]) -> None:
    """The planted counterpart: with it the search above finds neither."""

    class Yes(ReplicaServer):
        async def canary(self) -> CanaryReply:
            return CanaryReply(self._replica, None, 0.0)

    service = await watched(Yes)
    await service.struck(FAULTS["hang"])
    found = await service.found()
    assert (found.unready, found.suspected) == (None, None)
    assert found.check_health is not None


@pytest.mark.risk("R9", planted=True)
async def test_a_heartbeat_of_the_wrong_thread_would_be_seen(watched: Callable[..., Any]) -> None:
    """The planted counterpart: the event loop writes the heartbeat that is the step thread's to write."""

    class Wrong(ReplicaServer):
        def check_health(self) -> None:
            self.engine.core.heartbeat = self.engine._clock()
            super().check_health()

    service = await watched(Wrong)
    await service.struck(FAULTS["hang"])
    found = await service.found()
    assert found.check_health is None
    assert found.unready is not None  # the canary goes through the real path


@pytest.mark.risk("R9")
async def test_a_thread_that_hangs_without_work_is_found(watched: Callable[..., Any]) -> None:
    """A call that never became a job in its books is no reason to call it healthy."""
    service = await watched()
    await service.board.stop()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(started.set)
        service.model.released.wait()

    service.server.engine.core.calls.post(hang)
    await asyncio.wait_for(started.wait(), 10)
    assert not service.server.engine.stats().live_requests
    assert (await service.found()).check_health is not None
