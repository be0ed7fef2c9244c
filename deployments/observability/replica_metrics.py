"""Exports a replica's metrics: totals that its engine keeps, read at each scrape, with no cost per token."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily as Counters
from prometheus_client.metrics_core import GaugeMetricFamily as Gauges
from prometheus_client.metrics_core import Metric, SummaryMetricFamily

from deployments.observability.exposition import SECONDS, LoopHistogram, collected, histogram, labelled
from deployments.observability.ingress_metrics import known
from deployments.observability.link_figures import LinkFigures
from deployments.protocol import ModelCard
from engine.metrics import STEP_ROWS, STEP_SECONDS, STEP_TOKENS, EngineStats

WARM_UP_PARTS = frozenset((
    "load", "weights digest", "probe", "compile ahead", "head check", "packing check", "fuse projections",
    "second packing check", "invariance check", "skinny packing check", "pool", "trace", "attention kernels",
    "compile", "graphs", "prefill graphs", "likelihoods", "served invariance check", "background compile", "sampler",
    "canary", "toy", "total",
))  # fmt: skip
WARM_UP_PARTS |= {f"draft {part}" for part in WARM_UP_PARTS - {"load", "canary", "total"}} | {"draft runs"}


# Metrics that are one number of the engine: name, field of EngineStats, meaning.
GAUGES = (
    ("assay_queued_tokens", "queued_tokens", "Tokens that are accepted and not yet computed."),
    ("assay_queued_requests", "queued_requests", "Requests whose first step has not run."),
    ("assay_unfinished_requests", "live_requests", "Requests that have not ended."),
    ("assay_running_sequences", "live_rows", "Sequences that hold a slot of `engine.max_running`."),
    ("assay_step_heartbeat_seconds", "heartbeat_age_s", "Time since the step thread last completed a turn."),
    ("assay_tokens_per_second", "tokens_per_s", "Computed tokens per second, smoothed over steps."),
    ("assay_drain_tokens_per_second", "drain_per_s", "Rate at which a queue is computed; 0 while unknown."),
)
COUNTERS = (
    ("assay_lm_head_seconds", "head_seconds", "Time of scoring steps after the last decoder layer."),
    ("assay_graph_replays", "graph_replays", "Steps that ran as a CUDA graph."),
    ("assay_failed_steps", "failed_steps", "Steps that raised an exception."),
    ("assay_nonfinite_rows", "nonfinite_rows", "Sequences whose logits were not finite."),
    ("assay_kv_evictions", "evictions", "Tokens evicted from the prefix cache."),
    ("assay_preemptions", "preemptions", "Sequences that lost their KV cache slots and are computed again."),
    ("assay_spec_drafts", "drafts", "Drafts, each of one or more tokens."),
    ("assay_spec_unknown_drafts", "drafts_missing_q", "Drafts without their distribution."),
)
TOKENS = ("prompt", "cached", "computed", "generated", "wasted", "padding", "drafted")  # `..._tokens` of EngineStats


class ReplicaMetrics:
    """Holds the metrics of one replica process that its engine does not keep."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.links = LinkFigures()
        about = "Time from a request's arrival to its first step."
        self._wait = LoopHistogram(registry, "assay_queue_wait_seconds", about, SECONDS)
        self._failures = Counter(
            "assay_failed_requests", "Requests that the replica refused or lost.", ["code"], registry=registry
        )
        self._warm_up: dict[str, float] = {}

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def failed(self, code: str) -> None:
        self._failures.labels(code).inc()  # an ErrorCode: a closed set

    def warmed_up(self, part: str, seconds: float) -> None:
        """Counts a stage of the start-up. Names of kernels, which follow a colon, are left out."""
        part = known(part.partition(":")[0], WARM_UP_PARTS)
        self._warm_up[part] = self._warm_up.get(part, 0.0) + seconds

    def families(self, stats: EngineStats, card: ModelCard) -> tuple[Metric, ...]:
        build = Gauges("assay_build_info", "What runs, with the value 1.", labels=("version", "model", "revision"))
        build.add_metric((card.versions.get("assay", ""), card.name, card.revision or ""), 1)
        return (
            *collected(self.registry),
            *engine_families(stats),
            *self.links.families(),
            labelled(Gauges, "assay_warmup_seconds", "Time of start-up, by part.", "part", self._warm_up),
            build,
        )


def engine_families(stats: EngineStats) -> tuple[Metric, ...]:
    """Returns the metrics of an engine's own totals."""
    tokens = {kind: getattr(stats, f"{kind}_tokens") for kind in TOKENS} | {"accepted": sum(stats.drafts_accepted)}
    slots = {"used": stats.kv_slots_used, "cached": stats.kv_slots_cached, "free": stats.kv_slots_free}
    return (
        *(Gauges(name, help, getattr(stats, field)) for name, field, help in GAUGES),
        *(Counters(name, help, getattr(stats, field)) for name, field, help in COUNTERS),
        labelled(Gauges, "assay_kv_slots", "Slots of the KV cache, one a token.", "state", slots),
        labelled(Counters, "assay_tokens", "Tokens by kind.", "kind", tokens),
        *_step_families(stats),
        *_speculation_families(stats),
        *_sampler_families(stats.sampler),
    )


def _step_families(stats: EngineStats) -> tuple[Metric, ...]:
    """Returns time and size of steps by kind."""
    seconds = {kind: (stats.steps_by_seconds[kind], stats.step_seconds[kind]) for kind in stats.steps}
    tokens = {kind: (stats.steps_by_tokens[kind], stats.step_tokens[kind]) for kind in stats.steps}
    rows = {kind: (stats.steps_by_rows[kind], stats.step_rows[kind]) for kind in stats.steps}
    return (
        histogram("assay_step_seconds", "Time of steps.", STEP_SECONDS, seconds, "kind"),
        histogram("assay_step_tokens", "New tokens of a step.", STEP_TOKENS, tokens, "kind"),
        histogram("assay_step_sequences", "Sequences of a step.", STEP_ROWS, rows, "kind"),
        SummaryMetricFamily("assay_schedule_seconds", "Time to schedule a step.", stats.plans, stats.plan_seconds),
    )


def _speculation_families(stats: EngineStats) -> tuple[Metric, ...]:
    """Returns the metrics of speculative decoding. Accepted over verified tokens at a position is the acceptance rate
    given that all drafts before it were accepted."""
    verified, accepted = _by_position(stats.drafts_reached), _by_position(stats.drafts_accepted)
    seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    return (
        labelled(Counters, "assay_spec_verified_tokens", "Draft tokens verified.", "position", verified),
        labelled(Counters, "assay_spec_accepted_tokens", "Draft tokens accepted.", "position", accepted),
        labelled(Counters, "assay_spec_seconds", "Time of drafting and of verify steps.", "part", seconds),
    )


def _by_position(counts: Sequence[int]) -> dict[str, float]:
    return {str(position): count for position, count in enumerate(counts, 1)}


def _sampler_families(stats: Any) -> tuple[Metric, ...]:
    rows: Mapping[str, int] = getattr(stats, "rows", {})
    flags = {flag.lower(): count for flag, count in getattr(stats, "flags", {}).items()}
    return (
        labelled(Counters, "assay_sampler_rows", "Sampled tokens by code path.", "branch", rows),
        labelled(Counters, "assay_sampler_flags", "Sampled tokens with rare conditions, by condition.", "flag", flags),
    )
