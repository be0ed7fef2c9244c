"""Runs a Hugging Face causal language model over its own KV storage, called with packed steps.

The plain path is `forward`: `pack` makes the step's arrays, the backend plans their attention, `full_rows` calls the
model. Everything that exists for speed is behind a switch of `EngineConfig`: `compile`, `graphs`,
`prefill_graph_tokens`, `fuse_projections`, `restrict_last_layer`, `skinny_gemm`, `fused_norms`,
`onednn_linear`, `trace_base`.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention.interface import (
    ATTENTION,
    NO_SOFTCAP,
    NO_WINDOW,
    AttentionBackend,
    attach,
    attend,
    forward_context,
)
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import (
    MIN_TOKENS,
    InputBatch,
    ScheduledSequence,
    StepKind,
    StepSequences,
    StepSize,
    idle_sequences,
    pack,
    single_tokens,
)
from engine.batch.shared_prefix import MIN_SHARED_CONTEXT, with_cascade
from engine.config import EngineConfig
from engine.kv_cache.storage import KVStorage, bytes_of_token, slots_that_fit
from engine.metrics import Stopwatch
from engine.model.checkpoint import end_of_text_ids, longest_sequence
from engine.model.compatibility import PROBE, ProbedModel, check_config, probe, record_call, record_mask, set_attention
from engine.model.cuda_graphs.decode import MAX_ATTENDED, DecodeGraphs, graph_memory
from engine.model.cuda_graphs.prefill import PrefillGraphs
from engine.model.heads.pooling_head import PoolingHead, PoolingModel
from engine.model.heads.row_pooling import Pooling, pool_rows
from engine.model.invariant.layers import make_invariant, make_pooled_invariant
from engine.model.lm_head import (
    HeadSpec,
    LogprobQuery,
    RowLogprobs,
    block_rows,
    full_rows,
    hidden_rows,
    logprobs_of_blocks,
)
from engine.model.optimize.compile import TRIED_TOKENS, compile_layers, compile_outer_modules, record_outer_modules
from engine.model.optimize.compile_ahead import runner_without_attention, small_copy
from engine.model.optimize.decoder_layers import decoder_layers
from engine.model.optimize.fused_norms import fuse_norms
from engine.model.optimize.fused_projections import fuse_projections
from engine.model.optimize.last_layer import restrict_last_layer
from engine.model.optimize.onednn_linear import OneDnnLinear, linear, use_onednn
from engine.model.optimize.skinny_linear import skinny_step, use_skinny_linears
from engine.model.optimize.traced_base import TracedBase, trace_base
from engine.model.packing_check import PackingCheck, compare_bits, find_head, sequences_of
from engine.model.weights_digest import weights_digest
from engine.requests import Int32s
from gpu_sampler.backend import runs_kernels
from gpu_sampler.logprobs import head_logprob
from gpu_sampler.reference.lm_head_logprob import Rounding
from gpu_sampler.startup_progress import StartupProgress, silent, timed

if TYPE_CHECKING:
    from engine.attention.flashinfer_modules import BackgroundBuild

log = logging.getLogger(__name__)

ROUNDED_TO: dict[torch.dtype, Rounding] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
CHECKED_TOKENS = 600  # of served steps whose bits are compared: more than one part of attention, and library products

AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(PROBE, record_call)
AttentionMaskInterface.register(PROBE, record_mask)


class HFModel:
    """Implements `CausalLM`.

    Making one probes and checks the model, changes its layers for speed where the configuration says so, checks it
    again and allocates its KV storage. `warm_up` compiles and captures.
    """

    def __init__(
        self,
        module: Any,
        engine: EngineConfig,
        *,
        max_model_len: int | None = None,
        folder: Path | None = None,
        backend: AttentionBackend | None = None,
        allocate: bool = True,
        progress: StartupProgress = silent,
    ) -> None:
        """
        Args:
            module: A causal language model of transformers, on its device, or a `PoolingModel`.
            engine: The engine's configuration.
            max_model_len: Tokens of a sequence; None: as many as the model was made for.
            folder: The model's files, for its generation config.
            backend: Computes attention; None: the device's own.
            allocate: Whether the model gets its KV storage now, or later by `allocate_kv_storage`.
            progress: Receives the stages.

        Raises:
            UnsupportedModel: The model would be computed wrong, or not at all.
            KVStorageTooSmall: The memory left holds too few slots.
        """
        self._pooler: PoolingHead | None = None
        if isinstance(module, PoolingModel):
            module, self._pooler = module
        self.pooling_head = None if self._pooler is None else self._pooler.info
        with timed("weights digest", progress):
            parts = (module,) if self._pooler is None else (module, self._pooler)
            described = "" if self.pooling_head is None else str(self.pooling_head)
            self.weights_digest = weights_digest(*parts, described=described)
        self.module: nn.Module = module.eval().requires_grad_(False)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.max_model_len = longest_sequence(module.config, max_model_len)
        self.bos_token_id: int | None = getattr(module.config.get_text_config(decoder=True), "bos_token_id", None)
        invariant = engine.numerics == "invariant"
        if invariant:  # without what rounds by the size of a step
            engine = replace(
                engine,
                skinny_gemm=False,
                fused_norms=False,
                onednn_linear=False,
                trace_base=False,
            )
            self.dtype = torch.float32
        self._engine = engine
        self._decode_graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._traced: TracedBase | None = None
        self.prefill_graph_limit: StepSize | None = None
        self.padded_tokens = self.graph_replays = 0
        self.head_watch: Stopwatch | None = None
        self._scoring = self._warm = False
        if backend is None:
            backend = (
                _invariant_backend(self.device, self.max_model_len)
                if invariant
                else _attention_backend_for(self.device, module.dtype)
            )
        self._backend = backend
        self._check(module, progress)
        self.eos_token_ids = end_of_text_ids(module.config, folder, self.vocab_size)
        module.base_model.register_forward_hook(self._layers_done)
        if allocate:
            allocate_kv_storage([self], engine, progress)
        # Without a known head the model's own gives all rows in one call.
        self.max_targets = block_rows(self.device, self.vocab_size) if self.head is None else None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return bytes_of_token(self.probed.shapes, self.probed.module.dtype)

    def allocate(self, slots: int) -> None:
        """Gives the model a KV storage of `slots` slots."""
        self.kv_storage = KVStorage(self.probed.shapes, slots, self.probed.module.dtype, self.device)
        self.num_slots = slots
        attach(self.probed.attentions, self.kv_storage.keys, self.kv_storage.values)

    def _check(self, module: Any, progress: StartupProgress) -> None:
        """Probes and checks the model, changes its layers as configured, and checks them again."""
        check_config(module.config, self.max_model_len)
        with timed("probe", progress):
            self.probed = probe(module, self._backend, self.max_model_len)
            set_attention(module, ATTENTION)
        build = self._build_attention()
        self.contexts_built = None if build is None else build.ended
        if self._engine.compile and self._engine.numerics == "fast" and build is not None and build.delays_start:
            with timed("compile ahead", progress):
                self._compile_ahead()
        if self.pooling_head is None:
            with timed("head check", progress):
                self.head, self.vocab_size = find_head(self.probed)
        else:
            self.head, self.vocab_size = None, module.config.get_text_config(decoder=True).vocab_size
        with timed("packing check", progress):
            proof = PackingCheck(self.probed, max_model_len=self.max_model_len, seed=self._engine.seed)
            proof.run()
        with timed("fuse projections", progress):
            changed = self._optimize(self.probed)
            if self.head is not None and isinstance(module.get_output_embeddings(), OneDnnLinear):
                self.head = replace(self.head, linear=linear)  # the bits of the model's own rows
        if changed:
            with timed("second packing check", progress):
                proof.run()
        if self._engine.numerics == "invariant":
            with timed("invariance check", progress):
                if self._pooler is None:
                    self.head = make_invariant(module, self.head, self._engine.token_budget)
                else:
                    make_pooled_invariant(module, self._pooler, self._engine.token_budget)
                proof.run()
                proof.compare_bits()
        if self._use_skinny_linears(self.probed):
            with timed("skinny packing check", progress), skinny_step(1):
                proof.run()

    def _build_attention(self) -> "BackgroundBuild | None":
        """Starts to compile what FlashInfer lacks for the layers; None where it has no part in them."""
        if self.device.type != "cuda":
            return None
        from engine.attention.flashinfer_backend import FlashInferAttention

        if not isinstance(self._backend, FlashInferAttention):
            return None
        from engine.attention.flashinfer_modules import BackgroundBuild, ModuleShape

        dtype = str(self._backend.dtype).removeprefix("torch.")
        return BackgroundBuild(
            ModuleShape(dtype, shape.key_dim, call.window != NO_WINDOW, call.softcap != NO_SOFTCAP)
            for call, shape in zip(self.probed.calls, self.probed.shapes, strict=True)
        )

    def _compile_ahead(self) -> None:
        """Compiles a small copy of the model, as the model will be, so that the compiler finds its code later."""
        try:
            self._compile_copy()
        except Exception as error:  # of the compiler, and of models: what the model cannot do is found out later
            log.warning("Not all is compiled ahead: %s: %s", type(error).__name__, error)
        gc.collect()  # the copy has cycles, and the model's modules get the numbers of its own
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _compile_copy(self) -> None:
        copy = small_copy(self.probed)
        run = runner_without_attention(copy)
        self._optimize(copy)
        skinny = self._use_skinny_linears(copy)
        self._compile(copy, run)
        if skinny:
            with skinny_step(1):
                run(idle_sequences(MIN_TOKENS, 1))

    def _optimize(self, model: ProbedModel) -> int:
        """Changes the model's layers as configured, and returns the number of changes."""
        engine, module = self._engine, model.module
        fuses = self.device.type == "cuda" if engine.fuse_projections is None else engine.fuse_projections
        changed = fuse_projections(module) if fuses else 0
        changed += restrict_last_layer(module, model.attentions) if engine.restrict_last_layer else 0
        changed += fuse_norms(module) if engine.fused_norms and self.device.type == "cpu" else 0
        changed += use_onednn(module) if engine.onednn_linear else 0
        return changed

    @property
    def _will_capture(self) -> bool:
        possible = self.device.type == "cuda" and not isinstance(self._backend, TorchAttention)
        return self._engine.graphs and possible

    def _use_skinny_linears(self, model: ProbedModel) -> int:
        """Makes captured steps of few rows use the skinny GEMM; returns the number of changed linear layers."""
        if self.pooling_head is not None or not (self._will_capture and self._engine.skinny_gemm):
            return 0
        try:
            layers = decoder_layers(model.module, model.attentions)
        except ValueError:
            return 0
        _fix_kernel_keys()  # before the first launch of any kernel, which the check makes
        head = model.module.get_output_embeddings()
        return use_skinny_linears([*layers, head] if isinstance(head, nn.Module) else list(layers))

    @torch.no_grad()
    def forward(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] of the wanted rows, in the model's dtype; see `CausalLM`."""
        if self.head is not None and (hidden := self._replayed(kind, sequences, token_table)) is not None:
            return self.head.rows(hidden)
        singles = None if self._decode_graphs is None else _singles(self._decode_graphs, kind, sequences)
        if self._decode_graphs is not None and singles is not None:
            batch = self._pack(kind, singles, token_table, pad_to=self._decode_graphs.bucket(len(singles)))
            if self._decode_graphs.fits(batch):
                self.graph_replays += 1
                return self._decode_graphs.replay(batch)
        else:
            batch = self._pack(kind, sequences, token_table)
        if self._traced is not None and self.head is not None:
            return self.head.rows(self._eager_rows(batch))
        return full_rows(self.module, self._backend.plan(batch), batch)

    def _replayed(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor | None:
        """Runs a step as a CUDA graph: the rows [R, hidden] that the head reads. None: the step has to run eager."""
        if self._prefill_graphs is None or (tokens := self._prefill_graphs.bucket(kind, sequences)) is None:
            return None
        batch = self._pack(kind, sequences, token_table, tokens, whole=True)
        self.graph_replays += 1
        hidden = self._prefill_graphs.replay(batch)
        self._layers_done()
        return hidden

    def _hidden(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Returns the rows [R, hidden] that the head reads."""
        hidden = self._replayed(kind, sequences, token_table)
        if hidden is None:
            hidden = self._eager_rows(self._pack(kind, sequences, token_table))
        return hidden

    def _eager_rows(self, batch: InputBatch) -> torch.Tensor:
        """Returns the rows [R, hidden] that the head reads, by the model's modules or as they were traced."""
        step = self._backend.plan(batch)
        if self._traced is None or batch.num_tokens > self._traced.max_tokens:
            return hidden_rows(self.module, step, batch)
        rows = self._traced.rows(step, batch)
        self._layers_done()
        return rows

    def _pack(
        self,
        kind: StepKind,
        sequences: StepSequences,
        token_table: torch.Tensor,
        pad_to: int = MIN_TOKENS,
        *,
        whole: bool = False,
    ) -> InputBatch:
        """Packs the step. `whole`: each sequence attends to all of its context, in one level."""
        in_two_levels = kind is StepKind.SCORE and not whole and self.contexts_built is None
        cascade_ratio = self._backend.cascade_ratio if in_two_levels else None
        batch = pack(kind, sequences, token_table, self.device, pad_to)
        if cascade_ratio is not None:
            batch = with_cascade(batch, sequences, cascade_ratio, self._backend.min_cascade_context)
        self.padded_tokens += batch.padding
        self._scoring = kind is StepKind.SCORE
        return batch

    def _layers_done(self, *_: object) -> None:
        """Starts the head's stopwatch, in steps of scores alone: no captured step is timed."""
        if self._scoring:
            self.head_watch = Stopwatch(self.device)

    @torch.no_grad()
    def fill(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> None:
        """Writes keys and values; see `CausalLM`. Eager steps skip the head and most of the last layer."""
        if self._replayed(kind, sequences, token_table) is not None:
            return
        batch = self._pack(kind, sequences, token_table)
        with forward_context(self._backend.plan(batch), batch.keep_rows[:0]):
            base: Any = self.module.base_model
            base(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)

    @torch.no_grad()
    def label_logits(
        self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        """Returns f32 [R, L]; see `CausalLM`. Without a known head these are columns of the full rows."""
        columns = torch.from_numpy(labels).long().to(self.device, non_blocking=True)
        if self.head is None:
            return self.forward(kind, sequences, token_table)[:, columns].float()
        return self.head.columns(self._hidden(kind, sequences, token_table), columns)

    @torch.no_grad()
    def target_logprobs(
        self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor, query: LogprobQuery
    ) -> RowLogprobs:
        """Returns log-probabilities; see `CausalLM`. On CUDA the fused head gives those of targets without logits."""
        if self.head is None:
            return logprobs_of_blocks([self.forward(kind, sequences, token_table)], query)
        hidden = self._hidden(kind, sequences, token_table)
        if query.targets_only and self.device.type == "cuda" and self._engine.numerics == "fast":
            return self._fused(self.head, hidden, query)
        blocks = torch.split(hidden, block_rows(self.device, self.vocab_size))
        return logprobs_of_blocks(map(self.head.rows, blocks), query)

    @torch.no_grad()
    def pooled(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Returns the pooling head's numbers, f32 [R, K]; see `CausalLM`."""
        if self._pooler is None:
            raise RuntimeError("The model has no pooling head.")
        pooling = self._pooler.pooling
        if pooling in (None, Pooling.LAST):  # the wanted tokens are what the head reads
            read = self._hidden(kind, sequences, token_table)
        else:
            sizes = [len(one.write) for one in sequences]
            every = [
                one._replace(rows=np.arange(size, dtype=np.int32)) for one, size in zip(sequences, sizes, strict=True)
            ]
            ends = torch.tensor([0, *sizes]).cumsum(0).to(self.device, non_blocking=True)
            read = pool_rows(self._hidden(kind, every, token_table), ends, pooling)
        numbers: torch.Tensor = self._pooler(read)
        return numbers

    @staticmethod
    def _fused(head: HeadSpec, hidden: torch.Tensor, query: LogprobQuery) -> RowLogprobs:
        targets = torch.from_numpy(query.targets).to(hidden.device, non_blocking=True)
        found = head_logprob(
            hidden, head.weight, targets, head.bias, head.scale, head.softcap, ROUNDED_TO.get(hidden.dtype)
        )
        ids = torch.empty((len(hidden), 0), dtype=torch.int32, device=hidden.device)
        nothing = found.logprobs[:, None][:, :0]
        return RowLogprobs(found.logprobs, found.ranks, found.is_greedy, found.flags, ids, nothing, nothing)

    def decode_graphs(self) -> DecodeGraphs | None:
        """Returns the captured decode steps; see `CausalLM`."""
        self._scoring = False  # nothing is timed inside a graph
        return self._decode_graphs

    @torch.no_grad()
    def warm_up(self, progress: StartupProgress) -> None:
        """Builds attention kernels, compiles the layers and the modules around them, and captures graphs, on CUDA;
        traces the model's base on a CPU. In the first call alone. `capture_next` captures graphs of further sizes."""
        if self._warm:
            return
        self._warm = True
        if self.device.type != "cuda":
            if self._engine.trace_base:
                with timed("trace", progress):
                    self._traced = trace_base(
                        self.module,
                        self._backend,
                        longest=self.max_model_len,
                        slots=self.num_slots,
                        vocab_size=self.vocab_size,
                    )
            return
        with timed("attention kernels", progress):
            self._run_idle_steps((self._engine.token_budget, self._engine.max_running), self._run_idle)
        if self._engine.compile:
            with timed("compile", progress):
                self._compile(self.probed, self._run_idle)
        if self._will_capture:
            if self.pooling_head is None:
                with timed("graphs", progress):
                    self._decode_graphs = self._capture()
            reads_hidden = self.head is not None or self.pooling_head is not None
            if self._engine.prefill_graph_tokens and reads_hidden:
                with timed("prefill graphs", progress):
                    self._capture_prefill()
        if self.pooling_head is None:
            with timed("likelihoods", progress):
                self._run_idle_targets()
        if self._engine.numerics == "invariant":
            with timed("served invariance check", progress):
                self._compare_bits()

    @torch.no_grad()
    def capture_next(self) -> bool:
        """Captures a graph that `warm_up` left for later; see `CausalLM`."""
        self._scoring = False  # nothing is timed inside a graph
        captured = self._decode_graphs, self._prefill_graphs
        return any(graphs.capture_next() for graphs in captured if graphs is not None)

    @torch.no_grad()
    def share_contexts(self) -> None:
        """Begins to attend to shared contexts once, after a step that shows it works; see `CausalLM`."""
        built, self.contexts_built = self.contexts_built, None
        if built is None:
            return
        try:
            if failed := built.result():
                raise RuntimeError(f"{', '.join(failed)} did not compile")
            self._run_idle_cascade()
        except Exception:
            self.contexts_built = built
            raise

    def _compare_bits(self) -> None:
        """Compares steps as they are served, compiled and captured, bit by bit. Nothing else is in the KV storage yet.

        Raises:
            UnsupportedModel: A row's bits depend on its step.
        """
        longest = max(3, min(CHECKED_TOKENS, self.max_model_len, self._engine.token_budget, self.num_slots // 3))
        lengths = longest, max(3, longest * 3 // 4), longest // 4
        ids, slots = sequences_of(lengths, self.vocab_size, np.random.default_rng(self._engine.seed))
        table = torch.zeros((3, longest), dtype=torch.int32, device=self.device)
        pooler = self._pooler  # reads each wanted token by itself here, whatever it pools
        rows = self.forward if pooler is None else lambda *step: pooler(self._hidden(*step))
        compare_bits(self.probed.architecture, rows, lengths, ids, slots, table)

    def _compile(self, model: ProbedModel, run: Callable[[StepSequences], object]) -> None:
        """Compiles the layers and the modules around them. These are recorded first: compiled layers hold no hooks.

        `run` runs a step of the model.
        """
        _fix_kernel_keys()  # before torch's compiler names a folder and an assembler of its own
        tokens = self._engine.token_budget
        sequences = idle_sequences(min(TRIED_TOKENS, tokens), self.max_model_len)
        recorded = record_outer_modules(model.module, model.attentions, lambda: run(sequences))
        compile_layers(model.module, model.attentions)
        compile_outer_modules(recorded)
        self._run_idle_steps((tokens, MIN_TOKENS, self._engine.max_running), run)

    def _run_idle_steps(self, sizes: Sequence[int], run: Callable[[StepSequences], object]) -> None:
        """Runs steps of these token counts over the padding slot, as long sequences and as single tokens."""
        for size in sizes:
            run(idle_sequences(size, self.max_model_len))
            run(idle_sequences(min(size, self._engine.max_running), 1))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _run_idle(self, sequences: StepSequences) -> None:
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        (self.forward if self.pooling_head is None else self.pooled)(StepKind.PREFILL, sequences, table)

    def _run_idle_cascade(self) -> None:
        """Runs a step over a context that its sequences share, if sequences can be long enough for one."""
        context, one = np.zeros(MIN_SHARED_CONTEXT, np.int32), np.zeros(1, np.int32)
        if self._backend.cascade_ratio is not None and self.max_model_len > MIN_SHARED_CONTEXT:
            table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
            batch = self._pack(StepKind.SCORE, [ScheduledSequence(0, context, one, one, one)] * 2, table)
            self._eager_rows(batch)  # a graph of a small step would attend in one level

    def _run_idle_targets(self) -> None:
        """Computes log-probabilities of targets, by themselves and with others beside them: their kernels compile."""
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        sequences = [
            sequence._replace(rows=np.arange(len(sequence.write), dtype=np.int32))
            for sequence in idle_sequences(MIN_TOKENS, 1)
        ]
        targets = np.zeros(sum(len(sequence.rows) for sequence in sequences), np.int64)
        for top, chosen in ((0, 0), (1, 1)):
            self.target_logprobs(
                StepKind.SCORE, sequences, table, LogprobQuery(targets, top, np.zeros((len(targets), chosen), np.int64))
            )

    def _capture(self) -> DecodeGraphs:
        speculation = self._engine.speculation
        each = 1 if speculation.method == "none" else 1 + speculation.num_speculative_tokens
        rows = max(MIN_TOKENS, min(self._engine.max_graph_batch_size, each * self._engine.max_running))
        attended = min(rows * self.max_model_len, MAX_ATTENDED)
        return DecodeGraphs(
            self.probed,
            max_rows=rows,
            attended=attended,
            longest=self.max_model_len,
            skinny=self._engine.numerics == "fast",
            head=self.head,
        )

    def _capture_prefill(self) -> None:
        self._scoring = False  # nothing is timed inside a graph
        tokens = min(self._engine.prefill_graph_tokens, self._engine.token_budget)
        memory = graph_memory() if self._decode_graphs is None else self._decode_graphs.memory
        self._prefill_graphs = PrefillGraphs(self.probed, tokens, memory)
        self.prefill_graph_limit = self._prefill_graphs.largest


def allocate_kv_storage(models: Sequence[HFModel], engine: EngineConfig, progress: StartupProgress) -> None:
    """Gives models of one device KV storage over the same slots, as many as `engine` names or memory allows.

    Args:
        models: The target, and its draft model if there is one.
        engine: The engine's configuration.
        progress: Receives the stage.

    Raises:
        KVStorageTooSmall: The memory left holds too few slots.
    """
    target, *drafts = models
    with timed("pool", progress):
        beside = sum(draft.token_bytes for draft in drafts)
        shapes, length = target.probed.shapes, target.max_model_len
        slots = slots_that_fit(shapes, target.probed.module.dtype, target.device, engine, length, beside)
        for model in models:
            model.allocate(slots)


def _fix_kernel_keys() -> None:
    from engine import kernels  # needs Triton
    from gpu_sampler import kernels as sampler_kernels
    from gpu_sampler.kernel_cache import fix_keys

    fix_keys((sampler_kernels, kernels))


def _singles(graphs: DecodeGraphs, kind: StepKind, sequences: StepSequences) -> StepSequences | None:
    """Returns the step's tokens as sequences of one, or None where a replay does not pay."""
    if kind is StepKind.VERIFY:
        return single_tokens(sequences) if graphs.worth_replay(sequences) else None
    return sequences if kind is StepKind.DECODE else None


def _attention_backend_for(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if device.type != "cuda" or dtype == torch.float32:  # the paged kernels take halves only
        return TorchAttention(cascades=device.type == "cpu")
    from engine.attention.flashinfer_backend import FlashInferAttention

    return FlashInferAttention(device, dtype)


def _invariant_backend(device: torch.device, max_model_len: int) -> AttentionBackend:
    """Raises ValueError on a CPU, unless Triton's interpreter runs there."""
    if not runs_kernels(device):
        raise ValueError("`engine.numerics` must be fast on a CPU. Given: invariant.")
    from engine.attention.invariant_backend import InvariantAttention

    return InvariantAttention(device, max_model_len)
