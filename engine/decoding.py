"""Decoding: the rows that decode, and which of them share the next step."""

from collections.abc import Iterable

import numpy as np

from engine.jobs import Int64s
from engine.requests import Request

Together = tuple[Int64s, list[Request]]  # request slots, and their rows


class Decoding:
    """Rows by request slot, in the order in which they came."""

    def __init__(self) -> None:
        self._rows: dict[int, Request] = {}
        self._all: Together | None = None  # kept from step to step while nobody comes or goes
        self._solo = False  # some of them may be a solo job's
        self._turn = 0

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, slot: int) -> Request:
        return self._rows[slot]

    def values(self) -> Iterable[Request]:
        return self._rows.values()

    def add(self, request: Request) -> None:
        self._rows[request.slot] = request
        self._all = None

    def discard(self, request: Request) -> None:
        """Nothing happens for a row that is not there."""
        if self._rows.pop(request.slot, None) is not None:
            self._all = None

    def next(self) -> Together:
        """The rows that may share the next step: one solo job's, or all the others."""
        if self._all is None:
            self._all = _together(self._rows.values())
            self._solo = any(row.parent.solo for row in self._rows.values())
        return self._of_turn(self._all) if self._solo else self._all

    def _of_turn(self, all_rows: Together) -> Together:
        """A job may have ceased to be solo since the last step."""
        rows = self._rows.values()
        groups: list[int | None] = list(dict.fromkeys(id(row.parent) for row in rows if row.parent.solo))
        if not groups:
            self._solo = False
            return all_rows
        if any(not row.parent.solo for row in rows):
            groups.append(None)
        self._turn = (self._turn + 1) % len(groups)
        chosen = groups[self._turn]
        return _together([row for row in rows if (id(row.parent) if row.parent.solo else None) == chosen])


def _together(rows: Iterable[Request]) -> Together:
    found = list(rows)
    return np.array([row.slot for row in found], np.int64), found
