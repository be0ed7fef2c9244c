"""Every metric moves, label sets are closed, and processes merge into one exposition with exact sums."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from deployments.config.app_args import AppArgs
from deployments.config.sections import MetricsArgs
from deployments.observability import exposition
from deployments.observability.exposition import LoopHistogram, Snapshot, merge, render
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.observability.replica_metrics import ReplicaMetrics
from deployments.observability.scrape import MetricsScraper
from deployments.protocol import GenerateCall
from deployments.replica.replica import ReplicaServer
from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.requests import GenerateRequest, ScoreRequest, ScoreResult
from gpu_sampler.sampling_params import SamplingParams
from tests.support import toy_model


def values(families: Sequence[Metric]) -> dict[str, float]:
    """Sums over labels, by sample name; summaries and states keep their labels."""
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            keys = [sample.name, *(f"{sample.name}{{{value}}}" for value in sample.labels.values())]
            for key in keys:
                found[key] = found.get(key, 0.0) + sample.value
    return found


def moved(before: Sequence[Metric], after: Sequence[Metric]) -> set[str]:
    old, new = values(before), values(after)
    return {name for name, value in new.items() if value != old.get(name, 0.0)}


MOVES: dict[str, Callable[[IngressMetrics], None]] = {  # a metric without an entry has no test that it moves
    "assay_requests": lambda metrics: metrics.request_ended("/v1/completions", 200, "", 0.1),
    "assay_request_seconds": lambda metrics: metrics.request_ended("/v1/completions", 200, "", 0.1),
    "assay_stage_seconds": lambda metrics: metrics.stage("parse", 0.1),
    "assay_inflight_requests": lambda metrics: metrics.request_started(),
    "assay_inflight_body_bytes": lambda metrics: metrics.body(17),
    "assay_open_streams": lambda metrics: metrics.streams(1),
    "assay_fanout_shards": lambda metrics: metrics.fanned_out(3),
    "assay_micro_batch_requests": lambda metrics: metrics.called(3),
    "assay_time_to_first_token_seconds": lambda metrics: metrics.first_token("/v1/completions", 0.1),
    "assay_mean_inter_token_seconds": lambda metrics: metrics.token_gap("/v1/completions", 0.1),
    "assay_items": lambda metrics: metrics.items("/generative_scoring", 3, 0),
    "assay_truncated_items": lambda metrics: metrics.items("/generative_scoring", 3, 1),
    "assay_label_mass": lambda metrics: metrics.label_mass("/generative_scoring", np.array([0.5, 1.0])),
    "assay_rejected": lambda metrics: metrics.request_ended("/v1/completions", 429, "overloaded", 0.1),
    "assay_disconnects": lambda metrics: metrics.disconnected("stream"),
    "assay_auth_failures": lambda metrics: metrics.auth_failed("missing"),
    "assay_retries": lambda metrics: metrics.retried("died"),
    "assay_resumes": lambda metrics: metrics.resumed("handoff"),
    "assay_retry_budget_exhausted": lambda metrics: metrics.retry_budget_spent("died"),
    "assay_quarantine_entries": lambda metrics: metrics.quarantined(1),
    "assay_scrape_missing": lambda metrics: metrics.missing(1),
    "assay_canary_failures": lambda metrics: metrics.canary("mismatch", 0.1),
    "assay_canary_seconds": lambda metrics: metrics.canary(None, 0.1),
    "assay_ready_replicas": lambda metrics: metrics.readiness(2, 1),
    "assay_required_replicas": lambda metrics: metrics.readiness(2, 1),
    "assay_event_loop_lag_seconds": lambda metrics: metrics.loop_lagged(0.01),
    "assay_handle_calls": lambda metrics: metrics.sent_by_handle(),
    "assay_links": lambda metrics: setattr(metrics.links, "links", 1),
    "assay_link_calls": lambda metrics: setattr(metrics.links, "calls", 1),
    "assay_link_frames": lambda metrics: setattr(metrics.links, "frames_sent", 1),
    "assay_link_bytes": lambda metrics: setattr(metrics.links, "bytes_received", 1),
    "assay_link_losses": lambda metrics: metrics.links.losses.update(died=1),
}


def test_every_metric_of_an_ingress_has_a_test_that_moves_it() -> None:
    names = {family.name for family in IngressMetrics().families()} - {"assay_process_resident_bytes"}
    assert names == MOVES.keys()


@pytest.mark.parametrize("name", MOVES)
def test_metric_of_an_ingress_moves(name: str) -> None:
    metrics = IngressMetrics()
    before = metrics.families()
    MOVES[name](metrics)
    families = metrics.families()
    (family,) = (family for family in families if family.name == name)
    assert {sample.name for sample in family.samples} & moved(before, families)


def test_sums_are_exact() -> None:
    metrics = IngressMetrics()
    for _ in range(200):
        metrics.stage("parse", 0.0042)
    assert abs(values(metrics.families())["assay_stage_seconds_sum"] - 0.84) < 1e-9


@pytest.mark.parametrize("label", ["route", ""])
def test_histogram_of_the_loop_has_the_buckets_of_the_client_library(label: str) -> None:
    values = np.random.default_rng(3).uniform(0, 1, 257).round(2)  # some on a bucket's bound
    bounds = (0.25, 0.5, 0.99)
    tally = LoopHistogram(CollectorRegistry(), "assay_x", "X.", bounds, label)
    of = "/rerank" if label else ""
    tally.observe_all(values[:100], of)
    for value in values[100:].tolist():
        tally.observe(value, of)
    plain = Histogram("assay_x", "X.", [label] if label else [], buckets=bounds, registry=None)
    for value in values:
        (plain.labels(of) if label else plain).observe(value)
    (family,), (expected,) = tally.collect(), plain.collect()
    found, wanted = (dict(_by_labels(one.samples)) for one in (family, expected))
    wanted = {key: value for key, value in wanted.items() if key[0] != "assay_x_created"}
    assert found.keys() == wanted.keys()
    assert all(abs(found[key] - wanted[key]) < 1e-9 for key in found)


def _by_labels(samples: Sequence[Any]) -> Iterator[tuple[tuple[str, object], float]]:
    for sample in samples:
        yield (sample.name, frozenset(sample.labels.items())), sample.value


def series(metrics: IngressMetrics) -> int:
    return sum(len(family.samples) for family in metrics.families())


@pytest.mark.risk("S10")
def test_strangers_make_no_series() -> None:
    metrics = IngressMetrics()

    def everything(text: str, status: int) -> None:
        metrics.request_started()
        metrics.request_ended(text, status, text, 0.1)
        metrics.first_token(text, 0.1)
        metrics.items(text, 1, 0)
        metrics.disconnected(text)  # type: ignore[arg-type]
        metrics.retried(text)
        metrics.retry_budget_spent(text)
        metrics.resumed(text)
        metrics.canary(text, 0.1)
        metrics.token_gap(text, 0.1)
        metrics.label_mass(text, np.array([0.1]))
        metrics.auth_failed(text)  # type: ignore[arg-type]

    everything("first", 999)
    before = series(metrics)
    for number in range(5000):
        everything(f"/{number}", 600 + number)
    assert series(metrics) == before


async def make_server(toy_args: dict[str, Any], slots: int, **engine: Any) -> tuple[ReplicaServer, toy_model.ToyModel]:
    model = toy_model.ToyModel(num_slots=slots, max_model_len=128)
    server = ReplicaServer(AppArgs.model_validate(toy_args | {"engine": engine}), "r1")
    await server.start(model)
    return server, model


def generate(prompt: list[int], **params: Any) -> GenerateCall:
    ids = np.array(prompt, np.int32)
    return (GenerateRequest(request_id="g", prompt=ids, params=SamplingParams(**params), seed=5),)


class Held:
    """A toy whose first step waits for `go`, and whose first decode step waits for `on`: a test looks in between."""

    def __init__(self, model: toy_model.ToyModel) -> None:
        self.go, self.on, self.decoding = threading.Event(), threading.Event(), threading.Event()
        model.on_forward = self._before

    def _before(self, kind: StepKind, runs: Sequence[ScheduledSequence]) -> None:
        self.go.wait(30)
        if kind is StepKind.DECODE:
            self.decoding.set()
            self.on.wait(30)


async def crowd(server: ReplicaServer, model: toy_model.ToyModel) -> tuple[Metric, ...]:
    """Nine generations in a pool that holds two of them to their ends; what is reported while one of them waits."""
    held = Held(model)
    many = [
        asyncio.create_task(server.generate(generate(list(range(30 + i, 50 + i)), max_tokens=60))) for i in range(9)
    ]
    async with asyncio.timeout(30):
        while server.engine.core.tracker.queued_tokens < 9 * 20:
            await asyncio.sleep(0.001)
        held.go.set()
        assert await asyncio.to_thread(held.decoding.wait, 20)
        during = server.metric_families()
        held.on.set()
        await asyncio.gather(*many)
    return during


REPLICA_MOVES = {  # by family: samples that must change; a family without an entry has no test that it moves
    "assay_queue_wait_seconds": {"assay_queue_wait_seconds_count"},
    "assay_failed_requests": {
        "assay_failed_requests_total{step_failed}",
        "assay_failed_requests_total{nonfinite_logits}",
    },
    "assay_queued_tokens": {"assay_queued_tokens"},
    "assay_queued_requests": {"assay_queued_requests"},
    "assay_unfinished_requests": {"assay_unfinished_requests"},
    "assay_running_sequences": {"assay_running_sequences"},
    "assay_step_heartbeat_seconds": {"assay_step_heartbeat_seconds"},
    "assay_tokens_per_second": {"assay_tokens_per_second"},
    "assay_drain_tokens_per_second": set(),  # while work waits for a quarter of a second: test_admission.py
    "assay_kv_slots": {f"assay_kv_slots{{{state}}}" for state in ("used", "cached", "free")},
    "assay_tokens": {f"assay_tokens_total{{{kind}}}" for kind in ("prompt", "cached", "computed", "generated")},
    "assay_step_seconds": {f"assay_step_seconds_sum{{{kind}}}" for kind in ("prefill", "decode", "score")},
    "assay_step_tokens": {f"assay_step_tokens_count{{{kind}}}" for kind in ("prefill", "decode", "score")},
    "assay_step_sequences": {f"assay_step_sequences_sum{{{kind}}}" for kind in ("prefill", "decode", "score")},
    "assay_schedule_seconds": {"assay_schedule_seconds_count", "assay_schedule_seconds_sum"},
    "assay_failed_steps": {"assay_failed_steps_total"},
    "assay_kv_evictions": {"assay_kv_evictions_total"},
    "assay_preemptions": {"assay_preemptions_total"},
    "assay_nonfinite_rows": {"assay_nonfinite_rows_total"},
    "assay_sampler_rows": {f"assay_sampler_rows_total{{{branch}}}" for branch in ("greedy", "plain", "candidates")},
    "assay_sampler_flags": {"assay_sampler_flags_total{bad_value}"},
    "assay_lm_head_seconds": set(),  # of a model with a head: below
    "assay_graph_replays": set(),  # of a CUDA device: from the model's own count, below
    "assay_warmup_seconds": {"assay_warmup_seconds{total}"},
    "assay_build_info": {"assay_build_info{toy}"},
    **{f"assay_link{name}": set() for name in ("s", "_calls", "_frames", "_bytes", "_losses")},  # test_link.py
    "assay_process_resident_bytes": set(),  # whatever the allocator does
    **{f"assay_spec_{name}": set() for name in ("drafts", "unknown_drafts", "verified_tokens")},  # elsewhere
    **{f"assay_spec_{name}": set() for name in ("accepted_tokens", "seconds")},  # elsewhere
}


async def test_every_metric_of_a_replica_moves(toy_args: dict[str, Any]) -> None:
    """A pool of 160 slots holds two of these rows to their ends, not eight: rows are evicted and preempted."""
    server, model = await make_server(toy_args, 160, max_running=8, admission_tokens=1)
    before = server.metric_families()
    during = await crowd(server, model)
    await server.generate(generate([5, toy_model.RAISE]))
    await server.generate(generate([5, toy_model.NAN]))
    await server.generate(generate([5, 6], temperature=0, logprobs=1))
    await server.generate(generate([5, 6], top_k=5, top_p=0.9))
    rows = np.arange(12, dtype=np.int32)
    task = ScoreRequest(
        request_id="s", prefix=rows, ids=rows, starts=np.array([0, 5, 12], np.int32), labels=rows[:3], full=True
    )
    await server.score(task)
    after = server.metric_families()
    server.stop()
    assert {family.name for family in after} == REPLICA_MOVES.keys()
    constant = {name for name in ("assay_warmup_seconds{total}", "assay_build_info{toy}") if values(after)[name] > 0}
    changed = moved(before, after) | moved(before, during) | constant
    assert set().union(*REPLICA_MOVES.values()) <= changed


async def test_a_real_model_tells_of_padding_and_of_its_head(toy_args: dict[str, Any]) -> None:
    """A step of one token is padded to two; a score's time has a part behind the last layer."""
    builtin = {"model": {"path": "builtin", "device": "cpu"}}
    server = ReplicaServer(AppArgs.model_validate(toy_args | builtin), "r1")
    await server.start()
    before = server.metric_families()
    await server.generate(generate([5, 6, 7], max_tokens=3, temperature=0))
    rows = np.arange(12, dtype=np.int32)
    starts = np.array([0, 5, 12], np.int32)
    reply = await server.score(ScoreRequest(request_id="s", prefix=rows, ids=rows, starts=starts, labels=rows[:3]))
    model: Any = server.engine.model
    model.graph_replays += 3
    after = server.metric_families()
    server.stop()
    assert isinstance(reply, ScoreResult)
    assert 0 < reply.head_s < reply.compute_s
    old, new = values(before), values(after)
    assert new["assay_tokens_total{padding}"] - old["assay_tokens_total{padding}"] == 2
    assert new["assay_lm_head_seconds_total"] - old["assay_lm_head_seconds_total"] == pytest.approx(reply.head_s)
    assert new["assay_graph_replays_total"] - old["assay_graph_replays_total"] == 3
    assert new["assay_warmup_seconds{weights digest}"] > 0 and "assay_warmup_seconds{other}" not in new


