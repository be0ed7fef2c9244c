"""Defines the dashboard of the service: answers, latency by stage, refusals and failures."""

from k8s.alerts.objectives import ASKED, FAILED
from k8s.grafana.panels import Dashboard, Panel, PanelRow
from k8s.grafana.promql import APP, ROUTE, WINDOW, events, level, mean, per_second, quantile, series, share, total

SECONDS = "assay_request_seconds"
LAG = "assay_event_loop_lag_seconds"
INGRESS = f'{APP}, deployment="Ingress"'
NOT_WELL = " or ".join(
    f"rate({series('assay_requests_total', ROUTE, f'{where}, {ASKED}')}[{WINDOW}])"
    for where in ('status!="200"', 'code!=""')
)


def _quantiles(metric: str, by: str, where: str = APP, legend: str = "") -> dict[str, str]:
    return {f"{legend}p{round(100 * q)}": quantile(q, metric, by, where) for q in (0.5, 0.99)}


LEVEL = PanelRow(
    "Service level",
    (
        Panel(
            title="Requests per second",
            kind="stat",
            unit="reqps",
            width=6,
            height=5,
            note="Of clients: health checks and scrapes are left out.",
            queries={"": per_second("assay_requests_total", "", ROUTE, ASKED)},
        ),
        Panel(
            title="Answered without a server error",
            kind="stat",
            unit="percentunit",
            width=6,
            height=5,
            note="Over the whole range shown; the objective is 99.9 %. Refusals with 4xx are answers.",
            queries={
                "": f"1 - ({per_second('assay_requests_total', '', ROUTE, FAILED, '$__range')} or vector(0)) / "
                + per_second("assay_requests_total", "", ROUTE, ASKED, "$__range")
            },
        ),
        Panel(
            title="Replicas that pass their canary",
            kind="stat",
            unit="short",
            width=6,
            height=5,
            note="The lowest count that an ingress sees, and how many /readyz requires.",
            queries={
                "ready": level("assay_ready_replicas", how="min"),
                "wanted": level("assay_required_replicas", how="max"),
            },
        ),
        Panel(
            title="Time of a request",
            kind="stat",
            unit="s",
            width=6,
            height=5,
            note="From the first byte to the last, all chosen routes together.",
            queries=_quantiles(SECONDS, "", ROUTE),
        ),
        Panel(
            title="Requests by route",
            unit="reqps",
            stacked=True,
            note="What clients ask for.",
            queries={"{{route}}": per_second("assay_requests_total", "route", ROUTE, ASKED)},
        ),
        Panel(
            title="Answers that are no 200, by code",
            unit="reqps",
            stacked=True,
            note="Codes are those of the errors; 499 is a client that left, 200 with a code a stream that failed.",
            queries={"{{status}} {{code}}": total(NOT_WELL, "status, code")},
        ),
        Panel(
            title="Time of requests, 99th percentile by route",
            unit="s",
            note="As finely as the buckets are: 1, 2.5, 5 and ten times these.",
            queries={"{{route}}": quantile(0.99, SECONDS, "route", ROUTE)},
        ),
    ),
)

STAGES = PanelRow(
    "Latency by stage",
    (
        Panel(
            title="Mean time by stage",
            unit="s",
            width=12,
            stacked=True,
            note="Exact means. Prefill and head are parts of a score, prefill and decode of a generation.",
            queries={"{{stage}}": mean("assay_stage_seconds", "stage")},
        ),
        Panel(
            title="Time by stage, 99th percentile",
            unit="s",
            width=12,
            note="A stage that is slow for a few: not seen in the mean.",
            queries={"{{stage}}": quantile(0.99, "assay_stage_seconds", "stage")},
        ),
    ),
)

TOKENS = PanelRow(
    "Streams and tokens",
    (
        Panel(
            title="Time to the first token of streams",
            unit="s",
            note="From the first byte of the request to the first event with a token.",
            queries=_quantiles("assay_time_to_first_token_seconds", "route", ROUTE, "{{route}} "),
        ),
        Panel(
            title="Time between a stream's tokens",
            unit="s",
            note="Each stream's own mean, told at its end.",
            queries=_quantiles("assay_mean_inter_token_seconds", "route", ROUTE, "{{route}} "),
        ),
        Panel(
            title="Tokens per second",
            unit="short",
            note="Of prompts accepted, found in the cache, computed, and given to clients.",
            queries={
                "{{kind}}": per_second("assay_tokens_total", "kind", more='kind=~"prompt|cached|computed|generated"')
            },
        ),
    ),
)

