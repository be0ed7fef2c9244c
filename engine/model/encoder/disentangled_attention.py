"""Runs DeBERTa-v2 over packed rows: its modules of transformers, with an attention of our own between them.

The library's encoder has no attention interface, and makes tables of all pairs of tokens of a batch. Here a row's
tables are of its own tokens, and relative positions become strides instead of a gather.

Shape legend: T packed tokens, B rows of a group, n tokens of a row, H heads, D head dim, P relative positions.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.model.encoder.packed_rows import PackedRows

LENGTH_STEP = {"cpu": 1, "cuda": 64}  # rows are padded to a multiple inside attention, to share one call
GROUP_PAIRS = 1 << 22  # (query, key) pairs of one call, padding included, which bound its memory


class _RowGroup(NamedTuple):
    """Holds rows that attend in one call."""

    tokens: torch.Tensor  # i64 [B, n] places in the packed arrays; padding repeats a row's last token
    own: torch.Tensor  # bool [B, n], false for padding
    buckets: torch.Tensor  # i64 [2n - 1] index into the relative embeddings of distance n - 1, ..., 0, ..., 1 - n
    padded: bool


def disentangled_hidden(base: Any, rows: PackedRows) -> torch.Tensor:
    """Returns the last hidden states [T, hidden] of a `DebertaV2Model`.

    Source: He et al., DeBERTa, 2021 (disentangled attention), and the library's modelling file for its variants.
    """
    encoder = base.encoder
    hidden = base.embeddings(
        input_ids=rows.ids[None], token_type_ids=rows.token_types[None], position_ids=rows.positions[None]
    )
    embedded = hidden
    relative = encoder.get_rel_embedding()
    groups = list(_row_groups(encoder, rows))
    for index, layer in enumerate(encoder.layer):
        mixed = _attend(layer.attention.self, hidden, relative, groups)
        attended = layer.attention.output(mixed, hidden)
        hidden = layer.output(layer.intermediate(attended), attended)
        if index == 0 and encoder.conv is not None:
            hidden = _convolve(encoder.conv, embedded, hidden, rows)
    return hidden[0]  # type: ignore[no-any-return]


def _convolve(conv: Any, embedded: torch.Tensor, hidden: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Runs the convolution beside the first layer, row by row: it must not reach into a neighbour."""
    parts = []
    for first, last in pairwise(rows.bounds):
        own = torch.ones((1, last - first), dtype=torch.int64, device=hidden.device)
        parts.append(conv(embedded[:, first:last], hidden[:, first:last], own))
    return torch.cat(parts, dim=1)


def _row_groups(encoder: Any, rows: PackedRows) -> Iterator[_RowGroup]:
    """Yields the rows in groups of one padded length."""
    bounds = np.asarray(rows.bounds)
    starts, lengths = bounds[:-1], np.diff(bounds)
    device = rows.ids.device
    step = LENGTH_STEP.get(device.type, 1)
    padded_lengths = -(-lengths // step) * step
    for length in np.unique(padded_lengths).tolist():
        members = np.flatnonzero(padded_lengths == length)
        buckets = _buckets(encoder, length, device)
        size = max(1, GROUP_PAIRS // length**2)
        for part in np.split(members, range(size, len(members), size)):
            at = np.arange(length)
            own = at < lengths[part, None]
            tokens = starts[part, None] + np.minimum(at, lengths[part, None] - 1)
            yield _RowGroup(_to(tokens, device), _to(own, device), buckets, not own.all())


def _to(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _buckets(encoder: Any, length: int, device: torch.device) -> torch.Tensor:
    """Returns the index into the relative embeddings of each distance query - key, i64 [2n - 1], largest first."""
    distances: torch.Tensor = torch.arange(length - 1, -length, -1, device=device)
    if not encoder.relative_attention:
        return distances
    span = int(encoder.rel_embeddings.num_embeddings) // 2
    if encoder.position_buckets > 0 and encoder.max_relative_positions > 0:
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        distances = make_log_bucket_position(distances, encoder.position_buckets, encoder.max_relative_positions)
    return torch.clamp(distances.long() + span, 0, 2 * span - 1)


def _attend(module: Any, hidden: torch.Tensor, relative: torch.Tensor | None, groups: list[_RowGroup]) -> torch.Tensor:
    """Attends by one layer's `DisentangledSelfAttention`: hidden (1, T, H * D) -> (1, T, H * D)."""
    heads = module.num_attention_heads
    q, k, v = (
        project(hidden[0]).unflatten(-1, (heads, -1))
        for project in (module.query_proj, module.key_proj, module.value_proj)
    )  # [T, H, D]
    kinds = [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type]
    scale = float((q.shape[-1] * (1 + len(kinds))) ** -0.5)
    position_key = position_query = None
    if module.relative_attention and relative is not None:
        shared = module.share_att_key
        if "c2p" in kinds:
            project = module.key_proj if shared else module.pos_key_proj
            position_key = project(relative).unflatten(-1, (heads, -1)) * scale
        if "p2c" in kinds:
            project = module.query_proj if shared else module.pos_query_proj
            position_query = project(relative).unflatten(-1, (heads, -1)) * scale
    out = torch.empty_like(v)
    for group in groups:
        q_BHnD, k_BHnD, v_BHnD = (one[group.tokens].transpose(1, 2) for one in (q, k, v))
        bias = _bias(q_BHnD, k_BHnD, position_key, position_query, group.buckets)
        if group.padded:
            seen = group.own[:, None, None, :]
            bias = seen if bias is None else bias.masked_fill(~seen, float("-inf"))
        mixed = F.scaled_dot_product_attention(q_BHnD, k_BHnD, v_BHnD, attn_mask=bias, scale=scale).transpose(1, 2)
        if group.padded:
            out[group.tokens[group.own]] = mixed[group.own]
        else:
            out[group.tokens] = mixed
    return out.flatten(1)[None]


def _bias(
    q_BHnD: torch.Tensor,
    k_BHnD: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    buckets: torch.Tensor,
) -> torch.Tensor | None:
    """Returns what relative positions add to the scores of (query i, key j), [B, H, n, n].

    content to position: q_i . position_key(i - j), position to content: k_j . position_query(i - j).
    """
    parts = []
    if position_key is not None:  # column c of a query's line is distance n - 1 - c
        table = q_BHnD @ position_key[buckets].permute(1, 2, 0)  # [B, H, n, 2n - 1]
        parts.append(_shifted(table))
    if position_query is not None:  # lines are keys here, and distances grow with the column
        table = k_BHnD @ position_query[buckets.flip(0)].permute(1, 2, 0)
        parts.append(_shifted(table).transpose(2, 3))
    return sum(parts[1:], parts[0]) if parts else None


def _shifted(table: torch.Tensor) -> torch.Tensor:
    """Returns the view [B, H, n, n] whose entry (i, j) is `table`'s (i, j - i + n - 1): line i begins i columns
    earlier (the relative shift of Dai et al., Transformer-XL, 2019)."""
    batch, heads, length, width = table.shape
    table = table.contiguous()
    strides = (*table.stride()[:2], width - 1, 1)
    return table.as_strided((batch, heads, length, length), strides, table.storage_offset() + length - 1)
