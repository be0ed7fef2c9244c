"""CausalLM: what the step loop needs of a model (`engine.model.hf_model` runs Hugging Face models, `builtin.toy` fakes
one)."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.batch.input_batch import ScheduledSequence, StepKind, StepSize
from engine.model.cuda_graphs.decode import DecodeGraphs
from engine.model.lm_head import HeadSpec, LogprobQuery, TargetLogprobs
from engine.requests import Int32s
from engine.utils.cuda import Stopwatch


class CausalLM(Protocol):
    """A model over its own KV pool. Called by the step thread only; on CUDA calls are asynchronous, in stream order.

    Invariants: a pool slot holds what the last step that wrote it wrote; `forward` of a step sees every earlier step's
    writes; a row's logits depend on the tokens it attends to and on nothing else (up to rounding between step shapes).
    """

    vocab_size: int  # width of the logits, which may exceed the tokenizer's length
    max_model_len: int
    num_slots: int  # pool slots, slot 0 being the padding slot that no request owns
    max_targets: int | None  # rows of one call of `target_logprobs`; None: any number, in bounded memory
    device: torch.device
    dtype: torch.dtype  # of the logits
    head: HeadSpec | None  # None: not known; answers are of rows of logits
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    padded_tokens: int  # computed beside those of the runs, since start-up
    graph_replays: int  # steps that ran as a captured graph
    prefill_graph_limit: (
        StepSize | None
    )  # prefill and score steps up to it cost the host little, once warmed up; None: none do
    head_watch: Stopwatch | None  # running since the last layer of the last step of scores, where the model can tell

    def forward(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V] of the wanted rows, in order of the runs; float32, bfloat16 or float16, owned by the caller
        until the next call."""
        ...

    def fill(self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor) -> None:
        """Only the keys and values of the runs' new tokens."""
        ...

    def label_logits(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        """float32 [R, L]: the columns `labels` of what `forward` would return, computed without the other columns
        where the head allows it."""
        ...

    def target_logprobs(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, asked: LogprobQuery
    ) -> TargetLogprobs:
        """What is asked of the rows that `forward` would return, as tensors on the device."""
        ...

    def decode_graphs(self) -> DecodeGraphs | None:
        """Once warmed up, what makes steps of this model for graphs of the caller's; None where none are captured."""
        ...

    def warm_up(self, progress: "StartupProgress") -> None:
        """Checks, compiles and captures what start-up should pay for, one progress line a stage."""
        ...


class StartupProgress(Protocol):
    """Told of each start-up stage as it ends."""

    def __call__(self, stage: str, seconds: float) -> None: ...
