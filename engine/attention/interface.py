"""The attention function that Hugging Face models call, and the op behind it: write keys and values, then attend.

Shape legend: T packed tokens, H query heads, G key/value heads, D query/key dim, E value dim, A attended tokens.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.batch.input_batch import Batch
from engine.utils.torch_ops import operation

ATTENTION = "assay_paged"  # unknown to the model library's table of masks, so that no mask is built
NO_WINDOW = -1
NO_SOFTCAP = 0.0
LEAST_TABLE = 1 << 14  # places of a padded table that are always worth one call instead of many


class AttentionStep(Protocol):
    """One step's attention, planned. Called once a layer by the thread that runs the step."""

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes k and v to the step's slots of `keys` and `values`, then attends. [T, H, E], contiguous.

        `window` counts the tokens that a token sees, itself included (NO_WINDOW: all before it).
        """
        ...


class AttentionBody(Protocol):
    """How attention is computed on one class of device."""

    cascades: float | None  # context tokens a new token from which it wants a batch's `cascade`; None: never

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """The dims that the pool holds, padding included. Raises ValueError if they cannot be held."""
        ...

    def plan(self, batch: Batch) -> AttentionStep: ...


class _Current(threading.local):
    """The step that this thread runs. A slot and not an argument: some models drop arguments they do not know, and an
    op takes no Python objects."""

    step: AttentionStep | None = None
    wanted: torch.Tensor | None = None


_current = _Current()


@contextmanager
def running(step: AttentionStep, wanted: torch.Tensor | None = None) -> Iterator[None]:
    """Makes `step` the one that the model's layers attend in, on this thread. `wanted` i64 [R]: the rows that are read
    of the last layer; None: all."""
    before = _current.step, _current.wanted
    _current.step, _current.wanted = step, wanted
    try:
        yield
    finally:
        _current.step, _current.wanted = before


def running_step() -> AttentionStep:
    """The one that this thread runs. RuntimeError where it runs none."""
    if _current.step is None:
        raise RuntimeError("The model was called outside of a step: `running(step)` must be around the call.")
    return _current.step


def wanted_rows() -> torch.Tensor | None:
    """Of the step that this thread runs; None: all."""
    return _current.wanted


def _attended_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return q.new_empty((1, q.shape[2], q.shape[1], v.shape[3]))


@operation(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, float scale, int window, float softcap, "
    "Tensor? sinks) -> Tensor",
    _attended_shape,
)
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q (1, H, T, D), k (1, G, T, D), v (1, G, T, E), pool tensors (slots, 1, G, D or E) -> (1, T, H, E)."""
    q_THD, k_TGD, v_TGE = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    return running_step().attend(q_THD, k_TGD, v_TGE, keys, values, scale, window, softcap, sinks).unsqueeze(0)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What the model library calls once a layer, with rotated query (1, H, T, D). Returns (1, T, H, E) and no weights.

    The pool tensors are attributes of the attention module, put there by `attach`: an index would make the compiler
    specialise every layer.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = NO_WINDOW if sliding_window is None else sliding_window
    cap = NO_SOFTCAP if softcap is None else softcap
    keys, values = module.assay_keys, module.assay_values
    return torch.ops.assay.attend(query, key, value, keys, values, scale, window, cap, s_aux), None


