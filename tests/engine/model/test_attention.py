"""The attention op and its torch body, against a plain sum over tokens in float64."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import torch_backend
from engine.attention.interface import NO_SOFTCAP, NO_WINDOW, forward_context
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import ScheduledSequence, StepKind, pack
from engine.batch.shared_prefix import with_cascade
from engine.kv_cache.storage import KVStorage, LayerShape

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, SLOTS = 6, 2, 5, 3, 97
CPU = torch.device("cpu")


class _Case:
    """Two sequences in a pool full of NaN: one decoded, one prefilled behind a context; or both decoded."""

    def __init__(self, news: tuple[int, ...], contexts: tuple[int, ...]) -> None:
        self.rng = torch.Generator().manual_seed(3)
        self.pool = KVStorage([LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM)], SLOTS, torch.float32, CPU, fill=float("nan"))
        order = np.random.default_rng(0).permutation(np.arange(1, SLOTS)).astype(np.int32)
        none = np.zeros(0, np.int32)
        self.sequences, self.news = [], news
        for new, context in zip(news, contexts, strict=True):
            slots, order = order[: context + new], order[context + new :]
            self.sequences.append(ScheduledSequence(0, slots[:context], slots[context:], np.zeros(new, np.int32), none))
        for run in self.sequences:
            at = torch.from_numpy(run.context).long()
            for tensor in (self.pool.keys[0], self.pool.values[0]):
                tensor[at] = torch.randn((len(at), *tensor.shape[1:]), generator=self.rng)
        self.batch = pack(StepKind.PREFILL, self.sequences, torch.zeros((1, 1), dtype=torch.int32), CPU)
        tokens = self.batch.num_tokens
        self.q = torch.randn((1, HEADS, tokens, KEY_DIM), generator=self.rng)
        self.k = torch.randn((1, KV_HEADS, tokens, KEY_DIM), generator=self.rng)
        self.v = torch.randn((1, KV_HEADS, tokens, VALUE_DIM), generator=self.rng)

    def op(self, scale: float, window: int, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
        keys, values = self.pool.keys[0], self.pool.values[0]
        with forward_context(TorchAttention().plan(self.batch)):
            out: torch.Tensor = torch.ops.assay.attend(
                self.q, self.k, self.v, keys, values, scale, window, softcap, sinks
            )
        return out

    def by_hand(self, scale: float, window: int, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
        """[T, H, E] of the real tokens, from the pool after the op has written it."""
        rows: list[torch.Tensor] = []
        for run in self.sequences:
            slots = np.concatenate([run.context, run.write])
            for place, head in product(range(len(run.write)), range(HEADS)):
                token, position = len(rows) // HEADS, len(run.context) + place
                first = 0 if window == NO_WINDOW else max(0, position - window + 1)
                seen = torch.from_numpy(slots[first : position + 1]).long()
                k, v = (
                    pool[0][seen, 0, head // (HEADS // KV_HEADS)].double()
                    for pool in (self.pool.keys, self.pool.values)
                )
                scores = (k @ self.q[0, head, token].double()) * scale
                if softcap != NO_SOFTCAP:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                below = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                rows.append((weights @ v) / below)
        return torch.stack(rows).reshape(-1, HEADS, VALUE_DIM)


SHAPES = {"mixed": ((1, 7, 3), (11, 4, 0)), "decode": ((1, 1, 1), (13, 0, 6))}


def _block_sizes(case: _Case) -> list[int]:
    """The sequences of each block of a step."""
    batch = case.batch
    queries, attended = (one.numpy().astype(np.int64) for one in (batch.qo_indptr, batch.kv_indptr))
    blocks = torch_backend._blocks(queries, attended, batch.kv_indices, torch_backend.MAX_ATTENDED)
    return [block.shape[0] for block in blocks]


def test_one_long_row_among_short_ones_is_attended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Case((1, 1, 1, 1), (60, 0, 0, 0))
    together = case.op(0.3, NO_WINDOW, NO_SOFTCAP, None)
    assert _block_sizes(case) == [4]
    monkeypatch.setattr(torch_backend, "MIN_AREA", 0)
    assert _block_sizes(case) == [1, 3]
    assert torch.allclose(case.op(0.3, NO_WINDOW, NO_SOFTCAP, None), together, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_copy_on_a_cpu_is_larger_than_a_sequence_needs(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token = KV_HEADS * (KEY_DIM + VALUE_DIM) * 4
    copied: list[int] = []
    gathered, single = torch_backend._gathered, torch_backend._attend_single

    def noted(call: Any, slots: torch.Tensor, count: int) -> Any:
        copied.append(len(slots) * token)
        return gathered(call, slots, count)

    def noted_single(call: Any, block: Any) -> Any:
        copied.append(len(block.slots) * token)
        return single(call, block)

    monkeypatch.setattr(torch_backend, "_gathered", noted)
    monkeypatch.setattr(torch_backend, "_attend_single", noted_single)
    together = _Case(*SHAPES[shape]).op(0.3, NO_WINDOW, NO_SOFTCAP, None)
    assert max(copied) > 14 * token
    copied.clear()
    monkeypatch.setattr(torch_backend, "MAX_COPIED", 14 * token)
    apart = _Case(*SHAPES[shape]).op(0.3, NO_WINDOW, NO_SOFTCAP, None)
    assert max(copied) <= 14 * token
    assert torch.allclose(apart, together, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scores_of_halves_are_not_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens attend by products of matrices in float32, and by torch's fused attention in halves."""
    case, called = _Case(*SHAPES["decode"]), list[torch.dtype]()
    single = torch_backend._attend_single

    def noted(call: Any, block: Any) -> Any:
        called.append(call.q_THD.dtype)
        return single(call, block)

    monkeypatch.setattr(torch_backend, "_attend_single", noted)
    wanted = case.op(0.3, NO_WINDOW, NO_SOFTCAP, None)
    case.q, case.k, case.v = (tensor.to(dtype) for tensor in (case.q, case.k, case.v))
    for pool in (case.pool.keys, case.pool.values):
        pool[0] = pool[0].to(dtype)
    called.clear()
    found = case.op(0.3, NO_WINDOW, NO_SOFTCAP, None)
    assert called == ([torch.float32] if dtype is torch.float32 else [])
    assert torch.allclose(found.float(), wanted, atol=0.05)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", (NO_WINDOW, 1, 4, 50))
