"""Readiness before, during and after, on a clock that the test turns."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.broadcast import broadcast_of
from deployments.config.sections import HealthArgs
from deployments.health_probe import CanaryReply
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.routing.health_monitor import HealthMonitor
from deployments.start_failure import StartFailure


class World(IngressMetrics):
    """Replicas that answer what a test says."""

    def __init__(self, min_replicas: int = 1) -> None:
        super().__init__()
        self.now = 100.0
        self.answers: Sequence[object] = []
        self.failures: list[str | None] = []
        health = HealthArgs(period_s=5, min_replicas=min_replicas)
        self.failure: StartFailure | None = None
        self.asked = 0
        self.board = HealthMonitor(self.broadcast, health, self, lambda: self.now, self.start_failure)

    async def start_failure(self) -> StartFailure | None:
        self.asked += 1
        return self.failure

    async def broadcast(self, method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        assert method == "canary"
        for answer in self.answers:
            on_answer(answer)
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


async def test_a_new_ingress_waits_for_the_first_pass_and_no_longer_than_it_may() -> None:
    world = World()
    await world.board.first_pass(0.01)
    await world.look(CanaryReply("a", "timeout", 5))
    waiting = asyncio.create_task(world.board.first_pass(60))
    await asyncio.sleep(0)
    assert not waiting.done() and not world.board.passed_once.is_set()
    await world.look(passed("a"))
    await asyncio.wait_for(waiting, 10)
    await world.board.first_pass(0)
    assert world.board.passed_once.is_set()


async def test_a_start_that_has_failed_is_failed_with_its_reason_until_another_begins() -> None:
    world = World()
    world.failure = StartFailure("BadCheckpoint", "a file is cut off")
    await world.board._round()
    assert world.board.readiness()["status"] == "starting" and world.asked == 0
    world.now += 5
    await world.board._round()
    found = world.board.readiness()
    assert (found["status"], found["reason"]) == ("failed", "BadCheckpoint")
    world.now, world.failure = world.now + 5, None  # another version is deployed
    await world.board._round()
    assert world.board.readiness()["status"] == "starting" and "reason" not in world.board.readiness()
    world.answers = [passed("a")]
    await world.board._round()
    world.now += 60
    world.answers = []
    await world.board._round()
    assert world.board.status == "unready" and world.asked == 2


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


async def test_it_takes_as_many_replicas_as_are_configured() -> None:
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
    running = ["a", "b"]
    await world.look(passed("a"), passed("b"))
    assert not world.board.suspects(running)
    world.now += 5.5
    await world.look(passed("a"), CanaryReply("b", "timeout", 5))
    assert not world.board.suspects(running)
    world.now += 5.5
    await world.look(passed("a"), CanaryReply("b", "timeout", 5))
    assert set(world.board.suspects([*running, "new"])) == {"b"}  # and not one that was not asked yet
    await world.look(passed("a"), passed("b"))
    assert not world.board.suspects(running)
    world.now += 11
    await world.look()
    assert set(world.board.suspects(["a"])) == {"a"}
    assert set(world.board.suspects(running)) == {"a"}


async def test_the_suspects_of_an_unchanged_fleet_are_not_looked_for_again() -> None:
    """Each call asks. Until a pass grows old, or one comes from a suspect, the answer stays."""
    world, running = World(), tuple(map(str, range(256)))
    await world.look(*map(passed, running))
    world.board.suspects(running)
    looked = world.board._since
    world.now += 9.9
    assert not world.board.suspects(running)
    assert world.board._since is looked
    world.now += 0.2
    assert len(world.board.suspects(running)) == 256
    assert world.board._since is not looked
    await world.look(passed("7"))
    assert len(world.board.suspects(running)) == 255


async def test_one_that_was_a_zombie_before_we_came_is_suspected_after_two_periods() -> None:
    world = World()
    assert not world.board.suspects(["zombie"])
    world.now += 10.5
    await world.look(TimeoutError())
    assert set(world.board.suspects(["zombie", "new"])) == {"zombie"}
    assert world.failures == ["timeout"]


async def test_suspicion_needs_no_round_to_end() -> None:
    world = World()
    await world.look(passed("a"))
    assert not world.board.suspects(["a"])
    world.now += 10.5
    assert set(world.board.suspects(["a"])) == {"a"}


async def test_answers_count_when_they_come_though_one_replica_never_does() -> None:
    """Rounds overlap: the silent one holds up neither the others' answers nor the next round."""
    never, said = asyncio.Event(), asyncio.Event()
    rounds = 0

    async def broadcast(method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        nonlocal rounds
        rounds += 1
        on_answer(passed("a"))
        if rounds == 3:
            said.set()
        await never.wait()
        return []

    board = HealthMonitor(broadcast, HealthArgs(period_s=0.01), World())
    board.start()
    await asyncio.wait_for(said.wait(), 10)
    assert (board.status, board.ready, board.replicas) == ("ready", 1, 1)
    await board.stop()
    assert not board._rounds


async def test_a_round_begins_when_it_is_woken_though_an_earlier_one_still_waits() -> None:
    never, rounds = asyncio.Event(), asyncio.Queue[None]()
    first = True

    async def broadcast(method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        nonlocal first
        on_answer(passed("a"))
        rounds.put_nowait(None)
        if not first:
            await never.wait()
        first = False
        return []

    board = HealthMonitor(broadcast, HealthArgs(period_s=3600.0), World())
    board.start()
    await asyncio.wait_for(rounds.get(), 10)
    for _ in range(2):
        board.wake()
        await asyncio.wait_for(rounds.get(), 10)
    assert rounds.empty()
    await board.stop()


class Late:
    """One replica's answer, as Serve hands it over."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.cancelled = False

    async def get_async(self) -> object:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    deployment_name = "Replica"

    def __init__(self, *answers: Any) -> None:
        self.results = answers
        self.called: list[tuple[object, ...]] = []

    def broadcast(self, *called: object) -> "Handle":
        self.called.append(called)
        return self

    async def _fetch_replica_results_async(self) -> Sequence[Any]:
        if isinstance(self.results[0], Exception):
            raise self.results[0]
        return self.results


@pytest.mark.risk("R9")
async def test_a_replica_that_hangs_takes_no_answer_from_the_others() -> None:
    late, on_answer = Late(None), list[object]()
    handle = Handle(Late("a"), late, Late(KeyError("k")), Late("b"))
    answers = await broadcast_of(handle)("canary", 0.05, 7, on_answer=on_answer.append)
    kinds = [answer if isinstance(answer, str) else type(answer) for answer in answers]
    assert kinds == ["a", TimeoutError, KeyError, "b"]
    assert len(on_answer) == 4 and on_answer[-1] is answers[1]  # told as they come
    assert late.cancelled and handle.called == [("canary", 7)]


async def test_without_replicas_a_broadcast_is_empty() -> None:
    gone = Handle(DeploymentUnavailableError(DeploymentID("Replica", "app")))
    assert await broadcast_of(gone)("collect", 1.0) == []


async def test_a_replica_that_cancels_its_call_ends_no_round_of_its_callers() -> None:
    """Serve raises CancelledError for a call that a replica cancels as it ends."""
    handle = Handle(Late(asyncio.CancelledError()), Late("b"))
    answers = await broadcast_of(handle)("link_address", 5.0)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError, str]
    late = Late(None)
    round_ = asyncio.create_task(broadcast_of(Handle(late))("link_address", 5.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    round_.cancel()  # by the caller, who gets no answers then
    with pytest.raises(asyncio.CancelledError):
        await round_
