"""Cuts a scoring request into blocks of rows and puts the replies together again.

A block is a contiguous range of rows and a request of its own. A row of a likelihood request may share tokens with the
row before it: such rows stay together. The unit that is cut is therefore a group of rows, which in other requests is a
single row.

Shape legend: N rows, W wanted tokens of a likelihood request or answers of a pooling request, G groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deployments.config.sections import FanoutArgs
from deployments.protocol import LikelihoodReply, RowsCall
from engine.requests import LikelihoodRequest, PoolingRequest, PoolingResult, ScoreRequest, ScoreResult

Rows = TypeVar("Rows", ScoreRequest, PoolingRequest, LikelihoodRequest)
Reply = TypeVar("Reply", ScoreResult, PoolingResult, LikelihoodReply)
AnyReply = ScoreResult | PoolingResult | LikelihoodReply
Ints = npt.NDArray[np.intp]
BY_WANTED = frozenset(("logprobs", "greedy", "values"))  # arrays of a reply with W entries; others have one a row


class Block(NamedTuple, Generic[Rows]):
    """Holds rows `first` to `first + rows` of the whole request, with `size` wanted tokens or answers from `wanted`
    on."""

    first: int
    rows: int
    wanted: int
    size: int
    request: Rows


def count_blocks(request: RowsCall, replicas: int, fanout: FanoutArgs) -> int:
    """Returns how many replicas the request is worth.

    One, where a block would be too small or would compute too much of the prefix again.
    """
    tokens, prefix = len(request.ids), len(request.prefix)
    count = min(replicas, -(-tokens // fanout.shard_tokens), (len(_groups(request)) - 1) // fanout.min_items)
    if prefix and fanout.max_prefix_fraction < 1:  # prefix <= share * (prefix + tokens / count)
        share = fanout.max_prefix_fraction
        count = min(count, int(tokens * share / (prefix * (1 - share))))
    return max(1, count)


def cut(request: Rows, count: int, min_items: int = 1) -> list[Block[Rows]]:
    """Returns `count` blocks of about equal tokens that cover the rows in order, each with the whole prefix.

    A block has at least `min_items` groups of rows, and its arrays are views of the request's.
    """
    wanted = _wanted_starts(request)
    if count == 1:
        return [Block(0, len(request.starts) - 1, 0, int(wanted[-1]), request)]
    groups = _groups(request)
    edges = groups[_edges(request.starts[groups], count, min_items)].tolist()
    return [
        Block(
            first,
            last - first,
            int(wanted[first]),
            int(wanted[last] - wanted[first]),
            _part(request, f"{request.request_id}/{index}", first, last),
        )
        for index, (first, last) in enumerate(pairwise(edges))
    ]


def _groups(request: RowsCall) -> Ints:
    """Returns [G + 1] the rows at which groups begin, and N."""
    rows = len(request.starts) - 1
    if isinstance(request, LikelihoodRequest):
        return np.append(np.flatnonzero(request.shared == 0), rows)
    return np.arange(rows + 1)


def _wanted_starts(request: RowsCall) -> Ints:
    """Returns [N + 1] where the wanted tokens, or the answers, of each row begin in a reply, and W."""
    if isinstance(request, PoolingRequest) and len(request.positions):
        return np.searchsorted(request.positions, request.starts)
    starts = np.arange(len(request.starts), dtype=np.intp)
    if isinstance(request, LikelihoodRequest):
        np.cumsum(request.wanted, out=starts[1:])
    return starts


def _edges(starts: npt.NDArray[np.int32], count: int, min_items: int) -> list[int]:
    """Returns [count + 1] the groups at which blocks begin, 0 first and G last.

    The edges are the nearest to equal shares of the tokens that leave every block its groups.

    Args:
        starts: [G + 1], the first token of each group.
        count: Number of blocks.
        min_items: Groups that a block has at least.
    """
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


def _part(request: Rows, request_id: str, first: int, last: int) -> Rows:
    starts = request.starts[first : last + 1]
    own: dict[str, Any] = {"ids": request.ids[starts[0] : starts[-1]], "starts": starts - starts[0]}
    if isinstance(request, LikelihoodRequest):
        own |= {"shared": request.shared[first:last], "wanted": request.wanted[first:last]}
    elif isinstance(request, PoolingRequest):
        low, high = np.searchsorted(request.positions, (starts[0], starts[-1])).tolist()
        own |= {"positions": request.positions[low:high] - starts[0], "segments": request.segments[first:last]}
    return replace(request, request_id=request_id, **own)


def gather(blank: Reply, blocks: Sequence[Block[Any]], replies: Sequence[Reply]) -> Reply:
    """Puts the replies together.

    Args:
        blank: A reply to the whole request that answers no row; its arrays are filled in.
        blocks: The blocks, which may be the first ones only.
        replies: Their replies, in the same order.

    Returns:
        One reply to the whole request; its times are those of the slowest block.

    Raises:
        ValueError: if a reply is not of its block's shape.
    """
    for block, reply in zip(blocks, replies, strict=True):
        _fill(blank, block, reply)
    whole: Reply = blank._replace(
        queue_s=max(reply.queue_s for reply in replies),
        compute_s=max(reply.compute_s for reply in replies),
        head_s=max(replies, key=lambda reply: reply.compute_s).head_s,
        load=replies[-1].load,
    )
    return whole


def _fill(whole: AnyReply, block: Block[Any], reply: AnyReply) -> None:
    """Writes the reply to the block's rows. Raises ValueError if it is not of the block's shape."""
    rows = slice(block.first, block.first + block.rows)
    tokens = slice(block.wanted, block.wanted + block.size)
    for name, target in whole._asdict().items():
        if not isinstance(target, np.ndarray):
            continue
        place, part = target[tokens if name in BY_WANTED else rows], getattr(reply, name)
        if part.shape != place.shape:
            raise ValueError(f"`{name}` must be of shape {list(place.shape)}. Given: {list(part.shape)}.")
        place[:] = part
