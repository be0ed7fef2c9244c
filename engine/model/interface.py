"""Defines what the step loop needs of a model. `engine.model.hf_model` runs Hugging Face models, and
`tests.support.toy_model` stands in for one."""

from concurrent.futures import Future
from typing import Protocol

import torch

from engine.batch.input_batch import StepKind, StepSequences, StepSize
from engine.metrics import Stopwatch
from engine.model.cuda_graphs.decode import DecodeGraphs
from engine.model.heads.info import HeadInfo
from engine.model.lm_head import HeadSpec, LogprobQuery, RowLogprobs
from engine.requests import Int32s
from gpu_sampler.startup_progress import StartupProgress


class CausalLM(Protocol):
    """Runs packed steps over the model's own KV storage. The step thread alone calls it; on CUDA calls are
    asynchronous, in stream order.

    Invariants: a slot holds what the last step that wrote it wrote; a step sees the writes of every earlier step; a
    row's logits depend on the tokens that it attends to and on nothing else, up to rounding between shapes of steps.

    Shape legend: R wanted rows of a step, V vocabulary, L labels, K numbers of a pooling head.
    """

    vocab_size: int  # width of the logits, which may exceed the tokenizer's length
    max_model_len: int
    num_slots: int  # of the KV storage; slot 0 takes padding, and no request owns it
    max_targets: int | None  # rows of one call of `target_logprobs`; None: any number, in bounded memory
    device: torch.device
    dtype: torch.dtype  # of the logits
    head: HeadSpec | None  # None: the head is the model's own code, and answers come from rows of logits
    pooling_head: HeadInfo | None  # None: a language model. Else `pooled` and `fill` are the only steps it runs
    weights_digest: str  # of all weights as they were loaded (`engine.model.weights_digest`)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    padded_tokens: int  # computed beside those of requests, since start-up
    graph_replays: int  # steps that ran as a captured graph
    prefill_graph_limit: StepSize | None  # the largest prefill or score step that runs as a graph; None: none does
    contexts_built: Future[list[str]] | None  # ends once `share_contexts` does not wait; None: it has nothing to do
    head_watch: Stopwatch | None  # runs since the last layer of the last step of scores, where the model can time it

    def forward(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Runs a step.

        Args:
            kind: The step's kind.
            sequences: The sequences that the step computes.
            token_table: i32 [request slots, length] on the device, for tokens that the host does not know.

        Returns:
            Logits [R, V] of the wanted rows, in order of the sequences; float32, bfloat16 or float16. The caller owns
            them until the next call.
        """
        ...

    def fill(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> None:
        """Computes the keys and values of the new tokens, and no logits."""
        ...

    def label_logits(
        self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        """Returns the columns `labels` [L] of the logits, float32 [R, L]; other columns are not computed where the head
        allows it."""
        ...

    def target_logprobs(
        self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor, query: LogprobQuery
    ) -> RowLogprobs:
        """Returns the log-probabilities that `query` names, of the R rows, as tensors on the device."""
        ...

    def pooled(self, kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
        """Returns the pooling head's numbers of the wanted rows, float32 [R, K]."""
        ...

    def decode_graphs(self) -> DecodeGraphs | None:
        """Returns the captured decode steps of a warmed-up model, from which a caller makes graphs of its own; None
        where there are none."""
        ...

    def warm_up(self, progress: StartupProgress) -> None:
        """Compiles and captures what start-up should pay for; reports each stage."""
        ...

    def capture_next(self) -> bool:
        """Captures one size of steps as a CUDA graph that `warm_up` has left for later; returns False where none is
        left. Raises what capturing raises; steps then run as before."""
        ...

    def share_contexts(self) -> None:
        """Waits for `contexts_built`, and has steps attend to shared contexts once for all of their sequences. Raises
        what went wrong; steps then run as before."""
        ...
