"""Kept: log-probabilities of tokens that wait for their row's next chunk, by request slot.

A step's are written for all its rows at once; a row's are taken out when its chunk is due. A slot holds a block of
them in one table, and what went before in blocks of its own, so that the table is small however long a row is.

Legend: S request slots, R rows of a step, k tokens, N first ids of a row, C chosen ids.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.requests import Float32s, Int32s
from gpu_sampler.output import SampleOutput, VerifyOutput

# Log-probabilities of k tokens: sampled f32 [k], ranks i32 [k], top ids i32 [k, N], theirs [k, N], chosen [k, C].
Columns = tuple[Float32s | None, Int32s | None, Int32s | None, Float32s | None, Float32s | None]
Array = npt.NDArray[Any]
BLOCK = 64  # tokens


class Kept:
    def __init__(self, slots: int) -> None:
        self._tables: list[Array | None] = [None] * 5  # of Columns, each [S, BLOCK, *]
        self._count = np.zeros(slots, np.int64)  # tokens of the slot's block
        self._before: dict[int, list[Columns]] = {}  # by slot, oldest first
        self._slots = slots

    def add(self, slots: npt.NDArray[np.int64], out: SampleOutput, rows: npt.NDArray[np.int64]) -> None:
        """One token more of each of `slots`, theirs being `rows` of the step's."""
        at = self._count[slots]
        for index, values in enumerate(columns_of(out)):
            if values is not None:
                place: tuple[Any, ...] = (slots, at, *map(slice, values.shape[1:]))
                self._table(index, values)[place] = values[rows]
        self._count[slots] = at + 1
        for slot in slots[at + 1 == BLOCK].tolist():
            self._put_by(slot)

    def put(self, slot: int, columns: Columns) -> None:
        """Some tokens more of one slot."""
        self._put_by(slot)
        self._before.setdefault(slot, []).append(columns)

    def take(self, slot: int) -> list[Columns]:
        """All that the slot has, oldest first; it has nothing then."""
        self._put_by(slot)
        return self._before.pop(slot, [])

    def _put_by(self, slot: int) -> None:
        count = int(self._count[slot])
        if count:
            sampled, ranks, ids, top, chosen = (None if t is None else t[slot, :count].copy() for t in self._tables)
            self._before.setdefault(slot, []).append((sampled, ranks, ids, top, chosen))
            self._count[slot] = 0

    def _table(self, index: int, values: Array) -> Array:
        """At least as wide as a step's values [R, *]."""
        table = self._tables[index]
        shape = (self._slots, BLOCK, *values.shape[1:])
        if table is None or table.shape < shape:
            wider = np.zeros(shape, values.dtype)
            if table is not None:
                wider[tuple(map(slice, table.shape))] = table
            self._tables[index] = table = wider
        return table


def columns_of(out: SampleOutput | VerifyOutput) -> tuple[Any, Any, Any, Any, Any]:
    """Those of a step's rows, [R, *] each."""
    return out.logprobs, out.ranks, out.top_ids, out.top_logprobs, out.chosen_logprobs
