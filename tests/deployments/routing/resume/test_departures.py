"""Tests who learns that a replica takes no more calls, and whether it was stopped or has died."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.protocol import GenerateCall
from deployments.routing.load_tracker import LEFT_S, MAX_LEFT, LoadTracker
from tests.deployments.links import over_the_handle

FleetOf = Callable[..., Awaitable[Any]]
Make = Callable[..., GenerateCall]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_listeners_hear_who_joins_and_who_leaves_but_not_who_died() -> None:
    loads = LoadTracker()
    heard: list[tuple[set[str], set[str]]] = []
    loads.listen(lambda joined, left: heard.append((set(joined), set(left))))
    loads.publish(["a", "b"])
    loads.publish(["a", "b"])
    loads.publish(["b", "c"])
    loads.publish(["c"], dead="b")
    assert heard == [({"a", "b"}, set()), ({"c"}, {"a"})]


def test_one_that_joins_while_another_is_found_dead_stays() -> None:
    """The router's thread publishes; the loop's finds out that a link's replica died."""
    loads, heard = LoadTracker(), list[tuple[set[str], set[str]]]()
    loads.publish(["a", "b"])
    loads.listen(lambda joined, left: heard.append((set(joined), set(left))))
    found = threading.Thread(target=loads.died, args=("a",))

    def names() -> Iterator[str]:
        found.start()  # it waits until all names are taken
        yield from ("a", "b", "new")

    loads.publish(names())
    found.join()
    assert loads.replicas == ("b", "new") and heard == [({"new"}, set())]


def test_a_replica_has_left_a_while_after_it_had_to_stop() -> None:
    clock = Clock()
    loads = LoadTracker(clock)
    loads.publish(["a", "b", "c"])
    loads.publish(["a", "b"], dead="c")
    loads.publish(["a"])
    assert [loads.has_left(name) for name in "abc"] == [False, False, False]  # it may have died just now
    clock.now += LEFT_S
    assert [loads.has_left(name) for name in "abc"] == [False, True, False]
    loads.publish(["a", "b"])
    assert not loads.has_left("b")


def test_names_of_long_ago_are_forgotten() -> None:
    clock = Clock()
    loads = LoadTracker(clock)
    for number in range(MAX_LEFT + 10):
        loads.publish([str(number)])
    loads.publish([])
    clock.now += 1
    assert not loads.has_left("0") and loads.has_left(str(MAX_LEFT + 9))


def test_a_ticket_is_where_the_router_sent_it() -> None:
    loads = LoadTracker()
    loads.publish(["a"])
    ticket = loads.send("", 5)
    assert loads.where(ticket) == ""
    loads.moved(ticket, "a")
    assert (loads.where(ticket), loads.load("a")) == ("a", 5)
    assert loads.close(ticket) == "a"
    assert loads.load("a") == 0


@over_the_handle
@pytest.mark.parametrize(("stopped_before", "isolated"), [(True, False), (False, True)])
async def test_a_replica_that_had_to_stop_and_then_ended_makes_no_suspects(
    fleet_of: FleetOf, generation: Make, stopped_before: bool, isolated: bool
) -> None:
    """A score or a short answer stays where it is until it has ended, or its replica has."""
    fleet = await fleet_of()
    gate, entered = asyncio.Event(), asyncio.Event()
    plain = fleet._plain

    async def ends(name: str, task: Any, cut: Any) -> object:
        if len(fleet.sent) > 1:
            return await plain(name, task, cut)
        entered.set()
        await gate.wait()
        raise ActorDiedError()

    fleet._plain = ends
    call = asyncio.create_task(fleet.dispatch.generate(generation(max_tokens=10)))
    await entered.wait()
    if stopped_before:
        fleet.loads._clock = lambda: 0.0
        fleet.stop(fleet.sent[0][0])
        fleet.loads._clock = lambda: LEFT_S
    gate.set()
    await call
    assert [task[0].isolated for _, task in fleet.sent] == [False, isolated]