def test_every_stage_of_a_start_is_a_part_of_its_own() -> None:
    """Those that the guide lists, and those of a draft."""
    guide = (Path(__file__).parents[3] / "docs/guides/operations.md").read_text("utf-8")
    (listed,) = re.findall(r"`(load ->[^`]+)`", guide)
    stages = {*map(str.strip, listed.split("->")), "trace", "invariance check", "served invariance check"}
    stages |= {"draft weights digest", "draft trace", "draft runs"}
    metrics = ReplicaMetrics()
    for stage in stages:
        metrics.warmed_up(stage, 1.0)
    metrics.warmed_up("sampler: one_kernel, another", 2.0)
    assert metrics._warm_up == dict.fromkeys(stages, 1.0) | {"sampler": 3.0}


def snapshot(replica: str, total: float) -> Snapshot:
    family = CounterMetricFamily("assay_x", "X.", labels=("kind",))
    family.add_metric(("a",), total)
    return rendered("Replica", replica, (family,))


def rendered(deployment: str, replica: str, metrics: Sequence[Metric]) -> Snapshot:
    labels = {"deployment": deployment, "replica": replica}
    return Snapshot(deployment, replica, tuple(render(metric, labels) for metric in metrics))


async def test_processes_merge_under_one_name_with_their_own_labels() -> None:
    text = b"".join(await merge([snapshot("r1", 1), snapshot("r2", 2)])).decode()
    assert text.count("# TYPE assay_x_total counter") == 1
    (family,) = text_string_to_metric_families(text)
    assert [(dict(sample.labels), sample.value) for sample in family.samples] == [
        ({"kind": "a", "deployment": "Replica", "replica": "r1"}, 1.0),
        ({"kind": "a", "deployment": "Replica", "replica": "r2"}, 2.0),
    ]


