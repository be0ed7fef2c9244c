"""R14: what fifty clients that do not read cost a neighbour's time. A step takes 0.1 s, whatever it holds."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api import sse
from tests.deployments.clients import make_client as make_client  # fixtures
from tests.deployments.replicas import backend_of as backend_of
from tests.deployments.test_slow_readers import SHORT, SLOW, World
from tests.deployments.test_slow_readers import world as world  # a fixture
from tests.deployments.wires import wire_to as wire_to

pytestmark = pytest.mark.slow
STEP_S = 0.1
MOST = 1.2
BESIDE = {"prompt": [40, 41], "max_tokens": 900, "stream": True, "ignore_eos": True, "seed": 1}


async def seconds(world: World) -> float:
    since = time.perf_counter()
    assert (await world.client.post("/v1/completions", SHORT)).status_code == 200
    return time.perf_counter() - since


async def ratio(world: World, wire_to: Callable[..., Any]) -> float:
    """Seconds of a neighbour's answer beside them, over those without."""
    model: Any = world.server.engine.model
    model.step_seconds = STEP_S
    await seconds(world)
    alone = await seconds(world)
    wires = [wire_to(world.app, "/v1/completions", BESIDE) for _ in range(SLOW)]
    for wire in wires:
        wire.reading.clear()
    beside = await seconds(world)
    model.step_seconds = 0.0
    for wire in wires:
        wire.leave()
        await wire.task
    print(f"R14: {alone:.2f} s alone, {beside:.2f} s beside {SLOW} that do not read, {beside / alone:.2f}x")
    return beside / alone


@pytest.mark.risk("R14")
async def test_readers_that_do_not_read_cost_a_neighbour_little(world: World, wire_to: Callable[..., Any]) -> None:
    assert await ratio(world, wire_to) <= MOST


@pytest.mark.risk("R14", planted=True)
async def test_steps_that_wait_for_them_would_be_seen(
    world: World, wire_to: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted counterpart: whatever is made for a stream that is not read holds the loop a little."""

    put = sse._Buffer.put

    def holding(buffer: Any, data: bytes) -> bool:
        time.sleep(0.05)
        return put(buffer, data)

    monkeypatch.setattr(sse._Buffer, "put", holding)
    assert await ratio(world, wire_to) > MOST
