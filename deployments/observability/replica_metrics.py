"""Exports a replica's metrics: totals that its engine keeps, read at each scrape, with no cost per token."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from deployments.observability.exposition import (
    Family,
    counter,
    families_of,
    gauge,
    histogram,
    process_families,
    summary,
)
from deployments.observability.labels import SECONDS, known
from deployments.protocol import ModelCard
from engine.metrics import STEP_ROWS, STEP_SECONDS, STEP_TOKENS, EngineStats

WARM_UP_PARTS = frozenset(
    (
        "load",
        "probe",
        "head check",
        "packing check",
        "fuse projections",
        "second packing check",
        "skinny packing check",
        "pool",
        "attention kernels",
        "compile",
        "graphs",
        "prefill graphs",
        "likelihoods",
        "canary",
        "toy",
        "total",
    )
)
WARM_UP_PARTS |= {f"draft {part}" for part in WARM_UP_PARTS - {"load", "canary", "total"}}


class ReplicaMetrics:
    """Holds the metrics of one replica process that its engine does not keep."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._wait = Histogram(
            "assay_queue_wait_seconds",
            "Time from a request's arrival to its first step.",
            buckets=SECONDS,
            registry=registry,
        )
        self._failures = Counter(
            "assay_failed_requests", "Requests that the replica refused or lost.", ["code"], registry=registry
        )
        self._warm_up: dict[str, float] = {}

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def failed(self, code: str) -> None:
        self._failures.labels(code).inc()  # an ErrorCode: a closed set

    def warmed_up(self, part: str, seconds: float) -> None:
        part = known(part, WARM_UP_PARTS)
        self._warm_up[part] = self._warm_up.get(part, 0.0) + seconds

    def families(self, stats: EngineStats, card: ModelCard) -> tuple[Family, ...]:
        parts: dict[tuple[str, ...], float] = {(part,): seconds for part, seconds in self._warm_up.items()}
        build = (card.versions.get("assay", ""), card.name, card.revision or "")
        return (
            *families_of(self.registry.collect()),
            *engine_families(stats),
            *process_families(),
            gauge("assay_warmup_seconds", "Time of start-up, by part.", parts, ["part"]),
            gauge(
                "assay_build_info",
                "Versions of what runs, with the value 1.",
                {build: 1},
                ["version", "model", "revision"],
            ),
        )


def engine_families(stats: EngineStats) -> tuple[Family, ...]:
    """Returns the metrics of an engine's own totals."""
    tokens = {
        "prompt": stats.prompt_tokens,
        "cached": stats.cached_tokens,
        "computed": stats.computed_tokens,
        "generated": stats.generated_tokens,
        "wasted": stats.wasted_tokens,
        "padding": stats.padding_tokens,
    }
    tokens |= {"drafted": stats.drafted_tokens, "accepted": sum(stats.drafts_accepted)}
    slots = {"used": stats.kv_slots_used, "cached": stats.kv_slots_cached, "free": stats.kv_slots_free}
    return (
        gauge("assay_queued_tokens", "Tokens that are accepted and not yet computed.", {(): stats.queued_tokens}),
        gauge("assay_queued_requests", "Requests whose first step has not run.", {(): stats.queued_requests}),
        gauge("assay_unfinished_requests", "Requests that have not ended.", {(): stats.live_requests}),
        gauge("assay_running_sequences", "Sequences that hold a slot of `engine.max_running`.", {(): stats.live_rows}),
        gauge(
            "assay_step_heartbeat_seconds",
            "Time since the step thread last completed a turn.",
            {(): stats.heartbeat_age_s},
        ),
        gauge("assay_tokens_per_second", "Computed tokens per second, smoothed over steps.", {(): stats.tokens_per_s}),
        gauge(
            "assay_drain_tokens_per_second",
            "Rate at which a queue is computed; 0 while unknown.",
            {(): stats.drain_per_s},
        ),
        gauge("assay_kv_slots", "Slots of the KV cache, one a token.", _keyed(slots), ["state"]),
        counter("assay_tokens", "Tokens by kind.", _keyed(tokens), ["kind"]),
        *_step_families(stats),
        counter("assay_failed_steps", "Steps that raised an exception.", {(): stats.failed_steps}),
        counter("assay_nonfinite_rows", "Sequences whose logits were not finite.", {(): stats.nonfinite_rows}),
        counter("assay_kv_evictions", "Tokens evicted from the prefix cache.", {(): stats.evictions}),
        counter(
            "assay_preemptions",
            "Sequences that lost their KV cache slots and are computed again.",
            {(): stats.preemptions},
        ),
        *_speculation_families(stats),
        *_sampler_families(stats.sampler),
    )


def _step_families(stats: EngineStats) -> tuple[Family, ...]:
    """Returns time and size of steps by kind."""
    seconds = {kind: (stats.steps_by_seconds[kind], stats.step_seconds[kind]) for kind in stats.steps}
    tokens = {kind: (stats.steps_by_tokens[kind], stats.step_tokens[kind]) for kind in stats.steps}
    rows = {kind: (stats.steps_by_rows[kind], stats.step_rows[kind]) for kind in stats.steps}
    return (
        histogram("assay_step_seconds", "Time of steps.", STEP_SECONDS, seconds, "kind"),
        histogram("assay_step_tokens", "New tokens of a step.", STEP_TOKENS, tokens, "kind"),
        histogram("assay_step_sequences", "Sequences of a step.", STEP_ROWS, rows, "kind"),
        counter(
            "assay_lm_head_seconds", "Time of scoring steps after the last decoder layer.", {(): stats.head_seconds}
        ),
        summary("assay_schedule_seconds", "Time to schedule a step.", {(): (stats.plans, stats.plan_seconds)}),
        counter("assay_graph_replays", "Steps that ran as a CUDA graph.", {(): stats.graph_replays}),
    )


def _speculation_families(stats: EngineStats) -> tuple[Family, ...]:
    """Returns the metrics of speculative decoding. Accepted over verified tokens at a position is the acceptance rate
    given that all drafts before it were accepted."""
    seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    return (
        counter("assay_spec_drafts", "Drafts, each of one or more tokens.", {(): stats.drafts}),
        counter("assay_spec_unknown_drafts", "Drafts without their distribution.", {(): stats.drafts_missing_q}),
        counter(
            "assay_spec_verified_tokens", "Draft tokens verified.", _by_position(stats.drafts_reached), ["position"]
        ),
        counter(
            "assay_spec_accepted_tokens", "Draft tokens accepted.", _by_position(stats.drafts_accepted), ["position"]
        ),
        counter("assay_spec_seconds", "Time of drafting and of verify steps.", _keyed(seconds), ["part"]),
    )


def _by_position(counts: Sequence[int]) -> dict[tuple[str, ...], float]:
    return {(str(position),): float(count) for position, count in enumerate(counts, 1)}


def _sampler_families(stats: Any) -> tuple[Family, ...]:
    rows: Mapping[str, int] = getattr(stats, "rows", {})
    flags: Mapping[str, int] = getattr(stats, "flags", {})
    counted = {flag.lower(): count for flag, count in flags.items()}
    return (
        counter("assay_sampler_rows", "Sampled tokens by code path.", _keyed(rows), ["branch"]),
        counter("assay_sampler_flags", "Sampled tokens with rare conditions, by condition.", _keyed(counted), ["flag"]),
    )


def _keyed(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): float(value) for name, value in values.items()}
