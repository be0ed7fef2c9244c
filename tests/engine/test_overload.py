"""A queue that is longer than it should be: what is worked off first, what is never started, and how fast it goes.

Time is the model's: a step takes 2 ms and 0.1 ms a token, nothing else takes any.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine import metrics
from engine.batch.input_batch import StepKind
from engine.config import Costs
from engine.metrics import MIN_S, MIN_STEPS, Throughput
from engine.request_cost import request_cost
from engine.requests import EngineError, ErrorCode, GenerateRequest, ScoreRequest
from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.policy import StepTimeFit
from engine.scheduler.scheduler import Scheduler, Step

MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]
SMALL = 200
BUDGET = 2_048
LARGE = [[n % 250, n // 250, *range(8)] for n in range(4_000)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def of(self, rig: Any) -> None:
        def forward(kind: Any, runs: Any) -> None:
            self.now += 0.002 + 0.0001 * sum(len(run.write) for run in runs)

        rig.model.on_forward = forward


async def small_ones(rig: Any, clock: Clock, make: MakeScore, at_once: int) -> list[float]:
    """Seconds of each of the small requests, so many at a time."""
    gate, waits = asyncio.Semaphore(at_once), list[float]()

    async def one(number: int) -> None:
        async with gate:
            since = clock.now
            await rig.engine.score(make([number % 250, 1, 2], [list(range(20))]))
            waits.append(clock.now - since)

    await asyncio.gather(*(one(number) for number in range(SMALL)))
    return waits


async def ratio(make_rig: MakeRig, score_job: MakeScore, at_once: int) -> float:
    """p99 of the small requests beside a request of 4,000 items, over that without it."""
    waits = []
    for crowded in (False, True):
        clock = Clock()
        rig = make_rig(clock=clock, num_slots=8_192, token_budget=BUDGET)
        clock.of(rig)
        large = None
        if crowded:
            large = asyncio.create_task(rig.engine.score(score_job(range(100), LARGE)))
            while rig.model.steps < 3:
                await asyncio.sleep(0)
        waits.append(float(np.quantile(await small_ones(rig, clock, score_job, at_once), 0.99)))
        if large is not None:
            await large
    return waits[1] / waits[0]


@pytest.mark.risk(
    "R2",
    figure="p99 of 200 small requests beside 4,000 items 1.1 to 1.5x idle, on the engine, by the model's clock; over"
    " HTTP 1.21x (620 and 752 ms, with other work on the machine); planted (first come, first served): over "
    "6x and 7.6x",
)
async def test_small_requests_hardly_wait_for_a_large_one(make_rig: MakeRig, score_job: MakeScore) -> None:
    found = await ratio(make_rig, score_job, SMALL)
    print(f"fairness ratio: {found:.2f}")
    assert found <= 3


@pytest.mark.risk("R2", planted=True)
async def test_first_come_first_served_is_seen_to_be_unfair(
    make_rig: MakeRig, score_job: MakeScore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plants the fault: the request that came first gets the whole step."""

    def first_come(self: FairQueue[Any], budget: int, give: Callable[[Any, int, int], int]) -> int:
        left = budget
        for request in sorted(self, key=lambda request: request.arrival):
            left -= max(0, give(request, left, left)) if left > 0 else 0
        return budget - left

    monkeypatch.setattr(FairQueue, "serve", first_come)
    assert await ratio(make_rig, score_job, SMALL) > 6


async def test_no_request_loses_a_turn_because_a_step_was_full(make_rig: MakeRig, score_job: MakeScore) -> None:
    """32 callers of requests that are smaller than a turn, four to a step: none waits much longer than the queue is."""
    clock, waits = Clock(), list[float]()
    rig = make_rig(clock=clock, num_slots=8_192, token_budget=256, prefix_cache=False, max_queued_tokens=10_000)
    loop = asyncio.get_running_loop()

    def forward(kind: Any, runs: Any) -> None:
        """Behind the callers' next requests: on a busy machine the loop that hears of answers may be steps late."""
        for _ in range(8):  # an answer takes a few turns of the loop to become a request
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=10)
        clock.now += 0.5

    rig.model.on_forward = forward

    async def lane() -> None:
        for turn in range(14):
            since = clock.now
            await rig.engine.score(score_job([1, 2, 3], [[n, 7, 8, 9] for n in range(15)]))
            if turn >= 2:  # until then steps are as long as the first ones seemed slow
                waits.append(clock.now - since)

    await asyncio.gather(*(lane() for _ in range(32)))
    assert float(np.median(waits)) >= 3
    assert max(waits) <= 32 / 4 * 0.5 + 1.5


