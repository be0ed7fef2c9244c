"""Pooling requests through the engine: the same floats however the rows are cut, shared, cached or accompanied."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.model.heads.info import HeadInfo, HeadKind
from engine.requests import EngineError, ErrorCode, PoolingRequest, PoolingResult, RowStatus
from tests.support import toy_model

MakeRig = Callable[..., Any]
MakeJob = Callable[..., PoolingRequest]
both = pytest.mark.parametrize("overlap", [False, True])

HEAD = HeadInfo(HeadKind.SEQUENCE, 3, ("a", "b", "c"))
PREFIX = list(range(100, 131))


def some_rows(count: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 250, rng.integers(1, 23)).tolist() for _ in range(count)]


def expected(make_rig: MakeRig, rows: list[list[int]]) -> bytes:
    """Each row alone, from the model itself: no engine, one sequence over fresh slots."""
    model = make_rig(head=HEAD, start=False).model
    found = []
    for row in rows:
        ids = np.array([*PREFIX, *row], np.int32)
        slots = np.arange(1, len(ids) + 1, dtype=np.int32)
        run = ScheduledSequence(0, slots[:0], slots, ids, np.array([len(ids) - 1], np.int32))
        found.append(model.pooled(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32)).numpy())
    return np.concatenate(found).tobytes()


@both
async def test_rows_are_the_same_together_alone_split_and_cached(
    make_rig: MakeRig, pooling_job: MakeJob, overlap: bool
) -> None:
    rows = some_rows(41)
    wanted = expected(make_rig, rows)
    for fields in ({}, {"prefix_cache": False}, {"token_budget": 5}, {"token_budget": 37}, {"num_slots": 57}):
        rig = make_rig(head=HEAD, overlap=overlap, **fields)
        for _ in range(2):  # computed, then cached
            result: PoolingResult = await asyncio.wait_for(rig.engine.pooling(pooling_job(PREFIX, rows)), 30)
            assert result.values.tobytes() == wanted
            assert not result.status.any()
        halves = await asyncio.gather(
            rig.engine.pooling(pooling_job(PREFIX, rows[:17])), rig.engine.pooling(pooling_job(PREFIX, rows[17:]))
        )
        assert b"".join(half.values.tobytes() for half in halves) == wanted
        alone = [await rig.engine.pooling(pooling_job(PREFIX, [row])) for row in rows[:7]]
        assert b"".join(one.values.tobytes() for one in alone) == wanted[: 7 * 3 * 4]


async def test_the_prefix_is_computed_once(make_rig: MakeRig, pooling_job: MakeJob) -> None:
    rig = make_rig(head=HEAD)
    first = await rig.engine.pooling(pooling_job(PREFIX, [[1, 2, 3], [4], [5, 6]]))
    assert rig.engine.stats().step_tokens["score"] == len(PREFIX) + 6
    assert first.cached.tolist() == [0, 31, 31]
    second = await rig.engine.pooling(pooling_job(PREFIX, [[1, 2, 3], [4], [5, 6]]))
    assert second.cached.tolist() == [31, 31, 31]


@pytest.mark.parametrize("token", [toy_model.NAN, toy_model.INF, toy_model.EMPTY])
async def test_numbers_that_are_not_finite_fail_their_row_alone(
    make_rig: MakeRig, pooling_job: MakeJob, token: int
) -> None:
    rig = make_rig(head=HEAD)
    found = await rig.engine.pooling(pooling_job(PREFIX, [[1, 2], [3, token, 4], [5]]))
    assert found.status.tolist() == [RowStatus.OK, RowStatus.NONFINITE, RowStatus.OK]
    assert np.isnan(found.values).all(axis=1).tolist() == [False, True, False]
    assert rig.engine.stats().nonfinite_rows == 1


async def test_a_cancelled_request_leaves_nothing_behind(make_rig: MakeRig, pooling_job: MakeJob) -> None:
    rig = make_rig(head=HEAD, token_budget=5)
    task = asyncio.create_task(rig.engine.pooling(pooling_job(PREFIX, some_rows(200))))
    while not rig.engine.stats().step_tokens.get("score"):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # and closing the rig demands that every slot was returned


async def test_an_isolated_request_shares_no_step(make_rig: MakeRig, pooling_job: MakeJob) -> None:
    steps: list[list[Any]] = []
    rig = make_rig(head=HEAD, start=False, before_step=lambda step: steps.append(step.requests()))
    jobs = [pooling_job([], some_rows(3, seed), isolated=seed == 1) for seed in range(3)]
    tasks = [asyncio.create_task(rig.engine.pooling(request)) for request in jobs]
    await rig.queued()
    rig.engine.start()
    await asyncio.gather(*tasks)
    assert all(len(requests) == 1 for requests in steps if any(state.isolated for state in requests))
    assert any(len(requests) == 2 for requests in steps)


async def test_a_head_and_a_language_model_refuse_each_others_requests(
    make_rig: MakeRig, pooling_job: MakeJob, score_job: Any, generate_job: Any
) -> None:
    language_model, head = make_rig().engine, make_rig(head=HEAD).engine
    for call in (
        language_model.pooling(pooling_job([], [[1]])),
        head.score(score_job([], [[1]])),
        head.complete(generate_job([1])),
    ):
        with pytest.raises(EngineError) as caught:
            await call
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_VALUE, "request")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rows": [[1], []]}, "ids"),
        ({"rows": [[264]]}, "ids"),
        ({"rows": []}, "starts"),
        ({"task": "classify!"}, "task"),
        ({"task": "classify"}, "task"),
        ({"priority": 1.5}, "priority"),
    ],
)
async def test_a_bad_request_is_refused_by_the_name_of_its_field(
    make_rig: MakeRig, pooling_job: MakeJob, fields: dict[str, Any], field: str
) -> None:
    rig = make_rig(head=HEAD)
    with pytest.raises(EngineError) as caught:
        await rig.engine.pooling(pooling_job([5], fields.pop("rows", [[1]]), **fields))
    assert caught.value.field == field
