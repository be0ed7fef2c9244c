"""ModelRunner: runs one step on the device: forward, then sample, verify or score, and the copy to the host."""

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.input_batch import StepKind
from engine.config import EngineConfig
from engine.metrics import Stopwatch
from engine.model.interface import CausalLM
from engine.model.lm_head import LogprobQuery, RowLogprobs, TargetsToHost, ToHost
from engine.requests import Int32s
from engine.scheduler.request_state import LabelScoreState, LikelihoodState, PoolingState, RequestTable
from engine.scheduler.scheduler import Step, decode_sequences
from engine.spec_decode.proposer import DraftRows, Proposer
from engine.spec_decode.verify import verify_sequences, write_tokens
from engine.warmup.background_compile import background_compile_for
from gpu_sampler.logprobs import chosen_logprobs, label_logprobs
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingLimits
from gpu_sampler.startup_progress import StartupProgress, timed


class ModelRunner:
    """Launches steps on the model, the sampler and the proposer. The step thread alone calls `launch`."""

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        table: RequestTable,
        config: EngineConfig,
        proposer: Proposer | None,
    ) -> None:
        self.model = model
        self.proposer = proposer
        self._sampler = sampler
        self._table = table
        self._config = config

    def warm_up(self, progress: StartupProgress) -> None:
        """Compiles and captures, so that no request waits for it. `progress` is given each part as it is done."""
        with background_compile_for(self.model, self._config) as ahead:
            self.model.warm_up(progress)
            ahead.wait(progress)
        if self.model.device.type == "cuda":
            speculation = self._config.speculation
            self._sampler.warm_up(
                self._config.max_running,
                progress,
                drafts=0 if self.proposer is None else speculation.num_speculative_tokens,
                rules=speculation.rules,
                dtype=self.model.dtype,
            )
        if self.proposer is not None:
            self.proposer.warm_up(progress)  # captures what the sampler launches, so it comes after it

    def complete(self, progress: StartupProgress) -> None:
        """Does all that `warm_up` leaves to the time after it."""
        while self.capture_next():
            pass
        if self.model.contexts_built is not None:
            with timed("shared contexts", progress):
                self.model.share_contexts()

    def capture_next(self) -> bool:
        """Captures one CUDA graph that `warm_up` has left for later; returns False where none is left."""
        return self.model.capture_next() or (self.proposer is not None and self.proposer.capture_next())

    def launch(self, step: Step) -> None:
        """Launches a step and sets its `result`. On CUDA it returns before the device has computed it."""
        if step.kind is StepKind.SCORE:
            self._score(step)
        elif step.kind is StepKind.VERIFY and self.proposer is not None:
            self._verify(step, self.proposer)
        else:
            logits = self.model.forward(step.kind, step.sequences, self._table.token_table)
            if step.kind is StepKind.PREFILL and self.proposer is not None:
                self.proposer.prefill(step.sequences)
            self._sample(step, logits)

    def _sample(self, step: Step, logits: torch.Tensor) -> None:
        if step.sampled:
            out = self._sampler.sample(logits, step.slots)
            self._write_tokens(step, out.tokens)
            step.result = self._sampler.fetch(out).result

    def _verify(self, step: Step, proposer: Proposer) -> None:
        """Drafts, then runs one forward over all drafts. A step without any draft becomes a decode step."""
        step.drafting_watch = Stopwatch(self.model.device)
        proposal = proposer.propose(DraftRows(step.slots, step.positions, step.max_drafts))
        step.drafting_watch.stop()
        step.drafts = proposer.lengths(step.slots)
        table = self._table
        if not step.drafts.any():
            step.kind = StepKind.DECODE
            decode_sequences(step, table)
            self._sample(step, self.model.forward(step.kind, step.sequences, table.token_table))
            return
        step.missing_q = proposer.missing(step.slots)
        step.tokens += int(step.drafts.sum())
        step.sequences = verify_sequences(table, step.slots, step.positions, step.drafts)
        logits = self.model.forward(step.kind, step.sequences, table.token_table)
        out = self._sampler.verify(logits, step.slots, proposal, self._config.speculation.rules)
        step.result = self._sampler.fetch(out).result  # first: the next step waits for it
        write_tokens(table, step.slots, step.positions, step.drafts, out.tokens)

    def _score(self, step: Step) -> None:
        first, _ = step.parts[0]
        found: torch.Tensor | RowLogprobs
        if isinstance(first, LikelihoodState):
            found = self._targets(step)
        elif isinstance(first, PoolingState):
            found = self._pooled(step)
        else:
            found = self._label_logprobs(step)
        step.head_watch = self.model.head_watch
        if step.head_watch is not None:
            step.head_watch.stop()
        copied = ToHost(found) if isinstance(found, torch.Tensor) else TargetsToHost(found)
        step.result = copied.result

    def _label_logprobs(self, step: Step) -> torch.Tensor:
        """Scores all rows together: a step of many small requests costs no more launches than one large request."""
        sizes = [len(items) for _, items in step.parts]
        requests = [state.request for state, _ in step.parts if isinstance(state, LabelScoreState)]
        request, table = requests[0], self._table.token_table
        if sum(sizes) == 0 or request.full:
            logits = self.model.forward(step.kind, step.sequences, table)
            return scored_rows(logits, _filled([request.labels for request in requests], sizes))
        logits = self.model.label_logits(step.kind, step.sequences, table, request.labels)
        if request.raw_logits:
            return sound_rows(logits.float())
        return scored_rows(logits, None)

    def _pooled(self, step: Step) -> torch.Tensor:
        """Returns the pooling head's numbers, f32 [R, K]."""
        return sound_rows(self.model.pooled(step.kind, step.sequences, self._table.token_table))

    def _targets(self, step: Step) -> RowLogprobs:
        """Returns the head's answers for the wanted tokens of all rows."""
        parts = [(state, tokens) for state, tokens in step.parts if isinstance(state, LikelihoodState)]
        targets = [state.targets[tokens.start : tokens.stop] for state, tokens in parts]
        chosen = _filled([state.request.chosen for state, _ in parts], [len(tokens) for _, tokens in parts])
        top = max(state.request.top for state, _ in parts)
        asked = LogprobQuery(np.concatenate(targets).astype(np.int64), top, chosen)
        found = self.model.target_logprobs(step.kind, step.sequences, self._table.token_table, asked)
        if self.proposer is not None and any(state.request.keep for state, _ in parts):
            self.proposer.prefill(step.sequences)  # generations may find what stays in the tree
        return found

    def _write_tokens(self, step: Step, tokens: object) -> None:
        """Writes the sampled tokens to the device's token table, where the next step finds them."""
        device, table = self.model.device, self._table.token_table
        if isinstance(tokens, np.ndarray) and device.type == "cpu":
            table.numpy()[step.slots, step.positions] = np.maximum(tokens, 0)
            return
        new = torch.as_tensor(tokens).to(device=device, dtype=torch.int32).clamp(min=0)
        at = torch.from_numpy(np.stack((step.slots, step.positions)))
        if device.type == "cuda":
            at = at.pin_memory().to(device, non_blocking=True)
        table.index_put_((at[0], at[1]), new)


