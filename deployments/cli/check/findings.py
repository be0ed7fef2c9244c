"""Represents what a check finds in a configuration, and what to do about it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Holds one finding.

    `error`: the configuration does not start, or is wrong. `warning`: it causes trouble on some machines or at some
    times. `note`: an operator may want to know it.
    """

    level: Severity
    where: str  # path of the key, such as applications[0].args.engine.max_running
    message: str  # says what to change

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message}" if self.where else f"{self.level}: {self.message}"


def error(where: str, message: str) -> Finding:
    return Finding(level="error", where=where, message=message)


def warning(where: str, message: str) -> Finding:
    return Finding(level="warning", where=where, message=message)


def note(where: str, message: str) -> Finding:
    return Finding(level="note", where=where, message=message)


def meant(given: object, known: Iterable[str]) -> str:
    """Suggests the nearest of the known names, or lists them all."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, 1, 0.6)
    return f"Did you mean `{near[0]}`?" if near else f"It must be one of {', '.join(names)}."


def under(where: str, key: object) -> str:
    """Returns the path of a key or an index below `where`."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    return f"{where}.{key}" if where else str(key)
