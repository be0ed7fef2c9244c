"""Overload, for seconds: an ingress and two replicas in process, whose steps take a fixed time whatever they hold.

The service under more than it can do must do as much as it can, refuse the rest immediately, and finish what it took.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.service.bench_overload import is_sound
from benchmarks.support.open_loop import Reply, capacity, fire, summary
from engine.scheduler.request_tracker import RequestTracker

pytestmark = pytest.mark.slow
SECONDS = 20.0
STEP_S = 0.5
BUDGET = 256
BODY = {"query": [1, 2, 3], "items": [[n, 7, 8, 9] for n in range(15)], "label_token_ids": [65, 66]}
COST = 3 + 15 * 4  # less than a turn of the fair queue
DEADLINE_S = 10.0


MOST = 2 * BUDGET / STEP_S / COST  # requests a second that the steps hold


async def overload(make: Callable[..., Any], **engine: Any) -> dict[float, Any]:
    """By load what became of the requests."""
    fleet = await make(
        2,
        engine={"kv_slots": 8192, "token_budget": BUDGET, "prefix_cache": False} | engine,
        deadlines={"scoring_s": DEADLINE_S},
    )
    for model in fleet.models:
        model.step_seconds = STEP_S

    async def post(number: int) -> Reply:
        found = await fleet.client.post("/generative_scoring", BODY)
        return Reply(found.status_code, is_sound(found.status_code, found.headers, found.content))

    most = await capacity(post, [COST], 16, 6.0)
    assert most > 0.5 * MOST  # or the machine is too slow to tell
    rows = {}
    for load in (1.0, 4.0):
        rows[load] = summary(f"{load:g}x", await fire(post, [COST], load * MOST, SECONDS, seed=3), SECONDS)
        print(json.dumps(rows[load]))
        await asyncio.sleep(1)
    return rows


@pytest.mark.risk("R1")
async def test_goodput_does_not_fall_when_four_times_too_much_is_asked(make_fleet: Callable[..., Any]) -> None:
    rows = await overload(make_fleet)
    assert rows[4.0]["goodput_per_s"] >= 0.9 * rows[1.0]["goodput_per_s"]
    for row in rows.values():
        assert (row["timed_out"], row["other_errors"], row["unsound_refusals"]) == (0, 0, 0)
    assert rows[4.0]["refused_percent"] > 50
    late_ms = rows[4.0]["generator_late_p99_ms"]  # the same loop: what it is late itself is no fault of the gates
    assert rows[4.0]["refusal_p50_ms"] < max(50, late_ms)


@pytest.mark.risk("R1", planted=True)
async def test_a_service_that_takes_everything_is_seen_to_collapse(
    make_fleet: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted counterpart: no gate. Most of what is accepted ends at its deadline."""
    monkeypatch.setattr(RequestTracker, "max_queued_tokens", 1 << 40)
    monkeypatch.setattr("deployments.routing.admission.Admission.admit", lambda self, task, shares=1: None)
    monkeypatch.setattr("deployments.routing.admission.Admission.check_open", lambda self, timeout_s, tenant: None)
    rows = await overload(make_fleet)
    assert rows[4.0]["refused_percent"] < 5
    assert rows[4.0]["timed_out"] > 200
    assert rows[4.0]["goodput_per_s"] < 0.8 * MOST
