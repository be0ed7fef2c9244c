"""Defines alerts on faults, independent of the error budget."""

from k8s.alerts.model import BY, Alert, Bound
from k8s.alerts.objectives import ASKED

QUEUE_S = 10  # the default of `admission.max_wait_s`
ROOM = 'reason=~"overloaded|deadline|draining|not_ready"'  # refused for a reason on the server's side


def _rise(metric: str, where: str = "", window: str = "5m") -> str:
    return f"sum by ({BY}) (increase({metric}{where}[{window}]))"


def _rate(metric: str, where: str = "", by: str = BY) -> str:
    return f"sum by ({by}) (rate({metric}{where}[5m]))"


def _level(metric: str, where: str = "", how: str = "sum", by: str = BY) -> str:
    return f"{how} by ({by}) ({metric}{where})"


EACH = f"{BY}, replica"
USED = _level("assay_kv_slots", '{state="used"}', by=EACH) + " / " + _level("assay_kv_slots", by=EACH)
MISSING = f"{_level('assay_required_replicas', how='max')} - {_level('assay_ready_replicas', how='min')}"
REFUSED = f"{_rate('assay_rejected_total', f'{{{ROOM}}}')} / {_rate('assay_requests_total', f'{{{ASKED}}}')}"
LAG = f"histogram_quantile(0.99, {_rate('assay_event_loop_lag_seconds_bucket', by=f'{EACH}, le')})"
ALERTS = (
    Alert(
        name="AssayAbsent",
        severity="page",
        any_of=((Bound("absent(assay_ready_replicas)", 0),),),
        hold="5m",
        summary="No ingress reports metrics.",
        runbook="Does the Service have endpoints, and does `/metrics` answer with the scraper's key? With no ingress "
        "at all, look at the Serve controller's log and at the events of the RayService.",
    ),
    Alert(
        name="AssayTooFewReplicas",
        severity="page",
        any_of=((Bound(MISSING, 0),),),
        hold="1m",
        summary="{{ $value }} of the replicas that /readyz asks for are missing.",
        runbook="`/readyz` is 503 or about to be. Replicas dashboard, and the log of the replica that is missing: a "
        "failed start-up check names itself; a canary that fails has its reason in assay_canary_failures_total.",
    ),
    Alert(
        name="AssayCanaryFailing",
        severity="page",
        any_of=((Bound(_rise("assay_canary_failures_total"), 2),),),
        hold="1m",
        summary="{{ $value | humanize }} canaries failed within 5 minutes.",
        runbook="timeout: a step hangs, or the replica is overloaded beyond measure. error: the engine refuses. "
        "mismatch: the same row scores otherwise than at start-up; take the node out and check its device.",
    ),
    Alert(
        name="AssayNonfiniteRows",
        severity="page",
        any_of=((Bound(_rise("assay_nonfinite_rows_total", window="10m"), 0),),),
        hold=None,
        summary="{{ $value | humanize }} rows with logits that are not finite.",
        runbook="Each failed its own request only. On one replica: suspect its device. On all since a rollout: the "
        "model or its dtype. With one client only: its input; replay it against another replica.",
    ),
    Alert(
        name="AssayStepsFailing",
        severity="ticket",
        any_of=((Bound(_rise("assay_failed_steps_total", window="10m"), 0),),),
        hold=None,
        summary="{{ $value | humanize }} steps raised within 10 minutes.",
        runbook="The replica's log has the traceback (A ... step failed). Out of memory: lower `engine.token_budget` "
        "or `engine.kv_slots`.",
    ),
    Alert(
        name="AssayQueueOverLimit",
        severity="page",
        any_of=(
            (Bound(f"{_level('assay_queued_tokens')} / ({_level('assay_drain_tokens_per_second')} > 0)", QUEUE_S),),
        ),
        hold="5m",
        summary="{{ $value | humanizeDuration }} of work is queued.",
        runbook="More is asked than replicas can do. Add replicas, or look for one client that sends far more than "
        "before; new requests are refused with 429 and Retry-After meanwhile.",
    ),
    Alert(
        name="AssayRefusing",
        severity="page",
        any_of=((Bound(REFUSED, 0.05),),),
        hold="5m",
        summary="{{ $value | humanizePercentage }} of requests are refused for lack of capacity.",
        runbook="Refused, by reason, on the Service dashboard: overloaded and deadline as for AssayQueueOverLimit; "
        "draining during a rollout is brief; not_ready with AssayTooFewReplicas.",
    ),
    Alert(
        name="AssayRetryBudgetSpent",
        severity="page",
        any_of=((Bound(_rise("assay_retry_budget_exhausted_total", '{cause!="busy"}'), 0),),),
        hold=None,
        summary="{{ $value | humanize }} retries were not made within 5 minutes.",
        runbook="Replicas are lost faster than retries make sense: clients see 503 `replica_lost`. Find what kills "
        "them: the exit status in Serve's log, AssayQuarantine, memory.",
    ),
    Alert(
        name="AssayQuarantine",
        severity="ticket",
        any_of=((Bound(_level("assay_quarantine_entries", how="max"), 0),),),
        hold=None,
        summary="{{ $value }} requests are in quarantine.",
        runbook="A request killed a replica twice and is refused with 422 `quarantined_request`. The log names its "
        "fingerprint and the exit status: report it with the model's version; it expires after `retry.quarantine_s`.",
    ),
    Alert(
        name="AssayKvFull",
        severity="ticket",
        any_of=((Bound(USED, 0.95), Bound(_rate("assay_preemptions_total", by=EACH), 0)),),
        hold="5m",
        summary="{{ $labels.replica }} has {{ $value | humanizePercentage }} of its slots in use and preempts rows.",
        runbook="Rows lose their place and are computed again. Raise `engine.kv_slots`, lower `engine.max_running`, "
        "or add replicas.",
    ),
    Alert(
        name="AssayEventLoopLag",
        severity="ticket",
        any_of=((Bound(LAG, 0.25),),),
        hold="5m",
        summary="The loop of {{ $labels.replica }} is {{ $value | humanizeDuration }} late at the 99th percentile.",
        runbook="Something of over 1 ms runs on an ingress's event loop, or the node's cores are all taken. More "
        "ingresses help with the second only.",
    ),
    Alert(
        name="AssayScrapeMissing",
        severity="ticket",
        any_of=((Bound(_rise("assay_scrape_missing_total"), 0),),),
        hold="5m",
        summary="{{ $value | humanize }} processes did not answer scrapes within 5 minutes.",
        runbook="Their figures are missing from every sum. A replica that starts, or one whose loop is blocked; if it "
        "lasts, raise `metrics.timeout_s`.",
    ),
)
