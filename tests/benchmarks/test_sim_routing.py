"""The routing simulation: it repeats itself, its figures add up, and it tells policies and faults apart."""

from dataclasses import replace

import pytest

from benchmarks.fleet.sim_routing import POLICIES, SCENARIOS, Scenario, Simulation, compared, plots, scenarios
from deployments.routing import load_tracker
from deployments.routing.replica_selection import ReplicaSelector

SMALL = Scenario(replicas=16, ingresses=4, load=0.85, seconds=3.0)


def run(**fields: object) -> dict[str, float]:
    row = Simulation(replace(SMALL, **fields)).run()  # type: ignore[arg-type]
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def test_what_it_finds_follows_from_the_seed_and_every_request_has_an_end() -> None:
    one, again = Simulation(SMALL), Simulation(SMALL)
    first, second = one.run(), again.run()
    for row in (first, second):
        del row["simulated_s"]
    assert one.latencies and first["requests"] == len(one.latencies) + one.counts["refused"] + one.counts["failed"]
    assert second["requests"] == first["requests"]  # ties are drawn by the service's own generator


def test_policies_differ_as_their_names_say() -> None:
    found = {policy: run(policy=policy) for policy in POLICIES}
    assert found["two choices"]["hit_rate"] < 0.7 * found["service"]["hit_rate"]
    assert found["service"]["p99_ms"] < found["affinity"]["p99_ms"]
    assert found["central"]["p99_ms"] < found["two choices"]["p99_ms"]


@pytest.mark.full
def test_requests_on_a_replica_that_dies_are_sent_again() -> None:
    found = run(fault="dying", seconds=20.0)
    assert found["retries_1000"] > 0
    assert found["failed"] == 0


@pytest.mark.full
def test_a_policy_that_spreads_no_key_is_seen_to_overload_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants two faults in the service's own code: one replica for each key, and queues that are seen to empty."""
    sound = run(replicas=64, ingresses=16, seconds=6.0)
    monkeypatch.setattr(ReplicaSelector, "_best", staticmethod(lambda ahead, *key: 0))
    monkeypatch.setattr(load_tracker, "TREND_S", float("inf"))
    assert run(replicas=64, ingresses=16, seconds=6.0)["p99_ms"] > 2 * sound["p99_ms"]


def test_rows_are_compared_with_the_central_policy_of_their_scenario_and_drawn() -> None:
    rows = [
        {"case": "steady", "policy": policy, "replicas": count, "ingresses": 4, "load": 1.0}
        | {"hit_rate": 0.5 if policy == "central" else 0.4, "p99_ms": 100.0 * count}
        for policy in POLICIES
        for count in (8, 16)
    ]
    found = compared(rows)  # type: ignore[arg-type]
    assert {row["hits_of_central"] for row in found} == {0.8, 1.0}
    assert {row["p99_of_central"] for row in found} == {1.0}
    assert all("<svg" in text and "replicas" in text for text in plots(found).values())


def test_every_fault_is_simulated_by_every_policy() -> None:
    found = scenarios(0.85, 1000)
    assert {scenario.replicas for scenario in found} >= {8, 512}
    assert {scenario.ingresses for scenario in found} >= {4, 64}
    assert len({(scenario.fault, scenario.policy) for scenario in found}) == len(SCENARIOS) * len(POLICIES)
