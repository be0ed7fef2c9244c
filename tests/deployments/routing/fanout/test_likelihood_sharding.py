"""Rows that share tokens stay together, and wanted tokens come together as if nothing had been cut."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.config.sections import FanoutArgs
from deployments.protocol import LikelihoodReply
from deployments.routing import sharding as blocks_module
from deployments.routing.sharding import count_blocks, cut, gather
from engine.requests import LikelihoodRequest, Load


def task_of(rows: list[tuple[int, int, int]], prefix: int = 0) -> LikelihoodRequest:
    """Rows are (tokens of its own, shared with the row before, wanted)."""
    starts = np.cumsum([0, *(own for own, _, _ in rows)]).astype(np.int32)
    return LikelihoodRequest(
        request_id="l",
        prefix=np.arange(prefix, dtype=np.int32),
        ids=np.arange(starts[-1], dtype=np.int32) * 7 % 1009,
        starts=starts,
        shared=np.array([0, *(shared for _, shared, _ in rows[1:])], np.int32),
        wanted=np.array([wanted for _, _, wanted in rows], np.int32),
        tenant="t",
    )


def answer(task: LikelihoodRequest, seconds: float = 0.5) -> LikelihoodReply:
    """Values that name their row by its whole tokens, the shared ones included, and count its wanted tokens."""
    values: list[float] = []
    sums: list[int] = []
    own: list[int] = []
    for (first, last), shared, wanted in zip(pairwise(task.starts), task.shared, task.wanted, strict=True):
        if shared > len(own):
            raise ValueError("shared tokens that no row before has")
        own = own[:shared] + task.ids[first:last].tolist()
        sums.append(sum(own) + 1000 * len(own))
        values += [-sums[-1] - number / 64 for number in range(wanted)]
    logprobs, ends = np.array(values, np.float32), np.array(sums, np.int32)
    status = (ends % 5 == 0).astype(np.uint8)
    return LikelihoodReply(logprobs, logprobs.astype(np.int64) % 3 == 0, status, ends, seconds, seconds, Load(0, 1.0))


def groups_of(task: LikelihoodRequest) -> int:
    return int((task.shared == 0).sum())


@st.composite
def tasks(draw: Any) -> LikelihoodRequest:
    """Groups of one to five rows; those after the first share some of the row before."""
    rows: list[tuple[int, int, int]] = []
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=25)):
        for number in range(size):
            before = rows[-1][0] + rows[-1][1] if number else 0
            shared = draw(st.integers(1, before)) if number else 0
            rows.append((draw(st.one_of(st.integers(2, 9), st.just(211))), shared, draw(st.integers(1, 4))))
    return task_of(rows, draw(st.integers(0, 5)))


def plain(reply: LikelihoodReply) -> list[bytes]:
    return [column.tobytes() for column in reply[:4]]


@settings(max_examples=60)
@given(task=tasks(), count=st.integers(1, 9), least=st.integers(1, 3))
def test_blocks_begin_where_nothing_is_shared_and_cover_every_row(task: Any, count: int, least: int) -> None:
    if count * least > groups_of(task):
        with pytest.raises(ValueError, match="count"):
            cut(task, max(count, 2), least)
        return
    blocks = cut(task, count, least)
    assert len(blocks) == count
    for name in ("ids", "shared", "wanted"):
        parts = np.concatenate([getattr(block.request, name) for block in blocks])
        assert parts.tolist() == getattr(task, name).tolist()
    assert np.concatenate([np.diff(block.request.starts) for block in blocks]).tolist() == np.diff(task.starts).tolist()
    for block in blocks:
        part = block.request
        assert block.rows == len(part.starts) - 1 == len(part.shared) == len(part.wanted)
        assert part.starts[0] == part.shared[0] == 0 and part.prefix is task.prefix and part.tenant == "t"
        assert groups_of(part) >= (least if count > 1 else 1)
        assert block.wanted == task.wanted[: block.first].sum()


@settings(max_examples=60)
@given(task=tasks(), count=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_what_was_cut_comes_together_in_any_order_of_replies(task: Any, count: int, order: Any) -> None:
    blocks = cut(task, min(count, groups_of(task)))
    some = order.sample(blocks, len(blocks))
    found = gather(LikelihoodReply.blank(task), some, [answer(block.request) for block in some])
    assert plain(found) == plain(answer(task))


@settings(max_examples=60)
@given(task=tasks(), replicas=st.integers(0, 9), tokens=st.integers(1, 60), least=st.integers(1, 9))
def test_a_count_can_always_be_cut(task: Any, replicas: int, tokens: int, least: int) -> None:
    fanout = FanoutArgs(shard_tokens=tokens, min_items=least, max_prefix_fraction=0.5)
    count = count_blocks(task, replicas, fanout)
    assert 1 <= count <= max(1, replicas) and len(cut(task, count, least)) == count


def test_rows_that_all_share_are_one_block() -> None:
    task = task_of([(9, 0, 2), *[(9, 1, 2)] * 99])
    assert count_blocks(task, 9, FanoutArgs(shard_tokens=1, min_items=1)) == 1


def test_a_block_without_results_is_no_number() -> None:
    blank = LikelihoodReply.blank(task_of([(4, 0, 2), (4, 2, 3)]))
    assert blank.status.all() and np.isnan(blank.logprobs).all() and len(blank.logprobs) == len(blank.greedy) == 5


@pytest.mark.parametrize("column", ["logprobs", "greedy", "status", "cached"])
def test_a_reply_of_another_shape_is_refused(column: str) -> None:
    task = task_of([(4, 0, 2)] * 6)
    [first, _] = cut(task, 2)
    reply = answer(first.request)._replace(**{column: getattr(answer(first.request), column)[:-1]})
    with pytest.raises(ValueError, match=f"`{column}` must be of shape"):
        gather(LikelihoodReply.blank(task), [first], [reply])


# Planted faults, which the properties above must see.


def test_a_cut_between_rows_that_share_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of([(9, 0, 2), (3, 5, 2)] * 6)
    blocks = cut(task, 3)
    assert plain(gather(LikelihoodReply.blank(task), blocks, [answer(b.request) for b in blocks])) == plain(
        answer(task)
    )
    monkeypatch.setattr(blocks_module, "_groups", lambda task: np.arange(len(task.starts)))
    with pytest.raises(ValueError, match="no row before has"):
        [answer(block.request) for block in cut(task, 7)]


def test_wanted_tokens_put_by_row_would_be_seen() -> None:
    """Where every row wants two tokens, row k's do not begin at entry k."""
    task = task_of([(4, 0, 2)] * 6)
    blocks = [block._replace(wanted=block.first) for block in cut(task, 2)]
    found = gather(LikelihoodReply.blank(task), blocks, [answer(block.request) for block in blocks])
    assert plain(found) != plain(answer(task))


def test_replies_in_the_wrong_order_would_be_seen() -> None:
    task = task_of([(4, 0, 2)] * 6)
    blocks = cut(task, 2)
    replies = [answer(block.request) for block in blocks]
    assert plain(gather(LikelihoodReply.blank(task), blocks, replies[::-1])) != plain(answer(task))
