"""Refusals: logged as a rate. A line for each would make the load worse that they are there to shed."""

import asyncio
import logging
from collections import Counter

from deployments.wire.errors import Code

log = logging.getLogger("assay.http")
PERIOD_S = 1.0
SHED: frozenset[Code] = frozenset(
    ("overloaded", "quota_exceeded", "deadline_exceeded", "draining", "not_ready", "no_replica")
)


class Refusals:
    """Counts refusals by code and tells of them once a period, at its end: the last ones are not forgotten. For one
    event loop."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._counts: Counter[str] = Counter()

    def add(self, code: str) -> None:
        if not self._counts:
            asyncio.get_running_loop().call_later(self._period_s, self._tell)
        self._counts[code] += 1

    def _tell(self) -> None:
        told = ", ".join(f"{code} {count}" for code, count in sorted(self._counts.items()))
        log.warning("Refused %d requests in %g s: %s.", self._counts.total(), self._period_s, told)
        self._counts.clear()
