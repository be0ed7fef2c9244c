"""PooledEncoder: an encoder and its head as the step loop runs them.

Shape legend: R wanted rows of a step, K numbers of an answer, T tokens of all rows.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind, StepSequences, StepSize
from engine.config import EngineConfig
from engine.metrics import Stopwatch
from engine.model.encoder.encoder_model import EncoderModel
from engine.model.encoder.packed_rows import EncoderRow
from engine.model.heads.info import HeadInfo
from engine.model.heads.pooling_head import PoolingModel
from engine.model.heads.row_pooling import pool_rows
from engine.model.lm_head import HeadSpec, LogprobQuery, RowLogprobs
from engine.model.weights_digest import weights_digest
from engine.requests import Int32s
from gpu_sampler.startup_progress import StartupProgress, silent, timed


class PooledEncoder:
    """Implements `CausalLM` for a model that is bidirectional: a step of scores is one packed pass over whole rows.

    It has no KV storage. The slots that the scheduler counts only bound the tokens of the steps in flight.
    """

    def __init__(
        self,
        model: PoolingModel,
        engine: EngineConfig,
        *,
        max_model_len: int | None = None,
        progress: StartupProgress = silent,
    ) -> None:
        """
        Args:
            model: A base model of transformers on its device, and its head.
            engine: The engine's configuration.
            max_model_len: Tokens of a row; None: as many as the model has positions for.
            progress: Receives the stages.

        Raises:
            UnsupportedModel: The model would be computed wrong, or not at all.
            ValueError: `max_model_len` is more than the model has positions for.
        """
        with timed("weights digest", progress):
            self.weights_digest = weights_digest(model.body, model.head, described=str(model.head.info))
        self._encoder = EncoderModel(
            model.body,
            max_model_len=max_model_len,
            seed=engine.seed,
            onednn_linear=engine.onednn_linear,
            progress=progress,
        )
        self._pooler = model.head
        self.pooling_head: HeadInfo | None = model.head.info
        self.vocab_size = self._encoder.vocab_size
        self.max_model_len = self._encoder.max_model_len
        self.num_slots = 2 * max(engine.token_budget, self.max_model_len) + 1  # two steps in flight, and padding
        self.max_targets: int | None = None
        self.device = self._encoder.device
        self.dtype = self._encoder.dtype
        self.head: HeadSpec | None = None
        self.bos_token_id: int | None = model.body.config.bos_token_id
        self.eos_token_ids: tuple[int, ...] = ()
        self.padded_tokens = self.graph_replays = 0
        self.prefill_graph_limit: StepSize | None = None
        self.head_watch: Stopwatch | None = None
        self.contexts_built: Future[list[str]] | None = None

    @torch.no_grad()
    def pooled(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Returns the head's numbers, f32 [R, K]; see `CausalLM`."""
        hidden, indptr = self._encoder.encode([self._row(one) for one in sequences])
        self.head_watch = Stopwatch(self.device)
        if self._pooler.pooling is not None:
            read = pool_rows(hidden, indptr, self._pooler.pooling)
        else:
            ends = np.cumsum([0, *(len(one.write) for one in sequences)])
            wanted = np.concatenate([one.rows + end for one, end in zip(sequences, ends[:-1], strict=True)])
            read = hidden[torch.from_numpy(wanted).to(self.device, non_blocking=True)]
        numbers: torch.Tensor = self._pooler(read)
        return numbers

    def _row(self, sequence: ScheduledSequence) -> EncoderRow:
        if sequence.ids is None or len(sequence.context):
            raise RuntimeError("An encoder reads whole rows whose tokens the host knows.")
        split, length = sequence.first_segment, len(sequence.ids)
        if split is None or self._encoder.segments < 2:
            return EncoderRow(sequence.ids)
        return EncoderRow(sequence.ids, (np.arange(length) >= split).astype(np.int32))

    def warm_up(self, progress: StartupProgress) -> None:
        """Runs the longest row once on CUDA, so that no request waits for the library's first calls."""
        if self.device.type == "cuda":
            with timed("attention kernels", progress):
                ids = np.zeros(self.max_model_len, np.int32)
                last = np.array([len(ids) - 1], np.int32)
                table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
                self.pooled(StepKind.SCORE, [ScheduledSequence(0, ids[:0], ids, ids, last)], table)

    def share_contexts(self) -> None: ...

    def decode_graphs(self) -> None: ...

    def capture_next(self) -> bool:
        return False

    def fill(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> None:
        """Is never called: no row shares what another one has computed."""
        _refuse()

    def forward(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Is never called: the engine refuses requests for a language model."""
        _refuse()

    def label_logits(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        """Is never called; see `forward`."""
        _refuse()

    def target_logprobs(
        self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor, query: LogprobQuery
    ) -> RowLogprobs:
        """Is never called; see `forward`."""
        _refuse()


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError("An encoder has no language-model head.")