async def expired_rows(rig: Any, clock: Clock, requests: Sequence[Any], seen: list[Step]) -> tuple[int, int]:
    """Runs the requests; how many ended at their deadline, and how many had passed it when their step was planned."""
    ended = await asyncio.gather(*requests, return_exceptions=True)
    late = [one for one in ended if isinstance(one, EngineError)]
    assert {one.code for one in late} <= {ErrorCode.DEADLINE_EXCEEDED}
    return len(late), sum(work.deadline <= step.planned for step in seen for work in step.requests())


@pytest.mark.parametrize("planted", [False, True])
async def test_what_is_past_its_deadline_never_reaches_a_step(
    make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is several times as long as the deadlines. Planted: an engine that looks at deadlines only when it is
    idle."""
    clock, seen = Clock(), list[Step]()
    rig = make_rig(clock=clock, num_slots=8_192, token_budget=256, before_step=seen.append, max_step_s=0.01)
    clock.of(rig)
    if planted:
        expire = rig.engine.core.tracker.expire
        monkeypatch.setattr(rig.engine.core.tracker, "expire", lambda now: None)
    requests = [rig.engine.score(score_job([n], [list(range(30))] * 20, timeout_s=0.5)) for n in range(60)]
    requests += [rig.run(generate_job(range(n, n + 40), max_tokens=20, timeout_s=0.3)) for n in range(60)]
    late, rows = await expired_rows(rig, clock, requests, seen)
    if planted:
        assert rows > 20
        monkeypatch.setattr(rig.engine.core.tracker, "expire", expire)
        return
    assert late > 20
    assert rows == 0
    print(f"{late} of 120 expired, {rows} of them in a step after that")


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [(0.002, 0.0001, 980), (0.25, 0.0, 4_096), (0.08, 0.00005, 1_600), (0.0, 0.001, 100)],
    ids=["a small fixed part", "nothing else", "most of it: twice that", "none"],
)
def test_steps_are_cut_to_their_time_and_not_below_what_pays(fixed: float, each: float, expected: int) -> None:
    """A budget from the mean rate alone would shrink for ever where a step's time does not follow its size."""
    times, budget, by_rate = StepTimeFit(), 4_096, 4_096.0
    for number in range(60):
        times.add(budget, fixed + each * budget)
        by_rate = max(32.0, 0.1 * by_rate / (fixed + each * by_rate))
        budget = int(min(4_096, max(32, times.tokens_within(0.1))))
        assert number < 5 or budget == pytest.approx(expected, rel=0.1)
    assert budget == pytest.approx(expected, rel=0.1)
    if fixed >= 0.1:
        assert by_rate == 32


def test_a_rate_is_learnt_only_from_steps_that_left_work_waiting() -> None:
    found = Throughput(decode_token_cost=4)
    found.step(10**6, 0.0, 1.0, decoded=False, waiting=False)
    for number in range(MIN_STEPS):  # half of the time is between steps, and counts
        assert found.tokens_per_s == 0
        ended = 2.0 + (number + 1) * MIN_S
        found.step(10, ended - MIN_S / 2, ended, decoded=bool(number % 2), waiting=True)
    assert found.tokens_per_s == pytest.approx((10 + 40) / 2 / MIN_S, rel=0.15)
    end = ended
    for number in range(100):
        found.step(100, end + number / 2, end + number / 2 + 0.5, decoded=False, waiting=True)
    assert found.tokens_per_s == pytest.approx(200, rel=0.01)


def taught(stall_s: float) -> tuple[Throughput, float]:
    """By a backlog of ten steps of a hundredth of a second, 8,000 tokens/s, where one step took longer; and when it
    ended."""
    found, now = Throughput(), 0.0
    for number in range(10):
        took = stall_s if number == 4 else 0.01
        found.step(80, now, now + took, decoded=False, waiting=True)
        now += took
    return found, now


@pytest.mark.parametrize("planted", [False, True])
def test_a_machine_that_stood_still_is_not_taken_for_a_slow_one_forever(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers come as often as the rate lets them in, for a second's work at most; no step has more behind it.
    Planted: what is done without a backlog teaches nothing."""
    if planted:
        monkeypatch.setattr(metrics._Rate, "within_memory", 0.0)
    found, now = taught(20.0)
    assert 0 < found.tokens_per_s < 300
    since = now
    while now < since + 10 and found.tokens_per_s < 4_000:
        admitted = int(found.tokens_per_s)
        found.step(admitted, now, now + admitted / 8_000, decoded=False, waiting=False)
        now += max(admitted / 8_000, 0.1)
    assert found.tokens_per_s < 300 if planted else now < since + 10


def test_no_rate_is_above_what_was_done() -> None:
    found, now = taught(0.01)
    assert found.tokens_per_s == 0  # not for a quarter of a second yet
    for _ in range(40):
        found.step(80, now, now + 0.01, decoded=False, waiting=True)
        now += 0.01
    assert found.tokens_per_s == pytest.approx(8_000, rel=0.01)
    for gap in (0.01, 1.0, 100.0):
        for _ in range(20):
            now += gap
            found.step(80, now, now + 0.01, decoded=False, waiting=False)
            now += 0.01
            assert found.tokens_per_s == pytest.approx(8_000, rel=0.01)


@pytest.mark.parametrize("planted", [False, True])
async def test_the_time_after_those_who_waited_have_gone_does_not_count(
    make_rig: MakeRig, score_job: MakeScore, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All callers of a queue hang up, and an hour later the next come. Planted: the hour counts."""
    if planted:
        monkeypatch.setattr(Throughput, "idle", lambda self: None)
    clock, full = Clock(), [[n % 250, *range(9)] for n in range(600)]
    rig = make_rig(clock=clock, token_budget=256)
    clock.of(rig)
    await rig.engine.score(score_job([], full))
    rate = rig.engine.queue().tokens_per_s
    gone = asyncio.create_task(rig.engine.score(score_job([], full)))
    before = rig.model.steps
    while rig.model.steps < before + 3:
        await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    while rig.engine.core.tracker.live or rig.engine.core._in_flight:
        await asyncio.sleep(0)
    for _ in range(2):  # the second turn comes after all of the first
        await rig.engine.core.passed()
    clock.now += 3_600
    for number in range(2):
        await rig.engine.score(score_job([number], full[:50]))
    found = rig.engine.queue().tokens_per_s
    assert found < rate / 2 if planted else found == pytest.approx(rate, rel=0.05)


async def test_a_lone_stream_teaches_no_rate_and_a_backlog_does(
    make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob
) -> None:
    clock = Clock()
    rig = make_rig(clock=clock, token_budget=256)
    clock.of(rig)
    await rig.run(generate_job(range(9), max_tokens=200))
    assert clock.now > 0.4
    assert rig.engine.queue().tokens_per_s == 0
    await rig.engine.score(score_job([], [[n % 250, *range(9)] for n in range(600)]))
    steps = 256 / (0.002 + 0.0001 * 256)
    assert rig.engine.queue().tokens_per_s == pytest.approx(steps, rel=0.1)


def until_queued(rig: Any) -> threading.Event:
    """Rows decode only while something waits, until the event is set."""
    over, forward = threading.Event(), rig.model.on_forward

    def wait(kind: StepKind, runs: Any) -> None:
        while kind is StepKind.DECODE and not rig.engine.queue().queued_tokens and not over.is_set():
            time.sleep(1e-4)
        forward(kind, runs)

    rig.model.on_forward = wait
    return over


async def rate_after_light_load(make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob) -> tuple[float, float]:
    """Two streams, and small scores beside them one at a time: what they teach of the queue's speed, and then what a
    queue of scores was worked off at, over what it taught."""
    clock = Clock()
    rig = make_rig(clock=clock, token_budget=2_048, num_slots=8_192)
    clock.of(rig)
    over = until_queued(rig)
    streams = [asyncio.create_task(rig.run(generate_job(range(n, n + 9), max_tokens=900))) for n in range(2)]
    for _ in range(30):
        await rig.engine.score(score_job([1, 2], [list(range(20))] * 5))
    over.set()
    await asyncio.gather(*streams)
    light, since = rig.engine.queue().tokens_per_s, clock.now
    await rig.engine.score(score_job([], [[n % 250, *range(9)] for n in range(3_000)]))
    return light, 30_000 / (clock.now - since) / rig.engine.queue().tokens_per_s


@pytest.mark.parametrize("planted", [False, True])
async def test_what_only_waits_for_its_turn_beside_few_rows_teaches_no_rate(
    make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: whatever waits counts. A few rows then pass for what the machine can do, and the queue's bound with
    it."""
    if planted:
        monkeypatch.setattr(Scheduler, "_backlog", lambda self: bool(self.prompts or self.scores))
    light, ratio = await rate_after_light_load(make_rig, score_job, generate_job)
    print(f"after light load {light:.0f} tokens/s; a queue goes {ratio:.3f} times as fast as was learnt from it")
    if planted:
        assert 0 < light < 5_000  # the machine does 9,800
    else:
        assert light == 0
        assert ratio == pytest.approx(1, rel=0.02)


async def test_rows_that_wait_for_a_slot_teach_the_rate_of_those_that_run(
    make_rig: MakeRig, generate_job: MakeJob
) -> None:
    """A request that comes while every slot is taken is a queue, though no prefill step left it over."""
    clock = Clock()
    rig = make_rig(clock=clock, max_running=8)
    clock.of(rig)
    over = until_queued(rig)
    first = [asyncio.create_task(rig.run(generate_job([n, 1], max_tokens=400))) for n in range(8)]
    while rig.engine.stats().live_rows < 8 or rig.engine.queue().queued_tokens:
        await asyncio.sleep(0)
    last = asyncio.create_task(rig.run(generate_job([9, 9], max_tokens=400)))
    while not rig.engine.queue().queued_tokens:
        await asyncio.sleep(0)
    over.set()
    await asyncio.gather(*first, last)
    assert rig.engine.queue().tokens_per_s == pytest.approx(4 * 8 / (0.002 + 0.0001 * 8), rel=0.1)


async def test_answers_that_are_awaited_count_in_the_queue_until_their_rows_run(
    make_rig: MakeRig, generate_job: MakeJob
) -> None:
    costs = Costs(decode_token_cost=4, expected_tokens=100)
    rig = make_rig(start=False, max_running=1, costs=costs)
    seen: list[int] = []
    rig.model.on_forward = lambda kind, runs: seen.append(rig.engine.queue().queued_tokens)
    tasks = [asyncio.create_task(rig.run(generate_job([n, 1, 2], max_tokens=m))) for n, m in ((0, 50), (1, 1_000))]
    await rig.queued()
    rig.engine.start()
    await asyncio.gather(*tasks)
    assert seen[0] == 3 + 4 * 50 + 3 + 4 * 100
    assert 3 + 4 * 100 in seen
    assert rig.engine.queue().queued_tokens == 0
    resumed = generate_job([1, 2], max_tokens=9, n=2, emitted=([5, 6], []))
    assert request_cost(resumed, costs) == 2 + 2 + 4 * (7 + 9)


@pytest.mark.parametrize("charged", [True, False])
async def test_a_tenant_with_many_answers_does_not_hold_every_slot(
    make_rig: MakeRig, generate_job: MakeJob, charged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve requests of one tenant, and then one of another: it gets one of the next slots. Planted: prompts alone are
    charged, and each is smaller than a turn."""
    if not charged:
        monkeypatch.setattr(FairQueue, "charge", lambda self, request, tokens: None)
    rig = make_rig(max_running=1, token_budget=256)
    order: list[str] = []

    async def run(tenant: str, number: int) -> None:
        await rig.run(generate_job([number, 1], max_tokens=30, tenant=tenant))
        order.append(tenant)

    many = [asyncio.create_task(run("many", number)) for number in range(12)]
    while rig.model.steps < 5:
        await asyncio.sleep(0)
    await asyncio.gather(run("one", 99), *many)
    place = order.index("one")
    assert place <= 3 if charged else place > 3


async def test_a_solo_jobs_steps_say_nothing_of_the_queues_speed(make_rig: Any, generate_job: Any) -> None:
    """After a death suspects run alone while all others wait: the queue is not as slow as they are."""
    seen: list[tuple[bool, bool]] = []
    rig = make_rig(max_running=1, before_step=lambda step: seen.append((step.isolated, step.waiting)))
    requests = [generate_job(range(5), seed=n, max_tokens=9, isolated=n == 0) for n in range(3)]
    await rig.together(*requests)
    assert {waiting for isolated, waiting in seen if isolated} == {False}
    assert {waiting for isolated, waiting in seen if not isolated} == {False, True}
