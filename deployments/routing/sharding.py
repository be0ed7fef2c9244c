"""Blocks: contiguous ranges of a scoring task's rows, each a task of its own, and their replies put together again.

A row of a likelihood task may share tokens with the one before it: rows that do stay together. The unit that is cut is
therefore a group of rows, which in a score task is a row.

Shape legend: N rows, M their tokens together, P prefix tokens, L labels, W wanted tokens, G groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deployments.config.app_args import FanoutArgs
from deployments.protocol import LikelihoodReply, LikelihoodTask, ScoreReply, ScoreTask

Task = TypeVar("Task", ScoreTask, LikelihoodTask)
Reply = TypeVar("Reply", ScoreReply, LikelihoodReply)
Ints = npt.NDArray[np.intp]
OF_WANTED = frozenset(("logprobs", "greedy"))  # arrays of a reply with an entry a wanted token; others have one a row


class Block(NamedTuple, Generic[Task]):
    """Rows `first` to `first + rows` of the whole task, of which the wanted tokens begin at `wanted`."""

    first: int
    rows: int
    wanted: int
    task: Task


def count_blocks(task: ScoreTask | LikelihoodTask, replicas: int, fanout: FanoutArgs) -> int:
    """How many replicas the task is worth: never more than there are, and one where a part would be too small or
    would compute too much of the prefix again."""
    tokens, prefix = len(task.ids), len(task.prefix)
    most = min(replicas, -(-tokens // fanout.shard_tokens), (len(_groups(task)) - 1) // fanout.min_items)
    if prefix:  # prefix <= share * (prefix + tokens / count)
        share = fanout.max_prefix_fraction
        most = min(most, int(tokens * share / (prefix * (1 - share)))) if share < 1 else most
    return max(1, most)


def cut(task: Task, count: int, min_items: int = 1) -> list[Block[Task]]:
    """`count` blocks of about equal tokens that cover the rows in order; the prefix is in each. A block has at least
    `min_items` groups of rows, and its arrays are views of the task's."""
    if count == 1:
        return [Block(0, len(task.starts) - 1, 0, task)]
    groups = _groups(task)
    edges = groups[_edges(task.starts[groups], count, min_items)].tolist()
    wanted = _wanted_starts(task)
    return [
        Block(first, last - first, int(wanted[first]), _part(task, f"{task.task_id}/{index}", first, last))
        for index, (first, last) in enumerate(pairwise(edges))
    ]


def _groups(task: ScoreTask | LikelihoodTask) -> Ints:
    """[G + 1] rows at which groups begin, and N."""
    rows = len(task.starts) - 1
    if isinstance(task, ScoreTask):
        return np.arange(rows + 1)
    return np.append(np.flatnonzero(task.shared == 0), rows)


def _wanted_starts(task: ScoreTask | LikelihoodTask) -> Ints:
    """[N + 1] where the wanted tokens of each row begin in a reply, and W."""
    starts = np.zeros(len(task.starts), np.intp)
    if isinstance(task, LikelihoodTask):
        np.cumsum(task.wanted, out=starts[1:])
    return starts


def _edges(starts: npt.NDArray[np.int32], count: int, min_items: int) -> list[int]:
    """[count + 1] groups at which blocks begin, 0 first and G last: the nearest to equal shares of the tokens that
    leave every block its groups. `starts`: [G + 1] the first token of each."""
    groups = len(starts) - 1
    if not 1 <= count * min_items <= groups:
        raise ValueError(f"`count` must be in [1, {groups // min_items}]. Given: {count}.")
    edges = [0]
    for index in range(1, count):
        target = int(starts[-1]) * index / count
        after = int(np.searchsorted(starts, target))
        nearest = after if starts[after] - target <= target - starts[after - 1] else after - 1
        edges.append(min(max(nearest, edges[-1] + min_items), groups - (count - index) * min_items))
    return [*edges, groups]


def _part(task: Task, task_id: str, first: int, last: int) -> Task:
    starts = task.starts[first : last + 1]
    own: dict[str, Any] = {"ids": task.ids[starts[0] : starts[-1]], "starts": starts - starts[0]}
    if isinstance(task, LikelihoodTask):
        own |= {"shared": task.shared[first:last], "wanted": task.wanted[first:last]}
    return replace(task, task_id=task_id, **own)


class Gathered(Generic[Reply]):
    """The whole task's arrays. Replies land at their block's rows, in whatever order they come."""

    def __init__(self, blank: Reply, blocks: int) -> None:
        """`blank` is a reply to the whole task in which nothing is answered; it is filled in."""
        self._whole: Reply = blank
        self._replies: list[Reply] = []
        self._missing = blocks

    def put(self, block: Block[Any], reply: Reply) -> None:
        """ValueError if the reply is not of the block's shape."""
        wanted = int(block.task.wanted.sum(dtype=np.int64)) if isinstance(block.task, LikelihoodTask) else 0
        rows, tokens = slice(block.first, block.first + block.rows), slice(block.wanted, block.wanted + wanted)
        for name, whole in self._whole._asdict().items():
            if not isinstance(whole, np.ndarray):
                continue
            place, part = whole[tokens if name in OF_WANTED else rows], getattr(reply, name)
            if part.shape != place.shape:
                raise ValueError(f"`{name}` of {list(place.shape)} is wanted. Given: {list(part.shape)}.")
            place[:] = part
        self._replies.append(reply)
        self._missing -= 1

    def reply(self) -> Reply:
        """One reply for the whole task; its times are those of the slowest block. ValueError if a block is missing."""
        if self._missing:
            raise ValueError(f"{self._missing} blocks are missing.")
        whole: Reply = self._whole._replace(
            queue_s=max(reply.queue_s for reply in self._replies),
            compute_s=max(reply.compute_s for reply in self._replies),
            head_s=max(self._replies, key=lambda reply: reply.compute_s).head_s,
            load=self._replies[-1].load,
        )
        return whole


def gather(blank: Reply, blocks: Sequence[Block[Any]], replies: Sequence[Reply]) -> Reply:
    """Replies in the order of their blocks, put into `blank`."""
    whole = Gathered(blank, len(blocks))
    for block, reply in zip(blocks, replies, strict=True):
        whole.put(block, reply)
    return whole.reply()
