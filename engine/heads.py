"""How a packed step becomes rows: through the model's own head, or through columns of it where those were proven."""

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import AttentionStep, running
from engine.batch import Batch


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


def full_rows(module: Any, step: AttentionStep, batch: Batch) -> torch.Tensor:
    """The model's own logits [R, V] of the batch's kept rows, so that whatever its head does is done."""
    with running(step, batch.keep_rows):
        out = module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.keep_rows,
        )
    logits: torch.Tensor = out.logits[0]
    return logits


def hidden_rows(module: Any, step: AttentionStep, batch: Batch) -> torch.Tensor:
    """The rows [R, hidden] that the head would read."""
    with running(step, batch.keep_rows):
        out = module.base_model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state[0, batch.keep_rows]
    return hidden
