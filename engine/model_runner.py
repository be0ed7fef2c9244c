"""One step on the device: forward, sample or score, and the results on their way to the host."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.input_batch import StepKind
from engine.batch.transfer import ToHost
from engine.config import SpeculationConfig
from engine.model.interface import CausalLM
from engine.model.lm_head import LogprobQuery, RowLogprobs, TargetsToHost
from engine.requests import Int32s
from engine.sampler_interface import Fetched, RowSampler
from engine.scheduler.request_state import LabelScoring, Likelihood, RequestTable
from engine.scheduler.score_batcher import ScorePart
from engine.scheduler.step import Step, decode_sequences
from engine.spec_decode.proposer import DraftRows, Proposer
from engine.spec_decode.verify import verify_sequences, write_tokens
from engine.utils.cuda import Stopwatch
from gpu_sampler.logprobs import chosen_logprobs, label_logprobs
from gpu_sampler.output import SampleOutput, VerifyOutput


class Launched(NamedTuple):
    """A step in flight."""

    step: Step
    sampled: Fetched[SampleOutput] | None = None
    scores: ToHost | None = None  # f32 [R, L] of all parts' rows, L the most labels of a part
    targets: TargetsToHost | None = None  # of all parts' rows
    verified: Fetched[VerifyOutput] | None = None
    drafting: Stopwatch | None = None
    head: Stopwatch | None = None  # of a step of scores: from the last layer to the rows' answers


class Launcher:
    def __init__(
        self,
        model: CausalLM,
        sampler: RowSampler,
        table: RequestTable,
        speculation: SpeculationConfig,
        proposer: Proposer | None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._table = table
        self._rules = speculation.rules
        self._proposer = proposer

    def launch(self, step: Step) -> Launched:
        if step.kind is StepKind.SCORE:
            return self._score(step)
        if step.kind is StepKind.VERIFY and self._proposer is not None:
            return self._verify(step, self._proposer)
        logits = self._model.forward(step.kind, step.sequences, self._table.token_table)
        if step.kind is StepKind.PREFILL and self._proposer is not None:
            self._proposer.prefill(step.sequences)
        return self._sample(step, logits)

    def _sample(self, step: Step, logits: torch.Tensor) -> Launched:
        if not step.requests:
            return Launched(step)
        out = self._sampler.sample(logits, step.slots)
        self._write_tokens(step, out.tokens)
        return Launched(step, self._sampler.fetch(out))

    def _verify(self, step: Step, proposer: Proposer) -> Launched:
        """Drafts, then one forward over all of them. A step for which nobody drafts anything is a decode step."""
        watch = Stopwatch(self._model.device)
        proposal = proposer.propose(DraftRows(step.slots, step.positions, step.most_drafts))
        watch.stop()
        step.drafts = proposer.lengths(step.slots)
        table = self._table
        if not step.drafts.any():
            step.kind = StepKind.DECODE
            decode_sequences(step, table)
            launched = self._sample(step, self._model.forward(step.kind, step.sequences, table.token_table))
            return launched._replace(drafting=watch)
        step.missing_q = proposer.missing(step.slots)
        step.tokens += int(step.drafts.sum())
        step.sequences = verify_sequences(table, step.slots, step.positions, step.drafts)
        logits = self._model.forward(step.kind, step.sequences, table.token_table)
        out = self._sampler.verify(logits, step.slots, proposal, self._rules)
        verified = self._sampler.fetch(out)  # first: the next step waits for it
        write_tokens(table, step.slots, step.positions, step.drafts, out.tokens)
        return Launched(step, verified=verified, drafting=watch)

    def _score(self, step: Step) -> Launched:
        if isinstance(step.parts[0].work, Likelihood):
            found = self._targets(step)
            head = self._stop_head()
            return Launched(step, targets=TargetsToHost(found), head=head)
        scores = self._scores(step)
        head = self._stop_head()
        return Launched(step, scores=ToHost(scores), head=head)

    def _stop_head(self) -> Stopwatch | None:
        watch = self._model.head_watch
        if watch is not None:
            watch.stop()
        return watch

    def _scores(self, step: Step) -> torch.Tensor:
        """All rows at once: a step of many small jobs costs no more launches than one of a large job."""
        rows = sum(part.size for part in step.parts)
        table = self._table.token_table
        job = _labels(step.parts[0]).job
        if rows == 0 or job.full:
            logits = self._model.forward(step.kind, step.sequences, table)
            return scored_rows(logits, _labels_of_rows(step), True)
        logits = self._model.label_logits(step.kind, step.sequences, table, job.labels)
        return scored_rows(logits, np.arange(len(job.labels)), False)

    def _targets(self, step: Step) -> RowLogprobs:
        """The head's answers, all rows at once."""
        parts = [(part, part.work) for part in step.parts if isinstance(part.work, Likelihood)]
        targets = [work.targets[part.first : part.first + part.size] for part, work in parts]
        chosen = _filled([work.job.chosen for _, work in parts], [part.size for part, _ in parts])
        asked = LogprobQuery(np.concatenate(targets).astype(np.int64), max(work.job.top for _, work in parts), chosen)
        found = self._model.target_logprobs(step.kind, step.sequences, self._table.token_table, asked)
        if self._proposer is not None and any(work.job.keep for _, work in parts):
            self._proposer.prefill(step.sequences)  # what stays is for generations to find
        return found

    def _write_tokens(self, step: Step, tokens: object) -> None:
        """The device's own copy of what was sampled, where the next step finds it."""
        device = self._model.device
        new = torch.as_tensor(tokens).to(device=device, dtype=torch.int32).clamp(min=0)
        at = torch.from_numpy(np.stack((step.slots, step.positions)))
        if device.type == "cuda":
            at = at.pin_memory().to(device, non_blocking=True)
        self._table.token_table.index_put_((at[0], at[1]), new)


def _labels_of_rows(step: Step) -> npt.NDArray[np.int64]:
    """i64 [R, L]: each row's own labels."""
    return _filled([_labels(part).job.labels for part in step.parts], [part.size for part in step.parts])


def _labels(part: ScorePart) -> LabelScoring:
    if not isinstance(part.work, LabelScoring):
        raise TypeError(f"a {type(part.work).__name__} stands in a step of labels")
    return part.work


def _filled(lists: list[Int32s], sizes: list[int]) -> npt.NDArray[np.int64]:
    """i64 [R, L]: list i for `sizes[i]` rows, L the longest list; shorter ones are filled up with id 0."""
    filled = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for row, ids in zip(filled, lists, strict=True):
        row[: len(ids)] = ids
    return np.repeat(filled, sizes, axis=0)


def scored_rows(logits: torch.Tensor, labels: npt.NDArray[np.int64], full: bool) -> torch.Tensor:
    """f32 [R, L] as the sampler's ops give it at labels [R, L] (`full`) or among the columns [L], but a row with any
    flag is NaN throughout: it has no scores."""
    columns = torch.from_numpy(labels).to(logits.device, non_blocking=True)  # a plain copy would wait for the step
    found = chosen_logprobs(logits, columns) if full else label_logprobs(logits, columns, full=False)
    unsound = (found.flags != 0)[:, None]
    scores: torch.Tensor = found.logprobs.masked_fill(unsound, torch.nan)
    return scores
