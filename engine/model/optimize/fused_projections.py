"""Merging projections that read the same input: q, k and v, and gate and up, become one matrix product each.

A `Whole` holds the concatenated weight; `Part`s stand where the projections stood. The first part computes the product
and leaves the split, the last hands out its share and drops it. Models call them in this order; the packing check after
merging proves it. Three views of one linear would not do: a compiler sees three products again.
"""

from collections.abc import Sequence

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Module):
    """Several linears over one input as one: weight [sum of outs, in], bias [sum of outs] or None."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in linears]
        biased = linears[0].bias is not None
        self.linear = nn.Linear(linears[0].in_features, sum(self.sizes), bias=biased, device="meta")
        self.linear.weight = _joined([one.weight for one in linears])
        if biased:
            self.linear.bias = _joined([one.bias for one in linears])
        self.left: tuple[torch.Tensor, ...] = ()


class FusedOutput(nn.Module):
    """Output `index` of a Whole. Parts of one Whole must be called in order, each once, with the same input."""

    def __init__(self, whole: FusedLinear, index: int) -> None:
        super().__init__()
        self.whole = whole
        self.index = index
        self.is_last = index == len(whole.sizes) - 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        whole = self.whole
        if self.index == 0:
            whole.left = torch.split(whole.linear(hidden), whole.sizes, dim=-1)
        out = whole.left[self.index]
        if self.is_last:
            whole.left = ()
        return out


def _joined(tensors: Sequence[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([one.detach() for one in tensors]), requires_grad=False)


def fuse_projections(module: nn.Module) -> int:
    """Merges every group that can be, in place, one group at a time so that little memory is held twice. Returns how
    many."""
    merged = 0
    for parent in list(module.modules()):
        for names in GROUPS:
            linears = [getattr(parent, name, None) for name in names]
            if _can_merge(linears):
                whole = FusedLinear([one for one in linears if one is not None])
                for index, name in enumerate(names):
                    setattr(parent, name, FusedOutput(whole, index))
                merged += 1
    return merged


def _can_merge(linears: Sequence[nn.Module | None]) -> bool:
    plain = [one for one in linears if type(one) is nn.Linear]  # a subclass may do more than multiply
    if len(plain) != len(linears):
        return False
    alike = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in plain}
    return len(alike) == 1
