"""HFModel: a Hugging Face causal LM over its own KV pool, called with packed steps."""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from engine.attention.interface import ATTENTION, AttentionBackend, attach, attend, forward_context
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import (
    MIN_TOKENS,
    InputBatch,
    ScheduledSequence,
    StepKind,
    StepSize,
    idle_sequences,
    pack,
    single_tokens,
)
from engine.batch.shared_prefix import MIN_SHARED_CONTEXT
from engine.config import EngineConfig, ModelConfig
from engine.kv_cache.storage import KVStorage, bytes_of_token, slots_that_fit
from engine.model.checkpoint import (
    choose_device,
    end_of_text_ids,
    faults_allowed,
    find_folder,
    longest_sequence,
    read_config,
    read_model,
)
from engine.model.compatibility import PROBE, check_config, probe, record_call, set_attention, stored_shapes
from engine.model.cuda_graphs.decode import MAX_ATTENDED, DecodeGraphs, compile_layers, decoder_layers
from engine.model.cuda_graphs.prefill import PrefillGraphs
from engine.model.interface import CausalLM, StartupProgress
from engine.model.lm_head import HeadSpec, LogprobQuery, TargetLogprobs, block_rows, full_rows, hidden_rows, of_blocks
from engine.model.optimize.compile import TRIED_TOKENS, compile_around, listen
from engine.model.optimize.fused_projections import fuse_projections
from engine.model.optimize.last_layer import restrict_last_layer
from engine.model.optimize.skinny_linear import skinny_step, use_skinny_linears
from engine.model.packing_check import PackingCheck, find_head
from engine.requests import Int32s
from engine.utils.cuda import Stopwatch
from gpu_sampler.logprobs import head_logprob
from gpu_sampler.reference.lm_head_logprob import Rounding

ROUNDED_TO: dict[torch.dtype, Rounding] = {torch.bfloat16: "bf16", torch.float16: "fp16"}

AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(PROBE, record_call)


def silent(stage: str, seconds: float) -> None:
    """A Progress that says nothing."""


