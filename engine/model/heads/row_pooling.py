"""Pools the hidden states of packed rows: one float32 vector for each row.

Shape legend: T packed tokens, R rows, H hidden size.
"""

from enum import StrEnum

import torch


class Pooling(StrEnum):
    """Names what of a row's hidden states is read, in the words of sentence-transformers."""

    CLS = "cls"  # the first token
    MEAN = "mean"
    LAST = "last"  # the last token


def pool_rows(hidden_TH: torch.Tensor, indptr: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Returns one vector for each row, f32 [R, H].

    A mean is added up in float32 in the order of the tokens, so that neighbours do not change it.

    Args:
        hidden_TH: The hidden states of all rows.
        indptr: i32 or i64 [R + 1], where each row starts, and T. No row is empty.
        pooling: Names the part of a row that is read.
    """
    if pooling is Pooling.MEAN:
        return torch.segment_reduce(hidden_TH.float(), "mean", lengths=indptr.diff(), unsafe=True)
    at = indptr[:-1] if pooling is Pooling.CLS else indptr[1:] - 1
    return hidden_TH[at].float()
