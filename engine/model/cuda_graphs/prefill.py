"""Captures prefill and score steps of few tokens as CUDA graphs of the model's layers.

Launching the kernels of a step costs the host about the same whatever the step holds, and most where other threads need
the interpreter; below a thousand tokens or so the device waits for it. Gain: the prefill of one prompt of 128 tokens
takes 6.7 ms in place of 30, of the 8B shape (`benchmarks/results/http-load-small-steps.json`). Switch:
`engine.prefill_graph_tokens`.

Graphs exist for a few token counts, some from the start and the others soon after (`cuda_graphs.sizes`); a step is
padded to the next one, by one more sequence over the padding slot. A graph ends before the head, whose rows differ from
step to step, and computes every row of the last layer. Unlike in decode graphs a sequence keeps its tokens together, so
that its context is read once for each tile. Attention takes a fixed number of sequences in a graph, so that empty ones
follow the step's own.
"""

from typing import Any, cast

import torch

from engine.attention.plans import CapturableBackend, GraphBuffers, Sequences
from engine.batch.input_batch import InputBatch, StepKind, StepSequences, StepSize, idle_sequences, pack, size_of
from engine.model.compatibility import ProbedModel
from engine.model.cuda_graphs.decode import CapturedStep, layer_params, recorded
from engine.model.cuda_graphs.sizes import GraphSizes

TOKEN_COUNTS = (32, 64, 128, 256)
COUNT_STEP = 256
TOKENS_A_SEQUENCE = 8  # on average, or more: each sequence that a graph may hold costs idle blocks
MIN_SEQUENCES = 16
MAX_ATTENDED = 1 << 17  # tokens that the sequences of a step attend to together: about what launches cost
STAGING = 1 << 20  # bytes of a plan, which names each tile in 13 bytes and each token in 4


def token_counts(max_tokens: int) -> tuple[int, ...]:
    """Returns the token counts of the graphs, ascending, the largest being `max_tokens`."""
    counts = {count for count in TOKEN_COUNTS if count <= max_tokens}
    return tuple(sorted(counts | set(range(COUNT_STEP, max_tokens + 1, COUNT_STEP)) | {max_tokens}))


class PrefillGraphs:
    """Captures and replays steps of up to `max_tokens` tokens.

    `largest` is the largest step that they take; None where the attention kernels have no room for any.
    """

    def __init__(self, model: ProbedModel, max_tokens: int, memory: Any) -> None:
        """
        Args:
            model: Its backend computes attention, here and in eager steps.
            max_tokens: Tokens of the largest graph.
            memory: From `graph_memory`, for all graphs of the model.
        """
        self._module, self._backend = model.module, cast(CapturableBackend, model.backend)
        self._layer_params, self._memory = layer_params(model), memory
        self._device = self._backend.device
        self._sequences = self._sequences_of_counts(max_tokens)  # of each token count, ascending
        self._steps: dict[int, CapturedStep] = {}
        self._graphs: dict[int, Any] = {}
        self._hidden = torch.empty(0)
        self.largest: StepSize | None = None
        if self._sequences:
            most, sequences = max(self._sequences.items())
            self.largest = StepSize(most, sequences - 1, MAX_ATTENDED)  # one sequence is for padding
            self._front = torch.zeros(3 * most, dtype=torch.int64, device=self._device)
            self._slots = torch.zeros(most, dtype=torch.int32, device=self._device)
            self._queries = torch.zeros(most + 1, dtype=torch.int32, device=self._device)
            self._buffers = GraphBuffers.of(most, MAX_ATTENDED + most, self._device, STAGING)
        self._sizes = GraphSizes(list(self._sequences), self._capture_count)

    def _sequences_of_counts(self, max_tokens: int) -> dict[int, int]:
        """Returns how many sequences the graph of each token count may hold."""
        backend = self._backend
        found = {}
        for count in token_counts(max_tokens):
            fitting = min(backend.graph_sequences(params, count) for params in self._layer_params)
            wanted = min(max(MIN_SEQUENCES, count // TOKENS_A_SEQUENCE), count)
            if fitting >= 2:
                found[count] = min(wanted, fitting)
        return found

    def bucket(self, kind: StepKind, sequences: StepSequences) -> int | None:
        """Returns the token count to pad the step to; None where no graph runs it."""
        if kind not in (StepKind.PREFILL, StepKind.SCORE):
            return None
        size = size_of(sequences)
        if size.attended > MAX_ATTENDED:
            return None
        count = self._sizes.fitting(size.tokens)
        while count is not None and size.sequences >= self._sequences[count]:
            count = self._sizes.fitting(count + 1)
        return count

    def capture_next(self) -> bool:
        """Captures another token count; returns False where all are captured. Raises what capturing raises."""
        return self._sizes.capture_next()

    def replay(self, batch: InputBatch) -> torch.Tensor:
        """Runs a step that was padded to its `bucket`; returns the rows [R, hidden] that the head reads."""
        count = batch.num_tokens
        self._prepare(count, batch)
        self._graphs[count].replay()
        return self._hidden[batch.keep_rows]

    def _prepare(self, count: int, batch: InputBatch) -> None:
        self._front[: 3 * count].copy_(batch.front)
        self._slots[:count].copy_(batch.write_slots_i32)
        self._steps[count].plan_sequences(_filled_up(batch, self._sequences[count]))

    def _capture_count(self, count: int) -> None:
        self._graphs[count] = self._capture(count)

    def _capture(self, count: int) -> Any:
        sequences = self._sequences[count]
        queries = self._queries[: sequences + 1]
        wrappers = {
            params: self._backend.graph_prefiller(params, self._buffers, queries, count)
            for params in self._layer_params
        }
        step = self._steps[count] = CapturedStep(self._module, self._backend, wrappers, count)
        table = torch.zeros((1, 1), dtype=torch.int32, device=self._device)
        self._prepare(count, pack(StepKind.PREFILL, idle_sequences(1, 1), table, self._device, count))
        if not self._graphs:  # the largest comes first
            self._hidden = torch.empty_like(self._rows(step, count))
        return self._record(step, count)

    def _record(self, step: CapturedStep, count: int) -> Any:
        """Returns a graph that replays `_fill`."""
        return recorded(lambda: self._fill(step, count), self._device, self._memory)

    def _fill(self, step: CapturedStep, count: int) -> None:
        self._hidden[:count].copy_(self._rows(step, count))

    def _rows(self, step: CapturedStep, count: int) -> torch.Tensor:
        return step.hidden(self._front[:count], self._front[count : 2 * count], self._slots[:count])


def _filled_up(batch: InputBatch, sequences: int) -> Sequences:
    """Returns the step's sequences, its padding as one more, then empty ones: `sequences` in all."""
    own = len(batch.qo_indptr) - batch.padding
    pinned = batch.ids.device.type == "cuda"
    both = torch.empty((2, sequences + 1), dtype=torch.int32, pin_memory=pinned)
    for ends, given in zip(both.numpy(), (batch.qo_indptr.numpy(), batch.kv_indptr.numpy()), strict=True):
        ends[:own], ends[own:] = given[:own], given[-1]
    return Sequences(both[0], both[1], batch.kv_indices, causal=True)
