"""Pooling requests over several replicas in process, over the toy model: the same bytes as from one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from deployments.protocol import blank_pooling
from deployments.quarantine import fingerprint
from deployments.routing.sharding import cut, gather
from engine.model.heads.info import HeadInfo, HeadKind
from engine.requests import PoolingRequest, PoolingResult, PoolingTask
from tests.deployments.links import over_the_handle

HEAD = HeadInfo(HeadKind.SEQUENCE, 3, ("a", "b", "c"))
ROWS = 200

Make = Callable[..., Awaitable[Any]]


def large(**fields: Any) -> PoolingRequest:
    rng = np.random.default_rng(7)
    starts = np.cumsum([0, *rng.integers(1, 14, ROWS)]).astype(np.int32)
    given: dict[str, Any] = {
        "request_id": "p",
        "prefix": np.arange(40, 90, dtype=np.int32),
        "ids": rng.integers(0, 250, starts[-1]).astype(np.int32),
        "starts": starts,
        "task": PoolingTask.CLASSIFY,
        "timeout_s": 60.0,
    }
    return PoolingRequest(**given | fields)


async def world_of(make_world: Make, count: int, **fanout: Any) -> Any:
    """Replicas of a model with a head."""
    world = await make_world(count, fanout or None)
    for model in world.models.values():
        model.pooling_head = HEAD
    return world


async def test_two_replicas_give_the_bytes_of_one(make_world: Make) -> None:
    one, two = await world_of(make_world, 1), await world_of(make_world, 2)
    expected: PoolingResult = await one.dispatch.pooling(large())
    found: PoolingResult = await two.dispatch.pooling(large())
    assert found.values.tobytes() == expected.values.tobytes()
    assert not found.status.any()
    assert sorted(two.asked()) == sorted(two.servers)


@over_the_handle
async def test_a_micro_batch_changes_no_answer(make_world: Make) -> None:
    world = await world_of(make_world, 1, micro_batch_calls=1)
    blocks = cut(large(), 40)
    alone = [await world.dispatch.pooling(block.request) for block in blocks]
    together = await asyncio.gather(*(world.dispatch.pooling(block.request) for block in blocks))
    assert any(isinstance(call, tuple) and len(call) > 1 for _, call in world.calls)
    assert [one.values.tobytes() for one in together] == [one.values.tobytes() for one in alone]


def test_what_was_cut_comes_together() -> None:
    request = large()
    blocks = cut(request, 2)
    replies = [blank_pooling(block.request, 3)._replace(values=_numbers(block.request)) for block in blocks]
    whole = gather(blank_pooling(request, 3), blocks, replies)
    assert whole.values.tobytes() == _numbers(request).tobytes()
    other = [reply._replace(values=reply.values[::-1]) for reply in replies]
    assert gather(blank_pooling(request, 3), blocks, other).values.tobytes() != whole.values.tobytes()


def test_answers_of_tokens_and_segments_are_cut_with_their_rows() -> None:
    request = large()
    marked = np.flatnonzero(request.ids % 3 == 0)
    positions = np.union1d(marked, request.starts[1:] - 1).astype(np.int32)
    segments = np.arange(ROWS, dtype=np.int32) % 5
    request = large(task=PoolingTask.TOKEN_CLASSIFY, positions=positions, segments=segments)
    blocks = cut(request, 4)
    assert np.concatenate([block.request.segments for block in blocks]).tolist() == segments.tolist()
    replies = []
    for block in blocks:
        own = block.request
        values = own.ids[own.positions].astype(np.float32)[:, None]
        replies.append(blank_pooling(own, 1)._replace(values=values))
    whole = gather(blank_pooling(request, 1), blocks, replies)
    assert whole.values[:, 0].tolist() == request.ids[positions].tolist()
    assert len(whole.status) == ROWS


def test_quarantined_requests_are_told_apart() -> None:
    marks = {fingerprint(large()), fingerprint(large(prefix=np.arange(3, dtype=np.int32)))}
    assert len(marks) == 2
    assert fingerprint(large(request_id="q", tenant="t")) in marks


def _numbers(request: PoolingRequest) -> Any:
    """Three numbers of each row: functions of its own tokens."""
    rows = [request.ids[start:end] for start, end in zip(request.starts[:-1], request.starts[1:], strict=True)]
    return np.array([[row.sum(), len(row), row[-1]] for row in rows], np.float32)
