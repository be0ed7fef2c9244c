"""Tests what ends the engine and what does not: a lost device, a fault of the loop, a hang, a step that raises late."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.requests import EngineError, ErrorCode, GenerateRequest, ScoreRequest
from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.score_batcher import ScoreBatcher
from gpu_sampler.sampling_params import ParamError
from gpu_sampler.state.host_state import OverlayFull
from tests.support import toy_model

MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]


async def answers(*tasks: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


async def test_a_hang_shows_in_the_heartbeat_and_nowhere_else(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    task = asyncio.create_task(rig.run(generate_job([1, toy_model.HANG])))
    while not rig.model.hanging.is_set():
        await asyncio.sleep(0.001)
    first = rig.engine.stats().heartbeat_age_s
    await asyncio.sleep(0.02)
    assert rig.engine.stats().heartbeat_age_s >= first + 0.02
    with pytest.raises(RuntimeError, match="did not end"):
        rig.engine.stop(0.01)
    rig.model.released.set()
    assert isinstance((await answers(task))[0], EngineError | tuple)


def raising(*_: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


async def test_a_device_error_ends_the_engine_permanently(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    await rig.run(generate_job([1, 2]))

    rig.model.on_forward = raising
    rig.model.device = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.synchronize", raising)  # a sticky error: the next call meets it again
    heard = await answers(rig.run(generate_job([3, 4])), rig.engine.score(score_job([1], [[2]])))
    assert {answer.code for answer in heard} <= {ErrorCode.LOST, ErrorCode.NOT_READY}
    assert ErrorCode.LOST in {answer.code for answer in heard}
    assert not rig.engine.healthy
    with pytest.raises(EngineError) as caught:
        await rig.run(generate_job([1]))
    assert caught.value.code is ErrorCode.NOT_READY


async def test_a_request_that_comes_while_the_thread_ends_is_answered(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore
) -> None:
    """The engine takes it, and the thread takes no more calls."""
    rig = make_rig()
    calls = rig.engine.core.calls
    submits: list[Callable[[], Any]] = [
        lambda: rig.run(generate_job([1])),
        lambda: rig.engine.score(score_job([1], [[2]])),
    ]
    for submit in submits:
        post = calls.post_with_others

        def late(call: Callable[[], None], loop: asyncio.AbstractEventLoop, post: Callable[..., None] = post) -> None:
            calls.post_with_others = post
            rig.engine.stop()
            post(call, loop)

        calls.post_with_others = late
        (heard,) = await answers(submit())
        assert (heard.code, heard.admitted) == (ErrorCode.NOT_READY, True)
        rig.engine.start()
    assert len((await rig.run(generate_job([1]))).tokens) == 8


async def test_an_error_that_the_device_survives_fails_its_step_only(
    make_rig: MakeRig, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words, but the next call is answered: nothing sticks."""
    rig = make_rig()
    await rig.run(generate_job([1, 2]))  # the step thread has looked at its device
    rig.model.on_forward = raising
    rig.model.device = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    (heard,) = await answers(rig.run(generate_job([3, 4])))
    assert heard.code is ErrorCode.STEP_FAILED
    rig.model.on_forward, rig.model.device = None, torch.device("cpu")
    assert rig.engine.healthy and len((await rig.run(generate_job([3, 4]))).tokens) == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("magic", [toy_model.LOSE_DEVICE, toy_model.END_THREAD])
async def test_a_lost_engine_tells_suspects_from_those_that_waited(
    make_rig: MakeRig, generate_job: MakeJob, magic: tuple[int, int]
) -> None:
    rig = make_rig()
    started = asyncio.create_task(rig.run(generate_job([1, 2, 3], max_tokens=900)))
    while not rig.engine.stats().generated_tokens:
        await asyncio.sleep(0)
    heard = await answers(rig.run(generate_job([5, *magic])), started)
    assert [answer.code for answer in heard] == [ErrorCode.LOST] * 2
    assert not rig.engine.healthy and rig.engine.is_lost(3600)
    with pytest.raises(EngineError) as caught:
        await rig.run(generate_job([1]))
    assert caught.value.code is ErrorCode.NOT_READY