@pytest.mark.parametrize("softcap", (NO_SOFTCAP, 1.5))
@pytest.mark.parametrize("with_sinks", (False, True))
def test_attention_equals_a_sum_over_the_tokens_seen(shape: str, window: int, softcap: float, with_sinks: bool) -> None:
    case = _Case(*SHAPES[shape])
    sinks = torch.linspace(-2, 2, HEADS) if with_sinks else None
    out = case.op(0.3, window, softcap, sinks)
    assert out.shape == (1, case.batch.num_tokens, HEADS, VALUE_DIM)
    wanted = case.by_hand(0.3, window, softcap, sinks)
    assert float((out[0, : len(wanted)].double() - wanted).abs().max()) < 1e-6


def test_new_keys_and_values_are_written_where_the_runs_say_and_nowhere_else() -> None:
    case = _Case((1, 7, 3), (11, 4, 0))
    before = case.pool.keys[0].clone()
    case.op(1.0, NO_WINDOW, NO_SOFTCAP, None)
    written = torch.from_numpy(np.concatenate([run.write for run in case.sequences])).long()
    assert torch.equal(case.pool.keys[0][written, 0], case.k[0].transpose(0, 1))
    assert torch.equal(case.pool.values[0][written, 0], case.v[0].transpose(0, 1))
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, written, False)
    assert torch.equal(case.pool.keys[0][others].nan_to_num(7), before[others].nan_to_num(7))


