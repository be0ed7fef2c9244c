"""Log-probabilities of given next tokens, from blocks of logits: never all rows of a long prompt at once.

Shape legend: R rows, V vocabulary, T first tokens of the order, C chosen ids.

How a packed step becomes rows: through the model's own head, or through columns of it where those were proven.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.interface import AttentionStep, forward_context
from engine.batch.input_batch import InputBatch
from engine.batch.transfer import ToHost
from gpu_sampler.logprobs import chosen_logprobs, token_logprobs, topk_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """logits = cap(scale * (hidden @ weight^T + bias)), where cap(x) is softcap * tanh(x / softcap), or x if 0."""

    weight: torch.Tensor  # [V, hidden]
    bias: torch.Tensor | None  # [V]
    scale: float
    softcap: float

    def columns(self, hidden_RH: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
        """f32 [R, L]. Products are summed in float32, so no column is rounded to the model's dtype on the way."""
        rows = hidden_RH.float() @ self.weight[labels_L].float().T
        if self.bias is not None:
            rows = rows + self.bias[labels_L].float()
        rows = rows * self.scale
        return self.softcap * torch.tanh(rows / self.softcap) if self.softcap else rows

    def rows(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """[R, V] in the model's dtype, as the model itself computes them."""
        logits = torch.nn.functional.linear(hidden_RH, self.weight, self.bias) * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def full_rows(module: Any, step: AttentionStep, batch: InputBatch) -> torch.Tensor:
    """The model's own logits [R, V] of the batch's kept rows, so that whatever its head does is done."""
    with forward_context(step, batch.keep_rows):
        out = module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.keep_rows,
        )
    logits: torch.Tensor = out.logits[0]
    return logits


def hidden_rows(module: Any, step: AttentionStep, batch: InputBatch) -> torch.Tensor:
    """The rows [R, hidden] that the head would read."""
    with forward_context(step, batch.keep_rows):
        out = module.base_model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state[0, batch.keep_rows]
    return hidden


MAX_LOGITS = 160_000_000  # elements at once on a device: 1,024 rows of 152k
MAX_LOGITS_CPU = 4_000_000  # the CPU's arithmetic is in float64 and makes copies


class LogprobQuery(NamedTuple):
    """What is asked of R rows of logits."""

    targets: npt.NDArray[np.int64]  # [R]
    top: int  # T
    chosen: npt.NDArray[np.int64]  # [R, C]

    @property
    def alone(self) -> bool:
        """Nothing but the targets: a fused head may answer."""
        return not self.top and not self.chosen.shape[1]


class TargetLogprobs(NamedTuple):
    """Tensors on the model's device, or numpy arrays on the host."""

    logprobs: Any  # f32 [R]
    ranks: Any  # i32 [R]
    greedy: Any  # bool [R]
    flags: Any  # i32 [R], RowFlag
    top_ids: Any  # i32 [R, T]
    top_logprobs: Any  # f32 [R, T]
    chosen: Any  # f32 [R, C]

    @classmethod
    def blank(cls, rows: int, top: int, chosen: int) -> "TargetLogprobs":
        """On the host, to be filled in."""
        return cls(
            logprobs=np.full(rows, np.nan, np.float32),
            ranks=np.zeros(rows, np.int32),
            greedy=np.zeros(rows, np.bool_),
            flags=np.zeros(rows, np.int32),
            top_ids=np.full((rows, top), -1, np.int32),
            top_logprobs=np.full((rows, top), -np.inf, np.float32),
            chosen=np.full((rows, chosen), -np.inf, np.float32),
        )


def block_rows(device: torch.device, vocab_size: int) -> int:
    """Rows of logits that may stand in memory at once."""
    return max(1, (MAX_LOGITS_CPU if device.type == "cpu" else MAX_LOGITS) // vocab_size)


def of_blocks(blocks: Iterable[torch.Tensor], asked: LogprobQuery) -> TargetLogprobs:
    """Answers of consecutive blocks of logits [*, V], at least one, together R rows."""
    parts, at = [], 0
    for logits in blocks:
        rows = slice(at, at + len(logits))
        parts.append(_of_logits(logits, LogprobQuery(asked.targets[rows], asked.top, asked.chosen[rows])))
        at += len(logits)
    return parts[0] if len(parts) == 1 else TargetLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _of_logits(logits: torch.Tensor, asked: LogprobQuery) -> TargetLogprobs:
    """All floats come of the same logits in the same way: a token has one log-probability, wherever it is told."""
    targets = torch.from_numpy(asked.targets).to(logits.device, non_blocking=True)
    own, ranks = token_logprobs(logits, targets)
    listed = torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device), own.logprobs[:, :0]
    top_ids, top_logprobs = topk_logprobs(logits, asked.top) if asked.top else listed
    ids = torch.from_numpy(asked.chosen).to(logits.device, non_blocking=True)
    return TargetLogprobs(
        logprobs=own.logprobs[:, 0],
        ranks=ranks,
        greedy=logits.gather(1, targets[:, None])[:, 0] == logits.amax(1),
        flags=own.flags,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        chosen=chosen_logprobs(logits, ids).logprobs if asked.chosen.shape[1] else own.logprobs[:, :0],
    )


class TargetsToHost:
    """Starts copying; `result` waits."""

    def __init__(self, found: TargetLogprobs) -> None:
        self._columns = [ToHost(column) for column in found]

    def result(self) -> TargetLogprobs:
        """Numpy."""
        return TargetLogprobs(*(column.result() for column in self._columns))