async def test_callers_of_a_thread_that_hangs_are_answered_and_it_may_come_back(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore
) -> None:
    """Also those whose requests the thread never saw."""
    rig = make_rig()
    expected = await rig.run(generate_job([7, 8]))
    tasks = [asyncio.create_task(rig.run(generate_job([1, toy_model.HANG])))]
    await asyncio.to_thread(rig.model.hanging.wait, 10)
    tasks += [
        asyncio.create_task(rig.run(generate_job([n])) if n else rig.engine.score(score_job([1], [[2]])))
        for n in range(3)
    ]
    while len(rig.engine.core.tracker.callers) < 4:
        await asyncio.sleep(0)
    assert not rig.engine.is_lost(3600) and not any(task.done() for task in tasks)
    assert rig.engine.is_lost(0)
    heard = await answers(*tasks)
    assert [answer.code for answer in heard] == [ErrorCode.LOST, *[ErrorCode.NOT_READY] * 3]
    assert all(answer.admitted for answer in heard)
    with pytest.raises(EngineError) as caught:
        await rig.run(generate_job([7, 8]))
    assert caught.value.code is ErrorCode.NOT_READY and not caught.value.admitted
    rig.model.released.set()
    while rig.engine.stats().live_requests or rig.engine.core.heartbeat == rig.engine._silent:
        await asyncio.sleep(0.001)
    assert await rig.run(generate_job([7, 8])) == expected
    assert not rig.engine.is_lost(3600)


