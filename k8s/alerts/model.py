"""Recording rules and alerts as we write them. An alert is a choice of conditions, each a value held against a bound,
so that a test can ask for the value also where nothing is wrong."""

from dataclasses import dataclass
from typing import Literal

BY = "cluster, application"  # what every rule keeps
Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class Record:
    """A value that is kept, since several alerts read it over long windows."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Bound:
    """`value > limit`."""

    value: str
    limit: float

    def expr(self, change: str = "") -> str:
        """`change` is put behind the limit: what a test plants."""
        return f"{self.value} > {self.limit:g}{change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Fires where all bounds of one of `any_of` have held for `hold`."""

    name: str
    severity: Severity
    any_of: tuple[tuple[Bound, ...], ...]
    hold: str | None  # None: at once
    summary: str
    runbook: str  # what to look at and what to do, in a sentence or two

    @property
    def expr(self) -> str:
        return self.expr_with("")

    def expr_with(self, change: str) -> str:
        """`change`: see Bound."""
        parts = [" and ".join(f"({bound.expr(change)})" for bound in bounds) for bounds in self.any_of]
        return "\nor\n".join(parts)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(bound.value for bounds in self.any_of for bound in bounds)
