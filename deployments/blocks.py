"""Blocks: contiguous ranges of a scoring task's rows, each a task of its own, and their replies put together again.

Shape legend: N rows, M their tokens together, P prefix tokens, L labels.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.config import FanoutArgs
from deployments.messages import ScoreReply, ScoreTask
from engine.jobs import Float32s, Int32s, RowStatus, UInt8s

Ints = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Rows `first` to `first + rows` of the whole task."""

    first: int
    rows: int
    task: ScoreTask


def count_blocks(task: ScoreTask, replicas: int, fanout: FanoutArgs) -> int:
    """How many replicas the task is worth: never more than there are, and one where a part would be too small or
    would compute too much of the prefix again."""
    rows, tokens, prefix = len(task.starts) - 1, len(task.ids), len(task.prefix)
    most = min(replicas, -(-tokens // fanout.shard_tokens), rows // fanout.min_items)
    if prefix:  # prefix <= share * (prefix + tokens / count)
        share = fanout.max_prefix_share
        most = min(most, int(tokens * share / (prefix * (1 - share)))) if share < 1 else most
    return max(1, most)


def cut(task: ScoreTask, count: int, min_items: int = 1) -> list[Block]:
    """`count` blocks of about equal tokens that cover the rows in order; the prefix is in each. A block has at least
    `min_items` rows, and its arrays are views of the task's."""
    if count == 1:
        return [Block(0, len(task.starts) - 1, task)]
    edges = _edges(task.starts, count, min_items)
    return [_block(task, index, first, last) for index, (first, last) in enumerate(pairwise(edges))]


def _edges(starts: Int32s, count: int, min_items: int) -> list[int]:
    """[count + 1] rows at which blocks begin, 0 first and N last: the nearest to equal shares of the tokens that
    leave every block its rows."""
    rows = len(starts) - 1
    if not 1 <= count * min_items <= rows:
        raise ValueError(f"`count` must be in [1, {rows // min_items}]. Given: {count}.")
    edges = [0]
    for index in range(1, count):
        target = int(starts[-1]) * index / count
        after = int(np.searchsorted(starts, target))
        nearest = after if starts[after] - target <= target - starts[after - 1] else after - 1
        edges.append(min(max(nearest, edges[-1] + min_items), rows - (count - index) * min_items))
    return [*edges, rows]


def _block(task: ScoreTask, index: int, first: int, last: int) -> Block:
    starts = task.starts[first : last + 1]
    part = replace(
        task,
        task_id=f"{task.task_id}/{index}",
        ids=task.ids[starts[0] : starts[-1]],
        starts=starts - starts[0],
    )
    return Block(first, last - first, part)


def fits(reply: ScoreReply, task: ScoreTask) -> bool:
    """Whether the reply has a value for every row of the task."""
    rows = len(task.starts) - 1
    return (
        reply.label_logprobs.shape == (rows, len(task.labels))
        and reply.status.shape == (rows,)
        and reply.cached.shape == (rows,)
    )


class Gathered:
    """The whole task's arrays. Replies land at their block's rows, in whatever order they come."""

    def __init__(self, task: ScoreTask, blocks: int) -> None:
        rows = len(task.starts) - 1
        self._label_logprobs: Float32s = np.full((rows, len(task.labels)), np.nan, np.float32)
        self._status: UInt8s = np.full(rows, RowStatus.NONFINITE, np.uint8)  # a row that nobody wrote is no answer
        self._cached: Int32s = np.zeros(rows, np.int32)
        self._replies: list[ScoreReply] = []
        self._missing = blocks

    def put(self, block: Block, reply: ScoreReply) -> None:
        """ValueError if the reply is not of the block's shape."""
        if not fits(reply, block.task):
            raise ValueError(f"{block.rows} rows are wanted. Given: {len(reply.status)}.")
        rows = slice(block.first, block.first + block.rows)
        self._label_logprobs[rows], self._status[rows], self._cached[rows] = reply[:3]
        self._replies.append(reply)
        self._missing -= 1

    def reply(self) -> ScoreReply:
        """One reply for the whole task; its times are those of the slowest block. ValueError if a block is missing."""
        if self._missing:
            raise ValueError(f"{self._missing} blocks are missing.")
        queue_s, compute_s = (max(times) for times in zip(*(r[3:5] for r in self._replies), strict=True))
        load = self._replies[-1].load
        return ScoreReply(self._label_logprobs, self._status, self._cached, queue_s, compute_s, load)


def gather(task: ScoreTask, blocks: Sequence[Block], replies: Sequence[ScoreReply]) -> ScoreReply:
    """Replies in the order of their blocks."""
    whole = Gathered(task, len(blocks))
    for block, reply in zip(blocks, replies, strict=True):
        whole.put(block, reply)
    return whole.reply()
