"""LogprobBuffer: log-probabilities of tokens that wait for the next chunk of their sequence.

The buffer writes the log-probabilities of one step for all sequences in one operation, and takes those of a sequence
out when its chunk is due. Each request slot has a block of tokens in one table; full blocks move to a list of their
own, so that the table stays small however long a sequence is.

Shape legend: S request slots, R rows of a step, k tokens, N top ids of a row, C chosen ids.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.requests import Float32s, Int32s
from gpu_sampler.output import SampleOutput, VerifyOutput

# Log-probabilities of k tokens: sampled f32 [k], ranks i32 [k], top ids i32 [k, N], theirs f32 [k, N], of the chosen
# ids f32 [k, C].
LogprobColumns = tuple[Float32s | None, Int32s | None, Int32s | None, Float32s | None, Float32s | None]
Array = npt.NDArray[Any]
BLOCK = 64  # tokens


class LogprobBuffer:
    """Keeps log-probabilities by request slot, in the order of the tokens."""

    def __init__(self, slots: int) -> None:
        self._tables: list[Array | None] = [None] * 5  # one for each of LogprobColumns, [S, BLOCK, *]
        self._count = np.zeros(slots, np.int64)  # [S] tokens of the slot's block
        self._full_blocks: dict[int, list[LogprobColumns]] = {}  # by slot, oldest first
        self._slots = slots

    def add(self, slots: npt.NDArray[np.int64], out: SampleOutput, rows: npt.NDArray[np.int64]) -> None:
        """Adds one token for each of several slots.

        Args:
            slots: i64 [R], the request slots.
            out: the output of the step.
            rows: i64 [R], the row of `out` of each slot.
        """
        at = self._count[slots]
        for index, values in enumerate(columns_of(out)):
            if values is not None:
                place: tuple[Any, ...] = (slots, at, *map(slice, values.shape[1:]))
                self._table(index, values)[place] = values[rows]
        self._count[slots] = at + 1
        for slot in slots[at + 1 == BLOCK].tolist():
            self._close_block(slot)

    def put(self, slot: int, columns: LogprobColumns) -> None:
        """Adds several tokens of one slot."""
        self._close_block(slot)
        self._full_blocks.setdefault(slot, []).append(columns)

    def take(self, slot: int) -> list[LogprobColumns]:
        """Removes and returns everything of a slot, oldest first."""
        self._close_block(slot)
        return self._full_blocks.pop(slot, [])

    def _close_block(self, slot: int) -> None:
        count = int(self._count[slot])
        if count:
            sampled, ranks, ids, top, chosen = (None if t is None else t[slot, :count].copy() for t in self._tables)
            self._full_blocks.setdefault(slot, []).append((sampled, ranks, ids, top, chosen))
            self._count[slot] = 0

    def _table(self, index: int, values: Array) -> Array:
        """Returns the table of a column, at least as wide as the step's values [R, *]."""
        table = self._tables[index]
        shape = (self._slots, BLOCK, *values.shape[1:])
        if table is None or table.shape < shape:
            wider = np.zeros(shape, values.dtype)
            if table is not None:
                wider[tuple(map(slice, table.shape))] = table
            self._tables[index] = table = wider
        return table


def columns_of(out: SampleOutput | VerifyOutput) -> tuple[Any, Any, Any, Any, Any]:
    """Returns the log-probability columns of a step's rows, [R, *] each."""
    return out.logprobs, out.ranks, out.top_ids, out.top_logprobs, out.chosen_logprobs
