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
    types = [np.zeros(len(row.ids), np.int32) if row.token_types is None else row.token_types for row in rows]
    positions = [_positions(row.ids, padding_id) for row in rows]
    return PackedRows(
        ids=_joined([row.ids for row in rows], device),
        token_types=_joined(types, device),
        positions=_joined(positions, device),
        indptr=torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True),
        bounds=bounds,
        longest=max(lengths),
    )


def _positions(ids: Int32s, padding_id: int | None) -> Int64s:
    if padding_id is None:
        return np.arange(len(ids), dtype=np.int64)
    counted = ids != padding_id
    positions: Int64s = np.where(counted, np.cumsum(counted), 0) + padding_id
    return positions


def _joined(arrays: Sequence[Int32s] | Sequence[Int64s], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device, non_blocking=True)
