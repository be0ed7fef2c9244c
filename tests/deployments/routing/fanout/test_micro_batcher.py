"""Small tasks that go to a replica in one call, over the toy model: each is answered, fails and ends as if alone."""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.errors import ApiError
from deployments.protocol import Failure
from deployments.replica.replica import ReplicaServer
from deployments.routing.load_tracker import LoadTracker, QueueEstimate
from deployments.routing.micro_batcher import MicroBatcher
from engine.requests import ErrorCode, LikelihoodRequest, Load, ScoreRequest, ScoreResult
from tests.deployments.links import over_the_handle
from tests.support import toy_model

Make = Callable[..., Awaitable[Any]]
pytestmark = over_the_handle  # a link carries together what is sent in one turn of the event loop
FOUR = {
    "micro_batch_calls": 1,
    "micro_batch_max_requests": 4,
    "micro_batch_max_wait_s": 5.0,
}  # requests that share a micro-batch leave as one of four


def small(number: int, tokens: int = 9, **fields: Any) -> ScoreRequest:
    ids = np.random.default_rng(number).integers(0, 250, tokens).astype(np.int32)
    given: dict[str, Any] = {
        "request_id": f"s{number}",
        "prefix": np.arange(3, dtype=np.int32),
        "ids": ids,
        "starts": np.array([0, tokens], np.int32),
        "labels": np.array([65, 5, 200], np.int32),
        "timeout_s": 20.0,
    }
    return ScoreRequest(**given | fields)


def judged(number: int) -> LikelihoodRequest:
    task, none = small(number), np.zeros(1, np.int32)
    return LikelihoodRequest(
        request_id=task.request_id, prefix=task.prefix, ids=task.ids, starts=task.starts, shared=none, wanted=none + 2
    )


@pytest.fixture
def busy(make_world: Make) -> Make:
    """Replicas with a call of a small task each under way that never returns, and all equally loaded. They
    tell no speed."""

    async def make(count: int = 1, max_queued_tokens: int = 1_000_000, **fanout: Any) -> Any:
        world = await make_world(count, FOUR | fanout, max_queued_tokens=max_queued_tokens)
        world.loads.queue = lambda name: QueueEstimate(1000.0, 0.0, 0)
        for name in world.servers:
            world.dispatch._batcher._begin(name)
        return world

    return make


def sizes(world: Any) -> list[int]:
    return [len(call) if isinstance(call, tuple) else 1 for _, call in world.calls]


async def test_a_micro_batch_changes_no_answer(busy: Make, make_world: Make) -> None:
    alone, world = await make_world(1), await busy()
    expected = [await alone.dispatch.score(small(number)) for number in range(12)]
    found = await asyncio.gather(*(world.dispatch.score(small(number)) for number in range(12)))
    assert sizes(alone) == [1] * 12 and sizes(world) == [4, 4, 4]
    for one, other in zip(expected, found, strict=True):
        assert one.label_logprobs.tobytes() == other.label_logprobs.tobytes()
    assert len({one.label_logprobs.tobytes() for one in found}) == 12  # answers that were mixed up would show
    assert world.metrics.registry.get_sample_value("assay_micro_batch_requests_sum") == 12
    assert world.metrics.registry.get_sample_value("assay_micro_batch_requests_count") == 3


async def test_raw_logits_and_log_probabilities_share_no_micro_batch(busy: Make) -> None:
    world = await busy()
    raw = {"full": False, "raw_logits": True}
    await asyncio.gather(*(world.dispatch.score(small(number, **(raw if number % 2 else {}))) for number in range(8)))
    kinds = [{task.raw_logits for task in call} for _, call in world.calls]
    assert sizes(world) == [4, 4] and kinds == [{False}, {True}]


async def test_a_request_that_finds_none_under_way_leaves_alone(make_world: Make) -> None:
    world = await make_world(1, FOUR)
    for number in range(4):
        await world.dispatch.score(small(number))
    assert sizes(world) == [1] * 4 and not world.dispatch._batcher._under_way


@pytest.mark.parametrize(("calls", "expected"), [(1, [1, 7]), (2, [1, 1, 6]), (0, [1] * 8), (8, [1] * 8)])
async def test_those_behind_a_call_leave_together_when_it_returns(
    make_world: Make, calls: int, expected: list[int]
) -> None:
    world = await make_world(1, {"micro_batch_calls": calls, "micro_batch_max_wait_s": 5.0})
    for model in world.models.values():
        model.step_seconds = 0.02
    await asyncio.gather(*(world.dispatch.score(small(number)) for number in range(8)))
    assert sizes(world) == expected and not world.dispatch._batcher._under_way


