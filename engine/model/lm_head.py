"""Turns packed steps into rows of logits, and blocks of logits into log-probabilities of given next tokens.

Where `engine.model.optimize.last_layer` wraps a module in `WantedRows`, it runs for the rows that the head reads alone.

The rows of a long prompt are computed in blocks, so that their logits never stand in memory together.

Shape legend: R rows, V vocabulary, H hidden size, L labels, T top tokens, C chosen ids.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.attention.interface import AttentionStep, forward_context, wanted_rows
from engine.batch.input_batch import InputBatch
from engine.model.optimize.skinny_linear import in_skinny_step
from engine.utils.torch_ops import operation
from gpu_sampler.logprobs import chosen_logprobs, token_logprobs, topk_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Describes a head: logits = cap(scale (hidden weight^T + bias)), where cap(x) = softcap tanh(x / softcap), or x
    where softcap is 0."""

    weight: torch.Tensor  # [V, hidden]
    bias: torch.Tensor | None  # [V]
    scale: float
    softcap: float
    divisor: float | None = None  # 1 / scale, of a model that divides by it: a product rounds in another way
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = torch.nn.functional.linear

    def columns(self, hidden_RH: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
        """Returns logits f32 [R, L]. Products are summed in float32: no column is rounded to the model's dtype."""
        rows = hidden_RH.float() @ self.weight[labels_L].float().T
        if self.bias is not None:
            rows = rows + self.bias[labels_L].float()
        return self.capped(rows)

    def rows(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] in the model's dtype, as the model itself computes them."""
        return self.capped(self.linear(hidden_RH, self.weight, self.bias))

    def write_rows(self, hidden_RH: torch.Tensor, out_RV: torch.Tensor) -> None:
        """Writes what `rows` returns to `out_RV`, directly where the products are the logits."""
        if self.divisor is not None or self.scale != 1 or self.softcap or not self.write_products(hidden_RH, out_RV):
            out_RV.copy_(self.rows(hidden_RH))

    def write_products(self, hidden_RH: torch.Tensor, out_RV: torch.Tensor) -> bool:
        """Writes hidden weight^T + bias to `out_RV`; returns False where that would not be what `linear` gives."""
        if self.linear is not torch.nn.functional.linear or not out_RV.dtype == hidden_RH.dtype == self.weight.dtype:
            return False
        if self.bias is None:
            torch.mm(hidden_RH, self.weight.T, out=out_RV)
        else:
            torch.addmm(self.bias, hidden_RH, self.weight.T, out=out_RV)
        return True

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the products after scale and soft cap, in their dtype."""
        if self.divisor is not None:
            logits = logits / self.divisor
        elif self.scale != 1:
            logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


class WantedRows(nn.Module):
    """Runs `inner`, which must compute each token by itself, for the rows that the running step wants.

    It maps [1, T, in] to [1, T, out], zero in all other rows. A step that names no wanted rows gets all.
    """

    def __init__(self, inner: nn.Module, out_features: int) -> None:
        super().__init__()
        self.inner = inner
        self.out_features = out_features
        self.number = _numbered(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.rows(hidden)
        out: torch.Tensor
        if in_skinny_step():  # captured, so every row is wanted: its products are joined with what stands beside them
            out = self.inner(hidden)
        else:  # compiled code must not depend on the rows
            out = torch.ops.assay.wanted_rows(hidden, self.number, self.out_features)
        return out

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        wanted = wanted_rows()
        if wanted is None or len(wanted) >= hidden.shape[1]:
            made: torch.Tensor = self.inner(hidden)
            return made
        out = hidden.new_zeros((*hidden.shape[:-1], self.out_features))
        if len(wanted):
            out[0].index_copy_(0, wanted, self.inner(hidden[:, wanted])[0])
        return out


_modules: "weakref.WeakValueDictionary[int, WantedRows]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _numbered(module: WantedRows) -> int:
    """Returns a number that stands for the module, since a torch op takes no Python objects."""
    with _lock:
        number = max(_modules, default=0) + 1
        _modules[number] = module
    return number


def _rows_shape(hidden: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return hidden.new_empty((*hidden.shape[:-1], out_features))


@operation("wanted_rows(Tensor hidden, int number, int out_features) -> Tensor", _rows_shape)
def _wanted_rows(hidden: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return _modules[number].rows(hidden)


def full_rows(module: Any, step: AttentionStep, batch: InputBatch) -> torch.Tensor:
    """Returns logits [R, V] of the batch's wanted rows by the model's own head."""
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
    """Returns the rows [R, H] that the head reads."""
    with forward_context(step, batch.keep_rows):
        out = module.base_model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state[0, batch.keep_rows]
    return hidden


def output_rows(module: Any, step: AttentionStep, batch: InputBatch) -> torch.Tensor:
    """Returns what the model's own head makes of the wanted rows, or the hidden rows of a model without a head."""
    return (hidden_rows if module.base_model is module else full_rows)(module, step, batch)


MAX_LOGITS = 160_000_000  # elements of a block on a GPU: 1,024 rows of 152k
MAX_LOGITS_CPU = 4_000_000  # the CPU's arithmetic is in float64 and makes copies


class LogprobQuery(NamedTuple):
    """Names the log-probabilities that R rows of logits are read for."""

    targets: npt.NDArray[np.int64]  # [R]
    top: int  # T, the most probable tokens
    chosen: npt.NDArray[np.int64]  # [R, C]

    @property
    def targets_only(self) -> bool:
        """Whether it names targets and nothing else, so that a fused head can answer."""
        return not self.top and not self.chosen.shape[1]


class RowLogprobs(NamedTuple):
    """Holds log-probabilities of R rows: tensors on the model's device, or numpy arrays on the host."""

    logprobs: Any  # f32 [R]
    ranks: Any  # i32 [R]
    greedy: Any  # bool [R]
    flags: Any  # i32 [R], RowFlag
    top_ids: Any  # i32 [R, T]
    top_logprobs: Any  # f32 [R, T]
    chosen: Any  # f32 [R, C]

    @classmethod
    def blank(cls, rows: int, top: int, chosen: int) -> "RowLogprobs":
        """Returns arrays on the host, to be filled in."""
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
    """Returns how many rows of logits a block has."""
    return max(1, (MAX_LOGITS_CPU if device.type == "cpu" else MAX_LOGITS) // vocab_size)


def logprobs_of_blocks(blocks: Iterable[torch.Tensor], query: LogprobQuery) -> RowLogprobs:
    """Returns the log-probabilities of consecutive blocks of logits [*, V], at least one, together R rows."""
    parts, at = [], 0
    for logits in blocks:
        rows = slice(at, at + len(logits))
        parts.append(_of_logits(logits, LogprobQuery(query.targets[rows], query.top, query.chosen[rows])))
        at += len(logits)
    return parts[0] if len(parts) == 1 else RowLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _of_logits(logits: torch.Tensor, query: LogprobQuery) -> RowLogprobs:
    """Returns the log-probabilities of one block. All come from the same logits in the same way, so that a token has
    one log-probability wherever it is reported."""
    targets = torch.from_numpy(query.targets).to(logits.device, non_blocking=True)
    own, flags, ranks = token_logprobs(logits, targets)
    listed = torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device), own[:, :0]
    top_ids, top_logprobs = topk_logprobs(logits, query.top) if query.top else listed
    ids = torch.from_numpy(query.chosen).to(logits.device, non_blocking=True)
    return RowLogprobs(
        logprobs=own[:, 0],
        ranks=ranks,
        greedy=logits.gather(1, targets[:, None])[:, 0] == logits.amax(1),
        flags=flags,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        chosen=chosen_logprobs(logits, ids)[0] if query.chosen.shape[1] else own[:, :0],
    )


class ToHost:
    """Starts copying a tensor to the host; `result` waits for it. On the CPU it copies nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = tensor

    def result(self) -> npt.NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class TargetsToHost:
    """Starts copying log-probabilities to the host; `result` waits for them."""

    def __init__(self, found: RowLogprobs) -> None:
        self._columns = [ToHost(column) for column in found]

    def result(self) -> RowLogprobs:
        """Returns them as numpy arrays."""
        return RowLogprobs(*(column.result() for column in self._columns))
