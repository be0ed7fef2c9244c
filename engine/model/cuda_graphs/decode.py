"""What makes steps cheap on CUDA: compiled decoder layers, and captured graphs for decode steps and small verify steps.

Graphs exist for a few row counts (buckets); a step is padded to the next one with sequences of one token over the
padding slot. The tokens of a verify step are rows of their own: each attends to those before it, which the same step
writes first. So contexts are read once a token, which is cheaper than launching every kernel while they are short.
All graphs share one memory pool, one set of inputs and one logits buffer, since steps follow each other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine.attention.flashinfer_backend import FlashInferAttention, PagedStep
from engine.attention.interface import forward_context
from engine.attention.plans import AttentionParams, GraphBuffers, GraphDecoder, Sequences
from engine.batch.input_batch import InputBatch, ScheduledSequence, StepKind, idle_sequences, pack
from engine.kv_cache.storage import LayerShape
from engine.model.compatibility import LayerCall
from engine.model.optimize.fusion_passes import FusionBackend
from engine.model.optimize.skinny_linear import skinny_step

SMALL_BUCKETS = (2, 4, 8, 16)
BUCKET_STEP = 32
MAX_ATTENDED = 1 << 25  # tokens of one captured step, all rows together: 128 MiB of indices; beyond it runs eager
MAX_VERIFY_ATTENDED = 1 << 17  # tokens that a verify step's single tokens attend to together: about what launches cost
MAX_VARIANTS = 64  # of the compiled code of a layer: kinds of layers, each of two models, for few rows and for many
_cuda: Any = torch.cuda  # its streams carry no types
WARM_RUNS = 2  # before capture, so that nothing is built or tuned inside it


def buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts of the graphs, ascending, the largest being `most_rows` (at least 2)."""
    rows = {size for size in SMALL_BUCKETS if size <= max_rows}
    return tuple(sorted(rows | set(range(BUCKET_STEP, max_rows + 1, BUCKET_STEP)) | {max_rows}))


