"""Defines the dashboard of the service: answers, latency by stage, refusals and failures."""

from k8s.grafana.panels import Dashboard, Panel, PanelRow, Query
from k8s.grafana.promql import APP, ROUTE, events, level, mean, per_second, quantile, share

ASKED = 'route!~"/healthz|/readyz|/health|/metrics"'  # by clients, not by machines that watch
FAILED = f'status=~"5..", {ASKED}'
SECONDS = "assay_request_seconds"
LAG = "assay_event_loop_lag_seconds"


def _quantiles(metric: str, by: str, where: str = APP, legend: str = "") -> tuple[Query, ...]:
    return tuple(Query(quantile(q, metric, by, where), f"{legend}p{round(100 * q)}") for q in (0.5, 0.99))


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
            queries=(Query(per_second("assay_requests_total", "", ROUTE, ASKED)),),
        ),
        Panel(
            title="Answered without a server error",
            kind="stat",
            unit="percentunit",
            width=6,
            height=5,
            note="Over the whole range shown; the objective is 99.9 %. Refusals with 4xx are answers.",
            queries=(
                Query(
                    f"1 - ({per_second('assay_requests_total', '', ROUTE, FAILED, '$__range')} or vector(0)) / "
                    + per_second("assay_requests_total", "", ROUTE, ASKED, "$__range")
                ),
            ),
        ),
        Panel(
            title="Replicas that pass their canary",
            kind="stat",
            unit="short",
            width=6,
            height=5,
            note="The lowest count that an ingress sees, and how many /readyz requires.",
            queries=(
                Query(level("assay_ready_replicas", how="min"), "ready"),
                Query(level("assay_required_replicas", how="max"), "wanted"),
            ),
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
            queries=(Query(per_second("assay_requests_total", "route", ROUTE, ASKED), "{{route}}"),),
        ),
        Panel(
            title="Answers that are no 200, by code",
            unit="reqps",
            stacked=True,
            note="Codes are those of the error bodies; 499 is a client that left.",
            queries=(
                Query(
                    per_second("assay_requests_total", "status, code", ROUTE, f'status!="200", {ASKED}'),
                    "{{status}} {{code}}",
                ),
            ),
        ),
        Panel(
            title="Time of requests, 99th percentile by route",
            unit="s",
            note="As finely as the buckets are: 1, 2.5, 5 and ten times these.",
            queries=(Query(quantile(0.99, SECONDS, "route", ROUTE), "{{route}}"),),
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
            queries=(Query(mean("assay_stage_seconds", "stage"), "{{stage}}"),),
        ),
        Panel(
            title="Time by stage, 99th percentile",
            unit="s",
            width=12,
            note="A stage that is slow for a few: not seen in the mean.",
            queries=(Query(quantile(0.99, "assay_stage_seconds", "stage"), "{{stage}}"),),
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
            queries=(
                Query(
                    per_second("assay_tokens_total", "kind", more='kind=~"prompt|cached|computed|generated"'),
                    "{{kind}}",
                ),
            ),
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
            queries=(
                Query(level("assay_inflight_requests"), "requests"),
                Query(level("assay_open_streams"), "streams"),
            ),
        ),
        Panel(
            title="Bodies in flight",
            unit="bytes",
            note="The connection limit refuses at `admission.max_inflight_body_bytes` of one ingress.",
            queries=(Query(level("assay_inflight_body_bytes", "replica"), "{{replica}}"),),
        ),
        Panel(
            title="Refused, by reason",
            unit="reqps",
            stacked=True,
            note="overloaded and deadline mean too little room; the others, a request or a server that is wrong.",
            queries=(Query(per_second("assay_rejected_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Queue, in seconds of work",
            unit="s",
            note="Tokens accepted and not computed, over how fast replicas work queues off, once that is known.",
            queries=(Query(share(level("assay_queued_tokens"), f"({level('assay_drain_tokens_per_second')} > 0)")),),
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
            queries=(Query(per_second("assay_auth_failures_total", "reason"), "{{reason}}"),),
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
            queries=(Query(events("assay_retries_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            title="Streams continued elsewhere, by cause",
            unit="short",
            note="A rollout hands off; after a crash another replica resumes.",
            queries=(Query(events("assay_resumes_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            title="Retries not made, and quarantine",
            unit="short",
            note="Retries beyond the budget, and requests that are refused because they ended two replicas.",
            queries=(
                Query(events("assay_retry_budget_exhausted_total"), "budget spent"),
                Query(level("assay_quarantine_entries", how="max"), "in quarantine"),
            ),
        ),
        Panel(
            title="Clients that disconnected, by phase",
            unit="short",
            stacked=True,
            note="queued: before an answer began; prefill: before a stream's first token; last: after all tokens.",
            queries=(Query(events("assay_disconnects_total", "phase"), "{{phase}}"),),
        ),
        Panel(
            title="Canaries that failed, by reason",
            unit="short",
            note="mismatch is silent corruption: the same prompt scores differently than at start-up.",
            queries=(Query(events("assay_canary_failures_total", "reason"), "{{reason}}"),),
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
            queries=(Query(events("assay_failed_requests_total", "code"), "{{code}}"),),
        ),
        Panel(
            title="Steps and sequences that failed",
            unit="short",
            note="A step that raises fails its requests; logits that are not finite fail one.",
            queries=(
                Query(events("assay_failed_steps_total"), "steps that raised"),
                Query(events("assay_nonfinite_rows_total"), "sequences not finite"),
            ),
        ),
        Panel(
            title="Processes that did not answer a scrape",
            unit="short",
            note="Their metrics are missing from this dashboard for that time.",
            queries=(Query(events("assay_scrape_missing_total")),),
        ),
        Panel(
            title="Event loop lag",
            unit="s",
            note="How late an ingress ran what was due; a high value means that its loop was blocked.",
            queries=_quantiles(LAG, ""),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="service",
    title="Service",
    note="Answers, latency by stage, refusals and failures.",
    rows=(LEVEL, STAGES, TOKENS, ADMISSION, FAULTS),
)
