"""A large scoring request over several replicas in process, over the toy model: the same bytes whatever is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from deployments.errors import ApiError
from deployments.routing import dispatcher as dispatch_module
from deployments.routing.sharding import cut, gather
from engine.requests import ScoreRequest, ScoreResult
from tests.deployments.links import over_the_handle
from tests.support import toy_model

ROWS = 500
Make = Callable[..., Awaitable[Any]]


def large(**fields: Any) -> ScoreRequest:
    """Rows of 1 to 13 tokens, and a few that share all but the end."""
    rng = np.random.default_rng(7)
    starts = np.cumsum([0, *rng.integers(1, 14, ROWS)]).astype(np.int32)
    given: dict[str, Any] = {
        "request_id": "s",
        "prefix": np.arange(40, 90, dtype=np.int32),
        "ids": rng.integers(0, 250, starts[-1]).astype(np.int32),
        "starts": starts,
        "labels": np.array([65, 5, 200], np.int32),
        "timeout_s": 60.0,
    }
    return ScoreRequest(**given | fields)


@pytest.fixture
async def expected(make_world: Make) -> ScoreResult:
    """The large task on one replica."""
    world = await make_world(1)
    reply: ScoreResult = await world.dispatch.score(large())
    assert len(world.calls) == 1
    return reply


def same(one: ScoreResult, other: ScoreResult) -> bool:
    return one.label_logprobs.tobytes() == other.label_logprobs.tobytes() and bool((one.status == other.status).all())


@pytest.mark.parametrize("count", [2, 3])
async def test_any_number_of_replicas_gives_the_same_bytes(make_world: Make, expected: ScoreResult, count: int) -> None:
    world = await make_world(count)
    assert same(await world.dispatch.score(large()), expected)
    assert sorted(world.asked()) == sorted(world.servers)
    assert world.metrics.registry.get_sample_value("assay_fanout_shards_sum") == count
    assert [world.loads.load(name) for name in world.servers] == pytest.approx([0] * count, abs=1e5)


async def test_rows_one_by_one_give_the_same_bytes(make_world: Make, expected: ScoreResult) -> None:
    world = await make_world(2)
    task = large()
    singles = cut(task, ROWS)[:100]
    replies = await asyncio.gather(*(world.dispatch.score(block.request) for block in singles))
    found = np.concatenate([reply.label_logprobs for reply in replies])
    assert found.tobytes() == expected.label_logprobs[:100].tobytes()


@pytest.mark.risk("R7")
async def test_a_replica_that_dies_in_the_middle_costs_nothing(
    make_world: Make, expected: ScoreResult, until: Any
) -> None:
    world = await make_world(3)
    for model in world.models.values():
        model.step_seconds = 0.005
    call = asyncio.create_task(world.dispatch.score(large()))
    await until(lambda: all(model.steps > 6 for model in world.models.values()))
    assert not call.done()
    world.kill("r1")
    assert same(await call, expected)
    [(_, lost)] = [(name, task) for name, task in world.calls[:3] if name == "r1"]
    again, sent = world.calls[3]
    assert again != "r1" and len(world.calls) == 4  # the other blocks were not sent again
    assert sent.request_id == lost.request_id and sent.isolated and sent.timeout_s < lost.timeout_s


async def test_the_last_replica_standing_answers_for_all(make_world: Make, expected: ScoreResult, until: Any) -> None:
    world = await make_world(3)
    for model in world.models.values():
        model.step_seconds = 0.005
    call = asyncio.create_task(world.dispatch.score(large()))
    await until(lambda: len(world.calls) == 3)
    world.kill("r0")
    world.kill("r2")
    assert same(await call, expected)
    assert set(world.asked()[3:]) == {"r1"}


@over_the_handle
async def test_attempts_are_bounded(make_world: Make) -> None:
    world = await make_world(3)
    for event in world.lost.values():
        event.set()  # dead, and not yet reported

    async def call(task: ScoreRequest, route: Any) -> object:
        world.calls.append(("", task))
        raise ActorUnavailableError("gone", None)

    world._call = call
    with pytest.raises(ApiError) as raised:
        await world.dispatch.score(large())
    assert raised.value.code == "replica_lost"
    assert max(sum(task.request_id == f"s/{i}" for _, task in world.calls) for i in range(3)) == 3


async def test_a_lost_block_is_not_sent_again_after_the_deadline(make_world: Make, until: Any) -> None:
    world = await make_world(2)
    world.models["r0"].step_seconds = 0.05
    call = asyncio.create_task(world.dispatch.score(large(timeout_s=0.4)))
    await until(lambda: len(world.calls) == 2)
    await asyncio.sleep(0.45)
    world.kill("r0")
    with pytest.raises(ApiError) as raised:
        await call
    assert raised.value.code in ("deadline_exceeded", "replica_lost")
    assert len(world.calls) == 2


async def test_cancelling_the_caller_cancels_every_block(make_world: Make, until: Any) -> None:
    world = await make_world(3)
    for model in world.models.values():
        model.step_seconds = 0.02
    call = asyncio.create_task(world.dispatch.score(large()))
    await until(lambda: world.running == 3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: world.running == 0)
    for server in world.servers.values():
        await until(lambda server=server: not server.engine.stats().live_requests)
    assert not world.loads._tickets


async def test_a_block_that_fails_permanently_ends_the_others(make_world: Make, until: Any) -> None:
    world = await make_world(3)
    task = large()
    task.ids[-1] = toy_model.VOCAB_SIZE  # only the replica sees it, in the last block
    for model in world.models.values():
        model.step_seconds = 0.05
    with pytest.raises(ApiError) as raised:
        await world.dispatch.score(task)
    assert raised.value.code == "invalid_token_id"
    await until(lambda: world.running == 0)
    assert len(world.calls) == 3


async def test_a_poisoned_row_fails_alone(make_world: Make, expected: ScoreResult) -> None:
    world = await make_world(3)
    task = large()
    task.ids[task.starts[250]] = toy_model.NAN
    found = await world.dispatch.score(task)
    assert np.flatnonzero(found.status).tolist() == [250]
    others = np.arange(ROWS) != 250
    assert found.label_logprobs[others].tobytes() == expected.label_logprobs[others].tobytes()


async def test_a_task_to_be_whole_ends_with_its_first_failed_block(make_world: Make, until: Any) -> None:
    world = await make_world(3)
    task = large()
    row = next(row for row in range(ROWS) if task.starts[row] > len(task.ids) * 2 // 5)  # in the second block
    task.ids[task.starts[row]] = toy_model.NAN
    world.models[world.dispatch._caller.rank(task)[2]].step_seconds = 0.5
    found = await world.dispatch.score(task, all_or_nothing=True)
    assert np.flatnonzero(found.status)[0] == row
    assert found.status[-1] and len(found.status) == ROWS  # the third block was given up
    await until(lambda: world.running == 0)
    assert len(world.calls) == 3


async def test_the_first_failed_row_is_named_whichever_block_is_faster(make_world: Make) -> None:
    world = await make_world(3)
    task = large()
    task.ids[task.starts[[5, 495]]] = toy_model.NAN
    world.models[world.dispatch._caller.rank(task)[0]].step_seconds = 0.02
    assert np.flatnonzero((await world.dispatch.score(task, all_or_nothing=True)).status)[0] == 5


async def test_the_same_query_finds_its_replicas_again(make_world: Make) -> None:
    world = await make_world(3)
    small = replace(large(), ids=large().ids[:20], starts=np.array([0, 7, 20], np.int32))
    for number in range(5):
        cached = (await world.dispatch.score(replace(small, request_id=f"s{number}"))).cached
        assert cached[0] == (len(small.prefix) if number else 0)
    assert len(set(world.asked())) == 1


# Planted faults: each breaks the gathering on purpose, and the comparison of bytes must see it.


async def test_blocks_gathered_out_of_order_would_be_seen(
    make_world: Make, expected: ScoreResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_order(blank: ScoreResult, blocks: Any, replies: Any) -> ScoreResult:
        found: ScoreResult = gather(blank, blocks, replies)
        return found._replace(label_logprobs=np.concatenate([reply.label_logprobs for reply in reversed(replies)]))

    monkeypatch.setattr(dispatch_module, "gather", out_of_order)
    world = await make_world(3)
    assert not same(await world.dispatch.score(large()), expected)


@pytest.mark.risk("R7", planted=True)
async def test_a_block_that_is_lost_would_be_seen(
    make_world: Make, expected: ScoreResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(blank: ScoreResult, blocks: Any, replies: Any) -> ScoreResult:
        found: ScoreResult = gather(blank, [*blocks[:-1], blocks[0]], [*replies[:-1], replies[0]])
        return found

    monkeypatch.setattr(dispatch_module, "gather", forgetful)
    world = await make_world(3)
    assert not same(await world.dispatch.score(large()), expected)


async def test_a_replica_that_answers_too_few_rows_is_no_answer(make_world: Make) -> None:
    world = await make_world(2)
    server = world.servers["r1"]
    score = server.score

    async def short(task: ScoreRequest) -> Any:
        reply: Any = await score(task)
        return reply._replace(label_logprobs=reply.label_logprobs[:-1])

    server.score = short
    with pytest.raises(ApiError) as raised:
        await world.dispatch.score(large())
    assert raised.value.code == "internal_error"
