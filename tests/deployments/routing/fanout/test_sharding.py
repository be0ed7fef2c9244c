"""Blocks cover a task's rows once and in order, and what was cut comes together as if it never had been."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config.sections import FanoutArgs
from deployments.protocol import blank_scores
from deployments.routing.sharding import Block, count_blocks, cut, gather
from engine.requests import Load, ScoreRequest, ScoreResult

LABELS = 3


def task_of(lengths: list[int], prefix: int = 0) -> ScoreRequest:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    return ScoreRequest(
        request_id="s",
        prefix=np.arange(prefix, dtype=np.int32),
        ids=np.arange(starts[-1], dtype=np.int32) * 7 % 1009,
        starts=starts,
        labels=np.arange(LABELS, dtype=np.int32),
        cache_salt="a salt",
        priority=-3,
    )


def answer(task: ScoreRequest, seconds: float = 0.5) -> ScoreResult:
    """Values that name their row by its tokens."""
    rows = [task.ids[first:last] for first, last in zip(task.starts, task.starts[1:], strict=False)]
    sums = np.array([row.sum() + 1000 * len(row) for row in rows], np.float32)
    found = (-sums[:, None] - np.arange(LABELS)).astype(np.float32)
    status = (sums.astype(np.int64) % 5 == 0).astype(np.uint8)
    return ScoreResult(found, status, sums.astype(np.int32), seconds, 2 * seconds, Load(0, 1.0))


lengths = st.lists(st.one_of(st.integers(1, 9), st.just(301)), min_size=1, max_size=70)


@given(lengths=lengths, count=st.integers(1, 9), least=st.integers(1, 4))
def test_blocks_cover_every_row_once_and_in_order(lengths: list[int], count: int, least: int) -> None:
    task = task_of(lengths, prefix=5)
    if count * least > len(lengths):
        with pytest.raises(ValueError, match="count"):
            cut(task, max(count, 2), least)
        return
    blocks = cut(task, count, least)
    assert [block.first for block in blocks] == np.cumsum([0, *(block.rows for block in blocks[:-1])]).tolist()
    assert np.concatenate([block.request.ids for block in blocks]).tolist() == task.ids.tolist()
    assert np.concatenate([np.diff(block.request.starts) for block in blocks]).tolist() == lengths
    for block in blocks:
        assert block.rows == len(block.request.starts) - 1 >= (least if count > 1 else 1)
        assert block.request.starts[0] == 0 and block.request.starts.dtype == np.int32
        assert (
            block.request.prefix is task.prefix
            and block.request.cache_salt == "a salt"
            and block.request.priority == -3
        )
    assert len({block.request.request_id for block in blocks}) == count


@given(lengths=lengths, count=st.integers(1, 9))
def test_a_block_is_no_more_than_a_row_from_its_equal_share(lengths: list[int], count: int) -> None:
    """Where each has room for one row: the rows decide, not the fewest items."""
    if count > len(lengths) or max(lengths) * count > sum(lengths):
        return
    sizes = [len(block.request.ids) for block in cut(task_of(lengths), count)]
    assert max(sizes) <= sum(lengths) / count + max(lengths)


@given(lengths=lengths, count=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_what_was_cut_comes_together_in_any_order_of_replies(lengths: list[int], count: int, order: Any) -> None:
    task = task_of(lengths)
    blocks = cut(task, min(count, len(lengths)))
    some = order.sample(blocks, len(blocks))
    expected, found = answer(task), gather(blank_scores(task), some, [answer(block.request) for block in some])
    assert found.label_logprobs.tobytes() == expected.label_logprobs.tobytes()
    assert found.status.tolist() == expected.status.tolist() and found.cached.tolist() == expected.cached.tolist()
    assert (
        gather(blank_scores(task), blocks, [answer(block.request) for block in blocks])[0].tobytes()
        == expected[0].tobytes()
    )


def test_the_times_are_those_of_the_slowest_block() -> None:
    task = task_of([3] * 10)
    blocks = cut(task, 2)
    found = gather(blank_scores(task), blocks, [answer(block.request, 0.5 + block.first) for block in blocks])
    assert (found.queue_s, found.compute_s) == (5.5, 11.0)


def test_replies_in_the_wrong_order_are_another_answer() -> None:
    """The planted counterpart of the property above: blocks of equal size, their replies exchanged."""
    task = task_of([4] * 8)
    blocks = cut(task, 2)
    replies = [answer(block.request) for block in blocks]
    assert (
        gather(blank_scores(task), blocks, replies)[0].tobytes()
        != gather(blank_scores(task), blocks, replies[::-1])[0].tobytes()
    )


def test_a_lost_block_is_no_answer() -> None:
    task = task_of([4] * 8)
    blocks = cut(task, 2)
    with pytest.raises(ValueError, match="shorter"):
        gather(blank_scores(task), blocks, [answer(blocks[1].request)])


@pytest.mark.parametrize("wrong", ["rows", "labels", "status"])
def test_a_reply_of_another_shape_is_refused(wrong: str) -> None:
    task = task_of([4] * 8)
    [first, _] = cut(task, 2)
    reply = answer(first.request)
    if wrong == "rows":
        reply = answer(task)
    elif wrong == "labels":
        reply = reply._replace(label_logprobs=reply.label_logprobs[:, :1])
    else:
        reply = reply._replace(status=reply.status[:-1])
    with pytest.raises(ValueError, match="must be of shape"):
        gather(blank_scores(task), [first], [reply])


def test_one_block_is_the_task_itself() -> None:
    task = task_of([1, 2])
    assert cut(task, 1) == [Block(0, 2, 0, 2, task)] and cut(task, 1)[0].request is task


@pytest.mark.parametrize(
    ("rows", "length", "prefix", "replicas", "blocks"),
    [
        (640, 100, 0, 1, 1),
        (640, 100, 0, 0, 1),
        (640, 100, 0, 3, 3),
        (640, 100, 0, 9, 4),  # 64,000 tokens are four times 16,384, rounded up
        (150, 1000, 0, 9, 2),  # 64 items a block
        (640, 100, 2400, 9, 2),  # 2,400 of 34,400 tokens are under a tenth, of 23,733 they are over
        (640, 100, 4000, 9, 1),
        (1, 1, 100, 9, 1),
    ],
)
def test_how_many_replicas_a_task_is_worth(rows: int, length: int, prefix: int, replicas: int, blocks: int) -> None:
    assert count_blocks(task_of([length] * rows, prefix), replicas, FanoutArgs()) == blocks


@given(
    lengths=lengths,
    prefix=st.integers(0, 50),
    replicas=st.integers(0, 9),
    fanout=st.builds(
        FanoutArgs,
        shard_tokens=st.integers(1, 60),
        min_items=st.integers(1, 9),
        max_prefix_fraction=st.floats(0.01, 1),
    ),
)
def test_a_count_can_always_be_cut(lengths: list[int], prefix: int, replicas: int, fanout: FanoutArgs) -> None:
    task = task_of(lengths, prefix)
    count = count_blocks(task, replicas, fanout)
    assert 1 <= count <= max(1, replicas)
    blocks = cut(task, count, fanout.min_items)
    assert len(blocks) == count
    mean = prefix + len(task.ids) / count
    assert count == 1 or prefix <= fanout.max_prefix_fraction * mean + 1e-6


def test_a_task_keeps_its_other_fields() -> None:
    task = replace(task_of([2] * 4), full=False, tenant="t", isolated=True, timeout_s=3.0)
    for block in cut(task, 2):
        assert (block.request.full, block.request.tenant, block.request.isolated, block.request.timeout_s) == (
            False,
            "t",
            True,
            3.0,
        )
