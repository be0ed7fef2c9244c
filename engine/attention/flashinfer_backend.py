"""FlashInferAttention: the paged kernels of FlashInfer behind the attention op. CUDA only.

One plan per distinct kind of layer serves all its layers in a step, and two where its sequences have contexts in common
(`engine.batch.shared_prefix`). On Hopper those contexts are gathered, so that backend fa3 fetches them in whole tiles.

PagedStep: what the attention of every step over a paged pool does, eager or captured.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engine.attention import skinny_decode
from engine.attention.flashinfer_wrappers import LAYOUT, ConstantArrays, Form, PlannedWrapper, Wrappers
from engine.attention.interface import NO_WINDOW, AttentionStep
from engine.attention.plans import GraphBuffers, GraphDecoder, Kind, Sequences
from engine.attention.skinny_decode import NarrowDecoder
from engine.batch.input_batch import Batch
from engine.batch.shared_prefix import Cascade

if TYPE_CHECKING:  # Triton is no part of a CPU's installation
    from engine.kernels.qk_norm_rope import Rotation

Append = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class PagedStep(ABC):
    """An `AttentionStep` that writes a layer's keys and values into the pool, and attends by what was planned for such
    a layer."""

    def __init__(self, append: Append, slots: torch.Tensor) -> None:
        """`append(k, v, keys, values, slots)` writes; `slots` i32 [T] on the device."""
        self._append, self._slots = append, slots

    @abstractmethod
    def run_of(self, kind: Kind) -> Any:
        """What attends in a layer of `kind`, as a FlashInfer wrapper's `run`: it has its plan."""

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
        """[T, H, E]."""
        kind = Kind(q_THD.shape[1], k_TGD.shape[1], keys.shape[3], window, softcap, scale)
        q, k, v = (_padded(one.to(keys.dtype), kind.dim) for one in (q_THD, k_TGD, v_TGE))
        self._append(k, v, keys, values, self._slots)
        out = self._mixed(q, kind, keys, values, sinks)
        return out if v_TGE.shape[2] == kind.dim else out[..., : v_TGE.shape[2]].contiguous()

    def attend_rotating(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        rotation: "Rotation",
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `attend`, of queries and keys before their norm and rotation, which `narrow_rotation` takes."""
        from engine.kernels.qk_norm_rope import narrow_rotation

        kind = Kind(q_THD.shape[1], k_TGD.shape[1], keys.shape[3], window, softcap, scale)
        q = narrow_rotation(q_THD, k_TGD, v_TGE, rotation, keys, values, self._slots)
        return self._mixed(q, kind, keys, values, sinks)

    def _mixed(
        self, q: torch.Tensor, kind: Kind, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, H, D] of the pool, which has the step's keys and values by now."""
        run = self.run_of(kind)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if sinks is None:
            run(q, (keys, values), out=out)
        else:
            _, lse = run(q, (keys, values), out=out, return_lse=True)
            out = out * _share_of_tokens(lse, sinks).to(out.dtype)
        return out


def _share_of_tokens(lse_TH: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[T, H, 1]: what is left for the tokens when a sink takes its weight. The log-sum-exp is in base 2."""
    return torch.sigmoid(lse_TH * math.log(2) - sinks.float()).unsqueeze(-1)


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if tensor.shape[2] != dim:
        return F.pad(tensor, (0, dim - tensor.shape[2]))
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


HEAD_DIMS = (64, 128, 256)  # what fa2 is built for; others are padded with zeros, exact because the scale is explicit
HOPPER = 9  # major compute capability
CASCADES, HOPPER_CASCADES = 32.0, 8.0  # context tokens a new token from which two passes take less time than one
Attended = tuple[torch.Tensor, torch.Tensor]  # [T, H, D], and f32 [T, H] log-sum-exps in base 2


class FlashInferAttention:
    """Plans steps on one device. Not for two threads: wrappers keep the plan of the last step."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        import flashinfer

        self._lib: Any = flashinfer
        self.device, self.dtype = device, dtype
        self.constants = ConstantArrays(device)
        self.wrappers = Wrappers(flashinfer, device, dtype, self.constants)
        self._planned_by: dict[tuple[Kind, str], PlannedWrapper] = {}
        self._rooms: dict[Kind, Any] = {}  # of captured steps of few rows
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

    def own(self, kind: Kind, sequences: Sequences) -> Any:
        """As `planned`: what is each sequence's own, of a step in two levels."""
        return self._planned(kind, "own", "prefill", sequences)

    def contexts(self, kind: Kind, sequences: Sequences) -> Any:
        """As `planned`: the contexts of a step in two levels."""
        if not self._gathers:
            return self._planned(kind, "contexts", "prefill", sequences)
        attend, slots = self._planned(kind, "contexts", "ragged", sequences), sequences.kv_indices

        def run(q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], **more: Any) -> Any:
            return attend(q, *(one[:, 0].index_select(0, slots) for one in cache), **more)

        return run

    def _planned(self, kind: Kind, part: str, form: Form, sequences: Sequences) -> Any:
        """What runs a layer. Each part of a step has a wrapper of its own, since it keeps its plan."""
        key = (kind, part)
        if key not in self._planned_by:
            made = self.wrappers.decoder(kind) if form == "decode" else self.wrappers.prefiller(form)
            self._planned_by[key] = made
        wrapper = self._planned_by[key]
        wrapper.plan(kind, sequences)
        return wrapper.run

    def merge(self, into: Attended, more: Attended, rows_T: torch.Tensor) -> None:
        """Two disjoint parts of what the rows so marked attend to, into the first."""
        self._lib.merge_state_in_place(*into, *more, rows_T)

    def append(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes both in one launch, by calling each token a sequence of one page."""
        count = k.shape[0]
        fixed = self.constants.at_least(count)
        rows, zeros, ones = fixed.rows[:count], fixed.zeros[:count], fixed.ones[:count]
        self._lib.append_paged_kv_cache(k, v, rows, zeros, (keys, values), slots, fixed.rows[: count + 1], ones, LAYOUT)

    def graph_decoder(self, kind: Kind, buffers: GraphBuffers, rows: int, longest: int) -> GraphDecoder:
        """Of a captured step of single tokens, whose plan lives in `buffers`. Once it has planned, it can `replan`. No
        row attends to more than `longest` tokens."""
        if rows <= skinny_decode.MOST_ROWS and longest <= skinny_decode.LONGEST and self._takes_few(kind):
            indptr = buffers.indptr[: rows + 1]
            return NarrowDecoder(kind, indptr, buffers.indices, self._rooms[kind])
        return self.wrappers.graph_decoder(kind, buffers, rows)

    def _takes_few(self, kind: Kind) -> bool:
        """Whether our own kernel attends in layers of this kind; it has room from then on."""
        if self.device.type != "cuda":
            return False
        from engine.kernels.skinny_decode_attention import Room, fits

        if fits(kind.heads, kind.kv_heads, kind.dim, self.dtype) and kind not in self._rooms:
            self._rooms[kind] = Room.of(skinny_decode.MOST_ROWS, kind.heads, kind.kv_heads, kind.dim, self.device)
        return kind in self._rooms


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


class FlashInferStep(PagedStep):
    """One eager step: plans a kind when its first layer comes by."""

    def __init__(self, body: FlashInferAttention, batch: Batch) -> None:
        super().__init__(body.append, batch.write_slots_i32)
        self._body = body
        self._batch = batch
        self._runs: dict[Kind, Any] = {}

    def run_of(self, kind: Kind) -> Any:
        if kind not in self._runs:
            self._runs[kind] = self._body.planned(kind, self._batch)
        return self._runs[kind]


def sequences_of(batch: Batch) -> Sequences:
    return Sequences(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, causal=True)
