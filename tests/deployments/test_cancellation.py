"""A client that leaves, at each point of its request: what it held is free within two steps, and its rows are gone.

Over an ingress and a replica in process. The model's steps are the clock: the step in which the client leaves is held
until its leaving has reached the replica.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from engine.batch.input_batch import StepKind
from tests.deployments.replicas import settled

MakeFleet = Callable[..., Any]
TOKENS = 12
SAMPLING = {"prompt": list(range(40, 70)), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
SCORING = {"query": list(range(25)), "items": [[n, n + 1] for n in range(99)], "label_token_ids": [65, 66]}
OTHERS = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "temperature": 0}


class Point(NamedTuple):
    """Where a client leaves: in the so-and-so-many-th step of a kind that belongs to it."""

    path: str
    body: dict[str, Any]
    kind: StepKind
    step: int


POINTS = {
    "prefill": Point("/v1/completions", SAMPLING | {"stream": True}, StepKind.PREFILL, 2),
    "prefill, unary": Point("/v1/completions", SAMPLING, StepKind.PREFILL, 2),
    "between tokens": Point("/v1/completions", SAMPLING | {"stream": True}, StepKind.DECODE, 5),
    "between tokens, unary": Point("/v1/completions", SAMPLING, StepKind.DECODE, 5),
    "last token": Point("/v1/completions", SAMPLING | {"stream": True}, StepKind.DECODE, TOKENS - 1),
    "during scoring": Point("/generative_scoring", SCORING, StepKind.SCORE, 3),
}


class Gate:
    """Holds the replica's step number `step` of `kind`."""

    def __init__(self, model: Any, kind: StepKind, step: int) -> None:
        self._model, self._kind, self._left = model, kind, step
        self._reached, self._go = threading.Event(), threading.Event()
        self._model.on_forward = self._forward

    def _forward(self, kind: StepKind, runs: Any) -> None:
        if kind is self._kind:
            self._left -= 1
            if self._left == 0:
                self._reached.set()
                self._go.wait()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 10)

    def open(self) -> None:
        self._go.set()


async def gone_from(server: Any, calls: int = 0) -> None:
    """Until the client's leaving is known to the replica: the step thread will find more than so many calls in its
    inbox."""
    async with asyncio.timeout(10):
        while len(server.engine.core.calls._calls) <= calls:
            await asyncio.sleep(0.001)


async def steps_after_leaving(fleet: Any, wire_to: Callable[..., Any], point: Point) -> tuple[int, int]:
    """How many steps ran after the one that was held, until everything was free; and tokens generated in them."""
    server, model = fleet.servers[0], fleet.models[0]
    gate = Gate(model, point.kind, point.step)
    wire = wire_to(fleet.client.app, point.path, point.body)
    await gate.reached()
    steps, tokens = model.steps, server.engine.stats().generated_tokens
    wire.leave()
    await wire.task
    await gone_from(server)
    gate.open()
    stats = await settled(server)
    return model.steps - steps, stats.generated_tokens - tokens


@pytest.mark.risk("R4")
async def test_a_client_that_leaves_holds_nothing_two_steps_later(
    make_fleet: MakeFleet, wire_to: Callable[..., Any]
) -> None:
    fleet = await make_fleet(1, engine={"kv_slots": 2048, "token_budget": 16, "max_running": 4, "prefix_cache": False})
    found = {name: await steps_after_leaving(fleet, wire_to, point) for name, point in POINTS.items()}
    print(f"point: (steps until all was free, tokens after the client left): {found}")
    assert {name for name, (steps, tokens) in found.items() if steps > 2 or tokens > 1} == set()


@pytest.mark.risk("R4")
async def test_a_client_that_leaves_the_queue_is_never_computed(
    make_fleet: MakeFleet, wire_to: Callable[..., Any]
) -> None:
    fleet = await make_fleet(1, engine={"kv_slots": 2048, "max_running": 1})
    server, model = fleet.servers[0], fleet.models[0]
    gate = Gate(model, StepKind.DECODE, 3)
    first = wire_to(fleet.client.app, "/v1/completions", OTHERS)
    await gate.reached()
    before = server.engine.stats()
    waiting = wire_to(fleet.client.app, "/v1/completions", SAMPLING | {"stream": True})
    while server.engine.core.tracker.queued_tokens == before.queued_tokens:
        await asyncio.sleep(0)
    calls = len(server.engine.core.calls._calls)  # that it came
    waiting.leave()
    await waiting.task
    await gone_from(server, calls)
    seen: list[int] = []
    gate.open()
    model.on_forward = lambda kind, runs: seen.append(server.engine.stats().queued_requests)
    await first.task
    stats = server.engine.stats()
    assert stats.step_tokens["prefill"] == before.step_tokens["prefill"]
    assert seen[2:] and not any(seen[2:]), "two steps later no request waits any more"
    assert json.loads(first.body)["usage"]["completion_tokens"] == 40


@pytest.mark.risk("R4")
async def test_a_client_that_leaves_during_a_hand_off_holds_nothing_on_either_replica(
    make_fleet: MakeFleet, wire_to: Callable[..., Any]
) -> None:
    """Its replica has to stop, and the first step of the next one is held while the client leaves."""
    fleet = await make_fleet(2, engine={"kv_slots": 2048, "max_running": 4, "prefix_cache": False})
    for model in fleet.models:
        model.step_seconds = 0.005  # the stream must not end before it is moved
    wire = wire_to(fleet.client.app, "/v1/completions", SAMPLING | {"stream": True, "max_tokens": 900})
    async with asyncio.timeout(10):
        while not any(server.engine.stats().generated_tokens for server in fleet.servers):
            await asyncio.sleep(0.001)
    first = next(i for i, server in enumerate(fleet.servers) if server.engine.stats().generated_tokens)
    old, new, model = fleet.servers[first], fleet.servers[1 - first], fleet.models[1 - first]
    gate = Gate(model, StepKind.PREFILL, 1)
    fleet.loads.publish([f"r{1 - first}"])
    await gate.reached()
    steps = model.steps
    wire.leave()
    await wire.task
    await gone_from(new)
    gate.open()
    for server in (old, new):
        await settled(server)
    assert model.steps - steps <= 2
    assert old.engine.stats().generated_tokens + new.engine.stats().generated_tokens < 900


@pytest.mark.risk("R4", planted=True)
async def test_a_client_that_leaves_is_missed_where_no_one_cancels(
    make_fleet: MakeFleet, wire_to: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plants the fault: an engine that learns of no cancellation goes on to the last token."""
    fleet = await make_fleet(1, engine={"kv_slots": 2048, "token_budget": 16, "max_running": 4})
    monkeypatch.setattr(fleet.servers[0].engine, "_cancel", lambda state: None)
    monkeypatch.setitem(globals(), "gone_from", lambda server, calls=0: asyncio.sleep(0))
    steps, tokens = await steps_after_leaving(fleet, wire_to, POINTS["between tokens"])
    assert steps > 2 and tokens > 1
