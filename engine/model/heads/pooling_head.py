"""PoolingHead: the layers between hidden states and a head's numbers.

Shape legend: R rows, H hidden size, K numbers of an answer.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from engine.model.heads.info import HeadInfo
from engine.model.heads.row_pooling import Pooling


class PoolingHead(nn.Module):
    """Computes K numbers of each hidden row in float32, whatever the body's dtype: one rounding would reorder scores
    that lie close together."""

    def __init__(self, info: HeadInfo, layers: nn.Module, pooling: Pooling | None = Pooling.LAST) -> None:
        """
        Args:
            info: Describes the numbers.
            layers: Maps f32 [R, H] to f32 [R, K]; its parameters are float32.
            pooling: Names what the head reads of a row. None: every token that is wanted by itself.
        """
        super().__init__()
        self.info = info
        self.pooling = pooling
        self.layers = layers.float().eval().requires_grad_(False)

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Returns f32 [R, K] of hidden rows in the body's dtype."""
        numbers: torch.Tensor = self.layers(hidden_RH.float())
        return numbers


class PoolingModel(NamedTuple):
    """Holds a model of transformers without a head, and the head that reads its hidden states."""

    body: Any
    head: PoolingHead