class HFModel:
    """Implements `CausalLM`. Made by `load_model`, or from a module that is already on its device.

    Making one probes and checks the model, merges its projections, narrows its last layer and allocates the pool: it
    raises `rules.Refused`, or `kv_pool.KVStorageTooSmall`, or the model is right. `warm_up` then compiles and captures.
    """

    def __init__(
        self,
        module: Any,
        engine: EngineConfig,
        *,
        max_model_len: int | None = None,
        folder: Path | None = None,
        backend: AttentionBackend | None = None,
        merge: bool = True,
        draft: "HFModel | None" = None,
        pooled: bool = True,
        progress: StartupProgress = silent,
    ) -> None:
        """A `draft` was made without a pool (`pooled` false) and gets one here, over the same slots as this model's."""
        self.module: nn.Module = module.eval().requires_grad_(False)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.max_model_len = longest_sequence(module.config, max_model_len)
        self.eos_token_ids = end_of_text_ids(module.config, folder)
        self.bos_token_id: int | None = getattr(module.config.get_text_config(decoder=True), "bos_token_id", None)
        self.architecture = str(module.config.model_type)
        self._engine = engine
        self._graphs: DecodeGraphs | None = None
        self._small: PrefillGraphs | None = None
        self.prefill_graph_limit: StepSize | None = None
        self.padded_tokens = self.graph_replays = 0
        self.head_watch: Stopwatch | None = None
        self._scoring = self._warm = False
        self._backend = _attention_backend_for(self.device, module.dtype) if backend is None else backend
        self._check(module, merge, progress)
        module.base_model.register_forward_hook(self._layers_done)
        if pooled:
            with _timed("pool", progress):
                beside = 0 if draft is None else draft.token_bytes
                length = self.max_model_len
                slots = slots_that_fit(self._shapes, module.dtype, self.device, engine, length, beside)
                for model in (self,) if draft is None else (self, draft):
                    model.allocate(slots)
        # Without a known head the model's own gives all rows at once.
        self.max_targets = block_rows(self.device, self.vocab_size) if self.head is None else None

    @property
    def token_bytes(self) -> int:
        """Of keys and values."""
        return bytes_of_token(self._shapes, self.dtype)

    def allocate(self, slots: int) -> None:
        """Gives the model a pool of so many slots."""
        self.pool = KVStorage(self._shapes, slots, self.dtype, self.device)
        self.num_slots = slots
        attach([call.module for call in self.calls], self.pool.keys, self.pool.values)

    def _check(self, module: Any, merge: bool, progress: StartupProgress) -> None:
        check_config(module.config, self.max_model_len)
        with _timed("probe", progress):
            self.calls = probe(module, self.architecture)
            self._shapes = stored_shapes(self.calls, self._backend, self.architecture)
            set_attention(module, ATTENTION)
        with _timed("head check", progress):
            self.head, self.vocab_size = find_head(module, self._backend, self.calls, self._shapes)
        with _timed("packing check", progress):
            proof = PackingCheck(
                module,
                self._backend,
                self.calls,
                self._shapes,
                self.architecture,
                max_model_len=self.max_model_len,
                seed=self._engine.seed,
            )
            proof.run()
        if merge:
            with _timed("merge projections", progress):
                changed = fuse_projections(module) + restrict_last_layer(module, [call.module for call in self.calls])
            if changed:
                with _timed("second packing check", progress):
                    proof.run()
            if self._use_skinny_linears(module):
                with _timed("packing check of few rows", progress), skinny_step(1):
                    proof.run()

    @property
    def _will_capture(self) -> bool:
        return self._engine.graphs and self.device.type == "cuda" and not isinstance(self._backend, TorchAttention)

    def _use_skinny_linears(self, module: Any) -> int:
        """How many linear layers are such that captured steps of few rows compute otherwise."""
        if not self._will_capture:
            return 0
        try:
            layers = decoder_layers(module, [call.module for call in self.calls])
        except ValueError:
            return 0
        from engine import kernels  # needs Triton
        from gpu_sampler import kernels as sampler_kernels
        from gpu_sampler.kernel_cache import fix_keys

        fix_keys((sampler_kernels, kernels))  # before the first launch of any kernel, which the check makes
        head = module.get_output_embeddings()
        return use_skinny_linears([*layers, head] if isinstance(head, nn.Module) else layers)

    @torch.no_grad()
    def forward(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V] of the wanted rows, in the model's dtype; see `CausalLM`."""
        if self.head is not None and (hidden := self._replayed(kind, sequences, token_table)) is not None:
            return self.head.rows(hidden)
        singles = None if self._graphs is None else _singles(self._graphs, kind, sequences)
        if self._graphs is not None and singles is not None:
            batch = self._pack(kind, singles, token_table, pad_to=self._graphs.bucket(len(singles)))
            if self._graphs.fits(batch):
                self.graph_replays += 1
                return self._graphs.replay(batch)
        else:
            batch = self._pack(kind, sequences, token_table)
        return full_rows(self.module, self._backend.plan(batch), batch)

    def _replayed(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor
    ) -> torch.Tensor | None:
        """The rows [R, hidden] that the head would read, of a step that is a graph's; None: it has to run eager."""
        if self._small is None or (tokens := self._small.bucket(kind, sequences)) is None:
            return None
        batch = self._pack(kind, sequences, token_table, tokens, whole=True)
        self.graph_replays += 1
        hidden = self._small.replay(batch)
        self._layers_done()
        return hidden

    def _hidden(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor
    ) -> torch.Tensor:
        """The rows [R, hidden] that the head would read."""
        hidden = self._replayed(kind, sequences, token_table)
        if hidden is None:
            batch = self._pack(kind, sequences, token_table)
            hidden = hidden_rows(self.module, self._backend.plan(batch), batch)
        return hidden

    def _pack(
        self,
        kind: StepKind,
        sequences: Sequence[ScheduledSequence],
        token_table: torch.Tensor,
        pad_to: int = MIN_TOKENS,
        *,
        whole: bool = False,
    ) -> InputBatch:
        """`whole`: contexts that runs share are attended to by each of them."""
        cascade_ratio = self._backend.cascade_ratio if kind is StepKind.SCORE and not whole else None
        batch = pack(kind, sequences, token_table, self.device, pad_to, cascade_ratio=cascade_ratio)
        self.padded_tokens += batch.padding
        self._scoring = kind is StepKind.SCORE
        return batch

    def _layers_done(self, *_: object) -> None:
        """The head comes next. Only steps of scores are timed: never one that is being captured."""
        if self._scoring:
            self.head_watch = Stopwatch(self.device)

    @torch.no_grad()
    def fill(self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor) -> None:
        """See `CausalLM`. Without the head, and in an eager step without rows of the last layer."""
        if self._replayed(kind, sequences, token_table) is not None:
            return
        batch = self._pack(kind, sequences, token_table)
        with forward_context(self._backend.plan(batch), batch.keep_rows[:0]):
            base: Any = self.module.base_model
            base(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)

    @torch.no_grad()
    def label_logits(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        """f32 [R, L]; see `CausalLM`. Without a known head: columns of the full rows."""
        columns = torch.from_numpy(labels).long().to(self.device, non_blocking=True)
        if self.head is None:
            return self.forward(kind, sequences, token_table)[:, columns].float()
        return self.head.columns(self._hidden(kind, sequences, token_table), columns)

    @torch.no_grad()
    def target_logprobs(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, asked: LogprobQuery
    ) -> TargetLogprobs:
        """See `CausalLM`. On CUDA targets alone are answered by the fused head, without any logits in memory."""
        if self.head is None:
            return of_blocks([self.forward(kind, sequences, token_table)], asked)
        hidden = self._hidden(kind, sequences, token_table)
        if asked.alone and self.device.type == "cuda":
            return self._fused(self.head, hidden, asked)
        blocks = torch.split(hidden, block_rows(self.device, self.vocab_size))
        return of_blocks(map(self.head.rows, blocks), asked)

    @staticmethod
    def _fused(head: HeadSpec, hidden: torch.Tensor, asked: LogprobQuery) -> TargetLogprobs:
        targets = torch.from_numpy(asked.targets).to(hidden.device, non_blocking=True)
        found = head_logprob(
            hidden, head.weight, targets, head.bias, head.scale, head.softcap, ROUNDED_TO.get(hidden.dtype)
        )
        ids = torch.empty((len(hidden), 0), dtype=torch.int32, device=hidden.device)
        nothing = found.logprobs[:, None][:, :0]
        return TargetLogprobs(found.logprobs, found.ranks, found.is_greedy, found.flags, ids, nothing, nothing)

    def decode_graphs(self) -> DecodeGraphs | None:
        """See `CausalLM`."""
        self._scoring = False  # nothing is timed inside a graph
        return self._graphs

    @torch.no_grad()
    def warm_up(self, progress: StartupProgress) -> None:
        """On CUDA, and once: builds attention kernels, compiles the layers and what is around them, captures graphs.
        Else nothing."""
        if self.device.type != "cuda" or self._warm:
            return
        self._warm = True
        tokens = self._engine.token_budget
        with _timed("attention kernels", progress):
            self._run_idle_steps((tokens, self._engine.max_running))
            self._run_idle_cascade()
        if self._engine.compile:
            with _timed("compile", progress):
                self._compile(tokens)
                self._run_idle_steps((tokens, MIN_TOKENS, self._engine.max_running))
        if self._will_capture:
            with _timed("graphs", progress):
                self._graphs = self._capture()
            if self._engine.prefill_graph_tokens and self.head is not None:
                with _timed("small steps", progress):
                    self._capture_small(self._graphs)
        with _timed("likelihoods", progress):
            self._run_idle_targets()

    def _compile(self, tokens: int) -> None:
        """What is around the layers is listened to before these are compiled: their code would hold the hooks."""
        attentions = [call.module for call in self.calls]
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        sequences = idle_sequences(min(TRIED_TOKENS, tokens), self.max_model_len)
        heard = listen(self.module, attentions, lambda: self.forward(StepKind.PREFILL, sequences, table))
        compile_layers(self.module, attentions)
        compile_around(heard)

    def _run_idle_steps(self, sizes: Sequence[int]) -> None:
        """Steps of so many tokens over the padding slot, as one long sequence each and as single tokens."""
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        for size in sizes:
            self.forward(StepKind.PREFILL, idle_sequences(size, self.max_model_len), table)
            self.forward(StepKind.PREFILL, idle_sequences(min(size, self._engine.max_running), 1), table)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _run_idle_cascade(self) -> None:
        """A step over a context that its runs share, if sequences are long enough for one."""
        context, one = np.zeros(MIN_SHARED_CONTEXT, np.int32), np.zeros(1, np.int32)
        if self._backend.cascade_ratio is not None and self.max_model_len > MIN_SHARED_CONTEXT:
            table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
            self.fill(StepKind.SCORE, [ScheduledSequence(0, context, one, one, one)] * 2, table)

    def _run_idle_targets(self) -> None:
        """Log-probabilities of given tokens, alone and with what may be told beside them: their kernels compile."""
        table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        sequences = [
            run._replace(rows=np.arange(len(run.write), dtype=np.int32)) for run in idle_sequences(MIN_TOKENS, 1)
        ]
        targets = np.zeros(sum(len(run.rows) for run in sequences), np.int64)
        for top, chosen in ((0, 0), (1, 1)):
            self.target_logprobs(
                StepKind.SCORE, sequences, table, LogprobQuery(targets, top, np.zeros((len(targets), chosen), np.int64))
            )

    def _capture(self) -> DecodeGraphs:
        from engine.attention.flashinfer_backend import FlashInferAttention

        if not isinstance(self._backend, FlashInferAttention):
            raise TypeError(f"Only the paged kernels can be captured. Given: {type(self._backend).__name__}.")
        speculation = self._engine.speculation
        each = 1 if speculation.method == "none" else 1 + speculation.num_speculative_tokens
        longest = max(MIN_TOKENS, min(self._engine.largest_graph, each * self._engine.max_running))
        attended = min(longest * self.max_model_len, MAX_ATTENDED)
        return DecodeGraphs(
            self.module,
            self._backend,
            self.calls,
            self._shapes,
            max_rows=longest,
            attended=attended,
            longest=self.max_model_len,
        )

    def _capture_small(self, decode_graphs: DecodeGraphs) -> None:
        self._scoring = False  # nothing is timed inside a graph
        self._small = PrefillGraphs(decode_graphs, min(self._engine.prefill_graph_tokens, self._engine.token_budget))
        self.prefill_graph_limit = self._small.largest


def _singles(
    graphs: DecodeGraphs, kind: StepKind, sequences: Sequence[ScheduledSequence]
) -> Sequence[ScheduledSequence] | None:
    """The step's tokens as runs of one, where a replay is worth it."""
    if kind is StepKind.VERIFY:
        return single_tokens(sequences) if graphs.take(sequences) else None
    return sequences if kind is StepKind.DECODE else None


class _timed:
    """Reports the seconds inside to `progress` under `stage`; nothing where an exception leaves it."""

    def __init__(self, stage: str, progress: StartupProgress) -> None:
        self._stage, self._progress = stage, progress

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._progress(self._stage, time.perf_counter() - self._start)


def _attention_backend_for(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if device.type != "cuda" or dtype == torch.float32:  # the paged kernels take halves only
        return TorchAttention()
    from engine.attention.flashinfer_backend import FlashInferAttention

    return FlashInferAttention(device, dtype)


def load_model(model: ModelConfig, engine: EngineConfig, progress: StartupProgress = silent) -> CausalLM:
    """The model that `model` names, checked and with its pool. Raises `rules.Refused`, `loading.ModelNotFound`,
    `kv_pool.KVStorageTooSmall` or ValueError, each saying what to change.
    """
    if str(model.path) == "toy":
        return _load_toy(model, engine)
    device = choose_device(model.device)
    with _timed("load", progress):
        folder = find_folder(model)
        config = read_config(folder, model.max_model_len)
        module = read_model(folder, config, model, device)
    return HFModel(module, engine, max_model_len=model.max_model_len, folder=folder, progress=progress)


def _load_toy(model: ModelConfig, engine: EngineConfig) -> CausalLM:
    if not faults_allowed():
        raise ValueError("`model.path` toy is a fault-test model and needs ASSAY_TEST_FAULTS=1.")
    toy: Any = importlib.import_module("engine.testing.toy_model")
    made: CausalLM = toy.load(model, engine)
    return made
