"""Defines service level objectives, the recorded share of bad requests over several windows, and burn-rate alerts. Each
alert has two windows: the long one shows that the burn matters, the short one that it continues."""

from dataclasses import dataclass

from deployments.auth.api_keys import NEEDS
from deployments.errors import ERROR_KINDS
from k8s.alerts.model import BY, Alert, Bound, RecordingRule

ASKED = 'route!~"/healthz|/readyz|/health|/metrics"'  # by clients, not by machines that watch
FAILURES = "|".join(code for code, kind in ERROR_KINDS.items() if kind.status >= 500)
FAILED = f'code=~"{FAILURES}", {ASKED}'  # by code: a stream that fails has sent its status, 200
SCORING_ROUTES = "|".join(route for route, scopes in NEEDS.items() if "score" in scopes and "generate" not in scopes)
SCORING = f'route=~"{SCORING_ROUTES}"'
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))  # times the budget's even pace: 2 % of 30 days' in an hour, 5 % in six
SLOW = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Defines a share of requests that must be good. `bad` and `all` are rates over [WINDOW]."""

    key: str  # in the names of its recording rules
    name: str  # in those of its alerts
    target: float
    bad: str
    all: str
    what: str
    runbook: str

    def record(self, window: str) -> str:
        return f"assay:{self.key}:bad_share_{window}"


def _rate(metric: str, where: str) -> str:
    return f"sum by ({BY}) (rate({metric}{{{where}}}[WINDOW]))"


def _slower(metric: str, where: str, seconds: str) -> str:
    within = f'{where}, le="{seconds}"' if where else f'le="{seconds}"'
    return f"{_rate(f'{metric}_count', where)} - {_rate(f'{metric}_bucket', within)}"


OBJECTIVES = (
    Objective(
        key="requests",
        name="Errors",
        target=0.999,
        bad=_rate("assay_requests_total", FAILED),
        all=_rate("assay_requests_total", ASKED),
        what="of requests end with a server error; the objective is 0.1 %",
        runbook="Service dashboard, rows Service level and Faults: which code? `internal_error` has a traceback in "
        "the log under its request id; `no_replica`, `not_ready` and `replica_lost` are replicas that die or do not "
        "start.",
    ),
    Objective(
        key="scoring",
        name="SlowScores",
        target=0.99,
        bad=_slower("assay_request_seconds", SCORING, "2.5"),
        all=_rate("assay_request_seconds_count", SCORING),
        what="of scoring requests take over 2.5 s; the objective is 1 %",
        runbook="Latency by stage says where: queue means too few replicas or a few huge requests, prefill and head "
        "the model itself, tokenize and encode the ingresses.",
    ),
    Objective(
        key="first_token",
        name="SlowFirstTokens",
        target=0.99,
        bad=_slower("assay_time_to_first_token_seconds", "", "2.5"),
        all=_rate("assay_time_to_first_token_seconds_count", ""),
        what="of streams wait over 2.5 s for their first token; the objective is 1 %",
        runbook="Queue, in seconds of work, and Wait for the first step: if they are high add replicas; else look for "
        "long prompts, and for preemptions on the Replicas dashboard.",
    ),
)


def records() -> tuple[RecordingRule, ...]:
    """Returns the recording rules. A share is 0 if nothing bad was ever seen, and absent without requests."""
    found = []
    for one in OBJECTIVES:
        for window in WINDOWS:
            bad, every = (part.replace("WINDOW", window) for part in (one.bad, one.all))
            found.append(RecordingRule(one.record(window), f"(({bad}) or 0 * {every}) / {every}"))
    return tuple(found)


def alerts() -> tuple[Alert, ...]:
    found = []
    for one in OBJECTIVES:
        for speed, burns, hold in (("Fast", FAST, "2m"), ("Slow", SLOW, "15m")):
            choices = tuple(
                tuple(Bound(one.record(window), factor * (1 - one.target)) for window in (long, short))
                for factor, long, short in burns
            )
            found.append(
                Alert(
                    name=f"Assay{one.name}Burn{speed}",
                    severity="page" if speed == "Fast" else "ticket",
                    any_of=choices,
                    hold=hold,
                    summary=f"{{{{ $value | humanizePercentage }}}} {one.what}.",
                    runbook=one.runbook,
                )
            )
    return tuple(found)
