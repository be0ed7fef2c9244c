"""The dashboard that is looked at first: what clients get, where the time goes, what is refused, what fails."""

from k8s.grafana.panels import Dashboard, Panel, Query, Row
from k8s.grafana.promql import APP, ROUTE, events, level, mean, per_second, quantile, share

ASKED = 'route!~"/healthz|/readyz|/health|/metrics"'  # by clients, not by machines that watch
FAILED = f'status=~"5..", {ASKED}'
SECONDS = "assay_request_seconds"
LAG = "assay_event_loop_lag_seconds"


def _quantiles(metric: str, by: str, where: str = APP, legend: str = "") -> tuple[Query, ...]:
    return tuple(Query(quantile(q, metric, by, where), f"{legend}p{round(100 * q)}") for q in (0.5, 0.99))


LEVEL = Row(
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
            note="As the most pessimistic ingress sees it, and how many /readyz asks for.",
            queries=(
                Query(level("assay_ready_replicas", how="min"), "ready"),
                Query(level("assay_ready_replicas_wanted", how="max"), "wanted"),
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

STAGES = Row(
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

TOKENS = Row(
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

ADMISSION = Row(
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
            note="Many of them at once: somebody is trying, or a key was changed on one side only.",
            queries=(Query(per_second("assay_auth_failures_total", "reason"), "{{reason}}"),),
        ),
    ),
)

FAULTS = Row(
    "Faults",
    (
        Panel(
            title="Sent again, by cause",
            unit="short",
            note="Blocks and requests that another replica got. Clients see nothing of it.",
            queries=(Query(events("assay_retries_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            title="Streams continued elsewhere, by cause",
            unit="short",
            note="A rollout hands off; a replica that dies is resumed after.",
            queries=(Query(events("assay_resumes_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            title="Retries not made, and quarantine",
            unit="short",
            note="The budget was spent; and requests that are refused because they killed a replica twice.",
            queries=(
                Query(events("assay_retry_budget_exhausted_total"), "budget spent"),
                Query(level("assay_quarantine_entries", how="max"), "in quarantine"),
            ),
        ),
        Panel(
            title="Clients that left, by phase",
            unit="short",
            stacked=True,
            note="queued: before an answer began; prefill: before a stream's first token; last: all was made already.",
            queries=(Query(events("assay_disconnects_total", "phase"), "{{phase}}"),),
        ),
        Panel(
            title="Canaries that failed, by reason",
            unit="short",
            note="mismatch is silent corruption: the same row scores otherwise than at start-up.",
            queries=(Query(events("assay_canary_failures_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Time of a canary that passed",
            unit="s",
            note="One scoring row and two tokens through the real path.",
            queries=_quantiles("assay_canary_seconds", ""),
        ),
        Panel(
            title="Tasks that replicas refused or lost, by code",
            unit="short",
            note="The codes of the engine.",
            queries=(Query(events("assay_failures_total", "code"), "{{code}}"),),
        ),
        Panel(
            title="Steps and rows that failed",
            unit="short",
            note="A step that raised costs its own requests; a row that is not finite costs one.",
            queries=(
                Query(events("assay_failed_steps_total"), "steps that raised"),
                Query(events("assay_nonfinite_rows_total"), "rows not finite"),
            ),
        ),
        Panel(
            title="Processes that did not answer a scrape",
            unit="short",
            note="Their figures are missing from this dashboard for that time.",
            queries=(Query(events("assay_scrape_missing_total")),),
        ),
        Panel(
            title="Event loop lag",
            unit="s",
            note="How late an ingress ran what was due: something held up its loop.",
            queries=_quantiles(LAG, ""),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="service",
    title="Service",
    note="What clients get, where the time goes, what is refused and what fails.",
    rows=(LEVEL, STAGES, TOKENS, ADMISSION, FAULTS),
)