def test_the_compilers_view_of_the_op_agrees_with_the_op() -> None:
    case = _Case((1, 7), (3, 4))
    arguments = (case.q, case.k, case.v, case.pool.keys[0].zero_(), case.pool.values[0].zero_(), 0.5, 3, 0.0, None)
    with forward_context(TorchAttention().plan(case.batch)):
        torch.library.opcheck(torch.ops.assay.attend, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_step_of_before_stands_again_after_an_inner_step() -> None:
    case = _Case((2,), (0,))
    other = _Case((5,), (0,))
    with forward_context(TorchAttention().plan(case.batch)):
        other.op(1.0, NO_WINDOW, NO_SOFTCAP, None)
        keys, values = case.pool.keys[0], case.pool.values[0]
        out = torch.ops.assay.attend(case.q, case.k, case.v, keys, values, 1.0, NO_WINDOW, NO_SOFTCAP, None)
    assert out.shape[1] == 2


def _shared_context_outputs(own: tuple[int, ...], *, cascade: bool, window: int = NO_WINDOW) -> torch.Tensor:
    """What items of these lengths behind one context of 70 tokens, and a sequence beside them, get: [T, H, D]."""
    rng = torch.Generator().manual_seed(5)
    dim, count = 8, 70 + sum(own) + 9
    pool = KVStorage([LayerShape(KV_HEADS, dim, dim)], count + 1, torch.float32, CPU, fill=float("nan"))
    slots = np.random.default_rng(1).permutation(np.arange(1, count + 1)).astype(np.int32)
    context, *writes = np.split(slots, np.cumsum([70, *own]))
    sequences = [ScheduledSequence(0, context[:0], context, np.zeros(70, np.int32), context[:0])]
    sequences += [ScheduledSequence(0, context, write, np.zeros(len(write), np.int32), context[:0]) for write in writes]
    batch = pack(StepKind.SCORE, sequences, torch.zeros((1, 1), dtype=torch.int32), CPU)
    backend = TorchAttention(cascades=True)
    if cascade:
        batch = with_cascade(batch, sequences, 0.0, backend.min_cascade_context)
        assert batch.cascade is not None
    q, k, v = (torch.randn((1, heads, batch.num_tokens, dim), generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with forward_context(backend.plan(batch)):
        out: torch.Tensor = torch.ops.assay.attend(q, k, v, pool.keys[0], pool.values[0], 0.3, window, NO_SOFTCAP, None)
    return out[0]


@pytest.mark.parametrize("own", [(5,) * 4, (1, 30, 2, 2, 17), (1,) * 6])
def test_two_levels_give_what_one_level_gives(own: tuple[int, ...]) -> None:
    torch.testing.assert_close(
        _shared_context_outputs(own, cascade=True), _shared_context_outputs(own, cascade=False), rtol=1e-5, atol=1e-6
    )


def test_a_windowed_layer_attends_in_one_level() -> None:
    own = (3, 5, 4)
    found = [_shared_context_outputs(own, cascade=cascade, window=20) for cascade in (True, False)]
    assert torch.equal(*found)
    assert not torch.allclose(found[0], _shared_context_outputs(own, cascade=True), atol=1e-3)


def test_blocks_hold_every_token_once_however_different_the_sizes_are() -> None:
    sizes = np.random.default_rng(2).integers(1, 300, 40)
    contexts = np.random.default_rng(3).integers(0, 900, 40)
    queries, attended = (np.concatenate(([0], np.cumsum(each))) for each in (sizes, sizes + contexts))
    blocks = torch_backend._blocks(queries, attended, torch.arange(int(attended[-1])), 1 << 16)
    found = []
    for block in blocks:
        tokens = torch.arange(int(queries[-1])) if block.tokens is None else block.tokens
        found += (tokens if block.unpadded is None else tokens[block.unpadded]).tolist()
        count, n, a = block.shape
        real = int((block.places.diff(dim=1) > 0).sum()) + count
        assert count == 1 or count * n * a <= max(torch_backend.MIN_AREA, 4 * real * a)
    assert sorted(found) == list(range(int(queries[-1])))
    assert 1 < len(blocks) < 40
