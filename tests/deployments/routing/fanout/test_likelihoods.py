"""A large request with continuations over several replicas in process, over the toy model: the same bytes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from deployments.protocol import LikelihoodReply
from deployments.routing import dispatcher as dispatch_module
from deployments.routing.sharding import gather
from engine.requests import LikelihoodRequest
from tests.support import toy_model

ITEMS = 120
Make = Callable[..., Awaitable[Any]]


def large(**fields: Any) -> LikelihoodRequest:
    """Contexts of 2 to 13 tokens with three continuations each, which share all of the context but its last token."""
    rng = np.random.default_rng(7)
    ids: list[int] = []
    sizes, shared, wanted = [], [], []
    for _ in range(ITEMS):
        context = rng.integers(0, 250, rng.integers(2, 14)).tolist()
        for number in range(3):
            share = len(context) - 1 if number else 0
            tail = rng.integers(0, 250, rng.integers(1, 5)).tolist()
            ids += context[share:] + tail
            sizes.append(len(context) - share + len(tail))
            shared.append(share)
            wanted.append(len(tail))
    given: dict[str, Any] = {
        "request_id": "l",
        "prefix": np.arange(40, 90, dtype=np.int32),
        "ids": np.array(ids, np.int32),
        "starts": np.cumsum([0, *sizes]).astype(np.int32),
        "shared": np.array(shared, np.int32),
        "wanted": np.array(wanted, np.int32),
    }
    return LikelihoodRequest(**given | fields)


@pytest.fixture
async def expected(make_world: Make) -> LikelihoodReply:
    """The large task on one replica."""
    world = await make_world(1)
    reply: LikelihoodReply = await world.dispatch.likelihood(large())
    assert len(world.calls) == 1 and not reply.status.any()
    return reply


def same(one: LikelihoodReply, other: LikelihoodReply) -> bool:
    return [column.tobytes() for column in one[:3]] == [column.tobytes() for column in other[:3]]


@pytest.mark.parametrize("count", [2, 3])
async def test_any_number_of_replicas_gives_the_same_bytes(
    make_world: Make, expected: LikelihoodReply, count: int
) -> None:
    world = await make_world(count)
    found = await world.dispatch.likelihood(large())
    assert same(found, expected)
    assert sorted(world.asked()) == sorted(world.servers)
    assert (found.cached >= large().shared).all() and found.cached[0] == 0


async def test_a_replica_that_dies_in_the_middle_costs_nothing(
    make_world: Make, expected: LikelihoodReply, until: Any
) -> None:
    world = await make_world(3)
    for model in world.models.values():
        model.step_seconds = 0.005
    call = asyncio.create_task(world.dispatch.likelihood(large()))
    await until(lambda: all(model.steps > 6 for model in world.models.values()))
    assert not call.done()
    world.kill("r1")
    assert same(await call, expected)
    assert len(world.calls) == 4 and world.calls[3][0] != "r1"


async def test_a_poisoned_item_fails_alone(make_world: Make, expected: LikelihoodReply) -> None:
    world = await make_world(3)
    task = large()
    first = 3 * 61
    task.ids[task.starts[first]] = toy_model.NAN
    found = await world.dispatch.likelihood(task)
    assert np.flatnonzero(found.status).tolist() == [first, first + 1, first + 2]
    others = np.repeat(np.arange(len(task.wanted)) // 3 != 61, task.wanted)
    assert found.logprobs[others].tobytes() == expected.logprobs[others].tobytes()


async def test_a_task_to_be_whole_ends_with_its_first_failed_block(make_world: Make, until: Any) -> None:
    world = await make_world(3)
    task = large()
    first = 3 * 61
    task.ids[task.starts[first]] = toy_model.NAN
    world.models[world.dispatch._caller.rank(task)[2]].step_seconds = 0.5
    found = await world.dispatch.likelihood(task, all_or_nothing=True)
    assert np.flatnonzero(found.status)[0] == first
    assert found.status[-1] and len(found.logprobs) == task.wanted.sum()
    await until(lambda: world.running == 0)
    assert len(world.calls) == 3


async def test_blocks_gathered_out_of_order_would_be_seen(
    make_world: Make, expected: LikelihoodReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted counterpart."""

    def out_of_order(blank: LikelihoodReply, blocks: Any, replies: Any) -> LikelihoodReply:
        found: LikelihoodReply = gather(blank, blocks, replies)
        return found._replace(logprobs=np.concatenate([reply.logprobs for reply in reversed(replies)]))

    monkeypatch.setattr(dispatch_module, "gather", out_of_order)
    world = await make_world(3)
    assert not same(await world.dispatch.likelihood(large()), expected)
