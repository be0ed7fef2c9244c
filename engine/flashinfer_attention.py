"""FlashInferAttention: the paged kernels of FlashInfer (0.6.14, backend fa2) behind the attention op. CUDA only.

A page is one token slot. One plan per distinct kind of layer serves all its layers in a step, and two where its
sequences have contexts in common (`engine.cascade`). On Hopper those contexts are gathered, so that backend fa3 fetches
them in whole tiles.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from engine import narrow_attention
from engine.attention import NO_SOFTCAP, NO_WINDOW, AttentionStep
from engine.batch import Batch
from engine.cascade import Cascade
from engine.narrow_attention import NarrowDecoder
from engine.partition import Partition

HEAD_DIMS = (64, 128, 256)  # what fa2 is built for; others are padded with zeros, exact because the scale is explicit
WORKSPACE_BYTES = 384 << 20  # partial results of split sequences; shared by all wrappers, which run one after another
TENSOR_CORE_GROUP = 4  # query heads a key/value head from which decoding on tensor cores wins
LAYOUT = "NHD"
BACKEND = "fa2"  # beats fa3 on short items, and compiles three times faster
HOPPER_BACKEND = "fa3"  # of gathered contexts
HOPPER = 9  # major compute capability
CASCADES, HOPPER_CASCADES = 32.0, 8.0  # context tokens a new token from which two passes take less time than one
PAGE = 1
MOST_TILE, BLOCKS, FLOAT_BYTES = 128, 2, 4  # of fa2: rows of a tile, blocks that a multiprocessor runs at once
Form = Literal["decode", "prefill", "ragged"]
LEAST_CONSTANTS = 1024
Attended = tuple[torch.Tensor, torch.Tensor]  # [T, H, D], and f32 [T, H] log-sum-exps in base 2
_cuda: Any = torch.cuda  # its events carry no types


class Kind(NamedTuple):
    """What a plan depends on. `dim` is the stored head dim; window and soft cap as in `attention`."""

    heads: int
    kv_heads: int
    dim: int
    window: int
    softcap: float
    scale: float

    @property
    def window_left(self) -> int:
        """FlashInfer counts the tokens left of a token, this engine counts the token too."""
        return self.window - 1 if self.window != NO_WINDOW else -1


class Sequences(NamedTuple):
    """What a wrapper plans: S sequences of new tokens, and the pool slots that each attends to."""

    qo_indptr: torch.Tensor  # i32 [S + 1] on the host
    kv_indptr: torch.Tensor  # i32 [S + 1] on the host
    kv_indices: torch.Tensor  # i32 on the device
    causal: bool  # the new tokens are the last of what their sequence attends to


class FlashInferAttention:
    """Plans steps on one device. Not for two threads: wrappers keep the plan of the last step."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        import flashinfer

        self._lib: Any = flashinfer
        self.device, self.dtype = device, dtype
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[Kind, str], PlannedWrapper] = {}
        self._rooms: dict[Kind, Any] = {}  # of captured steps of few rows
        self._constants = Constants.of(LEAST_CONSTANTS, device)
        self._gathers = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
        self.cascades: float | None = HOPPER_CASCADES if self._gathers else CASCADES

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """One dim for both: the kernels want keys and values of the same strides."""
        wanted = max(key_dim, value_dim)
        for dim in HEAD_DIMS:
            if wanted <= dim:
                return dim, dim
        raise ValueError(f"its heads have {wanted} dims; the attention kernels of this device take {HEAD_DIMS[-1]}")

    def plan(self, batch: Batch) -> AttentionStep:
        return FlashInferStep(self, batch)

    def planned(self, kind: Kind, batch: Batch) -> Any:
        """What runs a layer of `kind`, planned for `batch`."""
        if batch.cascade is not None and kind.window == NO_WINDOW:
            return CascadeRun(self, kind, batch.qo_indptr, batch.cascade).run
        form: Form = "decode" if batch.single else "prefill"
        return self._planned(kind, form, form, sequences_of(batch))

    def own(self, kind: Kind, sequences: "Sequences") -> Any:
        """As `planned`: what is each sequence's own, of a step in two levels."""
        return self._planned(kind, "own", "prefill", sequences)

    def contexts(self, kind: Kind, sequences: "Sequences") -> Any:
        """As `planned`: the contexts of a step in two levels."""
        if not self._gathers:
            return self._planned(kind, "contexts", "prefill", sequences)
        attend, slots = self._planned(kind, "contexts", "ragged", sequences), sequences.kv_indices

        def run(q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], **more: Any) -> Any:
            return attend(q, *(one[:, 0].index_select(0, slots) for one in cache), **more)

        return run

    def _planned(self, kind: Kind, part: str, form: Form, sequences: "Sequences") -> Any:
        """What runs a layer. Each part of a step has a wrapper of its own, since it keeps its plan."""
        key = (kind, part)
        if key not in self._wrappers:
            self._wrappers[key] = self._decoder(kind) if form == "decode" else self._prefiller(form)
        wrapper = self._wrappers[key]
        wrapper.plan(kind, sequences, self)
        return wrapper.run

    def merge(self, into: Attended, more: Attended, rows_T: torch.Tensor) -> None:
        """Two disjoint parts of what the rows so marked attend to, into the first."""
        self._lib.merge_state_in_place(*into, *more, rows_T)

    def constants(self, count: int) -> "Constants":
        """Arrays of at least `count` entries."""
        if count > len(self._constants.ones):
            self._constants = Constants.of(1 << (count - 1).bit_length(), self.device)
        return self._constants

    def append(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes both in one launch, by calling each token a sequence of one page."""
        count = k.shape[0]
        fixed = self.constants(count)
        rows, zeros, ones = fixed.rows[:count], fixed.zeros[:count], fixed.ones[:count]
        self._lib.append_paged_kv_cache(k, v, rows, zeros, (keys, values), slots, fixed.rows[: count + 1], ones, LAYOUT)

    def graph_decoder(self, kind: Kind, buffers: "GraphBuffers", rows: int, longest: int) -> "GraphDecoder":
        """A decode wrapper whose plan lives in `buffers`, so that a captured graph sees the next plan. Once it has
        planned, it can `replan`. No row attends to more than `longest` tokens."""
        if rows <= narrow_attention.MOST_ROWS and longest <= narrow_attention.LONGEST and self._takes_few(kind):
            indptr = buffers.indptr[: rows + 1]
            return NarrowDecoder(kind, indptr, buffers.indices, self._rooms[kind])
        return self.library_decoder(kind, buffers, rows)

    def library_decoder(self, kind: Kind, buffers: "GraphBuffers", rows: int) -> "PlannedWrapper":
        """As `graph_decoder`, however few and short its rows are."""
        return self._decoder(
            kind,
            buffers.staging,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers.indptr[: rows + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page[:rows],
        )

    def _takes_few(self, kind: Kind) -> bool:
        """Whether our own kernel attends in layers of this kind; it has room from then on."""
        if self.device.type != "cuda":
            return False
        from gpu_sampler.kernels.narrow_attention import Room, fits

        if fits(kind.heads, kind.kv_heads, kind.dim, self.dtype) and kind not in self._rooms:
            self._rooms[kind] = Room.of(narrow_attention.MOST_ROWS, kind.heads, kind.kv_heads, kind.dim, self.device)
        return kind in self._rooms

    def graph_prefiller(self, buffers: "GraphBuffers", queries: torch.Tensor) -> "PlannedWrapper":
        """The same for sequences of several tokens, empty ones among them, that together are as many tokens in every
        plan; where each ends stands in `queries`, i32 [sequences + 1] on the device."""
        sequences = len(queries) - 1
        return self._prefiller(
            "prefill",
            buffers.staging,
            use_cuda_graph=True,
            qo_indptr_buf=queries,
            paged_kv_indptr_buf=buffers.indptr[: sequences + 1],
            paged_kv_indices_buf=buffers.indices,
            paged_kv_last_page_len_buf=buffers.last_page[:sequences],
        )

    def most_sequences(self, kind: Kind, tokens: int) -> int:
        """Of a captured step of `tokens` tokens, those whose partial results the workspace holds, however they are cut:
        the library plans for one tile a sequence beside those that the tokens fill, and for one a block that the device
        runs at once. Below 1 where it cannot be captured."""
        tiles = WORKSPACE_BYTES // (kind.heads * MOST_TILE * (kind.dim + 1) * FLOAT_BYTES)
        cuda = self.device.type == "cuda"
        blocks = BLOCKS * torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 0
        if blocks // kind.kv_heads > tiles:
            return 0
        return tiles + 1 - math.ceil(tokens * (kind.heads // kind.kv_heads) / MOST_TILE)

    def _decoder(self, kind: Kind, staging: int | None = None, **graph: Any) -> "PlannedWrapper":
        wrapper = self._lib.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_tensor_cores=kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP,
            backend=BACKEND,
            **graph,
        )
        return PlannedWrapper(self._with_room(wrapper, staging), "decode", repeats=bool(graph))

    def _prefiller(self, form: Form, staging: int | None = None, **graph: Any) -> "PlannedWrapper":
        if form == "ragged":
            wrapper = self._lib.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, LAYOUT, backend=HOPPER_BACKEND)
        else:
            wrapper = self._lib.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=BACKEND, **graph)
        return PlannedWrapper(self._with_room(wrapper, staging), form)

    def _with_room(self, wrapper: Any, staging: int | None) -> Any:
        """The wrapper, with so many bytes for its plans, or as many as it takes."""
        if staging is not None:
            wrapper.reset_workspace_buffer(self._workspace, torch.empty(staging, dtype=torch.uint8, device=self.device))
        return wrapper


class GraphBuffers(NamedTuple):
    """Where the plans of captured steps live; shared by all row counts, since steps follow each other."""

    indptr: torch.Tensor  # i32 [most rows + 1]
    indices: torch.Tensor  # i32 [most attended tokens]
    last_page: torch.Tensor  # i32 [most rows]
    staging: int | None = None  # bytes that a plan may take, on the device and again on the host; None: 8 MiB

    @classmethod
    def of(cls, rows: int, attended: int, device: torch.device, staging: int | None = None) -> "GraphBuffers":
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(ints(rows + 1), ints(max(attended, rows)), ints(rows).fill_(1), staging)


class GraphDecoder(Protocol):
    """What attends in a captured step of single tokens: its plan lies where a replay reads it."""

    run: Any  # as a FlashInfer wrapper's

    def plan(self, kind: Kind, given: Sequences, body: FlashInferAttention) -> None:
        """Takes what each sequence attends to."""
        ...

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """As `plan`, where the buffers hold all that is attended to already and the copies of the last plan have
        ended."""
        ...


class PlannedWrapper:
    """A FlashInfer wrapper, and the event after which its pinned staging memory may be written again."""

    def __init__(self, wrapper: Any, form: Form, *, repeats: bool = False) -> None:
        """`repeats`: it will `replan`."""
        self._wrapper = wrapper
        self._form = form
        self._repeats = repeats
        self._partition: Partition | None = None
        self._staged = _cuda.Event()
        self.run: Any = wrapper.run

    def plan(self, kind: Kind, given: Sequences, body: FlashInferAttention) -> None:
        """Plans from the host's indptrs: device ones would be copied back, and waited for.

        What is waited for is the copy of this wrapper's last plan, which was queued before the last step's kernels: a
        loop that is at most one step ahead finds it done.
        """
        self._staged.synchronize()
        sequences = len(given.kv_indptr) - 1
        last_page = body.constants(sequences).host_ones[:sequences]
        shape = (kind.heads, kind.kv_heads, kind.dim)
        same: dict[str, Any] = {
            "window_left": kind.window_left,
            "logits_soft_cap": kind.softcap if kind.softcap != NO_SOFTCAP else None,
            "sm_scale": kind.scale,
            "q_data_type": body.dtype,
            "kv_data_type": body.dtype,
            "non_blocking": True,
        }
        if self._form == "decode":
            lengths = given.kv_indptr.diff()
            pages = (given.kv_indptr, given.kv_indices, last_page)
            plan = partial(self._wrapper.plan, *pages, *shape, page_size=PAGE, seq_lens=lengths, **same)
            plan()
            if self._repeats and self._partition is None:
                module = getattr(self._wrapper, "_cached_module", None)
                self._partition = Partition.of(module, plan, given.kv_indptr, lengths)
        else:
            longest = int(given.qo_indptr.diff().max())  # sought in the same way
            same |= {"causal": given.causal, "max_token_per_sequence": longest}
            if self._form == "ragged":
                self._wrapper.plan(given.qo_indptr, given.kv_indptr, *shape, **same)
            else:  # fa2 reads no lengths, of which the library seeks the largest one after another
                pages, none = (given.kv_indptr, given.kv_indices, last_page), last_page[:1]
                self._wrapper.plan(given.qo_indptr, *pages, *shape, page_size=PAGE, seq_lens=none, **same)
        self._staged.record()

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """As `plan` for other lengths of as many sequences, where the buffers hold all that is attended to already and
        the copy of the last plan has ended."""
        if self._partition is None:
            raise RuntimeError("this wrapper cannot plan a part alone")
        self._partition(kv_indptr)


class CascadeRun:
    """Both levels of a step whose sequences have contexts in common, and the merge of the two."""

    def __init__(self, body: FlashInferAttention, kind: Kind, qo_indptr: torch.Tensor, step: Cascade) -> None:
        self._body, self._merged = body, step.merged
        contexts = Sequences(step.query_indptr, step.context_indptr, step.context_indices, causal=False)
        own = Sequences(qo_indptr, step.own_indptr, step.own_indices, causal=True)
        self._contexts = body.contexts(kind, contexts)
        self._own = body.own(kind, own)

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        """[T, H, D], and with `return_lse` also f32 [T, H], as a wrapper gives it."""
        _, lse = self._own(q, cache, out=out, return_lse=True)
        contexts = self._contexts(q, cache, out=torch.empty_like(out), return_lse=True)
        self._body.merge((out, lse), contexts, self._merged)
        return (out, lse) if return_lse else out


class FlashInferStep:
    """One eager step: plans a kind when its first layer comes by."""

    def __init__(self, body: FlashInferAttention, batch: Batch) -> None:
        self._body = body
        self._batch = batch
        self._runs: dict[Kind, Any] = {}

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
        kind = Kind(q_THD.shape[1], k_TGD.shape[1], keys.shape[3], window, softcap, scale)
        if kind not in self._runs:
            self._runs[kind] = self._body.planned(kind, self._batch)
        slots = self._batch.write_slots_i32
        return write_and_attend(self._body, self._runs[kind], slots, q_THD, k_TGD, v_TGE, keys, values, sinks)


def sequences_of(batch: Batch) -> Sequences:
    return Sequences(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, causal=True)


def write_and_attend(
    body: FlashInferAttention,
    run: Any,
    slots: torch.Tensor,
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[T, H, E]. `run` is a planned wrapper's, `slots` i32 [T]."""
    dim = keys.shape[3]
    q, k, v = (_padded(one.to(keys.dtype), dim) for one in (q_THD, k_TGD, v_TGE))
    body.append(k, v, keys, values, slots)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if sinks is None:
        run(q, (keys, values), out=out)
    else:
        _, lse = run(q, (keys, values), out=out, return_lse=True)
        out = out * _share_of_tokens(lse, sinks).to(out.dtype)
    return out if v_TGE.shape[2] == dim else out[..., : v_TGE.shape[2]].contiguous()


def _share_of_tokens(lse_TH: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[T, H, 1]: what is left for the tokens when a sink takes its weight. The log-sum-exp is in base 2."""
    return torch.sigmoid(lse_TH * math.log(2) - sinks.float()).unsqueeze(-1)


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if tensor.shape[2] != dim:
        return F.pad(tensor, (0, dim - tensor.shape[2]))
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


class Constants(NamedTuple):
    """Arrays that every step names. Replaced by longer ones, never changed: a captured graph keeps those it saw."""

    rows: torch.Tensor  # i32 [n + 1]: 0, 1, 2, ...
    zeros: torch.Tensor  # i32 [n]
    ones: torch.Tensor  # i32 [n]
    host_ones: torch.Tensor  # i32 [n], pinned

    @classmethod
    def of(cls, count: int, device: torch.device) -> "Constants":
        return cls(
            rows=torch.arange(count + 1, dtype=torch.int32, device=device),
            zeros=torch.zeros(count, dtype=torch.int32, device=device),
            ones=torch.ones(count, dtype=torch.int32, device=device),
            host_ones=torch.ones(count, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )
