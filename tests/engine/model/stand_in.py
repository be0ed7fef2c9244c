"""On a CPU, what FlashInfer documents of its calls, and graphs that run again where others are replayed."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import flashinfer_wrappers
from engine.model.cuda_graphs import decode
from engine.model.cuda_graphs.decode import DecodeGraphs
from engine.model.cuda_graphs.prefill import PrefillGraphs
from engine.spec_decode import draft_graphs
from engine.spec_decode.draft_graphs import DraftGraphs


class Wrapper:
    """Holds what both wrappers share. `log_base` is that of the log-sum-exp: 2 in FlashInfer."""

    log_base = 2.0
    plans = 0
    backend = "fa2"
    buffer = "buffer"  # how its own are called

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, *, backend: str, use_tensor_cores: bool = False, **graph: Any
    ) -> None:
        self._graph = graph
        assert (workspace.dtype, kv_layout, backend) == (torch.uint8, "NHD", self.backend)
        self._cached_module = SimpleNamespace(plan=self._share)

    def reset_workspace_buffer(self, workspace: torch.Tensor, staging: torch.Tensor) -> None:
        assert workspace.dtype == staging.dtype == torch.uint8

    def _keep(self, queries: torch.Tensor, kv: tuple[torch.Tensor, ...], shape: tuple[int, ...], more: Any) -> None:
        type(self).plans += 1
        indptr, self._indices, last_page = kv
        assert {one.dtype for one in (queries, *kv)} == {torch.int32}
        assert more["page_size"] == 1
        assert last_page.tolist() == [1] * (len(indptr) - 1)
        assert more["q_data_type"] == more["kv_data_type"] == torch.float32
        if self._graph:  # the plan lives in the buffers, and a replay reads them again
            held, slots = (self._graph[f"paged_kv_{name}_{self.buffer}"] for name in ("indptr", "indices"))
            assert len(indptr) == len(held)
            held.copy_(indptr)
            slots[: len(self._indices)].copy_(self._indices)
            self._indices = slots
        self._queries, self._shape, self._more = queries.tolist(), shape, more
        self._cached_module.plan(indptr, more["seq_lens"])

    def _share(self, indptr: torch.Tensor, lengths: torch.Tensor | None) -> None:
        """Says how blocks share the work, given where each sequence ends."""
        assert len(indptr) == len(self._queries)
        assert lengths is None or lengths.tolist() == indptr.diff().tolist()
        self._indptr = indptr.tolist()

    def run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor, return_lse: bool = False
    ) -> Any:
        assert q.shape[0] == self._queries[-1]
        assert (q.shape[1], cache[0].shape[2], q.shape[2]) == self._shape
        assert cache[0].stride() == cache[1].stride()
        if self._graph:  # the kernels read there the lengths that they attend to
            assert self._graph[f"paged_kv_indptr_{self.buffer}"].tolist() == self._indptr
        lse = torch.empty(q.shape[:2])
        for index in range(len(self._queries) - 1):
            first, last = self._queries[index : index + 2]
            slots = self._indices[self._indptr[index] : self._indptr[index + 1]].long()
            k, v = (one[slots, 0].repeat_interleave(q.shape[1] // one.shape[2], 1).double() for one in cache)
            scores = torch.einsum("nhd,ahd->hna", q[first:last].double(), k) * self._more["sm_scale"]
            if self._more["logits_soft_cap"]:
                scores = self._more["logits_soft_cap"] * torch.tanh(scores / self._more["logits_soft_cap"])
            age = torch.arange(len(slots) - (last - first), len(slots))[:, None] - torch.arange(len(slots))
            hidden = age < 0
            if self._more["window_left"] >= 0:
                hidden |= age > self._more["window_left"]
            if self._more.get("causal", True):
                scores = scores.masked_fill(hidden, -math.inf)
            if not len(slots):
                out[first:last], lse[first:last] = 0, -math.inf
                continue
            out[first:last] = torch.einsum("hna,ahd->nhd", scores.softmax(-1), v).float()
            lse[first:last] = (scores.logsumexp(-1) / math.log(self.log_base)).T.float()
        return (out, lse) if return_lse else out


class Decode(Wrapper):
    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, heads: int, kv_heads: int, head_dim: int, **more: Any
    ) -> None:
        queries = torch.arange(len(indptr), dtype=torch.int32)
        assert more["seq_lens"] is not None
        self._keep(queries, (indptr, indices, last_page_len), (heads, kv_heads, head_dim), more)


class Prefill(Wrapper):
    buffer = "buf"
    lengths = 1
    rows: int | None = None  # of all plans of a graph

    def plan(
        self, qo: Any, indptr: Any, indices: Any, last_page: Any, heads: int, kv_heads: int, head_dim: int, **more: Any
    ) -> None:
        assert more["max_token_per_sequence"] == int(qo.diff().max())
        if self._graph:
            self.rows = self.rows or int(qo[-1])
            assert (int(qo[-1]), len(qo)) == (self.rows, len(self._graph["qo_indptr_buf"]))
        assert len(more["seq_lens"]) == self.lengths  # their largest is sought one after another
        self._keep(qo, (indptr, indices, last_page), (heads, kv_heads, head_dim), more | {"seq_lens": None})


class Ragged(Prefill):
    backend = "fa3"
    lengths = 0

    def plan(  # type: ignore[override]
        self, qo: Any, indptr: Any, heads: int, kv_heads: int, head_dim: int, **more: Any
    ) -> None:
        every, pages = torch.arange(int(indptr[-1]), dtype=torch.int32), torch.ones(len(indptr) - 1, dtype=torch.int32)
        super().plan(qo, indptr, every, pages, heads, kv_heads, head_dim, page_size=1, seq_lens=(), **more)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:  # type: ignore[override]
        assert k.is_contiguous() and v.is_contiguous() and len(k) == self._indptr[-1]
        return super().run(q, (k[:, None], v[:, None]), **more)


def _merge(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor) -> None:
    both = torch.logaddexp2(s, s_other)
    mixed = v * (s - both).exp2()[..., None] + v_other * (s_other - both).exp2()[..., None]
    v[mask], s[mask] = mixed[mask], both[mask]


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Any,
    positions: Any,
    cache: Any,
    slots: Any,
    indptr: Any,
    last: Any,
    layout: str,
) -> None:
    assert indptr.tolist() == list(range(len(slots) + 1))
    assert (rows.tolist(), positions.tolist()) == (indptr.tolist()[:-1], [0] * len(slots))
    assert (last.tolist(), layout) == ([1] * len(slots), "NHD")
    for pool, new in zip(cache, (k, v), strict=True):
        pool[slots.long(), 0] = new


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the stand-in what `import flashinfer` finds."""
    made = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        append_paged_kv_cache=_append,
        merge_state_in_place=_merge,
    )
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    cuda = SimpleNamespace(Event=lambda: event, graph_pool_handle=lambda: None)
    monkeypatch.setattr(flashinfer_wrappers, "_cuda", cuda)
    monkeypatch.setattr(decode, "_cuda", cuda)
    monkeypatch.setattr(draft_graphs, "_cuda", cuda)
    monkeypatch.setattr(flashinfer_wrappers, "WORKSPACE_BYTES", 64)


def _again(graphs: Any, step: Any, size: int) -> Any:
    """A graph that fills the buffers by running the step again, and notes it in `replays`."""
    graphs.replays = []

    def replay() -> None:
        graphs.replays.append(size)
        graphs._fill(step, size)

    return SimpleNamespace(replay=replay)


class Replayed(DecodeGraphs):
    """Graphs that run their captured step again instead of replaying it."""

    replays: list[int]

    def _record(self, step: Any, size: int) -> Any:
        return _again(self, step, size)


class ReplayedPrefill(PrefillGraphs):
    """Counts like `Replayed`, for prefill and score steps."""

    replays: list[int]

    def _record(self, step: Any, count: int) -> Any:
        return _again(self, step, count)


def run_steps(graphs: DraftGraphs, size: int) -> None:
    """Runs all steps of a row count without a graph."""
    left = None
    for offset in range(graphs._drafts):
        left = graphs._step(size, offset, left)


class ReplayedDrafts(DraftGraphs):
    """Counts like `Replayed`, for whole runs of drafts."""

    def _record(self, size: int, pool: Any) -> list[Any]:
        self.replays: list[int] = []

        def replay() -> None:
            self.replays.append(size)
            run_steps(self, size)

        return [SimpleNamespace(replay=replay)]