async def test_a_micro_batch_is_a_call_under_way(make_world: Make) -> None:
    """Who comes after its departure waits for its return, from the moment it departs."""
    world = await make_world(1, {"micro_batch_calls": 1, "micro_batch_max_wait_s": 5.0})
    score, late = world.dispatch.score, list[asyncio.Task[Any]]()
    batcher, depart = world.dispatch._batcher, MicroBatcher._start

    def and_three_more(place: Any, party: Any) -> None:
        depart(batcher, place, party)
        if not late:
            late.extend(asyncio.create_task(score(small(number))) for number in range(10, 13))

    batcher._start = and_three_more
    await asyncio.gather(*(score(small(number)) for number in range(4)))
    await asyncio.gather(*late)
    assert sizes(world) == [1, 3, 3]


async def test_a_call_that_fails_keeps_no_request(make_world: Make) -> None:
    world = await make_world(1, FOUR)
    bad = replace(small(0), labels=np.array([65, 65], np.int32))
    calls = [world.dispatch.score(task) for task in (bad, small(1), small(2))]
    found: Sequence[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [ApiError, ScoreResult, ScoreResult]
    assert sizes(world) == [1, 2] and not world.dispatch._batcher._under_way


async def test_who_has_waited_long_enough_leaves(busy: Make) -> None:
    world = await busy(micro_batch_max_wait_s=0.02)
    await asyncio.gather(*(world.dispatch.score(small(number)) for number in range(3)))
    assert sizes(world) == [3]
    await world.dispatch.score(small(7))
    assert sizes(world) == [3, 1]
    assert not isinstance(world.calls[1][1], tuple)


async def test_large_suspect_and_accepted_tasks_go_alone(busy: Make) -> None:
    world = await busy(micro_batch_request_tokens=12)
    tasks = [small(1, tokens=10), small(2, isolated=True), small(3, tokens=10)]
    tasks += [small(number, already_admitted=True) for number in range(4, 8)]
    await asyncio.gather(*(world.dispatch.score(task) for task in tasks))
    assert sizes(world) == [1] * 7


async def test_a_full_micro_batch_leaves_by_its_tokens(busy: Make) -> None:
    world = await busy(micro_batch_max_tokens=24, micro_batch_max_requests=64)
    await asyncio.gather(*(world.dispatch.score(small(number)) for number in range(6)))
    assert sizes(world) == [2, 2, 2]


@pytest.mark.parametrize(("per_s", "expected"), [(10.0, [1] * 6), (500.0, [3, 3]), (1e6, [4])])
async def test_a_micro_batch_holds_what_a_replica_does_while_more_may_wait(
    busy: Make, per_s: float, expected: list[int]
) -> None:
    """Or the first of a slow replica's would be answered late."""
    world = await busy(micro_batch_max_wait_s=0.06)
    world.loads.queue = lambda name: QueueEstimate(0.0, per_s, 0)
    await asyncio.gather(*(world.dispatch.score(small(number)) for number in range(6)))
    assert sizes(world)[: len(expected)] == expected


async def test_kinds_and_replicas_have_batcher_of_their_own(busy: Make) -> None:
    world = await busy(2, micro_batch_max_wait_s=0.02)
    rows = [world.dispatch.score(small(number, prefix=np.arange(40, dtype=np.int32))) for number in range(3)]
    await asyncio.gather(*rows, *(world.dispatch.likelihood(judged(number)) for number in range(3)))
    for (name, call), route in zip(world.calls, world.routes, strict=True):
        kinds = {type(request) for request in call} if isinstance(call, tuple) else {type(call)}
        assert len(kinds) == 1 and name == route.replicas[0]
    assert sum(sizes(world)) == 6 and max(sizes(world)) > 1


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"priority": 3}, {"tokens": 16}])
async def test_who_will_not_be_done_at_the_same_time_goes_apart(busy: Make, other: dict[str, Any]) -> None:
    """A micro-batch is answered when its last task is done."""
    world = await busy(micro_batch_max_wait_s=0.02)
    tasks = [small(number, **other) if number % 2 else small(number) for number in range(6)]
    await asyncio.gather(*(world.dispatch.score(task) for task in tasks))
    assert sizes(world) == [3, 3]


