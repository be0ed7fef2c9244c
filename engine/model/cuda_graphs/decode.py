"""Captures decode steps, and small verify steps, as CUDA graphs.

Gain: a step that is launched kernel by kernel, some 560 operations, takes the host 15 ms or more whatever it holds; a
replay is one launch. Switch: `engine.graphs`, up to `engine.max_graph_batch_size` rows.

Graphs exist for a few row counts (buckets), some from the start and the others soon after (`cuda_graphs.sizes`); a step
is padded to the next one with sequences of one token over the padding slot. The tokens of a verify step are rows of
their own: each attends to those before it, which the same step writes first. Contexts are then read once a token, which
costs less than launching every kernel while they are short. Where other kernels attend to short contexts, a row count
has a graph for steps of such rows, and one for all others.
All graphs share one memory pool, one set of inputs and one logits buffer, since steps run one after another.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch

from engine.attention.flashinfer_backend import PagedStep
from engine.attention.interface import forward_context
from engine.attention.plans import AttentionParams, CapturableBackend, GraphBuffers, GraphDecoder, Sequences
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import InputBatch, StepKind, StepSequences, idle_sequences, pack
from engine.kv_cache.storage import LayerShape
from engine.model.compatibility import LayerCall, ProbedModel
from engine.model.cuda_graphs.sizes import GraphSizes
from engine.model.lm_head import HeadSpec
from engine.model.optimize.skinny_linear import MAX_ROWS, skinny_step

SMALL_BUCKETS = (2, 4, 8, 16)
BUCKET_STEP = 32
MAX_ATTENDED = 1 << 25  # tokens that all rows of a captured step attend to: 128 MiB of indices; others run eager
MAX_VERIFY_ATTENDED = 1 << 17  # tokens that all rows of a verify step attend to: about what launches cost
GraphKey = tuple[int, int]  # rows, and the longest context of one
_cuda: Any = torch.cuda  # its streams carry no types


def buckets(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts of the graphs, ascending, the largest being `max_rows` (at least 2)."""
    rows = {size for size in SMALL_BUCKETS if size <= max_rows}
    return tuple(sorted(rows | set(range(BUCKET_STEP, max_rows + 1, BUCKET_STEP)) | {max_rows}))


