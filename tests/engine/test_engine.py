"""The engine end to end with the toy model: every answer is compared bit for bit."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import SpeculationConfig
from engine.requests import EngineError, ErrorCode, GenerateRequest, ScoreRequest
from engine.utils import garbage_collection
from tests.support import toy_model

PROMPT = list(range(40, 57))
MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]
both = pytest.mark.parametrize("overlap", [False, True])


@both
async def test_a_request_alone_generates_to_its_length(make_rig: MakeRig, generate_job: MakeJob, overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    heard = await rig.run(generate_job(PROMPT, max_tokens=13, logprobs=3))
    assert len(heard.tokens) == 13
    assert heard.finish == "length"
    assert len(heard.logprobs) == 4 * 13
    assert len(heard.top) == 3 * 4 * 13


def random_jobs(generate_job: MakeJob, count: int, seed: int) -> list[GenerateRequest]:
    """Neighbours of every shape, some sharing the beginning of PROMPT."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        prompt = [*PROMPT[: rng.integers(0, 17)], *rng.integers(0, 250, rng.integers(1, 60)).tolist()]
        more = {"logprobs": int(rng.integers(0, 4))} if rng.random() < 0.5 else {}
        temperature = float(rng.choice([0.0, 0.7, 1.3]))
        length = int(rng.integers(1, 30))
        requests.append(generate_job(prompt, seed=number, temperature=temperature, max_tokens=length, **more))
    return requests


async def needle_among(make_rig: MakeRig, generate_job: MakeJob, **fields: Any) -> list[bool]:
    """Whether a seeded request, in batches of 2 to 32 random neighbours, hears what it hears alone."""
    alone = await make_rig(real_sampler=fields.get("real_sampler", False)).run(
        generate_job(PROMPT, max_tokens=20, logprobs=2)
    )
    same = []
    rig = make_rig(**fields)
    for batch, size in enumerate([2, 3, 7, 17, 32]):
        requests = random_jobs(generate_job, size - 1, batch)
        requests.insert(batch % size, generate_job(PROMPT, max_tokens=20, logprobs=2))
        heard = await rig.together(*requests)
        same.append(heard[batch % size] == alone)
    return same


