"""How many replicas the work needs: the policy with a fake context, and what a replica reports."""

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.app import SCALING_POLICY, build
from deployments.autoscaling import TokenPolicy
from deployments.config.app_args import AppArgs
from deployments.replica.utilization import Utilization
from engine.metrics import EngineStats

RATE = 1000.0
LARGEST = 32


class Context:
    """Holds what the policy reads of Serve's own."""

    def __init__(self, running: int, target: int | None = None, /, **figures: list[float]) -> None:
        self.current_num_replicas = running
        self.target_num_replicas = running if target is None else target
        self.aggregated_metrics = {
            name: {f"r{i}": value for i, value in enumerate(values)} for name, values in figures.items()
        }


def wanted(running: int, queued: float = 0.0, busy: float = 0.0, rate: float = RATE) -> int:
    """Replicas, for `queued` tokens in all and every replica as busy."""
    each = {"queued_tokens": [queued / running] * running, "tokens_per_s": [rate] * running, "busy": [busy] * running}
    return count(Context(running, **each))


def count(context: Context) -> int:
    found, state = TokenPolicy(target_drain_s=2.0, target_utilization=0.8)(context)
    assert state == {}
    return found


def test_an_idle_service_wants_one_replica() -> None:
    assert [wanted(n) for n in (1, 3, 17)] == [1, 1, 1]


@pytest.mark.parametrize(("queued", "replicas"), [(1, 1), (2000, 1), (2001, 2), (4000, 2), (33_000, 17)])
def test_enough_replicas_for_the_queue_to_be_done_in_time(queued: float, replicas: int) -> None:
    assert {wanted(n, queued=queued) for n in (1, 3, 17)} == {replicas}


@pytest.mark.parametrize(
    ("running", "busy", "replicas"), [(1, 0.8, 1), (1, 0.81, 2), (3, 1.0, 4), (4, 0.4, 2), (17, 0.1, 3)]
)
def test_enough_replicas_for_each_to_be_busy_as_wanted(running: int, busy: float, replicas: int) -> None:
    assert wanted(running, busy=busy) == replicas


def test_replicas_exactly_as_busy_as_wanted_stay() -> None:
    """3 * 0.8 / 0.8 is above 3 in floats, and a plain ceiling would add a replica for ever."""
    assert all(wanted(running, busy=0.8) == running for running in range(1, 1000))


def test_the_need_for_a_plain_ceiling_is_real() -> None:
    assert any(math.ceil(n * 0.8 / 0.8) > n for n in range(1, 1000))


def test_the_larger_need_counts() -> None:
    assert wanted(2, queued=10_000, busy=0.1) == 5
    assert wanted(2, queued=10, busy=1.0) == 3


def test_nothing_changes_before_the_first_report() -> None:
    assert count(Context(1, 3)) == 3
    assert count(Context(0, 0)) == 1


def test_a_replica_that_has_not_reported_is_like_the_others() -> None:
    two_of_four = Context(4, queued_tokens=[0.0, 0.0], tokens_per_s=[RATE, RATE], busy=[0.8, 0.8])
    assert count(two_of_four) == 4


def test_a_queue_of_unknown_speed_changes_nothing() -> None:
    """A replica that has made no step yet: its queue is work, but its size is unknown."""
    assert wanted(2, queued=1e9, busy=0.5, rate=0.0) == 2


def test_a_new_replica_without_a_rate_does_not_slow_the_mean() -> None:
    mixed = Context(2, queued_tokens=[8000.0, 0.0], tokens_per_s=[RATE, 0.0], busy=[1.0, 0.0])
    assert count(mixed) == 4


# Serve's use of it.


def options_of(**sections: Any) -> Any:
    ingress = build(AppArgs.model_validate({"model": {"path": "toy"}} | sections))._bound_deployment
    return ingress.init_args[1]._bound_deployment._deployment_config


def test_without_a_largest_count_the_count_is_fixed() -> None:
    found = options_of(replica={"count": 3})
    assert (found.num_replicas, found.autoscaling_config) == (3, None)


def test_bounds_delays_and_targets_reach_serve() -> None:
    given = {
        "max_replicas": 5,
        "target_drain_s": 4.0,
        "target_utilization": 0.5,
        "upscale_delay_s": 7,
        "downscale_delay_s": 70,
    }
    found = options_of(replica={"count": 2}, autoscaling=given | {"look_back_period_s": 11}).autoscaling_config
    assert isinstance(found, AutoscalingConfig)
    assert (found.min_replicas, found.max_replicas, found.initial_replicas) == (2, 5, None)
    assert (found.upscale_delay_s, found.downscale_delay_s, found.look_back_period_s) == (7, 70, 11)
    assert found.policy.policy_kwargs == {"target_drain_s": 4.0, "target_utilization": 0.5}