ADMISSION = PanelRow(
    "Admission",
    (
        Panel(
            title="In flight",
            unit="short",
            note="Requests being answered, and those of them that are streams.",
            queries={"requests": level("assay_inflight_requests"), "streams": level("assay_open_streams")},
        ),
        Panel(
            title="Bodies in flight",
            unit="bytes",
            note="The connection limit refuses at `admission.max_inflight_body_bytes` of one ingress.",
            queries={"{{replica}}": level("assay_inflight_body_bytes", "replica")},
        ),
        Panel(
            title="Refused, by reason",
            unit="reqps",
            stacked=True,
            note="overloaded and deadline mean too little room; the others, a request or a server that is wrong.",
            queries={"{{reason}}": per_second("assay_rejected_total", "reason")},
        ),
        Panel(
            title="Queue, in seconds of work",
            unit="s",
            note="Tokens accepted and not computed, over how fast replicas work queues off, once that is known.",
            queries={"": share(level("assay_queued_tokens"), f"({level('assay_drain_tokens_per_second')} > 0)")},
        ),
        Panel(
            title="Wait for the first step",
            unit="s",
            note="From the arrival at a replica.",
            queries=_quantiles("assay_queue_wait_seconds", ""),
        ),
        Panel(
            title="Without the right key, by reason",
            unit="reqps",
            stacked=True,
            note="A sudden rise means guessing of keys, or a key that was changed on one side only.",
            queries={"{{reason}}": per_second("assay_auth_failures_total", "reason")},
        ),
    ),
)

FAULTS = PanelRow(
    "Faults",
    (
        Panel(
            title="Sent again, by cause",
            unit="short",
            note="Shards and requests that were sent to another replica. Clients do not notice.",
            queries={"{{cause}}": events("assay_retries_total", "cause")},
        ),
        Panel(
            title="Streams continued elsewhere, by cause",
            unit="short",
            note="A rollout hands off; after a crash another replica resumes.",
            queries={"{{cause}}": events("assay_resumes_total", "cause")},
        ),
        Panel(
            title="Retries not made, and quarantine",
            unit="short",
            note="Retries beyond the budget, and requests that are refused because they ended two replicas.",
            queries={
                "budget spent": events("assay_retry_budget_exhausted_total"),
                "in quarantine": level("assay_quarantine_entries", how="max"),
            },
        ),
        Panel(
            title="Clients that disconnected, by phase",
            unit="short",
            stacked=True,
            note="queued: before an answer began; prefill: before a stream's first token; last: after all tokens.",
            queries={"{{phase}}": events("assay_disconnects_total", "phase")},
        ),
        Panel(
            title="Canaries that failed, by reason",
            unit="short",
            note="mismatch is silent corruption: the same prompt scores differently than at start-up.",
            queries={"{{reason}}": events("assay_canary_failures_total", "reason")},
        ),
        Panel(
            title="Time of a canary that passed",
            unit="s",
            note="One scored item and two tokens through the whole engine.",
            queries=_quantiles("assay_canary_seconds", ""),
        ),
        Panel(
            title="Requests that replicas refused or lost, by code",
            unit="short",
            note="Error codes of the engine.",
            queries={"{{code}}": events("assay_failed_requests_total", "code")},
        ),
        Panel(
            title="Steps and sequences that failed",
            unit="short",
            note="A step that raises fails its requests; logits that are not finite fail one.",
            queries={
                "steps that raised": events("assay_failed_steps_total"),
                "sequences not finite": events("assay_nonfinite_rows_total"),
            },
        ),
        Panel(
            title="Processes that did not answer a scrape",
            unit="short",
            note="Their metrics are missing from this dashboard for that time.",
            queries={"": events("assay_scrape_missing_total")},
        ),
        Panel(
            title="Event loop lag",
            unit="s",
            note="How late an ingress ran what was due; a high value means that its loop was blocked.",
            queries=_quantiles(LAG, ""),
        ),
    ),
)

LINKS = PanelRow(
    "Links",
    (
        Panel(
            title="Open links",
            unit="short",
            note="Of all ingresses together: each has one to every replica, or its calls go through Ray.",
            queries={"": level("assay_links", where=INGRESS)},
        ),
        Panel(
            title="Calls to replicas per second, by path",
            unit="short",
            note="Calls through Ray cost both sides several times as much.",
            queries={
                "link": per_second("assay_link_calls_total", "", INGRESS),
                "Ray": per_second("assay_handle_calls_total", "", INGRESS),
            },
        ),
        Panel(
            title="Bytes and frames per second",
            unit="short",
            note="A frame to an ingress holds what a step brought for all of its calls.",
            queries={
                "bytes {{direction}}": per_second("assay_link_bytes_total", "direction", INGRESS),
                "frames {{direction}}": per_second("assay_link_frames_total", "direction", INGRESS),
            },
        ),
        Panel(
            title="Links that were lost, by cause",
            unit="short",
            note="died: the replica's process ended; cut: it answers on a new link; behind: its ingress did not read.",
            queries={"{{cause}}": events("assay_link_losses_total", "cause")},
        ),
    ),
)

DASHBOARD = Dashboard(
    name="service",
    title="Service",
    note="Answers, latency by stage, refusals and failures.",
    rows=(LEVEL, STAGES, TOKENS, ADMISSION, FAULTS, LINKS),
)
