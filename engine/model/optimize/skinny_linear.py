"""Linear layers of captured steps of few rows: products by a kernel that reads each weight once, at the memory's speed.

`use_skinny_linears` makes a model's linear layers, its head and its gated MLPs such. They multiply as before, by the
same code, but inside `skinny_step`, which a `CapturedStep` of up to 16 rows runs in. Compiled layers are compiled once
more there: the compiler guards what `skinny_step` sets. The kernel sums a row in one order however many rows there are,
so that all those steps, plain, draft and verify, multiply a token alike.

Compiled layers of such steps have fewer kernels beside the products, too (`engine/model/optimize/fusion_passes.py`).

The choice costs a step that is not captured nothing but that guard: prefill, scores and wide decode steps keep the
library's products, which win where weights are read for many rows.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from engine.model.optimize.fused_projections import FusedOutput
from engine.utils.torch_ops import operation

MAX_ROWS = 16  # what the kernel multiplies at once
HALVES = (torch.bfloat16, torch.float16)
DIVISOR = 16  # of a weight's rows: they are copied 16 bytes at a time, and the kernel is compiled to know it
TRIED_ROWS = 16
TOLERANCE = 5e-2  # of a row's largest number, in half precision
_few = False  # of the process: a start-up captures before anything else runs; steps beside it would be right too


@contextmanager
def skinny_step(rows: int) -> Iterator[None]:
    """Steps of this process inside have so many rows; with up to `MOST_ROWS`, narrow layers are computed as such."""
    global _few
    before, _few = _few, rows <= MAX_ROWS
    try:
        yield
    finally:
        _few = before


class SkinnyLinear(nn.Linear):
    """A linear layer that is asked for few rows at times."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if _few:
            out: torch.Tensor = torch.ops.assay.skinny_gemm(hidden, self.weight, self.bias, False)
            return out
        return super().forward(hidden)


class SkinnyMlp(nn.Module):
    """An MLP, down(silu(gate(x)) * up(x)) with gate and up merged: few rows take two kernels, others its own way."""

    def __init__(self, own: nn.Module, down: nn.Module, whole: nn.Linear) -> None:
        super().__init__()
        self.own, self.down, self.whole = own, down, whole

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if _few:
            gated = torch.ops.assay.skinny_gemm(hidden, self.whole.weight, self.whole.bias, True)
            out: torch.Tensor = self.down(gated)
            return out
        own: torch.Tensor = self.own(hidden)
        return own


def _product_shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


@operation(
    "skinny_gemm(Tensor x, Tensor weight, Tensor? bias, bool gated, Tensor? residual=None) -> Tensor", _product_shape
)
def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., N] of x [..., K]; `engine.kernels.skinny_gemm` says how."""
    from engine.kernels.skinny_gemm import skinny_gemm  # Triton is no part of a CPU's installation

    return skinny_gemm(x, weight, bias, gated=gated, residual=residual)


@torch.no_grad()
def use_skinny_linears(parts: Sequence[nn.Module]) -> int:
    """Makes what can be narrow of these parts of a model so, in place; how many linear layers that were.

    Those that are nothing more, in half precision, over rows of a multiple of 16; beside them MLPs of merged
    projections that look like `SkinnyMlp` and, tried, give what it gives. A packing check in `skinny_step` proves it.
    """
    linears = {one for part in parts for one in part.modules() if type(one) is nn.Linear and _fits(one)}
    for linear in linears:
        linear.__class__ = SkinnyLinear  # the same module, with its weight, its hooks and its places in the model
    inside = {one for part in parts for one in part.modules()}
    for parent in inside:
        for name, child in list(parent.named_children()):
            narrow = _skinny_mlp(child)
            if narrow is not None and _alike(narrow):
                setattr(parent, name, narrow)
    return len(linears)


def _fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in HALVES and weight.is_contiguous() and linear.in_features % DIVISOR == 0


def _skinny_mlp(mlp: nn.Module) -> SkinnyMlp | None:
    """Of what has the parts of such an MLP and takes one argument."""
    gate, up, down = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, FusedOutput) and isinstance(up, FusedOutput) and isinstance(down, nn.Module)):
        return None
    activation = isinstance(getattr(mlp, "act_fn", None), nn.SiLU | SiLUActivation)
    whole = gate.whole.linear
    ordered = gate.whole is up.whole and (gate.index, up.index) == (0, 1) and len(set(gate.whole.sizes)) == 1
    alone = len(inspect.signature(mlp.forward).parameters) == 1
    return SkinnyMlp(mlp, down, whole) if activation and ordered and alone and isinstance(whole, SkinnyLinear) else None


def _alike(mlp: SkinnyMlp) -> bool:
    """Whether small and large rows go through it as through its own code: a limit or a scale of it would show."""
    weight = mlp.whole.weight
    generator = torch.Generator().manual_seed(0)
    tried = torch.randn((1, TRIED_ROWS, weight.shape[1]), generator=generator)
    tried = (tried * torch.logspace(-4, 4, TRIED_ROWS, base=2.0)[:, None]).to(weight.device, weight.dtype)
    own: torch.Tensor = mlp.own(tried)
    both = F.linear(tried, weight, mlp.whole.bias).float()
    gate, up = both.chunk(2, dim=-1)
    found: torch.Tensor = mlp.down((F.silu(gate) * up).to(tried.dtype))
    if own.shape != found.shape:
        return False
    apart = (found.float() - own.float()).abs().amax(-1) / own.float().abs().amax(-1).clamp(min=1e-30)
    return bool((apart <= TOLERANCE).all())
