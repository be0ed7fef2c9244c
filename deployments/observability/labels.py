"""Defines the closed sets of label values and the buckets of histograms."""

from typing import get_args

from deployments.auth.api_keys import NEEDS
from deployments.auth.authenticator import Reason
from deployments.errors import KINDS
from deployments.observability.observer import Phase, Stage

OTHER = "other"
SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))[:-2]
GAP_SECONDS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2.5, 5))[:-2]  # between tokens
LAG_SECONDS = GAP_SECONDS
SHARDS = (1, 2, 4, 8, 16, 32, 64)
MASS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
ROUTES = frozenset(NEEDS)
STATUSES = frozenset(str(kind.status) for kind in KINDS.values()) | {"200", "499"}
CODES = frozenset(KINDS) | {""}
STAGES = frozenset(get_args(Stage))
PHASES = frozenset(get_args(Phase))
AUTH_REASONS = frozenset(get_args(Reason))
REJECTIONS = {
    "overloaded": "overloaded",
    "quota_exceeded": "quota",
    "deadline_exceeded": "deadline",
    "draining": "draining",
    "not_ready": "not_ready",
    "no_replica": "not_ready",
    "request_too_large": "too_large",
    "body_too_large": "too_large",
    "quarantined_request": "quarantined",
}
RETRY_CAUSES = frozenset(("died", "unavailable", "busy", "step_failed", "handoff"))
RESUME_CAUSES = RETRY_CAUSES
CANARY_FAILURES = frozenset(("timeout", "mismatch", "error"))


def known(value: object, allowed: frozenset[str]) -> str:
    """Returns the label value, or "other" for one outside the closed set."""
    text = str(value)
    return text if text in allowed else OTHER
