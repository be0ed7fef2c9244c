"""Scores whose replica is lost while the other ones' queues are full: they were accepted, and are not refused.

Moved work is counted beyond the bound of the queue that it moves to; newcomers see that the queue is full.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from deployments.errors import ApiError
from deployments.protocol import Failure
from deployments.routing.retry import ADMITTED_WAIT_S, RetryState
from engine.requests import ErrorCode, ScoreRequest, ScoreResult

BOUND = 1_000
Make = Callable[..., Awaitable[Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def task(rows: int, size: int, seed: int = 3, **fields: Any) -> ScoreRequest:
    ids = np.random.default_rng(seed).integers(0, 250, rows * size).astype(np.int32)
    starts = np.arange(0, rows * size + 1, size, dtype=np.int32)
    none, labels = np.empty(0, np.int32), np.array([65, 5], np.int32)
    return ScoreRequest(request_id=f"s{seed}", prefix=none, ids=ids, starts=starts, labels=labels, **fields)


def stand(world: Any) -> threading.Event:
    """All steps wait for it."""
    gate = threading.Event()
    for model in world.models.values():
        model.on_forward = lambda kind, runs: gate.wait()
    return gate


def carried(world: Any) -> Counter[str]:
    """How often each task was in a call."""
    tasks = (task for _, sent in world.calls for task in (sent if isinstance(sent, tuple) else (sent,)))
    return Counter(task.request_id for task in tasks)


async def struck(world: Any, until: Until, large: ScoreRequest) -> tuple["asyncio.Task[ScoreResult]", threading.Event]:
    """A task of two blocks, each of which fills its replica's queue; none is computed yet, and one replica dies."""
    gate = stand(world)
    call = asyncio.create_task(world.dispatch.score(large))
    await until(lambda: all(server.engine.queue().queued_tokens == 800 for server in world.servers.values()))
    world.kill("r1")
    return call, gate


@pytest.mark.risk("R7")
async def test_a_block_whose_replica_dies_is_taken_by_one_that_is_full(make_world: Make, until: Until) -> None:
    large = task(160, 10)
    expected = await (await make_world(1)).dispatch.score(large)
    world = await make_world(2, max_queued_tokens=BOUND)
    call, gate = await struck(world, until, large)
    survivor = world.servers["r0"]
    try:
        await until(lambda: survivor.engine.queue().queued_tokens == 1_600)
        refused = await survivor.score(task(1, 10))
        assert isinstance(refused, Failure) and refused.code is ErrorCode.OVERLOADED
        assert refused.load is not None and refused.load.queued_tokens == 1_600
        with pytest.raises(ApiError) as raised:
            await world.dispatch.score(task(1, 10))
        assert raised.value.code == "overloaded"
        assert not call.done()
    finally:
        gate.set()
    assert (await call).label_logprobs.tobytes() == expected.label_logprobs.tobytes()
    assert survivor.engine.queue().queued_tokens == 0
    assert isinstance(await world.dispatch.score(task(1, 10)), ScoreResult)
    assert world.metrics.registry.get_sample_value("assay_retries_total", {"cause": "died"}) == 1


@pytest.mark.risk("R7", planted=True)
async def test_a_moved_block_under_the_bound_of_newcomers_would_be_refused(
    make_world: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted counterpart: its acceptance is forgotten."""
    monkeypatch.setattr(RetryState, "admitted", property(lambda self: False, lambda self, admitted: None))
    world = await make_world(2, max_queued_tokens=BOUND)
    call, gate = await struck(world, until, task(160, 10))
    try:
        with pytest.raises(ApiError) as raised:
            await call
    finally:
        gate.set()
    assert raised.value.code == "overloaded"


@pytest.mark.risk("R7")
async def test_many_that_move_wait_for_their_turns_and_are_all_answered(make_world: Make, until: Until) -> None:
    """Both queues full of small requests, and more refused; one replica dies. Its work is run alone, one after the
    other, and they ask for their turn ever more rarely."""
    world = await make_world(2, max_queued_tokens=BOUND)
    tasks = [task(10, 10, seed) for seed in range(30)]
    gate = stand(world)
    calls = [asyncio.create_task(world.dispatch.score(each)) for each in tasks]
    await until(lambda: sum(call.done() for call in calls) == 10)
    assert [server.engine.queue().queued_tokens for server in world.servers.values()] == [BOUND, BOUND]
    asked, came = carried(world), len(world.calls)
    began = time.monotonic()
    world.kill("r1")
    survivor = world.servers["r0"]
    most = 0
    try:
        await until(lambda: len(world.calls) >= came + 40)
        most = survivor.engine.queue().queued_tokens
    finally:
        gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    passed = time.monotonic() - began
    assert sum(isinstance(answer, ScoreResult) for answer in answers) == 20
    assert {answer.code for answer in answers if isinstance(answer, ApiError)} == {"overloaded"}
    assert BOUND < most <= 2 * BOUND
    least, longest = ADMITTED_WAIT_S
    for name, count in carried(world).items():
        waits = [0.5 * min(longest, least * 2.0**turn) for turn in range(1, count - asked[name])]
        assert sum(waits) <= passed


async def test_accepted_work_waits_for_its_turn_until_its_deadline(make_world: Make, until: Until) -> None:
    world = await make_world(2, max_queued_tokens=BOUND)
    gate = stand(world)
    calls = [asyncio.create_task(world.dispatch.score(task(10, 10, seed, timeout_s=0.8))) for seed in range(20)]
    await until(lambda: all(server.engine.queue().queued_tokens == BOUND for server in world.servers.values()))
    world.kill("r1")
    await until(lambda: any(call.done() for call in calls))
    gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {answer.code for answer in answers if isinstance(answer, ApiError)} == {"deadline_exceeded"}
