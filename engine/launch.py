"""One step on the device: forward, sample or score, and the results on their way to the host."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import StepKind
from engine.causal_lm import CausalLM
from engine.requests import RequestTable
from engine.row_sampler import Fetched, RowSampler
from engine.scheduler import Step
from engine.transfer import ToHost
from gpu_sampler.logprobs import label_logprobs


class Launched(NamedTuple):
    """A step in flight."""

    step: Step
    sampled: Fetched | None
    scores: list[ToHost]  # one a part


class Launcher:
    def __init__(self, model: CausalLM, sampler: RowSampler, table: RequestTable) -> None:
        self._model = model
        self._sampler = sampler
        self._table = table

    def launch(self, step: Step) -> Launched:
        if step.kind is StepKind.SCORE:
            return Launched(step, None, self._scores(step))
        logits = self._model.forward(step.kind, step.runs, self._table.token_table)
        if not step.requests:
            return Launched(step, None, [])
        out = self._sampler.sample(logits, step.slots)
        self._write_tokens(step, out.tokens)
        return Launched(step, self._sampler.fetch(out), [])

    def _scores(self, step: Step) -> list[ToHost]:
        rows = sum(part.size for part in step.parts)
        table = self._table.token_table
        job = step.parts[0].work.job
        if rows == 0 or job.full:
            logits = self._model.forward(step.kind, step.runs, table)
        else:
            logits = self._model.label_logits(step.kind, step.runs, table, job.labels)
        scores = []
        for part in step.parts:
            labels = part.work.job.labels.astype(np.int64) if job.full else np.arange(len(job.labels))
            scores.append(ToHost(scored_rows(logits[part.row : part.row + part.size], labels, job.full)))
        return scores

    def _write_tokens(self, step: Step, tokens: object) -> None:
        """The device's own copy of what was sampled, where the next step finds it."""
        device = self._model.device
        new = torch.as_tensor(tokens).to(device=device, dtype=torch.int32).clamp(min=0)
        at = torch.from_numpy(np.stack((step.slots, step.positions)))
        if device.type == "cuda":
            at = at.pin_memory().to(device, non_blocking=True)
        self._table.token_table.index_put_((at[0], at[1]), new)


def scored_rows(logits: torch.Tensor, labels: npt.NDArray[np.int64], full: bool) -> torch.Tensor:
    """f32 [R, L] as `label_logprobs` gives it, but a row with any flag is NaN throughout: it has no scores."""
    columns = torch.from_numpy(labels).to(logits.device, non_blocking=True)  # a plain copy would wait for the step
    found = label_logprobs(logits, columns, full)
    unsound = (found.flags != 0)[:, None]
    scores: torch.Tensor = found.logprobs.masked_fill(unsound, torch.nan)
    return scores