@pytest.mark.parametrize("planted", [False, True])
async def test_who_waits_for_a_micro_batch_is_on_the_books_whatever_is_reported(
    busy: Make, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Planted: a report is taken to count those who have not left, as it counts those who have."""
    if planted:
        monkeypatch.setattr(LoadTracker, "hold", lambda self, ticket: None)
    world = await busy(micro_batch_max_requests=3)
    (name,) = world.servers
    waiting = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(2)]
    while not world.dispatch._batcher._forming:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    reported = world.loads.send(name, 0)
    world.loads.report(reported, Load(0, 1000.0, 10_000))
    assert LoadTracker.queue(world.loads, name).tokens == (0 if planted else 2 * (3 + 9))
    await asyncio.gather(*waiting, world.dispatch.score(small(2)))
    assert sizes(world) == [3]
    world.loads.report(reported, Load(0, 1000.0, 10_000))
    assert LoadTracker.queue(world.loads, name).tokens == 0


async def test_all_tell_the_load_that_is_there_in_the_end(make_world: Make, until: Any) -> None:
    """A short task waits in its micro-batch for a long one, and the queue changes meanwhile."""
    world = await make_world(1)
    (server,) = world.servers.values()
    ended = list[int]()
    loads = iter(range(10, 100))
    server.load = lambda: Load(next(loads), 1.0)
    score = server.score

    async def noted(task: ScoreRequest) -> Any:
        if task.ids.size > 100:  # replies of one turn of the loop tell one load
            await until(lambda: bool(ended))
        reply = await score(task)
        ended.append(reply.load.queued_tokens)
        return reply

    server.score = noted
    found = await server.score_batch((small(1), small(2, tokens=200)))
    assert ended == [10, 11], "planted: each took its own when it ended"
    assert [reply.load.queued_tokens for reply in found] == [12, 12]


async def test_each_keeps_its_place_on_the_books(busy: Make) -> None:
    world = await busy()
    await asyncio.gather(*(world.dispatch.score(small(number)) for number in range(4)))
    [route] = world.routes
    assert len({route.ticket, *route.more}) == 4
    assert not world.loads._tickets


async def test_a_failure_is_one_tasks_own(busy: Make) -> None:
    world = await busy()
    bad = replace(small(1), labels=np.array([65, 65], np.int32))
    found: Sequence[Any] = await asyncio.gather(
        world.dispatch.score(small(0)),
        world.dispatch.score(bad),
        world.dispatch.score(small(2)),
        world.dispatch.score(small(3)),
        return_exceptions=True,
    )
    assert sizes(world) == [4]
    assert [type(one) for one in found] == [ScoreResult, ApiError, ScoreResult, ScoreResult]
    assert found[1].code == "invalid_value"


async def test_a_task_that_raises_meets_no_other(busy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await busy()
    score = ReplicaServer.score

    async def faulty(self: ReplicaServer, task: ScoreRequest) -> Any:
        if task.request_id == "s1":
            raise ZeroDivisionError
        return await score(self, task)

    monkeypatch.setattr(ReplicaServer, "score", faulty)
    calls = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(4)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [ScoreResult, ZeroDivisionError, ScoreResult, ScoreResult]
    assert sizes(world) == [4, 1] and world.calls[1][1].isolated


async def test_all_that_a_dead_replica_held_are_suspects(
    busy: Make, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.routing.replica_selection.CACHE_WORTH", 1000)  # all go to one
    world = await busy(2)
    for model in world.models.values():
        model.step_seconds = 0.05
    tasks = [small(number, prefix=np.arange(40, dtype=np.int32)) for number in range(4)]
    calls = [asyncio.create_task(world.dispatch.score(task)) for task in tasks]
    await until(lambda: bool(world.calls))
    first, batch = world.calls[0]
    assert len(batch) == 4
    world.kill(first)
    replies = await asyncio.gather(*calls)
    assert all(isinstance(reply, ScoreResult) for reply in replies)
    assert len(world.calls[0][1]) == 4
    again = world.calls[1:]  # several times, while another has the place of those that run alone
    assert {task.request_id for _, task in again} == {task.request_id for task in tasks}
    assert all(task.isolated and task.already_admitted and name != first for name, task in again)


async def test_a_task_that_spoils_its_steps_takes_no_other_along(busy: Make) -> None:
    """The four of its micro-batch are in its step, and are run again alone."""
    world = await busy()
    bad = small(1, ids=np.append(small(1).ids[:-1], np.int32(toy_model.RAISE)))
    calls = [world.dispatch.score(task) for task in (small(0), bad, small(2), small(3))]
    found: Sequence[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [ScoreResult, ApiError, ScoreResult, ScoreResult]
    assert found[1].code == "internal_error" and sizes(world)[0] == 4


async def test_a_request_that_leaves_before_the_departure_is_not_sent(busy: Make) -> None:
    world = await busy()
    calls = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.gather(calls[1], return_exceptions=True)
    calls += [asyncio.create_task(world.dispatch.score(small(number))) for number in (3, 4)]
    await asyncio.gather(calls[0], *calls[2:])
    [(_, batch)] = world.calls
    assert [request.request_id for request in batch] == ["s0", "s2", "s3", "s4"]


async def test_the_last_to_leave_ends_the_call(busy: Make, until: Any) -> None:
    world = await busy()
    world.models["r0"].step_seconds = 0.05
    calls = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(4)]
    await until(lambda: world.running == 1)
    for call in calls[:3]:
        call.cancel()
    await asyncio.gather(*calls[:3], return_exceptions=True)
    assert world.running == 1 and isinstance(await calls[3], ScoreResult)  # it was not taken along

    calls = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(10, 14)]
    await until(lambda: world.running == 1)
    for call in calls:
        call.cancel()
    await until(lambda: world.running == 0)
    engine = world.servers["r0"].engine
    await until(lambda: not engine.stats().live_rows and not engine.stats().queued_tokens)
    assert sizes(world) == [4, 4]


@pytest.mark.parametrize("taken", [False, True])
async def test_where_there_is_room_for_some_only_they_come_again(busy: Make, until: Any, taken: bool) -> None:
    """Two of four have room: the others are refused before those are computed, and so is one that finds its room taken
    by another when it comes again."""
    world = await busy(max_queued_tokens=2 * (3 + 9))
    gate, answer = threading.Event(), world._answer
    world.models["r0"].on_forward = lambda kind, runs: gate.wait()
    replies = list[Any]()

    async def noted(server: ReplicaServer, task: Any) -> object:
        reply: Any = (None, replies[0][-1]) if taken and replies else await answer(server, task)
        replies.append(reply)
        return reply

    world._answer = noted
    calls = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(4)]
    try:
        await until(lambda: sum(call.done() for call in calls) == (4 if taken else 2))
    finally:
        gate.set()
    found: Sequence[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert sizes(world) == [4, 2] and [reply is None for reply in replies[0]] == [True, True, False, False]
    refused = [isinstance(one, ApiError) and one.code == "overloaded" for one in found]
    assert refused == [taken, taken, True, True]
    if not taken:
        alone = [await world.dispatch.score(small(number, isolated=True)) for number in range(2)]
        assert [one.label_logprobs.tobytes() for one in found[:2]] == [one.label_logprobs.tobytes() for one in alone]


async def test_whose_client_leaves_between_the_calls_does_not_come_again(busy: Make) -> None:
    world = await busy(max_queued_tokens=2 * (3 + 9))
    answer = world._answer

    async def noted(server: ReplicaServer, task: Any) -> object:
        if len(world.calls) == 1:
            calls[1].cancel()
            await asyncio.sleep(0)
        return await answer(server, task)

    world._answer = noted
    calls = [asyncio.create_task(world.dispatch.score(small(number))) for number in range(4)]
    await asyncio.gather(*calls, return_exceptions=True)
    (_, all_four), (_, again) = world.calls
    assert len(all_four) == 4 and again.request_id == "s0"


PARENT: contextvars.ContextVar[str] = contextvars.ContextVar("PARENT", default="nobody")


@pytest.mark.parametrize("planted", [False, True])
async def test_no_client_takes_the_others_along(busy: Make, monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """Serve ends the calls that were made in the context of a request whose client has gone."""
    world = await busy()
    parents: list[str] = []
    answer = world._answer

    async def noted(server: ReplicaServer, task: Any) -> object:
        parents.append(PARENT.get())
        return await answer(server, task)

    world._answer = noted
    if planted:
        depart = MicroBatcher._start
        monkeypatch.setattr(world.dispatch._batcher, "_context", _Current())
        monkeypatch.setattr(MicroBatcher, "_start", depart)

    async def ask(number: int) -> None:
        PARENT.set(f"request {number}")
        await world.dispatch.score(small(number))

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(ask(number))
    assert sizes(world) == [4]
    assert (parents == ["nobody"]) is not planted


class _Current:
    """Stands for a context, and is that of the caller."""

    def copy(self) -> contextvars.Context:
        return contextvars.copy_context()


@pytest.mark.parametrize(
    "tasks", [(), [small(0)], (small(0), None), tuple(small(n) for n in range(257)), None, "tasks", (b"", small(1))]
)
async def test_a_replica_checks_what_comes_together(make_world: Make, tasks: Any) -> None:
    world = await make_world(1)
    reply = await world.servers["r0"].score_batch(tasks)
    assert isinstance(reply, Failure) and reply.field == "requests"


@pytest.mark.parametrize("answer", [(), None, Failure(ErrorCode.INVALID_VALUE, "words", "requests"), (1, 2, 3)])
async def test_an_answer_of_another_shape_is_no_answer(busy: Make, answer: Any) -> None:
    """A Failure has as many parts as the micro-batch has requests, and is not to be shared out."""
    world = await busy()

    async def other(server: ReplicaServer, task: Any) -> object:
        return answer

    world._answer = other
    calls = [world.dispatch.score(small(number)) for number in range(4)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [getattr(one, "code", None) for one in found] == ["internal_error"] * 4
