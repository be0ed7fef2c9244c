"""Computes attention by FlashInfer's paged kernels, on CUDA.

One plan serves all layers of equal parameters in a step; a step whose sequences have contexts in common has two
(`engine.batch.shared_prefix`). On Hopper those contexts are gathered, so that FlashInfer's fa3 fetches them in whole
tiles.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engine.attention import skinny_decode
from engine.attention.flashinfer_wrappers import LAYOUT, ConstantArrays, Form, PlannedWrapper, Wrappers
from engine.attention.interface import NO_WINDOW, AttentionCall, AttentionStep
from engine.attention.plans import AttentionParams, GraphBuffers, GraphDecoder, Sequences
from engine.attention.skinny_decode import SkinnyDecoder
from engine.batch.input_batch import Cascade, InputBatch

if TYPE_CHECKING:  # Triton is no part of a CPU's installation
    from engine.kernels.qk_norm_rope import Rotation

HEAD_DIMS = (64, 128, 256)  # what fa2 is built for; others are padded with zeros, exact because the scale is explicit
HOPPER = 9  # major compute capability
MANY_TOKENS = 64  # of a step, which are rotated eight together
CASCADE_RATIO, HOPPER_CASCADE_RATIO = 32.0, 8.0  # context tokens a new token from which two levels beat one
Append = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Attended = tuple[torch.Tensor, torch.Tensor]  # [T, H, D], and f32 [T, H] log-sum-exps in base 2


class PagedStep(ABC):
    """Implements `AttentionStep`, eager or captured: writes a layer's keys and values to the KV storage, then attends
    by what was planned for layers of its parameters."""

    def __init__(self, append: Append, slots: torch.Tensor, rotated_together: int = 1) -> None:
        """
        Args:
            append: Called with (k, v, keys, values, slots), writes k and v to these slots.
            slots: i32 [T] on the device.
            rotated_together: The step's; see `CapturableBackend`.
        """
        self._append, self._slots, self._rotated_together = append, slots, rotated_together

    @abstractmethod
    def planned_run(self, params: AttentionParams) -> Any:
        """Returns the planned `run` for layers of these parameters; it is called as a FlashInfer wrapper's."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns [T, H, E]; see `AttentionStep`."""
        params, width = AttentionParams.of(call), call.v_TGE.shape[2]
        q, k, v = (_padded(one.to(call.keys.dtype), params.dim) for one in call[:3])
        self._append(k, v, call.keys, call.values, self._slots)
        out = self._attend_stored(q, params, call)
        return out if width == params.dim else out[..., :width].contiguous()

    def attend_qk_norm_rope(self, call: AttentionCall, rotation: "Rotation") -> torch.Tensor:
        """Attends with queries and keys before their norm and rotary embedding, by one kernel for these and the write.

        Returns:
            [T, H, D].
        """
        from engine.kernels.qk_norm_rope import qk_norm_rope

        q = qk_norm_rope(*call[:3], rotation, call.keys, call.values, self._slots, self._rotated_together)
        return self._attend_stored(q, AttentionParams.of(call), call)

    def _attend_stored(self, q: torch.Tensor, params: AttentionParams, call: AttentionCall) -> torch.Tensor:
        """Attends with q [T, H, D] over the KV storage, which holds the step's keys and values."""
        run = self.planned_run(params)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if call.sinks is None:
            run(q, (call.keys, call.values), out=out)
        else:
            _, lse = run(q, (call.keys, call.values), out=out, return_lse=True)
            out = out * _share_of_tokens(lse, call.sinks).to(out.dtype)
        return out


