"""R9, R10: requests at a replica that answers no canary move before its process is called dead, and run alone then."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from deployments.config.sections import HealthArgs
from deployments.health_probe import CanaryReply
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.frozen_replica_watch import FrozenReplicaWatch
from deployments.routing.health_monitor import HealthMonitor
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.replica_call import RetryableError, replica_lost
from tests.deployments.fleets import make_fleet as make_fleet  # a fixture

REQUESTS = 12
SECTIONS: dict[str, Any] = {"admission": {"max_wait_s": 100.0}}
LABELS = {"label_token_ids": [65, 66]}
POISON = 250


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Scores, plain generations that are short and long, and streams."""
    prompt = [number, *range(20)]
    generation = {"prompt": prompt, "max_tokens": 20, "seed": number, "ignore_eos": True}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/generative_scoring", {"query": prompt, "items": [[1, 2]], **LABELS}),
        ("/v1/completions", generation),
        ("/v1/completions", generation | {"max_tokens": 400}),
        ("/v1/completions", generation | {"stream": True}),
    ]
    return kinds[number % 4]


async def asked(fleet: Any, seconds: float) -> list[Any]:
    headers = {"x_request_timeout_seconds": str(seconds)}
    return await asyncio.gather(*(fleet.client.post(*request(n), **headers) for n in range(REQUESTS)))


def said(answers: list[Any]) -> list[tuple[int, bool]]:
    """Each status, and whether a stream ended with an error."""
    return [(answer.status_code, "deadline_exceeded" in answer.text) for answer in answers]


async def frozen(fleet: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Asks two replicas. The first one stops after its next step, is left, and is suspect then. Returns the answers."""
    stopped, suspects = fleet.models[0], set[str]()
    monkeypatch.setattr(fleet.dispatch._caller._selector, "_suspects", lambda running: suspects)
    stopped.on_forward = lambda kind, runs: stopped.released.wait()
    asyncio.get_running_loop().call_later(seconds + 1.5, stopped.released.set)  # so that the test can end
    answers = asyncio.create_task(asked(fleet, seconds))
    while not answers.done():  # again for those that were on their way
        await asyncio.sleep(0.05)
        suspects.add("r0")
        fleet.dispatch.leave({"r0"})
    return await answers


@pytest.mark.risk("R9", figure="0 of 12 requests under way at a frozen replica ended in 408")
async def test_requests_at_a_frozen_replica_are_moved(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await make_fleet(2, **SECTIONS)
    assert said(await frozen(fleet, 30.0, monkeypatch)) == [(200, False)] * REQUESTS


@pytest.mark.risk("R9", planted=True)
async def test_requests_that_stay_there_would_be_seen(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "leave", lambda self, replicas: None)
    fleet = await make_fleet(2, **SECTIONS)
    assert said(await frozen(fleet, 1.0, monkeypatch)) != [(200, False)] * REQUESTS


async def hung_by_one_request(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Counts the replicas, of three, that hang for a request that makes its step hang. Those that hang are left."""
    suspects = set[str]()
    monkeypatch.setattr(fleet.dispatch._caller._selector, "_suspects", lambda running: suspects)
    for number, model in enumerate(fleet.models):

        def forward(kind: Any, runs: Any, number: int = number, model: Any = model) -> None:
            if any(run.ids is not None and POISON in run.ids for run in runs):
                suspects.add(f"r{number}")
                model.released.wait()

        model.on_forward = forward
        asyncio.get_running_loop().call_later(3.0, model.released.set)
    poison = {"prompt": [5, POISON], "max_tokens": 5}
    answer = asyncio.create_task(fleet.client.post("/v1/completions", poison, x_request_timeout_seconds="2"))
    while not answer.done():
        await asyncio.sleep(0.05)
        if len(suspects) < len(fleet.models):
            fleet.dispatch.leave(suspects)
    assert (await answer).status_code == 408
    return len(suspects)


@pytest.mark.full(keep=1)
@pytest.mark.risk("R10")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_freezes_replicas_leaves_the_first_alone(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    fleet = await make_fleet(3, **SECTIONS)
    if stream:  # as a long plain answer is
        monkeypatch.setattr("deployments.routing.stream_resume.CHECKPOINT", 1)
    assert await hung_by_one_request(fleet, monkeypatch) == 2


@pytest.mark.full
@pytest.mark.risk("R10", planted=True)
async def test_one_that_casts_no_suspicion_would_freeze_them_all(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deployments.routing.replica_call.left_behind", lambda: RetryableError("unavailable", replica_lost())
    )
    fleet = await make_fleet(3, **SECTIONS)
    assert await hung_by_one_request(fleet, monkeypatch) == 3


class Replicas:
    """Two replicas, a clock, and which of them pass their canaries."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passing = {"a", "b"}
        self.left: list[frozenset[str]] = []
        self.monitor = HealthMonitor(self.broadcast, HealthArgs(period_s=5.0), IngressMetrics(), lambda: self.now)
        self.loads = LoadTracker()
        self.loads.publish(["a", "b"])
        self.watch = FrozenReplicaWatch(self.monitor, self.loads, self.take)

    async def broadcast(self, method: str, timeout_s: float, *args: object, on_answer: Any = None) -> list[object]:
        answers: list[object] = [
            CanaryReply(name, None, 0.1) if name in self.passing else TimeoutError() for name in ("a", "b")
        ]
        for answer in answers:
            on_answer(answer)
        return answers

    def take(self, replicas: Collection[str]) -> None:
        self.left.append(frozenset(replicas))

    async def after(self, seconds: float) -> None:
        self.now += seconds
        await self.monitor.look()
        await self.watch.look()


async def test_a_replica_is_left_once_after_two_periods() -> None:
    replicas = Replicas()
    await replicas.after(0.0)
    replicas.passing = {"b"}
    await replicas.after(9.0)
    assert not replicas.left
    await replicas.after(2.0)
    await replicas.after(5.0)
    assert replicas.left == [frozenset("a")]
    replicas.passing = {"a", "b"}
    await replicas.after(1.0)
    replicas.passing = {"b"}
    await replicas.after(11.0)
    assert replicas.left == [frozenset("a")] * 2


async def test_none_is_left_where_no_canary_passes() -> None:
    """It is this process that was late then, or there is no better place."""
    replicas = Replicas()
    await replicas.after(0.0)
    replicas.passing = set()
    await replicas.after(20.0)
    assert not replicas.left


async def test_one_that_froze_while_none_passed_is_left_when_another_passes() -> None:
    replicas = Replicas()
    await replicas.after(0.0)
    replicas.passing = set()
    await replicas.after(20.0)
    replicas.passing = {"b"}
    await replicas.after(1.0)
    assert replicas.left == [frozenset("a")]
    replicas.passing = set()
    await replicas.after(20.0)
    replicas.passing = {"b"}
    await replicas.after(1.0)
    assert replicas.left == [frozenset("a")]  # once


async def test_a_new_replica_is_asked_before_the_period_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/readyz` counts it then, and a rollout goes on."""
    replicas = Replicas()
    woken = list[None]()
    monkeypatch.setattr(replicas.monitor, "wake", lambda: woken.append(None))
    for names, wakes in (("ab", 1), ("ab", 1), ("b", 1), ("bc", 2), ("bc", 2)):
        replicas.loads.publish(names)
        await replicas.watch.look()
        assert len(woken) == wakes, names
