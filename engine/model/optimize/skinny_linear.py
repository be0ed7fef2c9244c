"""Replaces linear layers in captured steps of few rows by a kernel that reads each weight once (skinny GEMM).

Gain: at 2 rows of the 0.6B shape the attention's output takes 4.0 us where the library takes 12.8, and the MLP's down
projection 4.8 where it takes 7.4; others are equal or a little faster (`benchmarks/results/skinny-gemm.json`). The
kernel sums a row in one order however many rows there are, so that decode, verify and draft steps multiply a token
alike. Switch: `engine.skinny_gemm`.

`use_skinny_linears` changes a model's linear layers, its head and its gated MLPs. They use the kernel inside
`skinny_step` alone, which a `CapturedStep` of up to 16 rows runs in; compiled layers have one more variant there, since
the compiler guards what `skinny_step` sets. All other steps keep the library's products, which win for many rows.
`engine.model.optimize.fusion_passes` joins what stands beside the products in such steps.
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

MAX_ROWS = 16  # what the kernel multiplies in one pass over the weight
HALVES = (torch.bfloat16, torch.float16)
DIVISOR = 16  # of a weight's width: rows are copied 16 bytes at a time, and the kernel is compiled to know it
TRIED_ROWS = 16
TOLERANCE = 5e-2  # of a row's largest number, in half precision
_few = False  # of the process: start-up captures before anything else runs, and steps beside it would be right too


@contextmanager
def skinny_step(rows: int) -> Iterator[None]:
    """Runs steps of `rows` rows inside; with up to `MAX_ROWS` the changed layers use the kernel."""
    global _few
    before, _few = _few, rows <= MAX_ROWS
    try:
        yield
    finally:
        _few = before


def in_skinny_step() -> bool:
    """Returns whether the changed layers use the kernel now."""
    return _few


class SkinnyLinear(nn.Linear):
    """Computes a linear layer, by the skinny GEMM inside `skinny_step`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if _few:
            out: torch.Tensor = torch.ops.assay.skinny_gemm(hidden, self.weight, self.bias, False)
            return out
        return super().forward(hidden)


class SkinnyMlp(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), gate and up being fused: by two kernels inside `skinny_step`, else by the
    model's own code."""

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
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, *_: object
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
    """Returns [..., N] of x [..., K]; see `engine.kernels.skinny_gemm`."""
    from engine.kernels.skinny_gemm import skinny_gemm  # Triton is no part of a CPU's installation

    return skinny_gemm(x, weight, bias, gated=gated, residual=residual)


@torch.no_grad()
def use_skinny_linears(parts: Sequence[nn.Module]) -> int:
    """Makes these parts of a model use the skinny GEMM where they can, in place.

    Plain linear layers in half precision whose width is a multiple of 16 can; so can MLPs of fused projections that
    look like `SkinnyMlp` and, when tried, give what it gives. A packing check inside `skinny_step` proves the rest.

    Returns:
        The number of linear layers that it has changed.
    """
    linears = {one for part in parts for one in part.modules() if type(one) is nn.Linear and _fits(one)}
    for linear in linears:
        linear.__class__ = SkinnyLinear  # the same module, with its weight, its hooks and its places in the model
    inside = {one for part in parts for one in part.modules()}
    for parent in inside:
        for name, child in list(parent.named_children()):
            skinny = _skinny_mlp(child)
            if skinny is not None and _alike(skinny):
                setattr(parent, name, skinny)
    return len(linears)


def _fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in HALVES and weight.is_contiguous() and linear.in_features % DIVISOR == 0


def _skinny_mlp(mlp: nn.Module) -> SkinnyMlp | None:
    """Returns a `SkinnyMlp` for a module that has the parts of such an MLP and takes one argument."""
    gate, up, down = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, FusedOutput) and isinstance(up, FusedOutput) and isinstance(down, nn.Module)):
        return None
    activation = isinstance(getattr(mlp, "act_fn", None), nn.SiLU | SiLUActivation)
    whole = gate.whole.linear
    ordered = gate.whole is up.whole and (gate.index, up.index) == (0, 1) and len(set(gate.whole.sizes)) == 1
    unary = len(inspect.signature(mlp.forward).parameters) == 1
    return SkinnyMlp(mlp, down, whole) if activation and ordered and unary and isinstance(whole, SkinnyLinear) else None


def _alike(mlp: SkinnyMlp) -> bool:
    """Returns whether rows of small and of large numbers pass it as they pass the model's own code, in which a limit or
    a scale would show."""
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