def _share_of_tokens(lse_TH: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Returns [T, H, 1], the weight left for the tokens beside a sink's. The log-sum-exp is in base 2."""
    return torch.sigmoid(lse_TH * math.log(2) - sinks.float()).unsqueeze(-1)


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if tensor.shape[2] != dim:
        return F.pad(tensor, (0, dim - tensor.shape[2]))
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


class FlashInferAttention:
    """Implements `CapturableBackend` on one device. One thread alone may use it: wrappers keep the last step's plan."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        import flashinfer

        self._lib: Any = flashinfer
        self.device, self.dtype = device, dtype
        self.constants = ConstantArrays(device)
        self.wrappers = Wrappers(flashinfer, device, dtype, self.constants)
        self._planned_by: dict[tuple[AttentionParams, str], PlannedWrapper] = {}
        self._workspaces: dict[AttentionParams, Any] = {}  # of the skinny decode kernel
        self._gathers = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
        self.min_cascade_context: int | None = None
        self.cascade_ratio: float | None = HOPPER_CASCADE_RATIO if self._gathers else CASCADE_RATIO

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Returns one dim for both: the kernels need keys and values of the same strides."""
        wanted = max(key_dim, value_dim)
        for dim in HEAD_DIMS:
            if wanted <= dim:
                return dim, dim
        raise ValueError(f"its heads have {wanted} dims; the attention kernels of this device take {HEAD_DIMS[-1]}")

    def plan(self, batch: InputBatch) -> AttentionStep:
        return FlashInferStep(self, batch)

    def rotated_together(self, tokens: int) -> int:
        """Returns one for few tokens, whose programs fill no device together."""
        return 1 if tokens < MANY_TOKENS else 8

    def planned(self, params: AttentionParams, batch: InputBatch) -> Any:
        """Plans `batch` for layers of these parameters, and returns their `run`."""
        if batch.cascade is not None and params.window == NO_WINDOW:
            return CascadeRun(self, params, batch.qo_indptr, batch.cascade).run
        form: Form = "decode" if batch.single else "prefill"
        return self._planned(params, form, form, sequences_of(batch))

    def own(self, params: AttentionParams, sequences: Sequences) -> Any:
        """Plans level 2 of a cascade, what is each sequence's own, and returns its `run`."""
        return self._planned(params, "own", "prefill", sequences)

    def contexts(self, params: AttentionParams, sequences: Sequences) -> Any:
        """Plans level 1 of a cascade, the shared contexts, and returns its `run`."""
        if not self._gathers:
            return self._planned(params, "contexts", "prefill", sequences)
        attend, slots = self._planned(params, "contexts", "ragged", sequences), sequences.kv_indices

        def run(q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], **more: Any) -> Any:
            return attend(q, *(one[:, 0].index_select(0, slots) for one in cache), **more)

        return run

    def _planned(self, params: AttentionParams, part: str, form: Form, sequences: Sequences) -> Any:
        """Plans one part of a step. Each part has a wrapper of its own, which keeps its plan."""
        key = (params, part)
        if key not in self._planned_by:
            decodes = form == "decode"
            self._planned_by[key] = self.wrappers.decoder(params) if decodes else self.wrappers.prefiller(form)
        wrapper = self._planned_by[key]
        wrapper.plan(params, sequences)
        return wrapper.run

    def merge(self, into: Attended, more: Attended, rows_T: torch.Tensor) -> None:
        """Merges two disjoint parts of what the tokens marked in `rows_T` attend to, in place of the first part."""
        self._lib.merge_state_in_place(*into, *more, rows_T)

    def append(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes k and v [T, G, D] to `slots`, i32 [T], in one launch: each token is a sequence of one page."""
        count = k.shape[0]
        fixed = self.constants.at_least(count)
        rows, zeros, ones = fixed.rows[:count], fixed.zeros[:count], fixed.ones[:count]
        self._lib.append_paged_kv_cache(k, v, rows, zeros, (keys, values), slots, fixed.rows[: count + 1], ones, LAYOUT)

    def graph_sequences(self, params: AttentionParams, tokens: int) -> int:
        """Returns how many sequences a captured step may have; see `CapturableBackend`."""
        return self.wrappers.max_sequences(params, tokens)

    def graph_prefiller(
        self, params: AttentionParams, buffers: GraphBuffers, queries: torch.Tensor, tokens: int
    ) -> GraphDecoder:
        """Makes what attends in a captured step of sequences of any number of tokens; see `CapturableBackend`."""
        return self.wrappers.graph_prefiller(buffers, queries)

    def named_by_graph(self, tokens: int) -> object:
        """Returns the constant arrays of `append`."""
        return self.constants.at_least(tokens)

    def graph_decoder(self, params: AttentionParams, buffers: GraphBuffers, rows: int, longest: int) -> GraphDecoder:
        """Makes what attends in a captured step of single tokens; see `CapturableBackend`."""
        if rows <= skinny_decode.MAX_ROWS and longest <= skinny_decode.MAX_CONTEXT and self._has_skinny_kernel(params):
            indptr = buffers.indptr[: rows + 1]
            return SkinnyDecoder(params, indptr, buffers.indices, self._workspaces[params])
        return self.wrappers.graph_decoder(params, buffers, rows)

    def graph_bounds(self, layers: Iterable[AttentionParams], rows: int, longest: int) -> tuple[int, ...]:
        """Returns the bounds of captured steps; see `CapturableBackend`."""
        bound = skinny_decode.MAX_CONTEXT
        if rows <= skinny_decode.MAX_ROWS and longest > bound and any(map(self._has_skinny_kernel, layers)):
            return bound, longest
        return (longest,)

    def _has_skinny_kernel(self, params: AttentionParams) -> bool:
        """Returns whether the skinny decode kernel attends in such layers; their workspace exists from then on."""
        if self.device.type != "cuda":
            return False
        from engine.kernels.skinny_decode_attention import SplitKVWorkspace, fits

        heads = params.heads, params.kv_heads, params.dim
        if fits(*heads, self.dtype) and params not in self._workspaces:
            self._workspaces[params] = SplitKVWorkspace.of(skinny_decode.MAX_ROWS, *heads, self.device)
        return params in self._workspaces


class CascadeRun:
    """Attends in a step whose sequences have contexts in common: in two levels, which it merges."""

    def __init__(
        self, backend: FlashInferAttention, params: AttentionParams, qo_indptr: torch.Tensor, step: Cascade
    ) -> None:
        self._backend, self._merged = backend, step.merged
        contexts = Sequences(step.query_indptr, step.context_indptr, step.context_indices, causal=False)
        own = Sequences(qo_indptr, step.own_indptr, step.own_indices, causal=True)
        self._contexts = backend.contexts(params, contexts)
        self._own = backend.own(params, own)

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        """Returns [T, H, D], and with `return_lse` also f32 [T, H], as a FlashInfer wrapper does."""
        _, lse = self._own(q, cache, out=out, return_lse=True)
        contexts = self._contexts(q, cache, out=torch.empty_like(out), return_lse=True)
        self._backend.merge((out, lse), contexts, self._merged)
        return (out, lse) if return_lse else out


class FlashInferStep(PagedStep):
    """Attends in one eager step. It plans for layers of equal parameters when the first of them attends."""

    def __init__(self, backend: FlashInferAttention, batch: InputBatch) -> None:
        super().__init__(backend.append, batch.write_slots_i32, backend.rotated_together(batch.num_tokens))
        self._backend = backend
        self._batch = batch
        self._runs: dict[AttentionParams, Any] = {}

    def planned_run(self, params: AttentionParams) -> Any:
        if params not in self._runs:
            self._runs[params] = self._backend.planned(params, self._batch)
        return self._runs[params]


def sequences_of(batch: InputBatch) -> Sequences:
    return Sequences(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, causal=True)