class Cluster:
    """Processes for a scrape."""

    def __init__(self) -> None:
        self.now = 100.0
        self.scrapes = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.metrics = IngressMetrics()
        self.replicas: list[object] = [snapshot("r1", 1), snapshot("r2", 2)]
        args = MetricsArgs(cache_s=0.5)
        self.scrape = MetricsScraper(self.broadcast, self.siblings, self.own, self.metrics, args, lambda: self.now)

    async def broadcast(self, method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        assert (method, timeout_s) == ("collect", 1.0)
        self.scrapes += 1
        await self.gate.wait()
        return self.replicas

    async def siblings(self, method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        return [Snapshot("Ingress", "i1", ()), rendered("Ingress", "i2", self.metrics.families())]

    async def own(self) -> Snapshot:
        return rendered("Ingress", "i1", self.metrics.families())


TRIES = 8  # another process may take the core meanwhile


async def longest_hold_s(collect: Any) -> float:
    """Runs `collect` beside a task that is always ready; returns the longest time in which that did not run."""
    longest, last, over = 0.0, time.perf_counter(), False

    async def watch() -> None:
        nonlocal longest, last
        while not over:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await collect()
    over = True
    await watcher
    return longest


def used_metrics() -> tuple[Metric, ...]:
    """The metrics of an ingress, with many series in use."""
    metrics = IngressMetrics()
    for status in (200, 429, 500):
        for route in ("/v1/score", "/v1/completions", "/generative_scoring", "/v1/chat/completions"):
            metrics.request_started()
            metrics.request_ended(route, status, "", 0.1)
            metrics.first_token(route, 0.1)
            metrics.token_gap(route, 0.1)
    return metrics.families()


async def test_a_scrape_of_a_hundred_processes_holds_no_loop() -> None:
    """Each process renders its own metrics, in pieces; the one that is scraped joins bytes. Bound: 10 ms."""
    families = used_metrics()
    snapshots = [await exposition.snapshot("Ingress", f"i{number}", families) for number in range(100)]

    async def joined() -> None:
        pieces = await merge(snapshots)
        assert len(pieces) == len(families)

    async def own() -> None:
        await exposition.snapshot("Ingress", "i", families)

    assert min([await longest_hold_s(joined) for _ in range(TRIES)]) < 0.010
    assert min([await longest_hold_s(own) for _ in range(TRIES)]) < 0.010


async def test_a_family_that_is_rendered_in_pieces_is_the_same() -> None:
    families = used_metrics()
    assert max(len(family.samples) for family in families) > 2 * exposition.PIECE
    assert await exposition.snapshot("Ingress", "i", families) == rendered("Ingress", "i", families)


async def test_rendering_them_where_they_are_joined_would_hold_it() -> None:
    """The planted counterpart."""
    families = used_metrics()

    async def rendered_there() -> None:
        await merge([rendered("Ingress", f"i{number}", families) for number in range(100)])

    assert await longest_hold_s(rendered_there) > 0.050


async def test_scrapes_at_the_same_time_are_one_and_soon_after_the_same() -> None:
    cluster = Cluster()
    cluster.gate.clear()
    asking = [asyncio.create_task(cluster.scrape.text()) for _ in range(7)]
    await asyncio.sleep(0)
    asking[0].cancel()  # one client leaves: the others get their answer
    await asyncio.sleep(0)
    cluster.gate.set()
    texts = await asyncio.gather(*asking[1:])
    assert cluster.scrapes == 1
    assert all(text is texts[0] for text in texts)
    cluster.now += 0.4
    assert await cluster.scrape.text() is texts[0]
    cluster.now += 0.2
    await cluster.scrape.text()
    assert cluster.scrapes == 2


async def test_every_process_is_in_it_once_and_who_is_missing_is_counted() -> None:
    cluster = Cluster()
    cluster.replicas = [snapshot("r1", 1), RuntimeError("it died")]
    text = b"".join(await cluster.scrape.text()).decode()
    assert text.count('replica="r1"') == 1
    assert text.count('assay_inflight_requests{deployment="Ingress",replica="i1"}') == 1
    assert text.count('assay_inflight_requests{deployment="Ingress",replica="i2"}') == 1
    assert 'assay_scrape_missing_total{deployment="Ingress",replica="i1"} 1.0' in text
