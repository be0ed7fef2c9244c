"""The budget, the bounds, and what happens to requests that end replicas."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.config.sections import RetryArgs
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import AnyCall, Failure, GenerateCall, with_fields
from deployments.quarantine import MAX_ENTRIES, Entries, Quarantine, fingerprint
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.quarantine_broadcast import QuarantineBroadcast
from deployments.routing.replica_call import RetryableError
from deployments.routing.retry import RetryBudget, RetryPolicy
from engine.requests import ErrorCode, LikelihoodRequest, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams

FleetOf = Callable[..., Awaitable[Any]]
Make = Callable[..., GenerateCall]


def score_task(**fields: Any) -> ScoreRequest:
    given: dict[str, Any] = {
        "request_id": "s",
        "prefix": np.arange(40, 57, dtype=np.int32),
        "ids": np.arange(60, 80, dtype=np.int32),
        "starts": np.array([0, 3, 9, 20], np.int32),
        "labels": np.array([65, 66, 67], np.int32),
    }
    return ScoreRequest(**given | fields)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retries_are_a_share_of_the_requests_of_the_last_seconds() -> None:
    clock = Clock()
    budget = RetryBudget(RetryArgs(budget_fraction=0.1, budget_min_retries=2, budget_window_s=10), clock)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.request()
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.now += 10
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_the_expected_time_is_the_median_of_the_latest() -> None:
    policy = RetryPolicy(RetryArgs(), Quarantine(), IngressMetrics())
    state, times = policy.begin(score_task()), policy.service_s[ScoreRequest]
    assert state._service_s() == 0
    times.extend((5.0, 1.0, 2.0))
    assert state._service_s() == 2
    times.extend([7.0] * 100)
    assert (state._service_s(), len(times)) == (7, 63)


async def test_a_spent_budget_is_an_error_immediately_and_the_first_retry_after_a_loss_is_free(
    fleet_of: FleetOf, cut: Any
) -> None:
    retry = {"max_backoff_s": 0, "budget_fraction": 0, "budget_min_retries": 0}
    fleet = await fleet_of(cut("unavailable", 0), retry=retry)
    await fleet.dispatch.score(score_task())
    assert len(fleet.sent) == 2
    fleet = await fleet_of(cut("unavailable", 0), cut("unavailable", 0), retry=retry)
    with pytest.raises(ApiError) as raised:
        await fleet.dispatch.score(score_task())
    assert (raised.value.code, len(fleet.sent)) == ("replica_lost", 2)
    assert fleet.count("assay_retry_budget_exhausted_total", cause="unavailable") == 1


def test_a_spent_budget_is_told_by_what_it_was_spent_on() -> None:
    """Full replicas are overload, which is answered with 429: the alert is about lost ones."""
    metrics = IngressMetrics()
    policy = RetryPolicy(RetryArgs(budget_fraction=0, budget_min_retries=0), Quarantine(), metrics)
    full = RetryableError("busy", ApiError("overloaded", "Full."), refused=True)
    with pytest.raises(ApiError, match="overloaded"):
        policy.begin(score_task()).next_wait_s(full, score_task())
    counted = {
        cause: metrics.registry.get_sample_value("assay_retry_budget_exhausted_total", {"cause": cause})
        for cause in ("busy", "died")
    }
    assert counted == {"busy": 1, "died": 0}


async def test_no_attempt_is_made_that_could_not_end_in_time(fleet_of: FleetOf, cut: Any) -> None:
    fleet = await fleet_of(cut("unavailable", 0))
    fleet.dispatch._retries.service_s[ScoreRequest].append(60.0)
    with pytest.raises(ApiError) as raised:
        await fleet.dispatch.score(score_task(timeout_s=30.0))
    assert (raised.value.code, len(fleet.sent)) == ("replica_lost", 1)


def test_an_attempt_that_could_not_end_in_time_costs_no_budget() -> None:
    policy = RetryPolicy(RetryArgs(budget_fraction=0, budget_min_retries=1), Quarantine(), IngressMetrics())
    policy.service_s[ScoreRequest].append(60.0)
    lost = RetryableError("died", ApiError("replica_lost", "It died."))
    state = policy.begin(score_task(timeout_s=30.0))
    state.lost = True  # the first attempt after a loss is free
    with pytest.raises(ApiError, match="replica_lost"):
        state.next_wait_s(lost, score_task(timeout_s=30.0))
    assert policy.budget.take()


async def test_three_attempts_and_no_more(fleet_of: FleetOf, generation: Make, cut: Any, told_of: Any) -> None:
    fleet = await fleet_of(*(cut("unavailable", 0) for _ in range(4)))
    with pytest.raises(ApiError) as raised:
        await told_of(fleet.dispatch.stream(generation()))
    assert (raised.value.code, len(fleet.sent)) == ("replica_lost", 3)


# Suspects and quarantine.


@pytest.mark.risk("R10")
async def test_a_second_death_quarantines_and_the_request_is_refused_from_then_on(
    fleet_of: FleetOf, generation: Make, cut: Any, told_of: Any
) -> None:
    fleet = await fleet_of(cut("died", 2), cut("died", 1))
    task = generation()
    for _ in range(2):
        with pytest.raises(ApiError) as raised:
            await told_of(fleet.dispatch.stream(task))
        assert (raised.value.code, raised.value.status) == ("quarantined_request", 422)
    assert [sent[0].isolated for _, sent in fleet.sent] == [False, True]
    assert [mark for mark, _ in fleet.quarantine.entries()] == [fingerprint(task)]  # sent to the replicas
    again = (replace(task[0], seed=task[0].seed + 1, request_id="another"),)
    with pytest.raises(ApiError):
        await fleet.dispatch.generate(again)
    assert len(fleet.sent) == 2
    await told_of(fleet.dispatch.stream(generation((1, 2, 3))))


async def test_a_stream_is_a_suspect_until_it_is_past_the_place_where_it_was_lost(
    fleet_of: FleetOf, generation: Make, cut: Any, told_of: Any, alone: Any
) -> None:
    """The second death comes long after: it tells nothing of this stream, which goes on a third time."""
    fleet = await fleet_of(cut("died", 2), cut("died", 25))
    task = generation(max_tokens=200)
    whole = await alone(fleet, task)
    assert await told_of(fleet.dispatch.stream(task)) == whole
    assert [sent[0].isolated for _, sent in fleet.sent] == [False, True, True]


async def test_a_suspect_whose_prompts_alone_are_scored_stays_one_until_the_last_has_its_scores(
    fleet_of: FleetOf, generation: Make, cut: Any
) -> None:
    fleet = await fleet_of(cut("died", 0), cut("died", 1))
    with pytest.raises(ApiError) as raised:
        await fleet.dispatch.generate(generation((70, 71, 72), (5, 6, 7), prompt_logprobs=1, prompt_only=True))
    assert raised.value.code == "quarantined_request"
    assert [sent[0].isolated for _, sent in fleet.sent] == [False, True]


async def test_a_block_that_is_quarantined_quarantines_its_request(fleet_of: FleetOf, cut: Any) -> None:
    rng = np.random.default_rng(1)
    rows = score_task(
        ids=rng.integers(0, 250, 64 * 8).astype(np.int32), starts=np.arange(0, 64 * 8 + 1, 8, dtype=np.int32)
    )
    fanout = {"shard_tokens": 64, "min_items": 4, "max_prefix_fraction": 1}
    fleet = await fleet_of(cut("died", 0), cut("never", 0), cut("died", 0), fanout=fanout)
    for _ in range(2):
        with pytest.raises(ApiError) as raised:
            await fleet.dispatch.score(rows)
        assert raised.value.code == "quarantined_request"
    assert len(fleet.sent) == 3


async def test_a_replica_runs_one_solo_task_at_a_time_and_the_next_waits_for_its_place(
    fleet_of: FleetOf, generation: Make, told_of: Any, alone: Any, cut: Any
) -> None:
    """Five streams lose their replica together and the other one takes them one after the other, until each is past its
    place: that is no failure of theirs, and costs neither attempts nor budget."""
    fleet = await fleet_of(
        *(cut("died", 2) for _ in range(5)), retry={"max_backoff_s": 0, "budget_fraction": 0, "budget_min_retries": 0}
    )
    fleet.stop("r1")
    tasks = [generation((70 + number, 5, 9), max_tokens=40) for number in range(5)]
    expected = [await alone(fleet, task) for task in tasks]
    streams = await asyncio.gather(*(told_of(fleet.dispatch.stream(task)) for task in tasks))
    assert streams == expected
    # A link takes all five with it, also one that has nothing yet: that one is tried again from its beginning.
    again = [fleet.count(f"assay_{name}_total", cause="died") for name in ("resumes", "retries")]
    assert sum(again) == 5 and again[0] > 0


async def test_a_replica_refuses_a_second_solo_task_and_what_is_in_quarantine(
    fleet_of: FleetOf, generation: Make
) -> None:
    fleet = await fleet_of()
    server = fleet.servers["r0"]
    first = server.stream(with_fields(generation(max_tokens=800), isolated=True, isolated_tokens=600))
    await anext(first)
    refused = await server.generate(isolated(generation()))
    assert isinstance(refused, Failure)
    assert (refused.code, refused.field) == (ErrorCode.OVERLOADED, "isolated")
    async for _ in of_tokens(first, 650):
        pass
    assert not isinstance(await server.generate(isolated(generation())), Failure)  # the first shares its steps by now
    await first.aclose()
    task = generation((1, 2, 3, 4))
    await server.quarantine(((fingerprint(task), 60.0),))
    for answer in (await server.generate(task), await anext(server.stream(task))):
        assert isinstance(answer, Failure) and answer.code is ErrorCode.QUARANTINED
    server._guard.quarantine._until.clear()


def isolated(task: GenerateCall) -> GenerateCall:
    return with_fields(task, isolated=True, isolated_tokens=8)


async def of_tokens(source: Any, tokens: int) -> Any:
    """Until so many tokens have come."""
    async for reply in source:
        tokens -= sum(len(item.chunk.tokens) for item in reply.chunks)
        yield reply
        if tokens <= 0:
            return


async def test_all_replicas_are_informed_immediately_and_again_when_one_joins() -> None:
    heard: asyncio.Queue[Entries] = asyncio.Queue()
    counts: list[int] = []
    loads, quarantine = LoadTracker(), Quarantine()

    async def replicas(method: str, timeout_s: float, *args: Any, on_answer: Any = None) -> Sequence[object]:
        await heard.put(args[0])
        return ()

    bulletin = QuarantineBroadcast(quarantine, replicas, loads, counts.append)
    bulletin.start()
    try:
        quarantine.add(((b"a", 60.0),))
        async with asyncio.timeout(5):
            assert [mark for mark, _ in await heard.get()] == [b"a"]
            loads.publish(["new"])
            ((mark, seconds),) = await heard.get()
            assert mark == b"a" and 0 < seconds <= 60
        assert counts == [1, 1]
    finally:
        await bulletin.stop()


async def test_an_entry_is_new_where_another_makes_room_for_it_or_the_same_has_ended() -> None:
    clock, changes = Clock(), list[float]()
    quarantine = Quarantine(clock)
    quarantine.changed = lambda: changes.append(clock.now)
    quarantine.add(tuple((number.to_bytes(16, "big"), 5.0) for number in range(MAX_ENTRIES)))
    quarantine.add(((b"a", 9.0),))
    quarantine.add(((b"a", 9.0),))  # known
    quarantine.add(((b"b", 1.0),))  # the first to end, and so no entry
    assert changes == [100.0, 100.0]
    clock.now += 9
    quarantine.add(((b"a", 9.0),))
    assert changes == [100.0, 100.0, 109.0]


def test_entries_end_and_are_bounded() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    task = score_task()
    quarantine.add(((fingerprint(task), 5.0),))
    with pytest.raises(ApiError):
        quarantine.check(task)
    clock.now += 5
    quarantine.check(task)
    assert quarantine.entries() == ()
    quarantine.add(tuple((number.to_bytes(16, "big"), 1.0 + number) for number in range(MAX_ENTRIES + 7)))
    assert len(quarantine.entries()) == MAX_ENTRIES
    assert (7).to_bytes(16, "big") in dict(quarantine.entries()) and (6).to_bytes(16, "big") not in dict(
        quarantine.entries()
    )


def test_a_fingerprint_is_of_tokens_and_parameters(generation: Make) -> None:
    ids, one = np.array([1, 2], np.int32), np.ones(1, np.int32)
    rows: dict[str, Any] = {"prefix": ids[:0], "ids": ids, "starts": ids * 0, "shared": one * 0, "wanted": one}
    base, score = generation(), score_task()
    different: list[AnyCall] = [
        base,
        generation((1, 2)),
        generation((1,), (2,)),
        with_fields(base, params=SamplingParams(max_tokens=61)),
        with_fields(base, prompt_logprobs=1),
        score,
        replace(score, full=False),
        replace(score, full=False, raw_logits=True),
        replace(score, labels=score.labels[:2]),
        LikelihoodRequest(request_id="l", **rows),
        LikelihoodRequest(request_id="l", **rows | {"shared": one}),
    ]
    marks = [fingerprint(task) for task in different]
    assert len(set(marks)) == len(marks) and {len(mark) for mark in marks} == {16}
    for same in (
        with_fields(base, request_id="x", seed=9, timeout_s=1.0, isolated=True),
        with_fields(base, emitted=(np.array([5], np.int32),)),
        generation(seed=8),  # which the client itself has named
    ):
        assert fingerprint(same) == marks[0]
    assert fingerprint(replace(score, request_id="x", tenant="t", isolated=True)) == fingerprint(score)
