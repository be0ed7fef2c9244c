"""Computes attention by torch operations: the CPU path, and the reference for other backends.

Shape legend: T packed tokens, H query heads, G key/value heads, D query/key dim, E value dim, S sequences, n new tokens
of a sequence, a tokens that it attends to.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.interface import NO_SOFTCAP, NO_WINDOW, AttentionCall, AttentionStep
from engine.batch.input_batch import InputBatch

MIN_TABLE = 1 << 14  # entries of a padded table that are always worth one call in place of one for each sequence


class TorchAttention:
    """Implements `AttentionBackend` by torch's scaled dot product attention, one sequence after another."""

    cascade_ratio: float | None = None

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        return key_dim, value_dim

    def plan(self, batch: InputBatch) -> AttentionStep:
        return _TorchStep(batch)


class _TorchStep:
    """Implements `AttentionStep`."""

    def __init__(self, batch: InputBatch) -> None:
        self._write_slots = batch.write_slots
        self._indices = batch.kv_indices.long()
        self._queries = batch.qo_indptr.tolist()
        self._attended = batch.kv_indptr.tolist()
        self._table = _slot_table(batch)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        keys, values = call.keys, call.values
        keys[:, 0].index_copy_(0, self._write_slots, call.k_TGD.to(keys.dtype))
        values[:, 0].index_copy_(0, self._write_slots, call.v_TGE.to(values.dtype))
        fused = call.softcap == NO_SOFTCAP and call.sinks is None
        if self._table is not None and fused:
            return _attend_single(call, self._table)
        out = call.q_THD.new_empty((*call.q_THD.shape[:2], call.v_TGE.shape[2]))
        for index in range(len(self._queries) - 1):
            first, last = self._queries[index], self._queries[index + 1]
            slots = self._indices[self._attended[index] : self._attended[index + 1]]
            q, k, v = (one.transpose(0, 1) for one in (call.q_THD[first:last], keys[slots, 0], values[slots, 0]))
            mixed = _attend_fused(q, k, v, call) if fused else _attend_unfused(q, k, v, call)
            out[first:last] = mixed.transpose(0, 1)
        return out


class _SlotTable(NamedTuple):
    """Lays sequences of one new token side by side: the last token of each is in the last column."""

    slots: torch.Tensor  # i64 [S, longest]; entries before a row's first token repeat its last slot
    age: torch.Tensor  # i64 [longest], 0 for the new token
    lengths: torch.Tensor  # i64 [S]


def _slot_table(batch: InputBatch) -> _SlotTable | None:
    """Returns None where a sequence has several new tokens, or where one long row would pad the others too far."""
    longest = int(batch.kv_indptr.diff().max())
    if not batch.single or longest * batch.num_tokens > max(MIN_TABLE, 2 * len(batch.kv_indices)):
        return None
    indptr = batch.kv_indptr.to(batch.kv_indices.device).long()
    lengths = indptr.diff()
    age = torch.arange(longest - 1, -1, -1, device=lengths.device)
    last = indptr[1:, None] - 1
    at = torch.where(age < lengths[:, None], last - age, last)
    return _SlotTable(batch.kv_indices[at].long(), age, lengths)


def _attend_single(call: AttentionCall, table: _SlotTable) -> torch.Tensor:
    """Attends in all sequences of one new token by one call. Unseen entries repeat a slot whose numbers are finite."""
    k, v = (storage[table.slots, 0].transpose(1, 2) for storage in (call.keys, call.values))
    seen = table.age < table.lengths[:, None]
    if call.window != NO_WINDOW:
        seen &= table.age < call.window
    grouped = call.q_THD.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        call.q_THD[:, :, None], k, v, attn_mask=seen[:, None, None, :], scale=call.scale, enable_gqa=grouped
    )
    return out[:, :, 0].contiguous()


def _visible(queries: int, attended: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Returns the mask bool [n, a] of n queries that are the last of a tokens; None where every query sees all."""
    if queries == 1 and (window == NO_WINDOW or attended <= window):
        return None
    at = torch.arange(attended - queries, attended, device=device)[:, None]
    seen = torch.arange(attended, device=device)[None, :]
    return seen <= at if window == NO_WINDOW else (seen <= at) & (seen > at - window)


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attends in one sequence by torch's fused kernel: q [H, n, D], k [G, a, D], v [G, a, E] -> [H, n, E]."""
    mask = _visible(q.shape[1], k.shape[1], call.window, q.device)
    grouped = q.shape[0] != k.shape[0]
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=call.scale, enable_gqa=grouped
    )
    return out[0]


def _attend_unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attends in one sequence with soft-capped scores, or with sinks; shapes as in `_attend_fused`."""
    group = q.shape[0] // k.shape[0]
    scores = (q @ k.repeat_interleave(group, 0).transpose(1, 2)).float() * call.scale
    if call.softcap != NO_SOFTCAP:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = _visible(q.shape[1], k.shape[1], call.window, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is not None:
        sink = call.sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype)
    return weights @ v.repeat_interleave(group, 0)
