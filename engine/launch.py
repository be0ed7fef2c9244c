"""One step on the device: forward, sample or score, and the results on their way to the host."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import StepKind
from engine.causal_lm import CausalLM
from engine.jobs import Int32s
from engine.requests import LabelScoring, Likelihood, RequestTable
from engine.row_sampler import Fetched, RowSampler
from engine.scheduler import Step
from engine.score_steps import ScorePart
from engine.targets import Asked, TargetsToHost
from engine.transfer import ToHost
from gpu_sampler.logprobs import chosen_logprobs, label_logprobs


class Launched(NamedTuple):
    """A step in flight."""

    step: Step
    sampled: Fetched | None
    scores: ToHost | None  # f32 [R, L] of all parts' rows, L the most labels of a part
    targets: TargetsToHost | None = None  # of all parts' rows


class Launcher:
    def __init__(self, model: CausalLM, sampler: RowSampler, table: RequestTable) -> None:
        self._model = model
        self._sampler = sampler
        self._table = table

    def launch(self, step: Step) -> Launched:
        if step.kind is StepKind.SCORE:
            if isinstance(step.parts[0].work, Likelihood):
                return Launched(step, None, None, self._targets(step))
            return Launched(step, None, self._scores(step))
        logits = self._model.forward(step.kind, step.runs, self._table.token_table)
        if not step.requests:
            return Launched(step, None, None)
        out = self._sampler.sample(logits, step.slots)
        self._write_tokens(step, out.tokens)
        return Launched(step, self._sampler.fetch(out), None)

    def _scores(self, step: Step) -> ToHost:
        """All rows at once: a step of many small jobs costs no more launches than one of a large job."""
        rows = sum(part.size for part in step.parts)
        table = self._table.token_table
        job = _labels(step.parts[0]).job
        if rows == 0 or job.full:
            logits = self._model.forward(step.kind, step.runs, table)
            return ToHost(scored_rows(logits, _labels_of_rows(step), True))
        logits = self._model.label_logits(step.kind, step.runs, table, job.labels)
        return ToHost(scored_rows(logits, np.arange(len(job.labels)), False))

    def _targets(self, step: Step) -> TargetsToHost:
        """The head's answers, all rows at once."""
        parts = [(part, part.work) for part in step.parts if isinstance(part.work, Likelihood)]
        targets = [work.targets[part.first : part.first + part.size] for part, work in parts]
        chosen = _filled([work.job.chosen for _, work in parts], [part.size for part, _ in parts])
        asked = Asked(np.concatenate(targets).astype(np.int64), max(work.job.top for _, work in parts), chosen)
        return TargetsToHost(self._model.target_rows(step.kind, step.runs, self._table.token_table, asked))

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
