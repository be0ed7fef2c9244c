"""Computes attention by torch operations: the CPU path, and the reference for other backends.

Sequences of a step are laid side by side in blocks, a call of torch each. On a CPU, sequences that share a context are
attended in two levels (`engine.batch.shared_prefix`): all their tokens over the context, whose keys are read once, and
each over its own tokens.

Shape legend: T packed tokens, H query heads, G key/value heads, D query/key dim, E value dim, S sequences, n new tokens
of a sequence, a tokens that it attends to, B sequences of a block.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.interface import NO_SOFTCAP, NO_WINDOW, AttentionCall, AttentionStep
from engine.batch.input_batch import InputBatch
from engine.requests import Int64s

MIN_AREA = 1 << 14  # scores of a padded block that are always worth one call in place of one for each sequence
MAX_PADDING = 1.5  # times the scores without padding, above that
MAX_ATTENDED = 1 << 16  # tokens whose keys and values a block copies on a GPU, unless one sequence attends to more
# Bytes of them on a CPU: larger copies leave its caches, and the C library maps the largest anew at each call.
MAX_COPIED = 4 << 20
MIN_CONTEXT = 64  # shared tokens from which two levels win on a CPU


class TorchAttention:
    """Implements `AttentionBackend` by torch's scaled dot product attention."""

    def __init__(self, *, cascades: bool = False) -> None:
        """`cascades`: shared contexts are attended in a level of their own, which torch supports on a CPU alone."""
        self.cascade_ratio: float | None = 0.0 if cascades else None
        self.min_cascade_context: int | None = MIN_CONTEXT

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        return key_dim, value_dim

    def plan(self, batch: InputBatch) -> AttentionStep:
        return _TorchStep(batch)


