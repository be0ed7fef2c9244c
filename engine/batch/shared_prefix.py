"""Shared contexts: what several runs of a step attend to is attended to once, by all their tokens together.

A run over a context of C tokens reads all C of them for its few new tokens, in tiles that these hardly fill. Runs that
name the very same context are cut in two: all their tokens over the context as one long sequence, and each run over its
own tokens. The two parts are merged by their log-sum-exps (cascade attention: Ye et al. 2024, "Cascade Inference"; the
merge is that of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

Shape legend: S sequences of a step and T tokens, padding included; G stretches of tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.batch.transfer import gathered
from engine.requests import Int32s, Int64s

MIN_SHARED_CONTEXT = 512  # tokens; below it a second pass and the merge cost more than they save


class Cascade(NamedTuple):
    """A step in two levels. 1: stretches of its tokens, those of a group over the group's context and those between
    groups over nothing. 2: each sequence over what is left to it."""

    query_indptr: torch.Tensor  # i32 [G + 1] on the host (pinned for CUDA), as the other indptrs
    context_indptr: torch.Tensor  # i32 [G + 1]
    context_indices: torch.Tensor  # i32, pool slots of level 1
    own_indptr: torch.Tensor  # i32 [S + 1]
    own_indices: torch.Tensor  # i32, pool slots of level 2
    merged: torch.Tensor  # bool [T], tokens that have both parts


class Group(NamedTuple):
    """Runs first .. last - 1 of a step, which share one context."""

    first: int
    last: int


def cascade_of(
    contexts: Sequence[Int32s],
    writes: Sequence[Int32s],
    lengths: Int32s,
    pads: int,
    device: torch.device,
    ratio: float,
) -> Cascade | None:
    """Of runs with these contexts, written slots and new tokens [S], and `pads` sequences of one token in slot 0. None
    where no context is shared by enough; see `groups`."""
    found = groups(contexts, lengths, ratio)
    if not found:
        return None
    ends = np.concatenate(([0], np.cumsum(lengths)))
    queries, attended = _stretches(found, contexts, ends, int(ends[-1]) + pads)
    merged = np.zeros(int(ends[-1]) + pads, np.int32)
    left = np.array([len(context) for context in contexts], np.int64)
    for group in found:
        merged[ends[group.first] : ends[group.last]] = 1
        left[group.first : group.last] = 0
    own_sizes = np.concatenate((left + lengths, np.ones(pads, np.int64)))
    shared = [contexts[group.first] for group in found]
    own: list[Int32s] = []
    for context, write, whole in zip(contexts, writes, left.tolist(), strict=True):
        own += [context, write] if whole else [write]
    sizes = [len(merged), sum(map(len, shared)), int(own_sizes.sum())]
    indptrs = [np.array(queries, np.int32), np.array(attended, np.int32), _indptr(own_sizes)]
    host = gathered([merged, *shared, *own, np.zeros(pads, np.int32), *indptrs], device)
    moved = host[: sum(sizes)].to(device, non_blocking=True)
    flags, context_indices, own_indices = torch.split(moved, sizes)
    query_indptr, context_indptr, own_indptr = torch.split(host[sum(sizes) :], [len(one) for one in indptrs])
    return Cascade(query_indptr, context_indptr, context_indices, own_indptr, own_indices, flags.bool())


def groups(contexts: Sequence[Int32s], lengths: Int32s, ratio: float) -> list[Group]:
    """Neighbours that name the same array, where it is worth two passes: for each new token of a run, of which there
    are `lengths` [S], there are `ratio` tokens of context on average, or more."""
    found: list[Group] = []
    first = 0
    for at in range(1, len(contexts) + 1):
        if at < len(contexts) and contexts[at] is contexts[first]:
            continue
        shared, sequences = len(contexts[first]), at - first
        enough = sequences > 1 and shared >= MIN_SHARED_CONTEXT
        if enough and shared * sequences >= ratio * int(lengths[first:at].sum()):
            found.append(Group(first, at))
        first = at
    return found


def _stretches(
    found: Sequence[Group], contexts: Sequence[Int32s], ends: Int64s, total: int
) -> tuple[list[int], list[int]]:
    """Both indptrs of level 1. `ends` [S + 1]: where each run begins, and where the last one ends."""
    queries, attended = [0], [0]
    for group in found:
        start, end = int(ends[group.first]), int(ends[group.last])
        if start > queries[-1]:
            queries.append(start)
            attended.append(attended[-1])
        queries.append(end)
        attended.append(attended[-1] + len(contexts[group.first]))
    if total > queries[-1]:
        queries.append(total)
        attended.append(attended[-1])
    return queries, attended


def _indptr(sizes: Int64s) -> Int32s:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
