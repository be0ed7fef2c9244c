"""LogprobBuffer: what waits for a row's next chunk is what the row was given, in order, whatever other rows do."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.request_state import BLOCK, LogprobBuffer, LogprobColumns, columns_of
from gpu_sampler.output import SampleOutput

SLOTS = 5


def _step(rng: np.random.Generator, rows: int, top: int, chosen: int) -> SampleOutput:
    return SampleOutput(
        rng.integers(0, 99, rows, dtype=np.int32),
        rng.random(rows, np.float32),
        rng.integers(1, 99, rows, dtype=np.int32),
        rng.integers(0, 99, (rows, top), dtype=np.int32),
        rng.random((rows, top), np.float32),
        rng.random((rows, chosen), np.float32),
        np.zeros(rows, np.uint32),
    )


def _taken(parts: list[LogprobColumns]) -> list[list[Any]]:
    """Token by token the first value of each column: how wide a row's columns are, is the step's."""
    return [[None if column is None else column[at, ...].ravel()[:1].tolist() for column in part]
            for part in parts for at in range(len(part[0] if part[0] is not None else ()))]  # fmt: skip


def _as_given(history: dict[int, list[tuple[SampleOutput, int]]], slot: int) -> list[list[Any]]:
    """The plain way: each token's columns as its own step had them."""
    return [[column[row : row + 1].ravel()[:1].tolist() for column in columns_of(out)]
            for out, row in history.pop(slot, [])]  # fmt: skip


class Shifted(LogprobBuffer):
    """Planted: of each step the rows of its neighbours."""

    def add(self, slots: Any, out: SampleOutput, rows: Any) -> None:
        super().add(slots, out, np.roll(rows, 1))


def disagreement(buffer: LogprobBuffer, seed: int, steps: int) -> bool:
    """Whether anything taken out of it is not what was put in. Rows come, go and share steps at random."""
    rng = np.random.default_rng(seed)
    history: dict[int, list[tuple[SampleOutput, int]]] = {}
    wrong = False
    for _ in range(steps):
        slots = np.flatnonzero(rng.random(SLOTS) < 0.8)
        extra = int(rng.integers(0, 3))
        out = _step(rng, len(slots) + extra, int(rng.integers(1, 4)), int(rng.integers(1, 3)))
        rows = np.sort(rng.permutation(len(slots) + extra)[: len(slots)])
        if len(slots):
            buffer.add(slots, out, rows)
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            history.setdefault(slot, []).append((out, row))
        if rng.random() < 0.03:
            slot = int(rng.integers(SLOTS))
            wrong |= _taken(buffer.take(slot)) != _as_given(history, slot)
    return wrong or any(_taken(buffer.take(slot)) != _as_given(history, slot) for slot in range(SLOTS))


@given(seed=st.integers(0, 2**32 - 1), steps=st.sampled_from((1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)))
@settings(max_examples=40, deadline=None)
def test_what_is_taken_is_what_was_added(seed: int, steps: int) -> None:
    assert not disagreement(LogprobBuffer(SLOTS), seed, steps)


def test_rows_of_neighbours_are_told_apart() -> None:
    assert disagreement(Shifted(SLOTS), 0, BLOCK)


def test_a_run_of_tokens_stands_between_those_before_and_behind_it() -> None:
    rng = np.random.default_rng(1)
    buffer = LogprobBuffer(SLOTS)
    one, run, other = _step(rng, 1, 2, 1), _step(rng, 3, 2, 1), _step(rng, 1, 2, 1)
    buffer.add(np.array([2]), one, np.array([0]))
    buffer.put(2, columns_of(run))
    buffer.add(np.array([2]), other, np.array([0]))
    found = np.concatenate([part[0] for part in buffer.take(2) if part[0] is not None])
    expected = np.concatenate([out.logprobs for out in (one, run, other) if out.logprobs is not None])
    assert found.tobytes() == expected.tobytes()
    assert buffer.take(2) == []


@pytest.mark.parametrize("tops", [(1, 4), (4, 1)])
def test_steps_of_another_width_cost_no_row_a_column(tops: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    buffer, outs = LogprobBuffer(SLOTS), [_step(rng, 1, top, 1) for top in tops]
    for out in outs:
        buffer.add(np.array([1]), out, np.array([0]))
    (part,) = buffer.take(1)
    assert part[2] is not None and part[2].shape == (2, max(tops))
    for at, (out, top) in enumerate(zip(outs, tops, strict=True)):
        assert out.top_ids is not None and part[2][at, :top].tolist() == out.top_ids[0].tolist()
