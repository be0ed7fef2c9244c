"""Defines the dashboard of replicas: load, KV cache, steps and versions."""

from k8s.grafana.panels import Dashboard, Panel, PanelRow
from k8s.grafana.promql import APP, REPLICA, level, mean, per_second, quantile, series, share, total

EACH = "{{replica}}"
SLOTS = "assay_kv_slots"


def _one_each(metric: str, more: str = "") -> dict[str, str]:
    return {EACH: level(metric, "replica", REPLICA, more)}


BALANCE = PanelRow(
    "Balance",
    (
        Panel(
            title="Tokens computed per second",
            unit="short",
            note="By each replica.",
            queries={EACH: per_second("assay_tokens_total", "replica", REPLICA, 'kind="computed"')},
        ),
        Panel(
            title="Highest load over mean",
            unit="short",
            note="Tokens computed: 1 is perfect balance; above 1.25 the router prefers other replicas.",
            queries={
                "": share(
                    *(
                        total(per_second("assay_tokens_total", "replica", REPLICA, 'kind="computed"'), how=how)
                        for how in ("max", "avg")
                    )
                )
            },
        ),
        Panel(
            title="Queued tokens",
            unit="short",
            note="Tokens that are accepted and not yet computed.",
            queries=_one_each("assay_queued_tokens"),
        ),
        Panel(
            title="Speed",
            unit="short",
            note="Tokens per second, smoothed: of steps, and of the queue while there is one.",
            queries={
                f"{EACH} steps": level("assay_tokens_per_second", "replica", REPLICA),
                f"{EACH} queue": level("assay_drain_tokens_per_second", "replica", REPLICA),
            },
        ),
        Panel(
            title="Requests",
            unit="short",
            note="Unfinished requests, and those of them whose first step has not run.",
            queries={
                f"{EACH} unfinished": level("assay_unfinished_requests", "replica", REPLICA),
                f"{EACH} waiting": level("assay_queued_requests", "replica", REPLICA),
            },
        ),
        Panel(
            title="Running sequences",
            unit="short",
            note="At most `engine.max_running`.",
            queries=_one_each("assay_running_sequences"),
        ),
    ),
)

MEMORY = PanelRow(
    "KV cache",
    (
        Panel(
            title="Slots by state",
            unit="short",
            stacked=True,
            note="Used by running requests, cached for prefixes, or free.",
            queries={"{{state}}": level(SLOTS, "state", REPLICA)},
        ),
        Panel(
            title="Slots in use",
            unit="percentunit",
            note="Near 1, sequences are preempted and computed again.",
            queries={EACH: share(level(SLOTS, "replica", REPLICA, 'state="used"'), level(SLOTS, "replica", REPLICA))},
        ),
        Panel(
            title="Evictions and preemptions",
            unit="short",
            note="Cached tokens evicted for new ones, and sequences that are computed again.",
            queries={
                "tokens evicted": per_second("assay_kv_evictions_total", "", REPLICA),
                "sequences preempted": per_second("assay_preemptions_total", "", REPLICA),
            },
        ),
    ),
)

STEPS = PanelRow(
    "Steps",
    (
        Panel(
            title="Time by kind of step",
            unit="percentunit",
            stacked=True,
            note="Seconds a second: the rest to 1 a replica is idle time or scheduling.",
            queries={"{{kind}}": per_second("assay_step_seconds_sum", "kind", REPLICA)},
        ),
        Panel(
            title="Time of a step, 99th percentile",
            unit="s",
            note="A stream waits at most `engine.decode_gap_s` and one step for its next token.",
            queries={"{{kind}}": quantile(0.99, "assay_step_seconds", "kind", REPLICA)},
        ),
        Panel(
            title="Scheduling a step",
            unit="s",
            note="Time to choose the next step, on the same thread.",
            queries={EACH: mean("assay_schedule_seconds", "replica", REPLICA)},
        ),
        Panel(
            title="Since the step thread last turned",
            unit="s",
            note="Grows while a step hangs; Serve replaces the replica after `health.step_timeout_s`.",
            queries={EACH: level("assay_step_heartbeat_seconds", "replica", REPLICA, how="max")},
        ),
        Panel(
            title="Memory of the processes",
            unit="bytes",
            note="Resident memory, also of ingresses. A steady rise is a leak.",
            queries={"{{deployment}} {{replica}}": level("assay_process_resident_bytes", "deployment, replica", APP)},
        ),
        Panel(
            title="Start-up, by part",
            unit="s",
            note="Replicas that run now.",
            queries={"{{part}}": level("assay_warmup_seconds", "part", REPLICA, 'part!="total"', how="max")},
        ),
        Panel(
            title="What runs",
            kind="table",
            unit="short",
            width=24,
            height=6,
            note="During a rollout, two versions or models.",
            queries={"": total(series("assay_build_info", REPLICA), "application, replica, version, model, revision")},
        ),
    ),
)

DASHBOARD = Dashboard(
    name="replicas",
    title="Replicas",
    note="Load, memory, steps and versions of each replica.",
    rows=(BALANCE, MEMORY, STEPS),
)