async def test_a_fault_of_the_loop_itself_answers_everyone(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    rig.model.step_seconds = 0.002
    tasks = [asyncio.create_task(rig.run(generate_job([n], max_tokens=200))) for n in range(3)]
    while rig.engine.stats().generated_tokens < 5:
        await asyncio.sleep(0.001)

    def broken(now: float) -> None:
        raise KeyError("a fault of ours")

    rig.engine.core.scheduler.plan = broken
    heard = await answers(*tasks)
    assert {answer.code for answer in heard} == {ErrorCode.LOST}
    assert not rig.engine.healthy


async def test_a_result_that_cannot_be_read_fails_its_step_only(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig(overlap=True)
    fetch, left = rig.sampler.fetch, [4]

    class Broken:
        def result(self) -> None:
            raise OSError("lost on the way")

    def sometimes(out: Any) -> Any:
        left[0] -= 1
        return Broken() if left[0] == 0 else fetch(out)

    rig.sampler.fetch = sometimes
    requests = [generate_job([n, *range(n)], max_tokens=9, isolated=n == 0) for n in range(5)]
    heard = await answers(*map(rig.run, requests))
    failed = [answer for answer in heard if isinstance(answer, EngineError)]
    assert failed
    assert {error.code for error in failed} == {ErrorCode.STEP_FAILED}
    assert rig.engine.stats().failed_steps == 1
    again = await rig.together(*requests)
    assert again == await make_rig().together(*requests)


@pytest.mark.parametrize("sound", [True, False])
async def test_a_prefix_of_a_step_that_failed_is_not_kept(
    make_rig: MakeRig, score_job: MakeScore, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is read once the second, which goes on with the prefix, has failed. Unsound: all of it is kept."""
    launched = []

    def fails_second(step: Any) -> None:
        launched.append(step)
        if len(launched) == 2:
            raise MemoryError("no room")

    if not sound:
        share = ScoreBatcher.share_prefix
        monkeypatch.setattr(
            ScoreBatcher, "share_prefix", lambda self, state, _: share(self, state, len(state.prefix_slots))
        )
    rig = make_rig(overlap=True, token_budget=64, before_step=fails_second, start=False)
    prefix, items = range(150), [[1], [2]]
    tasks = [asyncio.create_task(rig.engine.score(job)) for job in (score_job([], [[7, 8]]), score_job(prefix, items))]
    await rig.queued()
    rig.engine.start()
    first, second = await answers(*tasks)
    assert first.status.tolist() == [0] and second.code is ErrorCode.STEP_FAILED
    (again,) = await answers(rig.engine.score(score_job(prefix, items)))
    if sound:
        wanted = await make_rig().engine.score(score_job(prefix, items))
        assert again.label_logprobs.tobytes() == wanted.label_logprobs.tobytes()
    else:
        assert isinstance(again, EngineError)  # the toy refuses what it finds in slots that were not written


@pytest.mark.parametrize("sound", [True, False])
async def test_a_prompt_of_a_step_that_failed_is_not_kept_for_a_client_that_left(
    make_rig: MakeRig, generate_job: MakeJob, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(out: Any) -> Any:
        raise OSError("lost on the way")

    if not sound:
        monkeypatch.setattr(RunningBatch, "distrust", lambda self, sequence: None)
    rig = make_rig(overlap=True, start=False)
    core = rig.engine.core
    task = asyncio.create_task(rig.run(generate_job(range(20))))
    await rig.queued()
    monkeypatch.setattr(rig.sampler, "fetch", lambda out: SimpleNamespace(result=lambda: broken(out)))
    core._round()  # launches the prompt
    core._running = True
    task.cancel()
    await answers(task)
    core._round()  # takes the cancellation, and reads the step
    core._running = False
    assert rig.engine.stats().failed_steps == 1
    assert (rig.engine.stats().kv_slots_cached == 0) == sound


async def test_two_engines_give_the_same_bits(make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore) -> None:
    request, score = (
        generate_job(range(9), n=3, max_tokens=20, logprobs=4),
        score_job(range(5), [[n] for n in range(7)]),
    )
    heard = []
    for overlap in (False, True):
        engine = make_rig(overlap=overlap).engine
        chunks, scores = await engine.complete(request), await engine.score(score)
        heard.append([scores.label_logprobs.tobytes(), *(np.asarray(c.tokens).tobytes() for c in chunks)])
        heard[-1] += [c.top_logprobs.tobytes() for c in chunks]
    assert heard[0] == heard[1]


async def test_the_account_catches_a_planted_leak(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    rig.engine.core.kv_cache.free_later = lambda release: None
    await rig.run(generate_job([1, 2, 3]))
    with pytest.raises(AssertionError):
        await rig.close()


async def test_the_toy_catches_a_planted_swap_of_slots(make_rig: MakeRig, generate_job: MakeJob) -> None:
    """Cached equals computed, unless the tree is made to mix up two slots."""
    request = generate_job(range(20), max_tokens=9)
    rig = make_rig()
    insert = rig.engine.core.kv_cache.prefix_cache.insert

    def swapped(key: Any, ids: Any, slots: Any) -> Any:
        return insert(key, ids, np.concatenate((slots[1::-1], slots[2:])))

    rig.engine.core.kv_cache.prefix_cache.insert = swapped
    first = await rig.run(request)
    assert await rig.run(request) != first


async def test_the_toy_catches_slots_that_are_freed_while_a_row_needs_them(
    make_rig: MakeRig, generate_job: MakeJob
) -> None:
    rig = make_rig()
    rig.engine.core.kv_cache.prefix_cache.lock = lambda node: None
    rig.engine.core.kv_cache.prefix_cache.unlock = lambda node: None
    plan = rig.engine.core.scheduler.plan

    def evicting(now: float) -> Any:
        rig.engine.core.kv_cache.free(rig.engine.core.kv_cache.prefix_cache.evict(5))
        return plan(now)

    rig.engine.core.scheduler.plan = evicting
    (heard,) = await answers(rig.run(generate_job(range(20), max_tokens=9)))
    assert isinstance(heard, EngineError)
    assert heard.code is ErrorCode.STEP_FAILED


async def test_a_row_without_room_in_the_sampler_waits(make_rig: MakeRig, generate_job: MakeJob) -> None:
    requests = [generate_job([n, 5], max_tokens=7, seed=n) for n in range(9)]
    expected = await make_rig().together(*requests)
    rig = make_rig()
    admit = rig.sampler.admit

    def narrow(slot: int, *args: Any, **fields: Any) -> None:
        if len(rig.sampler.states) >= 2:
            raise OverlayFull("no room")
        admit(slot, *args, **fields)

    rig.sampler.admit = narrow
    assert await asyncio.wait_for(rig.together(*requests), 20) == expected
    assert rig.sampler.max_admitted == 2


async def test_a_row_that_the_sampler_could_never_hold_is_refused(make_rig: MakeRig, generate_job: MakeJob) -> None:
    rig = make_rig()
    admit = rig.sampler.admit

    def strict(slot: int, params: Any, *args: Any, **fields: Any) -> None:
        if params.logit_bias:
            raise ParamError("logit_bias", "too many entries", "fewer entries")
        admit(slot, params, *args, **fields)

    rig.sampler.admit = strict
    heard = await answers(rig.run(generate_job([1], n=2, logit_bias=((3, 1.0),))), rig.run(generate_job([1])))
    assert isinstance(heard[0], EngineError)
    assert (heard[0].code, heard[0].field) == (ErrorCode.INVALID_VALUE, "logit_bias")
    assert len(heard[1].tokens) == 8
