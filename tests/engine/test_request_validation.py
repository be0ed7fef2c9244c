"""Hostile requests: each is refused by field, a neighbour hears what it hears alone, and the engine lives."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.requests import EngineError, ErrorCode, GenerateRequest, ScoreRequest, TenantTokens

MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]
VOCAB = 264


def array(*values: int, dtype: Any = np.int32) -> Any:
    return np.array(values, dtype)


SCORE: list[tuple[str, Any, ErrorCode]] = [
    ("prefix", array(-1), ErrorCode.INVALID_TOKEN_ID),
    ("prefix", array(VOCAB), ErrorCode.INVALID_TOKEN_ID),
    ("prefix", array(2**31 - 1), ErrorCode.INVALID_TOKEN_ID),
    ("prefix", array(*range(8), -1), ErrorCode.INVALID_TOKEN_ID),  # more ids are read in another way
    ("prefix", array(*range(7), -(2**31)), ErrorCode.INVALID_TOKEN_ID),
    ("prefix", array(VOCAB, *range(100)), ErrorCode.INVALID_TOKEN_ID),
    ("prefix", array(1, dtype=np.int64), ErrorCode.INVALID_VALUE),
    ("prefix", array(1).reshape(1, 1), ErrorCode.INVALID_VALUE),
    ("prefix", [1, 2], ErrorCode.INVALID_VALUE),
    ("prefix", np.zeros(300, np.int32), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ("ids", array(1, 2, 3, VOCAB), ErrorCode.INVALID_TOKEN_ID),
    ("ids", np.array([1.0, np.nan, 2, 3]), ErrorCode.INVALID_VALUE),
    ("starts", array(0, 2), ErrorCode.INVALID_VALUE),
    ("starts", array(1, 4), ErrorCode.INVALID_VALUE),
    ("starts", array(4, 0), ErrorCode.INVALID_VALUE),
    ("starts", array(-(2**31), 2**31 - 1), ErrorCode.INVALID_VALUE),
    ("starts", array(0, 3, 2, 4), ErrorCode.INVALID_VALUE),
    ("starts", array(0, -5, 4), ErrorCode.INVALID_VALUE),
    ("starts", array(), ErrorCode.INVALID_VALUE),
    ("starts", array(0), ErrorCode.INVALID_VALUE),
    ("labels", array(), ErrorCode.INVALID_VALUE),
    ("labels", array(3, 3), ErrorCode.INVALID_VALUE),
    ("labels", array(-1), ErrorCode.INVALID_TOKEN_ID),
    ("labels", np.arange(257, dtype=np.int32), ErrorCode.INVALID_VALUE),
    ("full", 1, ErrorCode.INVALID_VALUE),
    ("raw_logits", 1, ErrorCode.INVALID_VALUE),
    ("raw_logits", True, ErrorCode.INVALID_VALUE),  # beside `full`
    ("cache_salt", 5, ErrorCode.INVALID_VALUE),
    ("tenant", "x" * 2_000, ErrorCode.INVALID_VALUE),
    ("priority", 1.5, ErrorCode.INVALID_VALUE),
    ("timeout_s", float("nan"), ErrorCode.INVALID_VALUE),
    ("timeout_s", True, ErrorCode.INVALID_VALUE),
    ("timeout_s", 0.0, ErrorCode.DEADLINE_EXCEEDED),
    ("timeout_s", -1.0, ErrorCode.DEADLINE_EXCEEDED),
]
PARAMS: list[tuple[str, Any]] = [
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", True),
    ("top_k", -2),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 2**31),
    ("logit_bias", ((VOCAB, 1.0),)),
    ("allowed_token_ids", (-1,)),
    ("stop_token_ids", (2**31 - 1,)),
    ("logprob_token_ids", tuple(range(129))),
]
GENERATE: list[tuple[str, Any, ErrorCode]] = [
    ("prompt", array(), ErrorCode.INVALID_VALUE),
    ("prompt", array(-1), ErrorCode.INVALID_TOKEN_ID),
    ("prompt", array(VOCAB), ErrorCode.INVALID_TOKEN_ID),
    ("prompt", array(1, dtype=np.uint32), ErrorCode.INVALID_VALUE),
    ("prompt", np.zeros(128, np.int32), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ("seed", -1, ErrorCode.INVALID_VALUE),
    ("seed", 2**64, ErrorCode.INVALID_VALUE),
    ("seed", 1.0, ErrorCode.INVALID_VALUE),
    ("params", {"temperature": 1}, ErrorCode.INVALID_VALUE),
    ("emitted", (array(1), array(2)), ErrorCode.INVALID_VALUE),
    ("emitted", (array(VOCAB),), ErrorCode.INVALID_TOKEN_ID),
    ("emitted", (np.zeros(9, np.int32),), ErrorCode.INVALID_VALUE),
    ("stream_interval", 0, ErrorCode.INVALID_VALUE),
    ("stream_interval", 2**63, ErrorCode.INVALID_VALUE),
]


async def test_hostile_jobs_are_refused_by_field_beside_an_untouched_neighbour(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore
) -> None:
    neighbour = generate_job(range(30), max_tokens=90, logprobs=1)
    expected = await make_rig(max_model_len=128).run(neighbour)
    rig = make_rig(max_model_len=128)
    running = asyncio.create_task(rig.run(neighbour))
    good_score, good = score_job([1, 2], [[1], [2, 3], [4]]), generate_job([1, 2, 3])
    for field, value, code in SCORE:
        with pytest.raises(EngineError) as caught:
            await rig.engine.score(replace(good_score, **{field: value}))
        assert (caught.value.code, caught.value.field) in {(code, field), (code, "ids")}, field
    hostile = [(replace(good, **{field: value}), field, code) for field, value, code in GENERATE]
    hostile += [
        (replace(good, params=replace(good.params, **{field: value})), field, ErrorCode.INVALID_VALUE)
        for field, value in PARAMS
    ]
    for request, field, code in hostile:
        with pytest.raises(EngineError) as caught:
            await rig.run(request)
        assert (caught.value.code, caught.value.field) == (code, field)
    assert await running == expected
    assert rig.engine.healthy


async def test_a_row_that_could_never_fit_the_pool_is_refused(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore
) -> None:
    rig = make_rig(num_slots=21)
    with pytest.raises(EngineError) as caught:
        await rig.run(generate_job(range(20)))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert len((await rig.run(generate_job(range(19), max_tokens=9))).tokens) == 1
    with pytest.raises(EngineError) as caught:
        await rig.engine.score(score_job(range(20), [[]]))
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
    assert (await rig.engine.score(score_job(range(19), [[], [5]]))).status.tolist() == [0, 0]


async def test_a_full_queue_refuses_and_an_empty_one_takes_anything(make_rig: MakeRig, score_job: MakeScore) -> None:
    rig = make_rig(max_queued_tokens=100)
    rig.model.step_seconds = 0.005
    big = asyncio.create_task(rig.engine.score(score_job([], [[n % 250] * 9 for n in range(80)])))
    await asyncio.sleep(0)
    with pytest.raises(EngineError) as caught:
        await rig.engine.score(score_job([1], [[2]]))
    assert caught.value.code is ErrorCode.OVERLOADED
    await big
    await rig.engine.score(score_job([1], [[2]]))


@pytest.mark.risk("S8")
async def test_equal_and_prefix_ids_are_independent(make_rig: MakeRig, generate_job: MakeJob) -> None:
    requests = [replace(generate_job([n, 2], max_tokens=30), request_id="a" * (1 + n % 2)) for n in range(6)]
    expected = await make_rig().together(*requests)
    rig = make_rig()
    tasks = [asyncio.create_task(rig.run(request)) for request in requests]
    await asyncio.sleep(0)
    tasks[0].cancel()
    heard = await asyncio.gather(*tasks, return_exceptions=True)
    assert heard[1:] == expected[1:]


async def test_an_engine_that_does_not_run_says_so(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig(start=False)
    with pytest.raises(EngineError) as caught:
        await rig.run(generate_job([1]))
    assert caught.value.code is ErrorCode.NOT_READY


async def test_stopping_answers_everyone(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    rig.model.step_seconds = 0.002
    task = asyncio.create_task(rig.run(generate_job([1], max_tokens=200)))
    while rig.engine.stats().generated_tokens < 3:
        await asyncio.sleep(0.001)
    rig.engine.stop()
    with pytest.raises(EngineError) as caught:
        await task
    assert caught.value.code is ErrorCode.NOT_READY


async def test_the_queue_grows_with_the_measured_rate(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    tracker = rig.engine.core.tracker
    assert tracker.admit(TenantTokens("", 0, 1), already_admitted=False)
    assert tracker.admit(TenantTokens("", 0, 262_143), already_admitted=False)
    with pytest.raises(EngineError) as full:
        tracker.admit(TenantTokens("", 0, 1), already_admitted=False)
    assert full.value.code is ErrorCode.OVERLOADED
    rig.engine.core.recorder.throughput.tokens_per_s = 100_000.0
    assert tracker.admit(TenantTokens("", 0, 8 * 100_000 - 262_144), already_admitted=False)
    with pytest.raises(EngineError):
        tracker.admit(TenantTokens("", 0, 1), already_admitted=False)
    assert tracker.admit(TenantTokens("", 0, 1), already_admitted=True)
    tracker._queues.add("", 0, 20_000 - tracker.queued_tokens)
    rig.engine.core.recorder.throughput.tokens_per_s = 100.0  # eight seconds of this are less than one step takes
    with pytest.raises(EngineError):
        rig.engine.check_room([generate_job([1], max_tokens=1)])
    assert rig.engine.queue()[:3] == (20_000, 100.0, rig.engine.config.token_budget)
    tracker._queues.add("", 0, -tracker.queued_tokens)
