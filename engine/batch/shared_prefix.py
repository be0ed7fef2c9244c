"""Finds contexts that several sequences of a step share, and plans attention in two levels (cascade attention).

A sequence over a context of C tokens reads all C of them for its few new tokens, in tiles that these hardly fill.
Sequences that name the same context are cut in two: all their tokens over the context as one long sequence, and each
over its own tokens. The two parts are merged by their log-sum-exps (Ye et al. 2024, "Cascade Inference"; the merge is
that of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). Gain: on Hopper GPUs 0.65 of the time
of one level for items of 32 tokens over 1,024 (docs/internals/engine.md).

Shape legend: S sequences of a step and T tokens, padding included; G spans of tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.batch.input_batch import Cascade, InputBatch, StepSequences, gathered, lengths_of
from engine.requests import Int32s, Int64s

MIN_SHARED_CONTEXT = 512  # tokens; below it a second pass and the merge cost more than they save


class Group(NamedTuple):
    """Names the sequences first .. last - 1 of a step, which share one context."""

    first: int
    last: int


def with_cascade(
    batch: InputBatch, sequences: StepSequences, ratio: float, min_context: int | None = None
) -> InputBatch:
    """Plans a packed step in two levels.

    Args:
        batch: The packed step.
        sequences: Those that it packs.
        ratio: See `groups`.
        min_context: See `groups`.

    Returns:
        The step with its `cascade`; as it is where no context is shared by enough tokens.
    """
    _, contexts, writes, *_ = zip(*sequences, strict=True)
    lengths, pads, device = lengths_of(writes), batch.padding, batch.ids.device
    found = groups(contexts, lengths, ratio, min_context)
    if not found:
        return batch
    ends = np.concatenate(([0], np.cumsum(lengths)))
    queries, attended = _spans(found, contexts, ends, int(ends[-1]) + pads)
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
    return batch._replace(
        cascade=Cascade(query_indptr, context_indptr, context_indices, own_indptr, own_indices, flags.bool())
    )


def groups(contexts: Sequence[Int32s], lengths: Int32s, ratio: float, min_context: int | None = None) -> list[Group]:
    """Returns neighbours that name the same context array, where two levels pay.

    Args:
        contexts: [S] of [C].
        lengths: [S] new tokens of the sequences.
        ratio: Tokens of context for each new token from which on they pay.
        min_context: Tokens of a context from which on they pay; None: MIN_SHARED_CONTEXT.
    """
    least = MIN_SHARED_CONTEXT if min_context is None else min_context
    found: list[Group] = []
    first = 0
    for at in range(1, len(contexts) + 1):
        if at < len(contexts) and contexts[at] is contexts[first]:
            continue
        shared, sequences = len(contexts[first]), at - first
        enough = sequences > 1 and shared >= least
        if enough and shared * sequences >= ratio * int(lengths[first:at].sum()):
            found.append(Group(first, at))
        first = at
    return found


def _spans(found: Sequence[Group], contexts: Sequence[Int32s], ends: Int64s, total: int) -> tuple[list[int], list[int]]:
    """Returns both indptrs of level 1. `ends` [S + 1] says where each sequence begins, and where the last one ends."""
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