class CapturedStep(PagedStep):
    """Runs a forward pass of `rows` tokens inside a graph. It has one decoder for layers of equal parameters, planned
    into buffers before every replay; each step of a graph has buffers of its own."""

    def __init__(
        self,
        module: Any,
        backend: CapturableBackend,
        wrappers: Mapping[AttentionParams, GraphDecoder],
        rows: int,
        *,
        skinny: bool = True,
    ) -> None:
        super().__init__(backend.append, torch.empty(0, dtype=torch.int32), backend.rotated_together(rows))
        self._module, self._wrappers, self._rows, self._skinny = module, wrappers, rows, skinny
        self._queries = torch.arange(rows + 1, dtype=torch.int32)
        self._named = backend.named_by_graph(rows)

    def plan(self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
        """Plans what each row attends to: i32 [rows + 1] on the host, and storage slots i32 on the device."""
        self.plan_sequences(Sequences(self._queries, kv_indptr, kv_indices, causal=True))

    def plan_sequences(self, sequences: Sequences) -> None:
        """Plans for as many sequences as the wrappers were made for, `rows` tokens together."""
        for params, wrapper in self._wrappers.items():
            wrapper.plan(params, sequences)

    @property
    def can_replan(self) -> bool:
        """Whether `replan` may be called; known after the first `plan`."""
        return all(wrapper.can_replan for wrapper in self._wrappers.values())

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Plans for other lengths, after `plan`; the caller has filled the buffers (see `GraphDecoder`)."""
        for wrapper in self._wrappers.values():
            wrapper.replan(kv_indptr)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, V]. Tokens and positions are i64 [rows], storage slots i32 [rows], in memory that a
        replay reads again."""
        self._slots = slots
        with forward_context(self), skinny_step(self._rows) if self._skinny else nullcontext():
            out = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        rows: torch.Tensor = out.logits[0]
        return rows

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rows [rows, hidden] that the head reads; arguments as in `logits`."""
        self._slots = slots
        with forward_context(self):
            out = self._module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        rows: torch.Tensor = out.last_hidden_state[0]
        return rows

    def planned_run(self, params: AttentionParams) -> Any:
        return self._wrappers[params].run


class DecodeGraphs:
    """Captures and replays decode steps of 2 to `max_rows` rows."""

    def __init__(
        self,
        model: ProbedModel,
        *,
        max_rows: int,
        attended: int,
        longest: int = MAX_ATTENDED,
        skinny: bool = True,
        head: HeadSpec | None = None,
    ) -> None:
        """
        Args:
            model: Its backend computes attention, here and in eager steps.
            max_rows: At least 2.
            attended: Tokens that all rows of a step may attend to.
            longest: Tokens that one row may attend to.
            skinny: Whether steps of few rows are skinny ones, whose compiled layers round in another way than others'.
            head: Writes the logits of other steps where they are read; None: those of all steps are copied there.
        """
        if isinstance(model.backend, TorchAttention):
            raise TypeError(f"Only the paged kernels can be captured. Given: {type(model.backend).__name__}.")
        self.module, self.backend = model.module, cast(CapturableBackend, model.backend)
        self.layer_params, self.memory = layer_params(model), graph_memory()
        self._buckets, self._longest, self._skinny, self._head = buckets(max_rows), longest, skinny, head
        self.max_rows, self.device = max_rows, self.backend.device
        self._front = torch.zeros(3 * max_rows, dtype=torch.int64, device=self.device)
        self._slots = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self._buffers = GraphBuffers.of(max_rows, attended, self.device)
        self._logits = torch.empty(0)
        self._planned: Any = _cuda.Event()  # after it the host may plan again
        self._steps: dict[GraphKey, CapturedStep] = {}
        self._graphs: dict[GraphKey, Any] = {}
        self._bounds = {rows: self.backend.graph_bounds(self.layer_params, rows, longest) for rows in self._buckets}
        self._sizes = GraphSizes(self._buckets, self._capture_rows)

    def bucket(self, rows: int) -> int:
        """Returns the row count to pad a step of `rows` to; `rows` itself where no graph is that large."""
        return self._sizes.fitting(rows) or rows

    def capture_next(self) -> bool:
        """Captures another row count; returns False where all are captured. Raises what capturing raises."""
        return self._sizes.capture_next()

    def fits(self, batch: InputBatch) -> bool:
        """Returns whether a graph runs this padded step."""
        attended = batch.kv_indices.shape[0]
        return batch.single and batch.num_tokens in self._sizes and attended <= len(self._buffers.indices)

    def worth_replay(self, sequences: StepSequences) -> bool:
        """Returns whether a verify step is worth a replay, its tokens being rows of their own."""
        sizes = [(len(run.context), len(run.write)) for run in sequences]
        attended = sum(new * before + new * (new + 1) // 2 for before, new in sizes)
        return sum(new for _, new in sizes) <= self._buckets[-1] and attended <= MAX_VERIFY_ATTENDED

    def replay(self, batch: InputBatch) -> torch.Tensor:
        """Returns the logits [R, V] of the wanted rows, in a buffer that the next replay overwrites."""
        key = batch.num_tokens, self._bound(batch)
        self._prepare(key, batch)
        self._graphs[key].replay()
        return self._logits[: batch.num_rows] if batch.whole else self._logits[batch.keep_rows]

    def step(self, rows: int, buffers: GraphBuffers) -> CapturedStep:
        """Makes a step for a graph of the caller's own, of the same model and of rows of any length."""
        return self._step(rows, self._longest, buffers)

    def _step(self, rows: int, bound: int, buffers: GraphBuffers) -> CapturedStep:
        wrappers = {params: self.backend.graph_decoder(params, buffers, rows, bound) for params in self.layer_params}
        return CapturedStep(self.module, self.backend, wrappers, rows, skinny=self._skinny)

    def _bound(self, batch: InputBatch) -> int:
        """Returns the bound of the graph that runs a padded step: the first that its longest row does not exceed."""
        bounds = self._bounds[batch.num_tokens]
        if len(bounds) == 1:
            return bounds[0]
        longest = int(batch.kv_indptr.diff().max())
        return next(bound for bound in bounds if longest <= bound)

    def _prepare(self, key: GraphKey, batch: InputBatch) -> None:
        """Brings the step's inputs to where the graph reads them, and plans. Only the first plan of a graph is whole:
        later ones differ from it by the lengths of the rows alone."""
        size = key[0]
        self._front[: 3 * size].copy_(batch.front)
        self._slots[:size].copy_(batch.write_slots_i32)
        step = self._steps[key]
        if not step.can_replan:
            step.plan(batch.kv_indptr, batch.kv_indices)
            return
        self._buffers.indptr[: size + 1].copy_(batch.kv_indptr, non_blocking=True)
        self._buffers.indices[: len(batch.kv_indices)].copy_(batch.kv_indices)
        self._planned.synchronize()  # queued before the last step's kernels: a loop one step ahead does not block
        step.replan(batch.kv_indptr)
        self._planned.record()

    def _capture_rows(self, rows: int) -> None:
        for bound in self._bounds[rows]:
            self._graphs[rows, bound] = self._capture(rows, bound)

    def _capture(self, size: int, bound: int) -> Any:
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        batch = pack(StepKind.DECODE, idle_sequences(size, 1), table, self.device)
        step = self._steps[size, bound] = self._step(size, bound, self._buffers)
        self._prepare((size, bound), batch)
        if not self._graphs:  # the largest comes first
            self._logits = torch.empty_like(self._all_rows(step, size))
        return self._record(step, size)

    def _record(self, step: CapturedStep, size: int) -> Any:
        """Returns a graph that replays `_fill`."""
        return recorded(lambda: self._fill(step, size), self.device, self.memory)

    def _fill(self, step: CapturedStep, size: int) -> None:
        if self._head is None or (self._skinny and size <= MAX_ROWS):  # a skinny head is faster, and its copy is small
            self._logits[:size].copy_(self._all_rows(step, size))
        else:
            self._head.write_rows(step.hidden(*self._inputs(size)), self._logits[:size])

    def _all_rows(self, step: CapturedStep, size: int) -> torch.Tensor:
        return step.logits(*self._inputs(size))

    def _inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._front[:size], self._front[size : 2 * size], self._slots[:size]


def recorded(launch: Callable[[], None], device: torch.device, pool: Any) -> Any:
    """Returns a CUDA graph of what `launch` launches.

    It runs `launch` first, so that nothing is built or tuned while the graph is captured. Other threads may use the
    device meanwhile: a service captures while it serves.
    """
    stream: Any = _cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        launch()
    return graph


def graph_memory() -> Any:
    """Returns memory for all graphs that are replayed one after another."""
    return _cuda.graph_pool_handle()


def layer_params(model: ProbedModel) -> list[AttentionParams]:
    """Returns the different parameters that the model's layers call attention with, in a fixed order."""
    return sorted({_params(call, shape) for call, shape in zip(model.calls, model.shapes, strict=True)})


def _params(call: LayerCall, shape: LayerShape) -> AttentionParams:
    return AttentionParams(call.heads, call.kv_heads, shape.key_dim, call.window, call.softcap, call.scale)
