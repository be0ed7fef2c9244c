"""Fuses projections that read the same input: q, k and v become one matrix product, and so do gate and up.

Gain: three products of a layer become one launch, and two become another. On a CPU, where a launch costs little, the
fused ones are slower: 16 rows of a 0.1B model decode in 75 ms, apart in 70. Results are bit for bit the same
(`tests/engine/model/test_fused_projections.py`). Switch: `engine.fuse_projections`.

A `FusedLinear` holds the concatenated weight; a `FusedOutput` stands where each projection stood. The first computes
the product and leaves the split, the last takes its share and drops the rest. Models call them in this order, which the
packing check proves afterwards. Three views of one linear would not do: a compiler sees three products again.
"""

from collections.abc import Sequence

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Module):
    """Computes several linears over one input as one: weight [sum of outs, in], bias [sum of outs] or None."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in linears]
        biased = linears[0].bias is not None
        self.linear = nn.Linear(linears[0].in_features, sum(self.sizes), bias=biased, device="meta")
        self.linear.weight = _concatenated([one.weight for one in linears])
        if biased:
            self.linear.bias = _concatenated([one.bias for one in linears])
        self.left: tuple[torch.Tensor, ...] = ()


class FusedOutput(nn.Module):
    """Gives output `index` of a `FusedLinear`. Its outputs must be called in order, each once, with the same input."""

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


def _concatenated(tensors: Sequence[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([one.detach() for one in tensors]), requires_grad=False)


def fuse_projections(module: nn.Module) -> int:
    """Fuses every group of projections that can be, in place.

    It fuses one group at a time, so that little memory is held twice.

    Returns:
        The number of groups that it has fused.
    """
    fused = 0
    for parent in list(module.modules()):
        for names in GROUPS:
            linears = [getattr(parent, name, None) for name in names]
            if _can_fuse(linears):
                whole = FusedLinear([one for one in linears if one is not None])
                for index, name in enumerate(names):
                    setattr(parent, name, FusedOutput(whole, index))
                fused += 1
    return fused


def _can_fuse(linears: Sequence[nn.Module | None]) -> bool:
    plain = [one for one in linears if type(one) is nn.Linear]  # a subclass may do more than multiply
    if len(plain) != len(linears):
        return False
    alike = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in plain}
    return len(alike) == 1