def compile_layers(module: nn.Module, attentions: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Compiles each decoder layer in place. Layers are alike, so the compiler's work does not grow with depth."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    config.specialize_float = True  # an epsilon is a number of the code, by which a norm is known
    for layer in decoder_layers(module, attentions):
        layer.compile(fullgraph=True, dynamic=True, backend=FusionBackend(backend))


def decoder_layers(module: nn.Module, attentions: Sequence[nn.Module]) -> list[nn.Module]:
    """The list of modules whose n-th holds the n-th attention. Raises ValueError where there is none."""
    for found in module.modules():
        if isinstance(found, nn.ModuleList) and len(found) == len(attentions):
            holds = (attention in set(layer.modules()) for layer, attention in zip(found, attentions, strict=True))
            if all(holds):
                return list(found)
    raise ValueError("The model keeps its decoder layers in no module list; set `engine.compile` to false.")


class CapturedStep(PagedStep):
    """A forward pass of `rows` tokens inside a graph, alone or with others. It has a wrapper for each kind of layer,
    planned into buffers before every replay; steps of one graph have buffers of their own."""

    def __init__(
        self, module: Any, backend: FlashInferAttention, wrappers: Mapping[AttentionParams, GraphDecoder], rows: int
    ) -> None:
        super().__init__(backend.append, torch.empty(0, dtype=torch.int32))
        self._module, self._wrappers, self._rows = module, wrappers, rows
        self._queries = torch.arange(rows + 1, dtype=torch.int32)
        self._kept = backend.constants.at_least(rows)  # the graph names these arrays

    def plan(self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
        """What each row attends to, of single tokens: i32 [rows + 1] on the host, and pool slots i32 on the device."""
        self.plan_sequences(Sequences(self._queries, kv_indptr, kv_indices, causal=True))

    def plan_sequences(self, sequences: Sequences) -> None:
        """The same of as many sequences as the wrappers were made for, `rows` tokens together."""
        for kind, wrapper in self._wrappers.items():
            wrapper.plan(kind, sequences)

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """As `plan`, once it was called, of what the caller has brought to the buffers: it sees to it, too, that the
        copies of the plan before have ended."""
        for wrapper in self._wrappers.values():
            wrapper.replan(kv_indptr)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[rows, V]. Tokens and positions i64 [rows], pool slots i32 [rows], in memory that a replay finds again."""
        self._slots = slots
        with forward_context(self), skinny_step(self._rows):
            out = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        rows: torch.Tensor = out.logits[0]
        return rows

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[rows, hidden]: the same without the head."""
        self._slots = slots
        with forward_context(self):
            out = self._module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        rows: torch.Tensor = out.last_hidden_state[0]
        return rows

    def planned_run(self, kind: AttentionParams) -> Any:
        return self._wrappers[kind].run


class DecodeGraphs:
    """Captured decode steps of 2 to `most_rows` rows that attend to `attended` tokens at most."""

    def __init__(
        self,
        module: Any,
        backend: FlashInferAttention,
        calls: Sequence[LayerCall],
        shapes: Sequence[LayerShape],
        *,
        max_rows: int,
        attended: int,
        longest: int = MAX_ATTENDED,
    ) -> None:
        """No row attends to more than `longest` tokens."""
        self.module, self.backend = module, backend
        self.kinds = sorted({_kind(call, shape) for call, shape in zip(calls, shapes, strict=True)})
        self.memory: Any = _cuda.graph_pool_handle()  # for all graphs that are replayed one after another
        self._buckets, self._longest = buckets(max_rows), longest
        self.max_rows, self.device = max_rows, backend.device
        self._front = torch.zeros(3 * max_rows, dtype=torch.int64, device=self.device)
        self._slots = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self._buffers = GraphBuffers.of(max_rows, attended, self.device)
        self._logits = torch.empty(0)
        self._steps: dict[int, CapturedStep] = {}
        self._graphs: dict[int, Any] = {}
        for rows in reversed(self._buckets):
            self._graphs[rows] = self._capture(rows)

    def bucket(self, rows: int) -> int:
        """The row count to pad a step of `rows` to; `rows` itself where no graph is that large."""
        return next((size for size in self._buckets if size >= rows), rows)

    def fits(self, batch: InputBatch) -> bool:
        attended = batch.kv_indices.shape[0]
        return batch.single and batch.num_tokens in self._graphs and attended <= len(self._buffers.indices)

    def take(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether runs of several tokens are worth a replay as single ones."""
        sizes = [(len(run.context), len(run.write)) for run in sequences]
        attended = sum(new * before + new * (new + 1) // 2 for before, new in sizes)
        return sum(new for _, new in sizes) <= self._buckets[-1] and attended <= MAX_VERIFY_ATTENDED

    def replay(self, batch: InputBatch) -> torch.Tensor:
        """Logits of the kept rows. The buffer is overwritten by the next replay."""
        size = batch.num_tokens
        self._prepare(size, batch)
        self._graphs[size].replay()
        return self._logits[: batch.num_rows] if batch.whole else self._logits[batch.keep_rows]

    def step(self, rows: int, buffers: GraphBuffers) -> CapturedStep:
        """For a graph of the caller's own, of the same model."""
        wrappers = {kind: self.backend.graph_decoder(kind, buffers, rows, self._longest) for kind in self.kinds}
        return CapturedStep(self.module, self.backend, wrappers, rows)

    def _prepare(self, size: int, batch: InputBatch) -> None:
        self._front[: 3 * size].copy_(batch.front)
        self._slots[:size].copy_(batch.write_slots_i32)
        self._steps[size].plan(batch.kv_indptr, batch.kv_indices)

    def _capture(self, size: int) -> Any:
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        batch = pack(StepKind.DECODE, idle_sequences(size, 1), table, self.device)
        step = self._steps[size] = self.step(size, self._buffers)
        self._prepare(size, batch)
        if not self._graphs:  # the largest comes first
            self._logits = torch.empty_like(self._all_rows(step, size))
        return self._record(step, size)

    def _record(self, step: CapturedStep, size: int) -> Any:
        """What replays `_fill`."""
        return recorded(lambda: self._fill(step, size), self.device, self.memory)

    def _fill(self, step: CapturedStep, size: int) -> None:
        self._logits[:size].copy_(self._all_rows(step, size))

    def _all_rows(self, step: CapturedStep, size: int) -> torch.Tensor:
        return step.logits(self._front[:size], self._front[size : 2 * size], self._slots[:size])


def recorded(launch: Callable[[], None], device: torch.device, pool: Any) -> Any:
    """A graph of what `launch` launches. Run a few times before, on a stream of its own as capture wants it."""
    stream: Any = _cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_RUNS):
            launch()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launch()
    return graph


def _kind(call: LayerCall, shape: LayerShape) -> AttentionParams:
    return AttentionParams(call.heads, call.kv_heads, shape.key_dim, call.window, call.softcap, call.scale)
