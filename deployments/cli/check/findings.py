"""Finding: one thing that is wrong with a configuration, or worth knowing, and what to do about it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`error`: it would not start, or start and be wrong. `warning`: it will hurt in some places. `note`: what an
    operator may want to know."""

    level: Level
    where: str  # a path in the file: applications[0].args.engine.max_running
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
    """The nearest of the known names as a question, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, 1, 0.6)
    return f"Did you mean `{near[0]}`?" if near else f"It must be one of {', '.join(names)}."


def under(where: str, key: object) -> str:
    """The path of a key, or of an index, below `where`."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    return f"{where}.{key}" if where else str(key)
