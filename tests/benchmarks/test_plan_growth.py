"""What one plan does beside thousands of waiting requests, counted: requests looked at, turns, searches for slots."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.service.bench_growth import Planner
from engine.scheduler import fair_queue, score_batcher
from engine.scheduler.fair_queue import MAX_FRUITLESS, TURNS, FairQueue, _PriorityClass
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.score_batcher import MAX_NO_ROOM
from tests.engine.scheduler.test_fair_queue import Job

BUDGET, TENANTS = 512, 300
QUANTUM = BUDGET // TURNS


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Counts the calls of a method."""
    calls, method = [0], getattr(owner, name)

    def count(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        return method(*args, **named)

    monkeypatch.setattr(owner, name, count)
    return calls


def queue_of(tenants: int, debt: int = 0) -> Any:
    queue: Any = FairQueue(QUANTUM)
    for tenant in range(tenants):
        job = Job(arrival=tenant, tenant=tenant, queued=10**6)
        queue.add(job)
        queue.charge(job, debt)
    return queue


def turns(monkeypatch: pytest.MonkeyPatch, debt: int) -> int:
    queue = queue_of(TENANTS, debt)
    calls = counted(monkeypatch, FairQueue, "_turn")
    assert queue.serve(BUDGET, Job.take) == BUDGET
    return calls[0]


def test_what_tenants_owe_costs_a_step_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, 1000 * QUANTUM) <= TENANTS + BUDGET // QUANTUM


def test_a_turn_a_quantum_would_cost_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the fault: a tenant in debt has a turn in every round."""
    wait: Callable[[Any, Any], None] = _PriorityClass.wait

    def one_round(group: Any, tenant: Any) -> None:
        flow = group.flows[tenant]
        owed, flow.deficit = flow.deficit, 0
        wait(group, tenant)
        flow.deficit = owed

    monkeypatch.setattr(_PriorityClass, "wait", one_round)
    assert turns(monkeypatch, 20 * QUANTUM) > 10 * TENANTS


def test_debts_are_paid_in_full_before_the_next_turn() -> None:
    """One tenant owes as much as three others get in ten steps: it gets nothing until then."""
    queue: Any = FairQueue(QUANTUM)
    jobs = [Job(arrival=tenant, tenant=tenant, queued=10**6) for tenant in range(4)]
    for job in jobs:
        queue.add(job)
    queue.charge(jobs[0], 10 * BUDGET // 3)
    for _ in range(9):
        queue.serve(BUDGET, Job.take)
    assert jobs[0].used == 0
    for _ in range(91):
        queue.serve(BUDGET, Job.take)
    assert jobs[0].used + 10 * BUDGET // 3 == pytest.approx(jobs[1].used, abs=BUDGET)


def looked_at(requests: int) -> int:
    queue, looks = queue_of(requests), 0

    def give(job: Job, allowance: int, left: int) -> int:
        nonlocal looks
        looks += 1
        return 0

    queue.serve(BUDGET, give)
    return looks


def test_a_step_looks_at_a_bounded_number_of_requests_that_cannot_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(3000) == MAX_FRUITLESS
    monkeypatch.setattr(fair_queue, "MAX_FRUITLESS", 10**9)  # the planted counterpart
    assert looked_at(3000) == 3000


def full_pool(requests: int) -> Planner:
    """No pool slot is free but those that requests hold, and each request is of a tenant of its own."""
    planner = Planner(2_000, occupied=1_700)
    for number in range(requests):
        planner.score(f"t{number}", [number % 1000, number // 1000, *range(60)])
    return planner


def searches(monkeypatch: pytest.MonkeyPatch, requests: int) -> tuple[int, int]:
    """Returns how often one plan looks for free slots, and how many requests are asked to release theirs."""
    planner = full_pool(requests)
    planner.plan()
    allocated = counted(monkeypatch, planner.kv_cache, "allocate")
    released = counted(monkeypatch, planner.scheduler.score_batcher, "release")
    planner.plan()
    return allocated[0], released[0]


def test_a_full_pool_is_searched_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, released = searches(monkeypatch, 1500)
    assert allocated <= MAX_NO_ROOM + 8
    assert released <= 2 * MAX_NO_ROOM + 16


def test_without_the_bound_every_request_would_search_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted counterpart."""
    monkeypatch.setattr(score_batcher, "MAX_NO_ROOM", 10**9)
    assert searches(monkeypatch, 400)[0] > 300


def test_every_request_is_served_in_a_full_pool() -> None:
    """More tenants than a plan tries stand before the request that arrived first."""
    planner = full_pool(3 * MAX_NO_ROOM)
    for _ in range(12 * MAX_NO_ROOM):
        if planner.scheduler.scores:
            planner.plan()
    assert not planner.scheduler.scores


def prefill_behind(monkeypatch: pytest.MonkeyPatch, *, planted: bool) -> bool:
    """A sequence in the middle of its prompt stands behind more tenants than a plan looks at, and none finds room."""
    monkeypatch.setattr(fair_queue, "MAX_FRUITLESS", 8)
    planner = Planner(2_000, occupied=900, budget=256)
    planner.generation("first", [1] * 1000)
    planner.plan()
    for number in range(50):
        planner.generation(f"t{number}", [number] * 900)
    prompts = planner.scheduler.prompts
    group = prompts._classes[0]
    group.begin(256 // TURNS)
    group.next_turns()
    group.turns["first"] = group.turns.pop("first")  # behind all others
    if planted:
        monkeypatch.setattr(Scheduler, "_prefill_admitted", lambda self, budget, give: 0)
    return planner.scheduler.plan(0.0) is not None


def test_an_admitted_prompt_goes_on_behind_many_that_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefill_behind(monkeypatch, planted=False)


def test_else_it_would_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted counterpart."""
    assert not prefill_behind(monkeypatch, planted=True)
