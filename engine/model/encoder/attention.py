"""Attends inside each packed row, in both directions: the attention function that encoders of transformers call.

On CUDA in half precision this is torch's variable-length FlashAttention, one call for all rows. It has windows on both
sides, which FlashInfer's ragged prefill lacks, and needs no compilation, as flex attention would. Elsewhere each row is
one call of torch's scaled dot product attention: on a CPU a call costs little beside a row's arithmetic, and padding
would cost more.

Shape legend: T packed tokens, H query heads, G key/value heads, D head dim, n tokens of a row.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from engine.model.encoder.packed_rows import PackedRows

BIDIRECTIONAL = "assay_bidirectional"  # transformers has no mask function of this name, so that it builds no mask
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY = (8, 0)  # of FlashAttention-2: Ampere
FLASH_HEAD_DIM = 256
QUERY_BLOCK = 128  # queries of a window that attend in one call, to the keys in reach of any of them


def attend_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rows: PackedRows | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends in one layer: transformers calls it as the model's attention function.

    Args:
        module: The layer's attention module, which is not read.
        query: (1, H, T, D), after any rotary embedding.
        key: (1, G, T, D).
        value: (1, G, T, D).
        attention_mask: None: rows say what each token sees.
        scaling: None: 1 / sqrt(D).
        sliding_window: A token sees those that are fewer than this many tokens away, on both sides. None: its row.
        rows: The packed rows, which the model's call is given and hands down to its layers.

    Returns:
        (1, T, H, D), and no weights.

    Raises:
        RuntimeError: The model did not hand down `rows`.
    """
    if rows is None:
        raise RuntimeError("The encoder's layers must get `rows`: the model was called without, or drops it.")
    reach = None if sliding_window is None else sliding_window - 1
    if _has_flash(query):
        return _attend_flash(query, key, value, scaling, reach, rows), None
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
    for first, last in pairwise(rows.bounds):
        q, k, v = (one[:, :, first:last] for one in (query, key, value))
        if reach is None or last - first <= reach + 1:
            out[:, first:last] = _attend(q, k, v, scaling).transpose(1, 2)
        else:
            _attend_window(q, k, v, scaling, reach, out[:, first:last])
    return out, None


def _has_flash(query: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in FLASH_DTYPES
        and query.shape[3] <= FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    )


def _attend_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    reach: int | None,
    rows: PackedRows,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, -1) if reach is None else (reach, reach)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    attend: Any = varlen_attn  # its keywords differ between releases
    out: torch.Tensor = attend(
        q, k, v, rows.indptr, rows.indptr, rows.longest, rows.longest, scale=scaling, window_size=window
    )
    return out[None]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, seen: torch.Tensor | None = None
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=grouped)


def _attend_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, reach: int, out: torch.Tensor
) -> None:
    """Attends in one row whose tokens see `reach` others on each side, block by block, so that work grows with n."""
    length = q.shape[2]
    at = torch.arange(length, device=q.device)
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        low, high = max(0, first - reach), min(length, last + reach)
        seen = (at[first:last, None] - at[None, low:high]).abs() <= reach
        mixed = _attend(q[:, :, first:last], k[:, :, low:high], v[:, :, low:high], scaling, seen)
        out[:, first:last] = mixed.transpose(1, 2)


AttentionInterface.register(BIDIRECTIONAL, attend_rows)
