"""Tests what is made of requests: quantiles, rates, quartiles over runs, and lateness that nothing can hide."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from deployments.cli.bench import load_generator, results, workloads
from deployments.cli.bench.results import RequestTiming
from deployments.cli.bench.workloads import WORKLOADS, ServedModel


def sample(due_s: float, took_s: float, status: int = 200, late_s: float = 0.0) -> RequestTiming:
    return RequestTiming(due_s=due_s, sent_s=due_s + late_s, done_s=due_s + late_s + took_s, status=status)


def test_a_service_that_holds_up_its_callers_is_seen_to() -> None:
    """It stands still for a second, and a caller with one connection sends what was due by then afterwards. Measured
    from the moment of sending, the planted fault, there would be nothing to see."""
    held = [sample(0.01 * number, 0.001, late_s=max(0.0, 1.0 - 0.01 * number)) for number in range(100)]
    assert results.summarise(held, 1.0, 100.0).p50_ms == pytest.approx(506, abs=10)
    forgiven = [replace(one, due_s=one.sent_s) for one in held]
    assert results.summarise(forgiven, 1.0, 100.0).p99_ms == pytest.approx(1)


def test_a_run_counts_what_was_answered_in_time_refused_and_broken() -> None:
    found = results.summarise(
        [sample(0, 0.05), sample(1, 0.2), sample(2, 0, 429), sample(3, 0, 503), sample(3, 0, 500), sample(3, 2, 0)],
        4.0,
        100.0,
    )
    assert (found.requests, found.rejected, found.failed) == (6, 2, 2)
    assert found.answered_per_s == pytest.approx(2 / 5) and found.good_per_s == pytest.approx(1 / 5)
    assert found.offered_per_s == 1.5


def test_answers_that_come_after_the_last_request_stretch_the_run() -> None:
    assert results.summarise([sample(0, 10.0)], 1.0, 1e6).answered_per_s == pytest.approx(0.1)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.9, 0.99])
def test_quantiles_are_those_of_numpy(count: int, part: float) -> None:
    values = sorted(random.Random(count).random() for _ in range(count))
    assert results.quantile(values, part) == pytest.approx(float(np.quantile(values, part)))


def test_a_run_of_nothing_but_failures_has_no_latency_and_spoils_no_median() -> None:
    bad = results.summarise([sample(0, 1, 500)], 1.0, 100.0)
    good = results.summarise([sample(0, 0.5)], 1.0, 1000.0)
    assert math.isnan(bad.p50_ms)
    found = results.spreads([bad, good, good])
    assert found["p50_ms"].median == pytest.approx(500) and found["failed"].median == 0
    assert "first_p50_ms" not in found


def test_arrivals_are_a_poisson_process_and_the_same_for_a_seed() -> None:
    due = load_generator.poisson(200.0, 50.0, random.Random(3))
    assert due == load_generator.poisson(200.0, 50.0, random.Random(3)) == sorted(due)
    gaps = np.diff([0.0, *due])
    assert len(due) == pytest.approx(10_000, rel=0.05) and due[-1] < 50
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)  # 0 for a metronome, the planted fault
    assert (np.full(100, 0.005).std() / 0.005) < 0.5
    assert len(load_generator.poisson(0.001, 1.0, random.Random(1))) == 1


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("vocab", [3, 17, 300, 32_003])
def test_a_workload_asks_for_ids_of_the_model_and_never_twice_the_same(name: str, vocab: int) -> None:
    draw = random.Random(5)
    asked = [WORKLOADS[name](ServedModel("m", vocab), draw) for _ in range(40)]
    assert {one.path for one in asked} <= {"/generative_scoring", "/v1/rerank", "/v1/completions"}
    if vocab > 17:
        assert len({one.data for one in asked}) == len(asked)
    ids = [number for one in asked for number in _numbers(one)]
    assert all(0 <= number < vocab for number in ids)
    assert (len({one.workload for one in asked}) > 1) is (name == "mixed")


def _numbers(one: workloads.BenchRequest) -> list[int]:
    import json

    body = json.loads(one.data)
    found = list(body.get("prompt", []))
    if one.workload == "score":
        found += body["query"] + body["label_token_ids"] + [number for item in body["items"] for number in item]
    return found
