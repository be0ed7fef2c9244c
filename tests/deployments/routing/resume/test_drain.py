"""An ingress that its own deployment no longer names: what it says, and what becomes of its streams."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from deployments.config.sections import DrainArgs
from deployments.errors import ApiError
from deployments.protocol import GenerateCall
from deployments.routing.drain import DrainWatcher

FleetOf = Callable[..., Awaitable[Any]]
Make = Callable[..., GenerateCall]


class World:
    """A deployment whose names a test sets, and the ingress `a` in it."""

    def __init__(self, fleet: Any, grace_s: float | None = None) -> None:
        self.names: Sequence[str] | None = ()
        self.board, self.streams = fleet.board, fleet.dispatch.streams
        self.drain = DrainWatcher("a", self.say, self.board, self.streams.cut, DrainArgs(stream_grace_s=grace_s))

    def say(self) -> Sequence[str] | None:
        return self.names

    async def look(self, *names: str) -> str:
        self.names = names
        await self.drain.look()
        return str(self.board.status)


async def test_it_is_draining_once_it_has_been_named_and_is_no_longer(fleet_of: FleetOf) -> None:
    world = World(await fleet_of())
    assert await world.look() == "ready"  # not named yet: it has only just started
    assert await world.look("b") == "ready"
    assert await world.look("a", "b") == "ready"
    assert await world.look("b") == "draining"
    world.names = None
    await world.drain.look()
    assert world.board.status == "draining"  # no answer: nothing new
    assert await world.look("a", "b") == "ready"
    assert await world.look() == "draining"


@pytest.mark.risk(
    "R8", figure="0 failed, 0 cut in 3 rollouts and 3 scale-downs under load (benchmarks/results/kill-table.json)"
)
async def test_it_answers_what_still_comes_and_its_streams_go_on(
    fleet_of: FleetOf, generation: Make, told_of: Any, alone: Any
) -> None:
    fleet = await fleet_of()
    world = World(fleet)
    await world.look("a")
    await world.look("b")
    task = generation()
    assert await told_of(fleet.dispatch.stream(task)) == await alone(fleet, task)


async def test_after_the_grace_streams_end_with_an_error_and_can_be_resumed_from_their_tokens(
    fleet_of: FleetOf, generation: Make, cut: Any
) -> None:
    fleet = await fleet_of(cut("stalled", 2))
    world = World(fleet, grace_s=0.0)
    fleet.stop = lambda name: None  # the replica is not the one that stops: it is slow
    stream = fleet.dispatch.stream(generation(max_tokens=200))
    await anext(stream)
    await world.look("a")
    await world.look("b")
    with pytest.raises(ApiError) as raised:
        async with asyncio.timeout(10):
            async for _ in stream:
                pass
    assert raised.value.code == "draining"
    assert "resume_token_ids" in raised.value.message
    with pytest.raises(ApiError):
        await anext(fleet.dispatch.stream(generation()))


async def test_the_watch_outlives_a_round_that_fails(fleet_of: FleetOf) -> None:
    world = World(await fleet_of())
    looked = asyncio.Event()

    def fail() -> Sequence[str] | None:
        looked.set()
        raise OSError

    world.drain._names = fail
    world.drain.start()
    async with asyncio.timeout(10):
        await looked.wait()
    task = world.drain._task
    assert task is not None and not task.done()
    await world.drain.stop()
    assert task.done()
