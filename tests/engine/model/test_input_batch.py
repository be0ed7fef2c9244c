"""pack: the arrays of a step equal those of a plain loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.input_batch import (
    MIN_TOKENS,
    DecodeSequences,
    InputBatch,
    ScheduledSequence,
    StepKind,
    idle_sequences,
    pack,
)

CPU = torch.device("cpu")
SLOTS, LENGTH = 5, 23


def _table() -> torch.Tensor:
    return torch.arange(SLOTS * LENGTH, dtype=torch.int32).reshape(SLOTS, LENGTH) + 1000


@st.composite
def runs_of_a_step(draw: st.DrawFn) -> list[ScheduledSequence]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = []
    for _ in range(draw(st.integers(1, 7))):
        context, new = draw(st.integers(0, LENGTH - 1)), draw(st.integers(1, 5))
        known = new > 1 or draw(st.booleans())
        rows = np.flatnonzero(rng.random(new) < 0.5).astype(np.int32)
        ids = rng.integers(0, 99, new).astype(np.int32) if known else None
        slots = rng.permutation(500)[: context + new].astype(np.int32)
        sequences.append(ScheduledSequence(int(rng.integers(SLOTS)), slots[:context], slots[context:], ids, rows))
    return sequences


def _by_hand(sequences: list[ScheduledSequence], table: torch.Tensor, pad_to: int) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {
        "ids": [], "positions": [], "write_slots": [], "keep_rows": [], "kv_indices": [],
        "qo_indptr": [0], "kv_indptr": [0],
    }  # fmt: skip
    for run in sequences:
        out["keep_rows"] += [len(out["ids"]) + int(row) for row in run.rows]
        for place, slot in enumerate(run.write):
            position = len(run.context) + place
            out["ids"].append(int(table[run.slot, position]) if run.ids is None else int(run.ids[place]))
            out["positions"].append(position)
            out["write_slots"].append(int(slot))
        out["kv_indices"] += [*map(int, run.context), *map(int, run.write)]
        out["qo_indptr"].append(len(out["ids"]))
        out["kv_indptr"].append(len(out["kv_indices"]))
    while len(out["ids"]) < pad_to:
        for name in ("ids", "positions", "write_slots", "kv_indices"):
            out[name].append(0)
        out["qo_indptr"].append(len(out["ids"]))
        out["kv_indptr"].append(len(out["kv_indices"]))
    return out


@given(sequences=runs_of_a_step(), pad_to=st.sampled_from((MIN_TOKENS, 3, 17, 32)))
@settings(max_examples=200, deadline=None)
def test_packing_equals_a_loop_over_tokens(sequences: list[ScheduledSequence], pad_to: int) -> None:
    batch = pack(StepKind.SCORE, sequences, _table(), CPU, pad_to)
    for name, values in _by_hand(sequences, _table(), pad_to).items():
        assert getattr(batch, name).tolist() == values, name
    assert batch.write_slots_i32.tolist() == batch.write_slots.tolist()
    assert batch.front.tolist() == [*batch.ids.tolist(), *batch.positions.tolist(), *batch.write_slots.tolist()]
    assert batch.single == all(np.diff(batch.qo_indptr) == 1)
    assert (batch.num_tokens, batch.num_rows) == (len(batch.ids), sum(len(run.rows) for run in sequences))


def _last_tokens(seed: int, count: int) -> DecodeSequences:
    rng = np.random.default_rng(seed)
    pool_slots = rng.permutation(SLOTS * LENGTH).astype(np.int32).reshape(SLOTS, LENGTH)
    slots, places = rng.permutation(SLOTS)[:count], rng.integers(0, LENGTH, count)
    return DecodeSequences(slots, places, pool_slots, list(pool_slots))


def _differing(found: InputBatch, expected: InputBatch) -> set[str]:
    """Fields that do not agree, bit for bit and in type."""
    wrong = set()
    for name in InputBatch._fields:
        one, other = getattr(found, name), getattr(expected, name)
        tensors = isinstance(one, torch.Tensor)
        if not (one.dtype == other.dtype and torch.equal(one, other) if tensors else one == other):
            wrong.add(name)
    return wrong


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, SLOTS), pad_to=st.sampled_from((MIN_TOKENS, 3, 17)))
@settings(max_examples=100, deadline=None)
def test_last_tokens_are_packed_as_the_runs_that_they_are(seed: int, count: int, pad_to: int) -> None:
    sequences = _last_tokens(seed, count)
    found = pack(StepKind.DECODE, sequences, _table(), CPU, pad_to)
    assert not _differing(found, pack(StepKind.DECODE, list(sequences), _table(), CPU, pad_to))
    assert found.whole and found.single
    for name, values in _by_hand(list(sequences), _table(), pad_to).items():
        assert getattr(found, name).tolist() == values, name


def test_last_tokens_of_other_places_are_told_apart() -> None:
    sequences = _last_tokens(0, 3)
    sequences.places[1] = (sequences.places[1] + 1) % LENGTH
    found = _differing(
        pack(StepKind.DECODE, sequences, _table(), CPU), pack(StepKind.DECODE, _last_tokens(0, 3), _table(), CPU)
    )
    assert {"ids", "positions", "write_slots", "kv_indices", "kv_indptr"} <= found


@pytest.mark.parametrize(
    ("new", "rows", "whole"), [(1, [0], True), (1, [], False), (1, [0, 0], False), (2, [1], False)]
)
def test_a_step_is_whole_if_each_run_is_one_token_wanted_once(new: int, rows: list[int], whole: bool) -> None:
    one = ScheduledSequence(1, np.arange(3, dtype=np.int32), np.ones(1, np.int32), None, np.zeros(1, np.int32))
    other = one._replace(write=np.ones(new, np.int32), rows=np.array(rows, np.int32))
    assert pack(StepKind.VERIFY, [one, other], _table(), CPU, 17).whole == whole


def test_dtypes_are_those_that_the_model_and_the_kernels_want() -> None:
    batch = pack(StepKind.PREFILL, idle_sequences(3, 2), _table(), CPU)
    wide = (batch.ids, batch.positions, batch.write_slots, batch.keep_rows)
    narrow = (batch.write_slots_i32, batch.kv_indices, batch.qo_indptr, batch.kv_indptr)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    assert {tensor.dtype for tensor in narrow} == {torch.int32}


def test_packing_changes_no_array_of_its_runs() -> None:
    context, write, ids, rows = (np.arange(n, dtype=np.int32) for n in (4, 3, 3, 2))
    sequences = [
        ScheduledSequence(1, context, write, ids, rows),
        ScheduledSequence(2, context, write[:1], None, rows[:1]),
    ]
    before = [array.copy() for array in (context, write, ids, rows)]
    batch: InputBatch = pack(StepKind.VERIFY, sequences, _table(), CPU)
    batch.ids.fill_(7)
    for array, copy in zip((context, write, ids, rows), before, strict=True):
        assert array.tolist() == copy.tolist()


@pytest.mark.parametrize(("tokens", "longest", "lengths"), [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 9, [2])])
def test_idle_runs_have_the_tokens_asked_for_and_touch_only_the_padding_slot(
    tokens: int, longest: int, lengths: list[int]
) -> None:
    sequences = idle_sequences(tokens, longest)
    assert [len(run.write) for run in sequences] == lengths
    assert not any(run.write.any() or len(run.context) for run in sequences)


def test_a_step_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        pack(StepKind.DECODE, [], _table(), CPU)
    none = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="at least one slot"):
        pack(StepKind.DECODE, [ScheduledSequence(0, none, none, none, none)], _table(), CPU)