class Unpickler(pickle.Unpickler):
    """Unpickles like a process in which our package is not installed."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "deployments":
            raise ModuleNotFoundError(module)
        return super().find_class(module, name)


def test_the_policy_travels_by_value() -> None:
    """Serve's controller may run where our package is not."""
    policy = AutoscalingPolicy(
        policy_function=SCALING_POLICY, policy_kwargs={"target_drain_s": 2.0, "target_utilization": 0.8}
    )
    found = Unpickler(io.BytesIO(policy.get_serialized_policy_def())).load()
    context = Context(1, queued_tokens=[6000.0], tokens_per_s=[RATE], busy=[1.0])
    assert found(**policy.policy_kwargs)(context) == (3, {})


def test_planted_policy_that_needs_our_package_is_seen() -> None:
    with pytest.raises(ModuleNotFoundError, match="deployments"):
        Unpickler(io.BytesIO(pickle.dumps(TokenPolicy))).load()


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"max_replicas": 0}, "max_replicas"),
        ({"max_replicas": 1}, "max_replicas"),  # under replica.count
        ({"target_utilization": 1.01}, "target_utilization"),
        ({"target_utilization": 0}, "target_utilization"),
        ({"target_drain_s": 0}, "target_drain_s"),
        ({"target_drain_s": float("inf")}, "target_drain_s"),
        ({"upscale_delay_s": -1}, "upscale_delay_s"),
        ({"look_back_period_s": 10}, "look_back_period_s"),  # a replica reports every 10 s
        ({"min_replicas": 1}, "min_replicas"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(section: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        AppArgs.model_validate({"replica": {"count": 2}, "autoscaling": section})


# Reports of a replica.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def stats(replica_backend: Callable[..., Any]) -> EngineStats:
    """Returns the statistics of a replica that has done nothing."""
    found: EngineStats = (await replica_backend()).server.engine.stats()
    return replace(found, step_seconds=dict.fromkeys(found.step_seconds, 0.0), live_rows=0, kv_slots_used=0)


def after(stats: EngineStats, live_rows: int = 0, **seconds: float) -> EngineStats:
    return replace(stats, step_seconds=stats.step_seconds | seconds, live_rows=live_rows)


async def test_steps_of_prompts_and_scores_fill_their_time(stats: EngineStats) -> None:
    clock = Clock()
    usage = Utilization(LARGEST, clock)
    clock.now += 10
    assert usage.read(after(stats, score=2.0, prefill=3.0))["busy"] == pytest.approx(0.5)
    clock.now += 10
    assert usage.read(after(stats, score=3.0, prefill=3.0))["busy"] == pytest.approx(0.1)


async def test_steps_of_decoding_count_by_their_rows(stats: EngineStats) -> None:
    clock = Clock()
    usage = Utilization(LARGEST, clock)
    clock.now += 10
    assert usage.read(after(stats, live_rows=8, decode=6.0, verify=2.0))["busy"] == pytest.approx(0.8 * 8 / 32)


async def test_a_full_pool_is_busy_whatever_the_time_says(stats: EngineStats) -> None:
    clock = Clock()
    usage = Utilization(LARGEST, clock)
    clock.now += 10
    found = usage.read(replace(stats, kv_slots_used=90, kv_slots_cached=4, kv_slots_free=6))
    assert found["busy"] == pytest.approx(0.9)


def after_long_answers(stats: EngineStats, streams: int, by_rows: bool) -> int:
    """Replicas at which the policy settles, from one, under so many endless streams spread over all."""
    replicas = 1
    for _ in range(50):
        rows = streams / replicas
        clock = Clock()
        usage = Utilization(LARGEST if by_rows else 1, clock)
        clock.now += 10
        busy = usage.read(after(stats, live_rows=math.ceil(rows), decode=10.0 * min(1.0, rows)))["busy"]
        replicas = wanted(replicas, busy=busy)
    return replicas


async def test_a_few_long_answers_call_for_few_replicas(stats: EngineStats) -> None:
    assert after_long_answers(stats, streams=16, by_rows=True) == 1
    assert after_long_answers(stats, streams=64, by_rows=True) <= 4


async def test_planted_time_alone_calls_for_a_replica_a_stream(stats: EngineStats) -> None:
    assert after_long_answers(stats, streams=16, by_rows=False) > 16


async def test_a_replica_reports_what_it_has_done(replica_backend: Callable[..., Any]) -> None:
    from tests.deployments.replica.test_replica import score_task

    server = (await replica_backend()).server
    server.record_autoscaling_stats()
    await server.score(score_task())
    found = server.record_autoscaling_stats()
    assert set(found) == {"queued_tokens", "tokens_per_s", "busy"}
    assert all(isinstance(value, float) for value in found.values())
    assert 0 < found["busy"] <= 1 and found["tokens_per_s"] > 0 and found["queued_tokens"] == 0