def _filled(lists: list[Int32s], sizes: list[int]) -> npt.NDArray[np.int64]:
    """Repeats list i for `sizes[i]` rows: i64 [R, L], L the longest list; shorter ones are filled up with id 0."""
    filled = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for row, ids in zip(filled, lists, strict=True):
        row[: len(ids)] = ids
    return np.repeat(filled, sizes, axis=0)


def scored_rows(logits: torch.Tensor, labels: npt.NDArray[np.int64] | None) -> torch.Tensor:
    """Returns label log-probabilities, f32 [R, L]. A row with any flag has no scores: it is NaN throughout.

    Args:
        logits: [R, V], or the labels' own [R, L].
        labels: i64 [R, L], the labels of each row, for a softmax over the whole vocabulary; None: it is over the
            labels, whose logits are given alone.
    """
    if labels is None:
        return label_logprobs(logits)
    # A plain copy would wait for the step.
    found, flags = chosen_logprobs(logits, torch.from_numpy(labels).to(logits.device, non_blocking=True))
    unsound = (flags != 0)[:, None]
    scores: torch.Tensor = found.masked_fill(unsound, torch.nan)
    return scores


def sound_rows(values: torch.Tensor) -> torch.Tensor:
    """Returns numbers of a head, f32 [R, K]. A row with one that is not finite is NaN throughout."""
    return values.masked_fill(~values.isfinite().all(dim=1, keepdim=True), torch.nan)


def make_sampler(model: CausalLM, config: EngineConfig, limits: SamplingLimits) -> Sampler:
    """Makes the sampler of an engine, with one slot for each running sequence and the dummy."""
    return Sampler(
        num_slots=config.max_running + 1,
        vocab_size=model.vocab_size,
        device=model.device,
        logprobs_mode=config.sampler.logprobs_mode,
        backend=config.sampler.backend,
        overlay_entries=config.sampler.overlay_entries,
        limits=limits,
    )