@pytest.mark.risk("D1")
@both
async def test_a_seeded_request_is_the_same_alone_and_among_neighbours(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    assert all(await needle_among(make_rig, generate_job, overlap=overlap))


async def test_so_it_is_with_the_real_sampler(make_rig: MakeRig, generate_job: MakeJob) -> None:
    assert all(await needle_among(make_rig, generate_job, overlap=True, real_sampler=True))


async def test_the_real_sampler_resumes_exactly_after_preemption(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rng = np.random.default_rng(5)
    more = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_p": 0.9, "bad_words_ids": ((3,), (4, 5))}
    requests = [generate_job(rng.integers(0, 250, 9).tolist(), seed=n, max_tokens=40, **more) for n in range(9)]
    expected = await make_rig(real_sampler=True).together(*requests)
    rig = make_rig(num_slots=71, admission_tokens=4, overlap=True, real_sampler=True)
    assert await asyncio.wait_for(rig.together(*requests), 30) == expected
    assert rig.engine.stats().preemptions > 3


@pytest.mark.risk("D1", planted=True)
async def test_noise_keyed_by_the_row_of_the_batch_is_caught(make_rig: MakeRig, generate_job: MakeJob) -> None:
    assert not all(await needle_among(make_rig, generate_job, by_row=True))


@pytest.mark.full(keep=1)
@both
async def test_neighbours_and_every_chunk_size_and_cache_setting_agree(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    requests = random_jobs(generate_job, 12, 99)
    expected = await make_rig().together(*requests)
    for budget in (2, 3, 5, 17, 64):
        for cache in (True, False):
            rig = make_rig(token_budget=budget, prefix_cache=cache, overlap=overlap)
            assert await rig.together(*requests) == expected


@both
async def test_a_prompt_seen_before_is_read_from_the_tree(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    rig = make_rig(overlap=overlap)
    first = [chunk async for chunk in rig.engine.generate(generate_job(PROMPT))]
    computed = rig.engine.stats().step_tokens["prefill"]
    second = [chunk async for chunk in rig.engine.generate(generate_job(PROMPT))]
    assert [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in second]
    assert (first[0].cached, second[0].cached) == (0, len(PROMPT) - 1)
    assert rig.engine.stats().step_tokens["prefill"] == computed + 1
    other = [chunk async for chunk in rig.engine.generate(generate_job(PROMPT, cache_salt="other"))]
    assert other[0].cached == 0


@both
async def test_a_tiny_pool_preempts_and_changes_nothing(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    rng = np.random.default_rng(5)
    requests = [generate_job(rng.integers(0, 250, 9).tolist(), seed=n, max_tokens=40, logprobs=1) for n in range(9)]
    expected = await make_rig().together(*requests)
    rig = make_rig(num_slots=71, admission_tokens=4, overlap=overlap)
    assert await asyncio.wait_for(rig.together(*requests), 30) == expected
    assert rig.engine.stats().preemptions > 3


async def test_a_request_that_begins_like_a_cached_one_finds_room_in_a_full_pool(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore
) -> None:
    rig = make_rig(num_slots=101)
    first, other = range(90), [*range(5), *range(100, 160)]
    await rig.run(generate_job(first, max_tokens=4))
    await asyncio.wait_for(rig.run(generate_job(other, max_tokens=4)), 20)
    await rig.engine.score(score_job(first, [[1]]))
    await asyncio.wait_for(rig.engine.score(score_job(other, [[1]])), 20)


@pytest.mark.risk("R12")
@both
async def test_preemption_at_every_position_resumes_exactly(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    request = generate_job(PROMPT, max_tokens=12, logprobs=1)
    expected = await make_rig().run(request)
    for position in range(1, 12):
        rig = make_rig(overlap=overlap, prefix_cache=bool(position % 2), start=False)
        engine = rig.engine
        plan = engine.core.scheduler.plan
        done: list[int] = []

        def planned(
            now: float, at: int = position, seen: list[int] = done, engine: Any = engine, plan: Any = plan
        ) -> Any:
            rows = list(engine.core.scheduler.running.decoding.values())
            if rows and not seen and engine.core.table.length[rows[0].slot] == len(PROMPT) + at:
                if engine.core.kv_cache.in_flight:
                    return None
                engine.core.scheduler.preempt_one()
                seen.append(at)
            return plan(now)

        engine.core.scheduler.plan = planned
        engine.start()
        assert await rig.run(request) == expected
        assert done == [position]


@both
async def test_a_stream_resumed_elsewhere_continues_exactly(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    whole = await make_rig().run(generate_job(PROMPT, max_tokens=12))
    rig = make_rig(overlap=overlap)
    for cut in range(13):
        rest = await rig.run(generate_job(PROMPT, max_tokens=12, emitted=[whole.tokens[:cut]]))
        assert rest.tokens == whole.tokens[cut:]
        assert rest.finish == whole.finish


@both
async def test_branches_share_one_prefill_and_equal_themselves_alone(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    for cache in (True, False):
        rig = make_rig(overlap=overlap, prefix_cache=cache, max_running=3)
        chunks = await rig.engine.complete(generate_job(PROMPT, n=7, max_tokens=9, logprobs=2))
        assert [chunk.branch for chunk in chunks] == list(range(7))
        assert len({tuple(chunk.tokens.tolist()) for chunk in chunks}) > 1
        assert rig.engine.stats().step_tokens["prefill"] == len(PROMPT) + 6
        streamed = [chunk async for chunk in make_rig().engine.generate(generate_job(PROMPT, n=7, max_tokens=9))]
        for branch, chunk in enumerate(chunks):
            tokens = [int(token) for c in streamed if c.branch == branch for token in c.tokens]
            assert tokens == chunk.tokens.tolist()
            assert chunk.logprobs is not None and chunk.logprobs.shape == (9,)
            assert chunk.top_ids is not None and chunk.top_ids.shape == (9, 2)


async def test_resumed_branches_that_find_all_their_tokens_run_together(
    make_rig: MakeRig, generate_job: MakeJob
) -> None:
    rig = make_rig()
    await rig.run(generate_job(PROMPT, max_tokens=2))
    resumed = generate_job(PROMPT, n=2, max_tokens=10, emitted=[[5], [6]])
    assert [chunk.branch async for chunk in rig.engine.generate(resumed)] == [0, 1] * 9


@both
async def test_a_stop_token_ends_the_row_and_is_its_last_token(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    free = await make_rig().run(generate_job(PROMPT, max_tokens=20))
    stop = free.tokens[6]
    first = free.tokens.index(stop)
    rig = make_rig(overlap=overlap)
    heard = await rig.run(generate_job(PROMPT, max_tokens=20, stop_token_ids=(stop, 5)))
    assert heard.tokens == free.tokens[: first + 1]
    assert (heard.finish, heard.stop_token) == ("stop", stop)
    await rig.idle()
    assert rig.engine.stats().wasted_tokens == (1 if overlap else 0)


@both
async def test_the_context_end_is_a_length_finish(make_rig: MakeRig, generate_job: MakeJob, overlap: bool) -> None:
    rig = make_rig(max_model_len=30, overlap=overlap)
    heard = await rig.run(generate_job(PROMPT, max_tokens=99))
    assert len(heard.tokens) == 30 - len(PROMPT)
    assert heard.finish == "length"


async def test_steps_on_a_cpu_run_in_inference_mode(make_rig: MakeRig, generate_job: MakeJob) -> None:
    seen: list[bool] = []
    rig = make_rig(before_step=lambda step: seen.append(torch.is_inference_mode_enabled()))
    await rig.run(generate_job(PROMPT, max_tokens=3))
    assert len(seen) >= 3
    assert all(seen)


async def test_a_step_thread_gets_the_interpreter_sooner_while_it_launches_and_reads(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to 10 us, since Python keeps whole microseconds. A launch that fails leaves turns as they were."""
    seen: dict[str, set[float]] = {"plan": set(), "launch": set(), "read": set()}

    def note(when: str) -> None:
        seen[when].add(round(sys.getswitchinterval(), 5))

    rig = make_rig(before_step=lambda step: note("plan"))
    launch = rig.engine.core.runner.launch

    def noted_read(result: Callable[[], Any]) -> Any:
        note("read")
        return result()

    def noted_launch(step: Any) -> None:
        note("launch")
        launch(step)
        if step.result is not None:
            step.result = partial(noted_read, step.result)

    monkeypatch.setattr(rig.engine.core.runner, "launch", noted_launch)
    await rig.run(generate_job(PROMPT, max_tokens=3))
    turn, short = garbage_collection.TURN_S, garbage_collection.SHORT_TURN_S
    assert seen == {"plan": {turn}, "launch": {short}, "read": {short}}

    def fails(step: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(rig.engine.core.runner, "launch", fails)
    with pytest.raises(EngineError):
        await rig.run(generate_job(PROMPT, max_tokens=3))
    assert round(sys.getswitchinterval(), 5) == turn


async def test_one_hand_over_a_step_however_many_rows(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    await rig.together(*random_jobs(generate_job, 20, 3))
    stats = rig.engine.stats()
    assert stats.hand_overs <= sum(stats.steps.values())


@pytest.mark.risk("R11")
async def test_a_nan_row_fails_alone(make_rig: MakeRig, generate_job: MakeJob) -> None:
    requests = random_jobs(generate_job, 6, 8)
    expected = await make_rig().together(*requests)
    for token in (toy_model.NAN, toy_model.INF, toy_model.EMPTY):
        rig = make_rig()
        bad = generate_job([*PROMPT, token])
        heard = await asyncio.gather(*map(rig.run, requests), rig.run(bad), return_exceptions=True)
        assert heard[:-1] == expected
        assert isinstance(heard[-1], EngineError)
        assert heard[-1].code is ErrorCode.NONFINITE_LOGITS
        assert rig.engine.stats().nonfinite_rows == 1


@pytest.mark.parametrize(
    "bans",
    [
        {"bad_words_ids": ((65,), (66,))},
        {"min_tokens": 2, "stop_token_ids": (65, 66)},
        {"bad_words_ids": ((65, 65), (65, 66), (66, 65), (66, 66))},  # nothing is left behind the first token
    ],
)
@pytest.mark.parametrize("speculation", [SpeculationConfig(), SpeculationConfig(method="ngram", ngram_tokens=1)])
async def test_bans_that_leave_no_allowed_token_are_the_requests_fault(
    make_rig: MakeRig, generate_job: MakeJob, bans: dict[str, Any], speculation: SpeculationConfig
) -> None:
    rig = make_rig(real_sampler=True, speculation=speculation)
    beside, expected = generate_job(PROMPT), await make_rig(real_sampler=True).run(generate_job(PROMPT))
    refused = generate_job([*PROMPT, 65, 66, 65, 66], allowed_token_ids=(65, 66), **bans)
    heard = await asyncio.gather(rig.run(refused), rig.run(beside), return_exceptions=True)
    assert isinstance(heard[0], EngineError)
    assert (heard[0].code, heard[0].field) == (ErrorCode.INVALID_VALUE, "allowed_token_ids")
    assert heard[1] == expected
    assert rig.engine.stats().nonfinite_rows == 0  # which pages an operator
    bad = generate_job([*PROMPT, toy_model.NAN], allowed_token_ids=(0, 65))
    with pytest.raises(EngineError) as caught:
        await rig.run(bad)
    assert caught.value.code is ErrorCode.NONFINITE_LOGITS
    assert rig.engine.stats().nonfinite_rows == 1


async def test_each_nan_row_raises_an_error_of_its_own(make_rig: MakeRig, generate_job: MakeJob) -> None:
    """One for all would keep the frames of every caller that raised it, for ever."""
    rig, depths = make_rig(), []
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            await rig.run(generate_job([*PROMPT, toy_model.NAN]))
        depths.append(len(caught.traceback))
    assert depths[0] == depths[1]


@both
async def test_a_raising_token_costs_its_own_step_and_solo_only_itself(
    make_rig: MakeRig, generate_job: MakeJob, overlap: bool
) -> None:
    rig = make_rig(overlap=overlap)
    requests = random_jobs(generate_job, 6, 8)
    expected = await make_rig().together(*requests)
    bad = generate_job([*PROMPT, toy_model.RAISE])
    heard = await asyncio.gather(*map(rig.run, requests), rig.run(bad), return_exceptions=True)
    assert isinstance(heard[-1], EngineError)
    for answer, good in zip(heard[:-1], expected, strict=True):
        assert answer == good or (isinstance(answer, EngineError) and answer.code is ErrorCode.STEP_FAILED)
    alone = generate_job([*PROMPT, toy_model.RAISE], isolated=True)
    heard = await asyncio.gather(*map(rig.run, requests), rig.run(alone), return_exceptions=True)
    assert heard[:-1] == expected
    assert isinstance(heard[-1], EngineError)
    assert heard[-1].code is ErrorCode.STEP_FAILED
    assert rig.engine.stats().failed_steps == 2
    assert rig.engine.healthy


@pytest.mark.risk("R6", figure="0 rows")
async def test_expired_work_is_never_computed(make_rig: MakeRig, generate_job: MakeJob) -> None:
    now = [0.0]
    rig = make_rig(clock=lambda: now[0], start=False)
    answers = [
        asyncio.create_task(rig.run(request))
        for request in (generate_job(PROMPT, timeout_s=1.0), generate_job(PROMPT[::-1], timeout_s=9.0))
    ]
    await rig.queued()
    now[0] = 5.0
    rig.engine.start()
    heard = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(heard[0], EngineError)
    assert heard[0].code is ErrorCode.DEADLINE_EXCEEDED
    assert not isinstance(heard[1], BaseException)
    assert len(heard[1].tokens) == 8
    assert rig.engine.stats().step_tokens["prefill"] == len(PROMPT)


async def test_a_deadline_ends_a_running_row(make_rig: MakeRig, generate_job: MakeJob) -> None:
    now = [0.0]
    rig = make_rig(clock=lambda: now[0])
    chunks = []
    with pytest.raises(EngineError) as caught:
        async for chunk in rig.engine.generate(generate_job(PROMPT, max_tokens=200, timeout_s=1.0)):
            chunks.append(chunk)
            now[0] = 2.0
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert chunks


@pytest.mark.risk("R8")
async def test_a_drained_stream_continues_on_another_engine(make_rig: MakeRig, generate_job: MakeJob) -> None:
    request = generate_job(PROMPT, n=3, max_tokens=40)
    whole = await make_rig().engine.complete(request)
    rig = make_rig()
    rig.model.step_seconds = 0.002
    seen: list[Any] = []

    async def read() -> None:
        async for chunk in rig.engine.generate(request):
            seen.append(chunk)

    reader = asyncio.create_task(read())
    while len(seen) < 12:
        await asyncio.sleep(0.001)
    requests = await rig.engine.drain(0.0)
    with pytest.raises(EngineError) as caught:
        await reader
    assert caught.value.code is ErrorCode.DRAINING
    with pytest.raises(EngineError):
        await rig.run(generate_job(PROMPT))
    rest = await make_rig().engine.complete(requests[0])
    for branch in range(3):
        before = [int(t) for chunk in seen if chunk.branch == branch for t in chunk.tokens]
        assert before == requests[0].emitted[branch].tolist()
        assert before + rest[branch].tokens.tolist() == whole[branch].tokens.tolist()
