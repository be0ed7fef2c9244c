"""Steps in two levels: every token attends to its context and to its own sequence, whichever level that is in."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import shared_prefix
from engine.batch.input_batch import ScheduledSequence, StepKind, pack
from engine.batch.shared_prefix import MIN_SHARED_CONTEXT, Group, groups, with_cascade
from engine.requests import Int32s

CPU = torch.device("cpu")
NO_TABLE = torch.zeros((1, 1), dtype=torch.int32)


def _lengths(*lengths: int) -> Int32s:
    return np.array(lengths, np.int32)


def _runs(rng: np.random.Generator, contexts: list[int], runs_of: list[int]) -> list[ScheduledSequence]:
    """`runs_of[i]` runs of 1 to 4 tokens over one array of `contexts[i]` slots."""
    made = []
    for length, count in zip(contexts, runs_of, strict=True):
        context = rng.integers(1, 10_000, length).astype(np.int32)
        for _ in range(count):
            new = int(rng.integers(1, 5))
            write = rng.integers(1, 10_000, new).astype(np.int32)
            made.append(ScheduledSequence(0, context, write, np.zeros(new, np.int32), np.zeros(0, np.int32)))
    return made


@settings(max_examples=200)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), pad_to=st.sampled_from((2, 60)))
def test_both_levels_together_are_the_whole(data: st.DataObject, seed: int, pad_to: int) -> None:
    contexts = data.draw(st.lists(st.sampled_from((0, 3, 8, 21)), min_size=1, max_size=6))
    counts = [data.draw(st.integers(1, 5)) for _ in contexts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SHARED_CONTEXT", 8)
        sequences = _runs(np.random.default_rng(seed), contexts, counts)
        batch = with_cascade(pack(StepKind.SCORE, sequences, NO_TABLE, CPU, pad_to), sequences, 0.0)
    step = batch.cascade
    if step is None:
        assert not any(context >= 8 and count > 1 for context, count in zip(contexts, counts, strict=True))
        return
    shared = _attended(step.query_indptr, step.context_indptr, step.context_indices)
    own = _attended(batch.qo_indptr, step.own_indptr, step.own_indices)
    whole = _attended(batch.qo_indptr, batch.kv_indptr, batch.kv_indices)
    assert [one + other for one, other in zip(shared, own, strict=True)] == whole
    assert step.merged.tolist() == [bool(one) for one in shared]
    assert {one.dtype for one in step[:-1]} == {torch.int32}


def _attended(queries: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """By token: the slots of its stretch."""
    found: list[list[int]] = []
    ends, parts = queries.tolist(), indptr.tolist()
    for at in range(len(ends) - 1):
        found += [indices[parts[at] : parts[at + 1]].tolist()] * (ends[at + 1] - ends[at])
    return found


def test_neighbours_that_name_one_array_are_a_group() -> None:
    one, other = (np.zeros(MIN_SHARED_CONTEXT, np.int32) for _ in range(2))
    assert groups([one, one, other, other, other, one], _lengths(*[1] * 6), 0) == [Group(0, 2), Group(2, 5)]
    assert groups([one, one.copy()], _lengths(1, 1), 0) == []


def test_short_contexts_and_long_items_take_one_pass() -> None:
    short = np.zeros(MIN_SHARED_CONTEXT - 1, np.int32)
    assert groups([short, short], _lengths(1, 1), 0) == []
    context = np.zeros(MIN_SHARED_CONTEXT, np.int32)
    own = MIN_SHARED_CONTEXT // 8
    assert groups([context, context], _lengths(own, own), 8) == [Group(0, 2)]
    assert groups([context, context], _lengths(own, own + 1), 8) == []


def test_steps_that_share_nothing_have_no_second_level() -> None:
    sequences = _runs(np.random.default_rng(0), [300, 300], [1, 1])
    assert with_cascade(pack(StepKind.SCORE, sequences, NO_TABLE, CPU), sequences, 0.0).cascade is None
    assert pack(StepKind.SCORE, [sequences[0], sequences[0]], NO_TABLE, CPU).cascade is None
