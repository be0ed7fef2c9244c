"""Everything that an engine says of itself, gathered from its parts at one moment."""

from typing import Any

from engine.causal_lm import CausalLM
from engine.pool import Pool
from engine.requests import RequestTable
from engine.scheduler import Scheduler
from engine.stats import Counters, Counts, EngineStats
from engine.works import Works


def engine_stats(
    counters: Counters,
    model: CausalLM,
    pool: Pool,
    works: Works,
    table: RequestTable,
    scheduler: Scheduler,
    *,
    hand_overs: int,
    sampler: Any,
    heartbeat_age_s: float,
    healthy: bool,
    draining: bool,
) -> EngineStats:
    """Read by any thread while the step thread goes on: figures of one moment need not add up."""
    alive = list(works.alive.values())
    return EngineStats(
        steps=dict(counters.steps),
        step_tokens=dict(counters.step_tokens),
        step_seconds=dict(counters.step_seconds),
        step_rows=dict(counters.step_rows),
        steps_by_seconds=_frozen(counters.by_seconds),
        steps_by_tokens=_frozen(counters.by_tokens),
        steps_by_rows=_frozen(counters.by_rows),
        plans=counters.plans,
        plan_seconds=counters.plan_seconds,
        head_seconds=counters.head_seconds,
        graph_replays=model.graph_replays,
        failed_steps=counters.failed_steps,
        hand_overs=hand_overs,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        computed_tokens=sum(counters.step_tokens.values()),
        generated_tokens=counters.generated_tokens,
        wasted_tokens=counters.wasted_tokens,
        padding_tokens=model.padded_tokens,
        queued_tokens=works.queued_tokens,
        queued_requests=sum(work.started is None for work in alive),
        live_requests=len(alive),
        live_rows=table.live,
        kv_slots_used=pool.used,
        kv_slots_cached=pool.tree.size,
        kv_slots_free=pool.allocator.free,
        tree_locks=pool.tree.locks,
        evictions=pool.tree.evicted,
        preemptions=scheduler.rows.preemptions,
        nonfinite_rows=counters.nonfinite_rows,
        drafts=counters.drafts,
        drafts_reached=tuple(counters.drafts_reached),
        drafts_accepted=tuple(counters.drafts_accepted),
        drafted_tokens=counters.drafted_tokens,
        drafts_missing_q=counters.drafts_missing_q,
        draft_seconds=counters.draft_seconds,
        verify_seconds=counters.verify_seconds,
        heartbeat_age_s=heartbeat_age_s,
        tokens_per_s=counters.tokens_per_s,
        drain_per_s=counters.throughput.tokens_per_s,
        sampler=sampler,
        healthy=healthy,
        draining=draining,
    )


def _frozen(counts: dict[str, list[int]]) -> dict[str, Counts]:
    return {kind: tuple(found) for kind, found in counts.items()}
