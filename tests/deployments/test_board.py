"""Readiness before, during and after, on a clock that the test turns."""

from collections.abc import Sequence
from typing import Any

import pytest

from deployments.board import Board
from deployments.canary import CanaryReply
from deployments.config import HealthArgs


class World:
    """Replicas that answer what a test says."""

    def __init__(self, min_replicas: int = 1) -> None:
        self.now = 100.0
        self.answers: Sequence[object] = []
        self.failures: list[str | None] = []
        health = HealthArgs(period_s=5, min_replicas=min_replicas)
        self.board = Board(self.broadcast, health, self, lambda: self.now)

    async def broadcast(self, method: str, timeout_s: float) -> Sequence[object]:
        assert method == "canary"
        return self.answers

    def canary(self, failure: str | None, seconds: float) -> None:
        self.failures.append(failure)

    async def look(self, *answers: object) -> dict[str, Any]:
        self.answers = answers
        await self.board.look()
        return self.board.readiness()


def passed(replica: str) -> CanaryReply:
    return CanaryReply(replica, None, 0.01)


async def test_it_is_starting_until_a_canary_has_passed() -> None:
    world = World()
    assert world.board.readiness()["status"] == "starting"
    assert (await world.look())["status"] == "starting"
    assert (await world.look(CanaryReply("a", "timeout", 5)))["status"] == "starting"
    found = await world.look(passed("a"))
    assert found == {"status": "ready", "replicas_ready": 1, "replicas_total": 1, "canary_age_s": 0.0}
    assert world.failures == ["timeout", None]


@pytest.mark.parametrize(
    "answer", [CanaryReply("a", "timeout", 5), CanaryReply("a", "mismatch", 0.1), RuntimeError("it died")]
)
async def test_two_missed_canaries_make_it_unready_and_one_does_not(answer: object) -> None:
    world = World()
    await world.look(passed("a"))
    world.now += 5
    assert (await world.look(answer))["status"] == "ready"
    world.now += 5.5
    found = await world.look(answer)
    assert (found["status"], found["replicas_ready"], found["replicas_total"]) == ("unready", 0, 1)
    assert (await world.look(passed("a")))["status"] == "ready"


async def test_old_passes_count_for_nothing_even_if_no_round_ends() -> None:
    """A broadcast that hangs must not leave /readyz green."""
    world = World()
    await world.look(passed("a"))
    world.now += 10.1
    assert world.board.readiness()["status"] == "unready"


async def test_it_takes_as_many_replicas_as_it_is_told() -> None:
    world = World(min_replicas=2)
    await world.look(passed("a"), CanaryReply("b", "error", 0))
    assert world.board.ready == 1
    assert world.board.status != "ready"
    assert (await world.look(passed("a"), passed("b")))["status"] == "ready"


async def test_a_board_that_was_stopped_is_draining() -> None:
    world = World()
    await world.look(passed("a"))
    world.board.start()
    await world.board.stop()
    assert world.board.readiness()["status"] == "draining"


async def test_a_replica_that_misses_two_canaries_is_suspected_until_it_passes_or_is_gone() -> None:
    world = World()
    running = ["a", "b", "new"]
    await world.look(passed("a"), passed("b"))
    assert not world.board.suspects(running)
    world.now += 5.5
    await world.look(passed("a"), CanaryReply("b", "timeout", 5))
    assert not world.board.suspects(running)
    world.now += 5.5
    await world.look(passed("a"), CanaryReply("b", "timeout", 5))
    assert set(world.board.suspects(running)) == {"b"}  # and not one that nobody has asked yet
    await world.look(passed("a"), passed("b"))
    assert not world.board.suspects(running)
    world.now += 11
    await world.look()
    assert set(world.board.suspects(["a"])) == {"a"}
    assert set(world.board.suspects(running)) == {"a"}
