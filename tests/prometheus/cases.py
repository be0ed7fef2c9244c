"""For each alert: series under which it fires, with what it then says, and others like them under which it does not.

A sample a minute for half an hour: windows of days hold no more than that, and every hold has passed.
"""

from dataclasses import dataclass, field

APP = {"cluster": "c", "application": "a"}
REPLICA = {**APP, "replica": "r1"}
RUN = 30  # samples a series
ROUTE = {"route": "/v1/score"}
STREAM = {"route": "/v1/completions"}


def series(metric: str, values: str, **labels: str) -> tuple[str, str]:
    """A series and its values: "4" stays there, "+4" rises by 4 a sample."""
    own = ",".join(f'{name}="{value}"' for name, value in ({**APP, **labels}).items())
    return f"{metric}{{{own}}}", f"0{values}x{RUN}" if values.startswith("+") else f"{values}+0x{RUN}"


Series = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    fires: Series
    silent: Series
    says: str  # the summary
    labels: dict[str, str] = field(default_factory=lambda: dict(APP))


def _requests(bad: int, good: int, status: str = "500") -> Series:
    """`status`: of the bad ones; 200 where a stream had begun."""
    return [
        series("assay_requests_total", f"+{bad}", status=status, code="internal_error", **ROUTE),
        series("assay_requests_total", f"+{good}", status="200", code="", **ROUTE),
        series("assay_requests_total", "+9999", status="503", code="", route="/readyz"),  # asked by machines
    ]


def _slower(metric: str, within: int, labels: dict[str, str]) -> Series:
    """So many of 100 a sample within 2.5 s."""
    return [
        series(f"{metric}_bucket", f"+{within}", le="2.5", **labels),
        series(f"{metric}_bucket", "+100", le="+Inf", **labels),
        series(f"{metric}_count", "+100", **labels),
    ]


def _lag(within: int) -> Series:
    metric = "assay_event_loop_lag_seconds_bucket"
    return [
        series(metric, f"+{within}", le="0.25", replica="r1"),
        series(metric, "+100", le="0.5", replica="r1"),
        series(metric, "+100", le="+Inf", replica="r1"),
    ]


def _slots(preemptions: str) -> Series:
    states = {"used": "97", "cached": "2", "free": "1"}
    found = [series("assay_kv_slots", count, state=state, replica="r1") for state, count in states.items()]
    return [*found, series("assay_preemptions_total", preemptions, replica="r1")]


def _rise(metric: str, says: str) -> Case:
    """A counter that rises, against one that stands where it was."""
    return Case(fires=[series(metric, "+1")], silent=[series(metric, "7")], says=says)


SCORES, FIRST = "assay_request_seconds", "assay_time_to_first_token_seconds"
REQUESTS = "of requests end with a server error; the objective is 0.1 %."
SCORING = "of scoring requests take over 2.5 s; the objective is 1 %."
STREAMS = "of streams wait over 2.5 s for their first token; the objective is 1 %."
CASES = {
    "AssayErrorsBurnFast": Case(fires=_requests(5, 95), silent=_requests(1, 1999), says=f"5% {REQUESTS}"),
    "AssayErrorsBurnSlow": Case(
        fires=_requests(5, 995, "200"),
        silent=_requests(1, 1999),
        says=f"0.5% {REQUESTS}",
    ),
    "AssaySlowScoresBurnFast": Case(
        fires=_slower(SCORES, 70, ROUTE), silent=_slower(SCORES, 96, ROUTE), says=f"30% {SCORING}"
    ),
    "AssaySlowScoresBurnSlow": Case(
        fires=_slower(SCORES, 96, ROUTE),
        silent=[*_slower(SCORES, 100, ROUTE), *_slower(SCORES, 10, STREAM)],
        says=f"4% {SCORING}",
    ),
    "AssaySlowFirstTokensBurnFast": Case(
        fires=_slower(FIRST, 70, STREAM), silent=_slower(FIRST, 96, STREAM), says=f"30% {STREAMS}"
    ),
    "AssaySlowFirstTokensBurnSlow": Case(
        fires=_slower(FIRST, 96, STREAM),
        silent=_slower(FIRST, 100, STREAM),
        says=f"4% {STREAMS}",
    ),
    "AssayAbsent": Case(
        fires=[series("up", "0")],
        silent=[series("assay_ready_replicas", "1")],
        says="No ingress reports metrics.",
        labels={},
    ),
    "AssayTooFewReplicas": Case(
        fires=[
            series("assay_ready_replicas", "2", replica="i1"),
            series("assay_ready_replicas", "1", replica="i2"),
            series("assay_required_replicas", "2", replica="i1"),
        ],
        silent=[series("assay_ready_replicas", "2"), series("assay_required_replicas", "2")],
        says="1 of the replicas that /readyz asks for are missing.",
    ),
    "AssayCanaryFailing": Case(
        fires=[series("assay_canary_failures_total", "+1", reason="timeout")],
        silent=[(series("assay_canary_failures_total", "0", reason="timeout")[0], "0+0x26 2+0x9")],
        says="5 canaries failed within 5 minutes.",
    ),
    "AssayNonfiniteRows": _rise("assay_nonfinite_rows_total", "10 rows with logits that are not finite."),
    "AssayStepsFailing": _rise("assay_failed_steps_total", "10 steps raised within 10 minutes."),
    "AssayQueueOverLimit": Case(
        fires=[series("assay_queued_tokens", "12000"), series("assay_drain_tokens_per_second", "1000")],
        silent=[series("assay_queued_tokens", "9000"), series("assay_drain_tokens_per_second", "1000")],
        says="12s of work is queued.",
    ),
    "AssayRefusing": Case(
        fires=[
            series("assay_rejected_total", "+10", reason="overloaded"),
            series("assay_requests_total", "+10", status="429", code="overloaded", **ROUTE),
            series("assay_requests_total", "+90", status="200", code="", **ROUTE),
            series("assay_requests_total", "+9999", status="200", code="", route="/healthz"),  # asked by machines
        ],
        silent=[
            series("assay_rejected_total", "+50", reason="too_large"),
            series("assay_rejected_total", "+4", reason="overloaded"),
            series("assay_requests_total", "+100", status="200", code="", **ROUTE),
        ],
        says="10% of requests are refused for lack of capacity.",
    ),
    "AssayRetryBudgetSpent": Case(
        fires=[series("assay_retry_budget_exhausted_total", "+1", cause="died")],
        silent=[
            series("assay_retry_budget_exhausted_total", "0", cause="died"),
            series("assay_retry_budget_exhausted_total", "+1", cause="busy"),  # the answer is 429
        ],
        says="5 retries were not made within 5 minutes.",
    ),
    "AssayQuarantine": Case(
        fires=[series("assay_quarantine_entries", "2")],
        silent=[series("assay_quarantine_entries", "0")],
        says="2 requests are in quarantine.",
    ),
    "AssayKvFull": Case(
        fires=_slots("+1"),
        silent=_slots("7"),
        says="r1 has 97% of its slots in use and preempts rows.",
        labels=REPLICA,
    ),
    "AssayEventLoopLag": Case(
        fires=_lag(90),
        silent=_lag(100),
        says="The loop of r1 is 475ms late at the 99th percentile.",
        labels=REPLICA,
    ),
    "AssayScrapeMissing": _rise("assay_scrape_missing_total", "5 processes did not answer scrapes within 5 minutes."),
}
