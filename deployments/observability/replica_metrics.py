"""What a replica tells about its engine: totals that the engine keeps, read at the scrape, nothing per token."""

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
    """One replica's registry, beside what `engine_families` reads from the engine."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._wait = Histogram(
            "assay_queue_wait_seconds", "From arrival to the first step.", buckets=SECONDS, registry=registry
        )
        self._failures = Counter("assay_failures", "Tasks refused or lost.", ["code"], registry=registry)
        self._warm_up: dict[str, float] = {}

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def failed(self, code: str) -> None:
        self._failures.labels(code).inc()  # an ErrorCode: closed

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
            gauge("assay_warmup_seconds", "Start-up, by part.", parts, ["part"]),
            gauge("assay_build_info", "What runs here.", {build: 1}, ["version", "model", "revision"]),
        )


def engine_families(stats: EngineStats) -> tuple[Family, ...]:
    """The families of an engine's own totals."""
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
        gauge("assay_queued_tokens", "Accepted and not yet computed.", {(): stats.queued_tokens}),
        gauge("assay_queued_requests", "Jobs none of whose tokens was computed.", {(): stats.queued_requests}),
        gauge("assay_live_requests", "Jobs that have not ended.", {(): stats.live_requests}),
        gauge("assay_live_rows", "Rows that hold a request slot.", {(): stats.live_rows}),
        gauge("assay_step_heartbeat_seconds", "Since the step thread last turned.", {(): stats.heartbeat_age_s}),
        gauge("assay_tokens_per_second", "Computed, smoothed over steps.", {(): stats.tokens_per_s}),
        gauge("assay_drain_tokens_per_second", "Of cost, while work waits; 0 while unknown.", {(): stats.drain_per_s}),
        gauge("assay_kv_slots", "Token slots of the pool.", _keyed(slots), ["state"]),
        counter("assay_tokens", "Tokens by what became of them.", _keyed(tokens), ["kind"]),
        *_step_families(stats),
        counter("assay_failed_steps", "Steps that raised.", {(): stats.failed_steps}),
        counter("assay_nonfinite_rows", "Rows whose logits were not finite.", {(): stats.nonfinite_rows}),
        counter("assay_kv_evictions", "Tokens evicted from the prefix tree.", {(): stats.evictions}),
        counter("assay_preemptions", "Rows that lost their place.", {(): stats.preemptions}),
        *_speculation_families(stats),
        *_sampler_families(stats.sampler),
    )


def _step_families(stats: EngineStats) -> tuple[Family, ...]:
    """How long, and how large: by kind of step, from counts that the engine keeps."""
    seconds = {kind: (stats.steps_by_seconds[kind], stats.step_seconds[kind]) for kind in stats.steps}
    tokens = {kind: (stats.steps_by_tokens[kind], stats.step_tokens[kind]) for kind in stats.steps}
    rows = {kind: (stats.steps_by_rows[kind], stats.step_rows[kind]) for kind in stats.steps}
    return (
        histogram("assay_step_seconds", "Steps.", STEP_SECONDS, seconds, "kind"),
        histogram("assay_step_tokens", "New tokens of steps.", STEP_TOKENS, tokens, "kind"),
        histogram("assay_step_rows", "Sequences of steps.", STEP_ROWS, rows, "kind"),
        counter("assay_head_seconds", "Of score steps, behind the model's last layer.", {(): stats.head_seconds}),
        summary("assay_plan_seconds", "Choosing what runs next.", {(): (stats.plans, stats.plan_seconds)}),
        counter("assay_graph_replays", "Steps that ran as a captured graph.", {(): stats.graph_replays}),
    )


def _speculation_families(stats: EngineStats) -> tuple[Family, ...]:
    """Acceptance at a position is accepted over reached there: conditional on all drafts before it."""
    seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    return (
        counter("assay_spec_runs", "Runs of drafted tokens.", {(): stats.drafts}),
        counter("assay_spec_missing_q", "Runs drawn from an unknown law.", {(): stats.drafts_missing_q}),
        counter("assay_spec_reached", "Drafts behind accepted ones.", _by_position(stats.drafts_reached), ["position"]),
        counter("assay_spec_accepted", "Drafts accepted.", _by_position(stats.drafts_accepted), ["position"]),
        counter("assay_spec_seconds", "Time in steps with drafts.", _keyed(seconds), ["part"]),
    )


def _by_position(counts: Sequence[int]) -> dict[tuple[str, ...], float]:
    return {(str(position),): float(count) for position, count in enumerate(counts, 1)}


def _sampler_families(stats: Any) -> tuple[Family, ...]:
    rows: Mapping[str, int] = getattr(stats, "rows", {})
    flags: Mapping[str, int] = getattr(stats, "flags", {})
    counted = {flag.lower(): count for flag, count in flags.items()}
    return (
        counter("assay_sampler_rows", "Rows drawn, by branch.", _keyed(rows), ["branch"]),
        counter("assay_row_flags", "What the sampler found wrong or rare in rows.", _keyed(counted), ["flag"]),
    )


def _keyed(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): float(value) for name, value in values.items()}
