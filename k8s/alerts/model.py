"""Defines recording rules and alerts. An alert compares values with bounds, so that a test can query the values also
when nothing is wrong."""

from dataclasses import dataclass
from typing import Literal

BY = "cluster, application"  # labels that every rule keeps
Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """Records a value that several alerts read over long windows."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Bound:
    """States that `value > limit`."""

    value: str
    limit: float

    def expr(self, change: str = "") -> str:
        """Renders the condition. `change` is appended to the limit; tests use it to plant a fault."""
        return f"{self.value} > {self.limit:g}{change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Fires where all bounds of one of `any_of` have held for `hold`."""

    name: str
    severity: Severity
    any_of: tuple[tuple[Bound, ...], ...]
    hold: str | None  # None: immediately
    summary: str
    runbook: str  # where to look and what to do

    @property
    def expr(self) -> str:
        return self.expr_with("")

    def expr_with(self, change: str) -> str:
        """Renders the alert's condition, with a change of the limits."""
        parts = [" and ".join(f"({bound.expr(change)})" for bound in bounds) for bounds in self.any_of]
        return "\nor\n".join(parts)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(bound.value for bounds in self.any_of for bound in bounds)
