"""Packs rows of mixed lengths end to end, without padding, for one pass of an encoder.

Shape legend: R rows, T tokens of all rows, n tokens of a row.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.requests import Int32s, Int64s


class EncoderRow(NamedTuple):
    """Holds one row: a text, or a pair of texts with the control tokens between them."""

    ids: Int32s  # [n]
    token_types: Int32s | None = None  # [n] the segment of each token; None: all of segment 0


class PackedRows(NamedTuple):
    """Holds the arrays of one pass."""

    ids: torch.Tensor  # i64 [T]
    token_types: torch.Tensor  # i64 [T]
    positions: torch.Tensor  # i64 [T]
    indptr: torch.Tensor  # i32 [R + 1], where each row starts, and T
    bounds: tuple[int, ...]  # the same on the host
    longest: int  # tokens of the longest row


def pack_rows(rows: Sequence[EncoderRow], device: torch.device, padding_id: int | None = None) -> PackedRows:
    """Packs rows.

    Args:
        rows: At least one row, none empty.
        device: The model's.
        padding_id: Position ids start at `padding_id + 1` and leave out tokens that are the padding token, as
            `RobertaEmbeddings` has it. None: they are 0 to n - 1.
    """
    lengths = [len(row.ids) for row in rows]
    bounds = tuple(accumulate(lengths, initial=0))
    ids = np.concatenate([row.ids for row in rows])
    types = np.zeros_like(ids)
    for first, row in zip(bounds, rows, strict=False):
        if row.token_types is not None:
            types[first : first + len(row.ids)] = row.token_types
    starts = np.array(bounds[:-1])
    positions = _positions(ids, np.repeat(starts, lengths), padding_id)
    return PackedRows(
        ids=_tokens(ids, device),
        token_types=_tokens(types, device),
        positions=_tokens(positions, device),
        indptr=torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True),
        bounds=bounds,
        longest=max(lengths),
    )


def _positions(ids: Int32s, starts: Int64s, padding_id: int | None) -> Int64s:
    """Returns position ids. `starts`: i64 [T], where the row of each token starts."""
    if padding_id is None:
        return np.arange(len(ids)) - starts
    counted = ids != padding_id
    before = np.cumsum(counted)
    positions: Int64s = np.where(counted, before - (before - counted)[starts], 0) + padding_id
    return positions


def _tokens(array: Int32s | Int64s, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)