class _Block(NamedTuple):
    """Lays B sequences side by side, padded to n new tokens and a attended ones.

    Padding repeats a sequence's last token and its last slot, whose numbers are finite.
    """

    shape: tuple[int, int, int]  # B, n, a
    tokens: torch.Tensor | None  # i64 [B n] of the step; None: all of its tokens in order
    slots: torch.Tensor  # i64 [B a]
    places: torch.Tensor  # i64 [B, n] place of each new token among those that its sequence attends to
    unpadded: torch.Tensor | None  # i64 [*], entries of [B n] that are no padding; None: all
    triangular: bool  # every sequence attends to its new tokens alone, and none is padded
    masks: dict[int, torch.Tensor | None]  # by window, once they are needed
    heads: dict[int, torch.Tensor]  # by number of key heads, once they are needed

    def head_slots(self, heads: int) -> torch.Tensor:
        """Returns i64 [B G a]: where each key head finds its keys, or values, among the [slots G] of the storage."""
        if heads not in self.heads:
            first = self.slots.view(self.shape[0], 1, -1) * heads
            self.heads[heads] = (first + torch.arange(heads, device=first.device)[:, None]).flatten()
        return self.heads[heads]

    def mask(self, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns what is added to the scores, [B, 1, n, a]; None where every token sees all."""
        if window not in self.masks:
            at = torch.arange(self.shape[2], device=self.places.device)
            place = self.places[:, :, None]
            seen = at <= place if window == NO_WINDOW else (at <= place) & (at > place - window)
            if bool(seen.all()):
                self.masks[window] = None
            else:
                blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                self.masks[window] = blank.masked_fill_(~seen, float("-inf"))[:, None]
        return self.masks[window]


class _Span(NamedTuple):
    """Names the tokens first .. last - 1 of a step, which share a context."""

    first: int
    last: int
    slots: torch.Tensor  # i64 [C]


class _TorchStep:
    """Implements `AttentionStep`."""

    def __init__(self, batch: InputBatch) -> None:
        self._write_slots = batch.write_slots
        self._queries = batch.qo_indptr.numpy().astype(np.int64)
        self._attended = batch.kv_indptr.numpy().astype(np.int64)
        self._indices = batch.kv_indices
        self._single = batch.single and batch.cascade is None  # a decode step
        self._whole_blocks: list[_Block] | None = None  # made by the first layer that needs them
        self._own_blocks: list[_Block] | None = None
        self._spans: list[_Span] = []
        if (cascade := batch.cascade) is not None:
            queries, contexts = cascade.query_indptr.tolist(), cascade.context_indptr.tolist()
            bounds = zip(queries, queries[1:], contexts, contexts[1:], strict=False)
            self._spans = [
                _Span(first, last, cascade.context_indices[start:end].long())
                for first, last, start, end in bounds
                if end > start
            ]
            self._own_attended, self._own_indices = cascade.own_indptr.numpy(), cascade.own_indices

    def _blocks(self, call: AttentionCall) -> list[_Block]:
        """Returns the blocks of all that the step attends to, in one level."""
        if self._whole_blocks is None:
            self._whole_blocks = _blocks(self._queries, self._attended, self._indices, _max_attended(call))
        return self._whole_blocks

    def attend(self, call: AttentionCall) -> torch.Tensor:
        keys, values = call.keys.flatten(1), call.values.flatten(1)
        keys.index_copy_(0, self._write_slots, call.k_TGD.flatten(1).to(keys.dtype))
        values.index_copy_(0, self._write_slots, call.v_TGE.flatten(1).to(values.dtype))
        fused = call.softcap == NO_SOFTCAP and call.sinks is None
        exact = call.q_THD.dtype == torch.float32  # halves would round the scores
        if fused and exact and self._single and len(blocks := self._blocks(call)) == 1:
            return _attend_single(call, blocks[0])
        out = call.q_THD.new_empty((*call.q_THD.shape[:2], call.v_TGE.shape[2]))
        if not fused:
            self._attend_one_by_one(call, out)
        elif self._spans and call.window == NO_WINDOW and call.q_THD.shape[2] == call.v_TGE.shape[2]:
            self._attend_in_levels(call, out)
        else:
            for block in self._blocks(call):
                _attend_block(call, block, out)
        return out

    def _attend_in_levels(self, call: AttentionCall, out_THE: torch.Tensor) -> None:
        logsums = call.q_THD.new_empty(call.q_THD.shape[:2], dtype=torch.float32)
        if self._own_blocks is None:
            self._own_blocks = _blocks(self._queries, self._own_attended, self._own_indices, _max_attended(call))
        for block in self._own_blocks:
            _attend_block(call, block, out_THE, logsums)
        for span in self._spans:
            tokens = slice(span.first, span.last)
            k, v = _gathered(call, span.slots, 1)
            q = call.q_THD[tokens].transpose(0, 1)[None]
            found, logsum = _flash(q, k, v, 0.0, False, scale=call.scale)
            weight = torch.sigmoid(logsum[0].T - logsums[tokens])[:, :, None].to(out_THE.dtype)
            out_THE[tokens] = torch.lerp(out_THE[tokens], found[0].transpose(0, 1), weight)

    def _attend_one_by_one(self, call: AttentionCall, out_THE: torch.Tensor) -> None:
        """Attends in one sequence after another."""
        for index in range(len(self._queries) - 1):
            tokens = slice(*self._queries[index : index + 2].tolist())
            slots = self._indices[slice(*self._attended[index : index + 2].tolist())].long()
            k, v = (one[0] for one in _gathered(call, slots, 1))
            mixed = _attend_unfused(call.q_THD[tokens].transpose(0, 1), k, v, call)
            out_THE[tokens] = mixed.transpose(0, 1)


_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the call that gives log-sum-exps


def _max_attended(call: AttentionCall) -> int:
    """Returns how many tokens' keys and values a block of such layers copies at most."""
    if call.keys.device.type != "cpu":
        return MAX_ATTENDED
    return MAX_COPIED // (call.keys[0].nbytes + call.values[0].nbytes)


def _blocks(queries: Int64s, attended: Int64s, indices: torch.Tensor, max_attended: int) -> list[_Block]:
    """Lays all sequences of a step in blocks, those of like sizes together.

    Args:
        queries: [S + 1] where each sequence's new tokens begin, and where the last one's end.
        attended: [S + 1] the same for `indices`.
        indices: [A] slots that the sequences attend to.
        max_attended: Tokens that a block copies at most, unless one sequence attends to more.
    """
    sizes, lengths = queries[1:] - queries[:-1], attended[1:] - attended[:-1]
    count, n, a = len(sizes), int(sizes.max()), int(lengths.max())
    layout = _Layout(queries[:-1], sizes, attended[:-1], lengths)
    if count * n * a <= MIN_AREA and count * a <= max_attended:  # what the search below would come to
        return [_block(layout, indices, n, a, whole=True)]
    order = np.lexsort((lengths, sizes))[::-1]
    blocks, start = [], 0
    while start < len(order):
        n, a = int(sizes[order[start]]), 0
        end, area = start, 0
        while end < len(order):
            size, length = int(sizes[order[end]]), int(lengths[order[end]])
            a_with, count = max(a, length), end - start + 1
            area += size * length
            padded = count * n * a_with
            if end > start and (padded > max(MIN_AREA, MAX_PADDING * area) or count * a_with > max_attended):
                break
            a, end = a_with, end + 1
        chosen = np.sort(order[start:end])
        of_block = _Layout(*(column[chosen] for column in layout))
        blocks.append(_block(of_block, indices, n, a, whole=len(chosen) == len(sizes)))
        start = end
    return blocks


class _Layout(NamedTuple):
    """Says where the sequences of a block are among the step's new tokens and among its `indices`: i64 [B] each."""

    first: Int64s
    sizes: Int64s  # new tokens
    first_attended: Int64s
    lengths: Int64s  # tokens that it attends to


def _block(layout: _Layout, indices: torch.Tensor, n: int, a: int, *, whole: bool) -> _Block:
    """Lays sequences side by side, padded to n new tokens and a attended ones; `whole`: all of the step's."""
    first, sizes, first_attended, lengths = layout
    new = np.minimum(np.arange(n), sizes[:, None] - 1)  # [B, n]
    at = np.minimum(np.arange(a), lengths[:, None] - 1)  # [B, a]
    places = torch.from_numpy(new + (lengths - sizes)[:, None])
    padded = bool((sizes < n).any())
    device = indices.device

    def moved(array: Int64s) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return _Block(
        shape=(len(sizes), n, a),
        tokens=None if whole and not padded else moved((first[:, None] + new).ravel()),
        slots=indices.index_select(0, moved((first_attended[:, None] + at).ravel())).long(),
        places=places.to(device),
        unpadded=moved(np.flatnonzero(np.arange(n) < sizes[:, None])) if padded else None,
        triangular=a == n and not padded and bool((lengths == n).all()),
        masks={},
        heads={},
    )


def _gathered(call: AttentionCall, slots: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys [B, G, a, D] and values [B, G, a, E] of `count` sequences, whose slots are i64 [B a]."""
    k, v = (
        storage.flatten(1).index_select(0, slots).view(count, -1, *storage.shape[2:]).transpose(1, 2)
        for storage in (call.keys, call.values)
    )
    return k, v


def _single_tokens(
    q_BHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Returns [B, H, E]. The query heads of a key head count as tokens of one head, which read its keys together."""
    q = q_BHD.reshape(len(q_BHD), k.shape[1], -1, q_BHD.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).reshape(*q_BHD.shape[:2], -1)


def _attend_single(call: AttentionCall, block: _Block) -> torch.Tensor:
    """Attends in the sequences of a step of single tokens, which are one block: [T, H, E] in float32.

    Products of matrices take half of the time of torch's fused attention, which is made for many queries: the keys of
    each key head are gathered side by side, and its query heads are the rows.
    """
    (count, _, attended), heads = block.shape, call.keys.shape[2]
    at = block.head_slots(heads)
    k, v = (
        storage.flatten(0, 2).index_select(0, at).view(count * heads, attended, -1)
        for storage in (call.keys, call.values)
    )
    q = call.q_THD.reshape(count * heads, -1, k.shape[2])
    scores = torch.bmm(q * call.scale, k.transpose(1, 2))
    mask = block.mask(call.window, scores.dtype)
    if mask is not None:
        scores.view(count, heads, -1, attended).add_(mask)
    return torch.bmm(scores.softmax(dim=-1), v).view(*call.q_THD.shape[:2], -1)


def _attend_block(
    call: AttentionCall, block: _Block, out_THE: torch.Tensor, logsums_TH: torch.Tensor | None = None
) -> None:
    """Attends in the sequences of a block, and writes the results of their tokens, and log-sum-exps where wanted."""
    (count, n, _), heads = block.shape, call.q_THD.shape[1]
    k, v = _gathered(call, block.slots, count)
    q = call.q_THD if block.tokens is None else call.q_THD.index_select(0, block.tokens)
    q = q.reshape(count, n, heads, -1).transpose(1, 2)
    triangular = block.triangular and call.window == NO_WINDOW
    mask = None if triangular else block.mask(call.window, q.dtype)
    if logsums_TH is not None:
        found, logsums = _flash(q, k, v, 0.0, triangular, attn_mask=mask, scale=call.scale)
        logsums = logsums.transpose(1, 2).reshape(count * n, heads)
    elif n == 1:
        found = _single_tokens(q[:, :, 0], k, v, mask, call.scale)
    else:
        grouped = heads != k.shape[1]
        found = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=triangular, scale=call.scale, enable_gqa=grouped
        )
    rows = found if n == 1 and found.ndim == 3 else found.transpose(1, 2).reshape(count * n, heads, -1)
    tokens = block.tokens
    if block.unpadded is not None and tokens is not None:
        tokens, rows = tokens[block.unpadded], rows[block.unpadded]
        logsums = None if logsums_TH is None else logsums[block.unpadded]
    if tokens is None:
        out_THE.copy_(rows)
        if logsums_TH is not None:
            logsums_TH.copy_(logsums)
    else:
        out_THE.index_copy_(0, tokens, rows)
        if logsums_TH is not None:
            logsums_TH.index_copy_(0, tokens, logsums)


def _visible(queries: int, attended: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Returns the mask bool [n, a] of n queries that are the last of a tokens; None where every query sees all."""
    if queries == 1 and (window == NO_WINDOW or attended <= window):
        return None
    at = torch.arange(attended - queries, attended, device=device)[:, None]
    seen = torch.arange(attended, device=device)[None, :]
    return seen <= at if window == NO_WINDOW else (seen <= at) & (seen > at - window)


def _attend_unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attends in one sequence with soft-capped scores, or with sinks; q [H, n, D], k [G, a, D], v [G, a, E]."""
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