def attach(modules: list[nn.Module], keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Gives every attention module, in layer order, its tensors of the pool."""
    for module, key, value in zip(modules, keys, values, strict=True):
        module.assay_keys, module.assay_values = key, value


class TorchAttention:
    """Attention by torch operations, one sequence after another: the CPU path, and the reference elsewhere."""

    cascades: float | None = None

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        return key_dim, value_dim

    def plan(self, batch: Batch) -> AttentionStep:
        return _TorchStep(batch)


class _TorchStep:
    def __init__(self, batch: Batch) -> None:
        self._write_slots = batch.write_slots
        self._indices = batch.kv_indices.long()
        self._queries = batch.qo_indptr.tolist()
        self._attended = batch.kv_indptr.tolist()
        self._table = _slot_table(batch)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        keys[:, 0].index_copy_(0, self._write_slots, k_TGD.to(keys.dtype))
        values[:, 0].index_copy_(0, self._write_slots, v_TGE.to(values.dtype))
        if self._table is not None and softcap == NO_SOFTCAP and sinks is None:
            return _attend_single(q_THD, keys, values, self._table, scale, window)
        out = q_THD.new_empty((*q_THD.shape[:2], v_TGE.shape[2]))
        for index in range(len(self._queries) - 1):
            first, last = self._queries[index], self._queries[index + 1]
            slots = self._indices[self._attended[index] : self._attended[index + 1]]
            q, k, v = (one.transpose(0, 1) for one in (q_THD[first:last], keys[slots, 0], values[slots, 0]))
            if softcap == NO_SOFTCAP and sinks is None:
                mixed = _attend_fused(q, k, v, scale, window)
            else:
                mixed = _attend_in_steps(q, k, v, scale, window, softcap, sinks)
            out[first:last] = mixed.transpose(0, 1)
        return out


class _SlotTable(NamedTuple):
    """Sequences of one new token each, side by side: the last token of each stands in the last column."""

    slots: torch.Tensor  # i64 [S, longest], the row's own last slot in front of its first
    age: torch.Tensor  # i64 [longest], 0 for the new token
    lengths: torch.Tensor  # i64 [S]


def _slot_table(batch: Batch) -> _SlotTable | None:
    """None where a sequence has several new tokens, or where one long row would pad the others too far."""
    longest = int(batch.kv_indptr.diff().max())
    if not batch.single or longest * batch.num_tokens > max(LEAST_TABLE, 2 * len(batch.kv_indices)):
        return None
    indptr = batch.kv_indptr.to(batch.kv_indices.device).long()
    lengths = indptr.diff()
    age = torch.arange(longest - 1, -1, -1, device=lengths.device)
    last = indptr[1:, None] - 1
    at = torch.where(age < lengths[:, None], last - age, last)
    return _SlotTable(batch.kv_indices[at].long(), age, lengths)


def _attend_single(
    q_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: _SlotTable, scale: float, window: int
) -> torch.Tensor:
    """As `_attend_fused` for every row at once. Unseen places repeat the row's own last slot, which is finite."""
    k, v = (pool[table.slots, 0].transpose(1, 2) for pool in (keys, values))
    seen = table.age < table.lengths[:, None]
    if window != NO_WINDOW:
        seen &= table.age < window
    grouped = q_THD.shape[1] != k.shape[1]
    mask = seen[:, None, None, :]
    out = F.scaled_dot_product_attention(q_THD[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[:, :, 0].contiguous()


def _visible(queries: int, attended: int, window: int, device: torch.device) -> torch.Tensor | None:
    """bool [queries, attended], or None where every query sees all: the queries are the last of the attended tokens."""
    if queries == 1 and (window == NO_WINDOW or attended <= window):
        return None
    at = torch.arange(attended - queries, attended, device=device)[:, None]
    seen = torch.arange(attended, device=device)[None, :]
    return seen <= at if window == NO_WINDOW else (seen <= at) & (seen > at - window)


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """q [H, n, D], k [G, a, D], v [G, a, E] -> [H, n, E]."""
    mask = _visible(q.shape[1], k.shape[1], window, q.device)
    grouped = q.shape[0] != k.shape[0]
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0]


def _attend_in_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `_attend_fused`, with scores softly capped, and with sinks [H]: logits that take weight and give no value."""
    group = q.shape[0] // k.shape[0]
    scores = (q @ k.repeat_interleave(group, 0).transpose(1, 2)).float() * scale
    if softcap != NO_SOFTCAP:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _visible(q.shape[1], k.shape[1], window, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype)
    return weights @ v.repeat_interleave(group, 0)
