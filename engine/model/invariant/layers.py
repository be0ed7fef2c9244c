"""Replaces the layers of a model that sum over a row by ones that sum each row alike (`engine.numerics: invariant`).

Linear layers are those of `engine.model.invariant.linear`, root mean square norms are computed by
`engine.kernels.rms_norm`. Elementwise layers, embeddings and torch's LayerNorm, which normalises each row by itself,
stay. The norm in front of the head gives float32, which the head multiplies without rounding it: a float32 tail.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.model.compatibility import UnsupportedModel
from engine.model.heads.pooling_head import PoolingHead
from engine.model.invariant.linear import (
    MOST_COLUMNS,
    InvariantLinear,
    Products,
    make_linear,
    make_linears,
    multiply,
    proven,
)
from engine.model.lm_head import HeadSpec
from engine.utils.torch_ops import operation

TRIED_ROWS = 8
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of a row's largest number
ROWWISE = (nn.Embedding, nn.LayerNorm, nn.Dropout, nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh)


class NormRule(NamedTuple):
    """Says how a model's own code applies the weight of a norm."""

    offset: float  # is added to the weight
    round_first: bool  # the normalised numbers are rounded before the weight multiplies them


RULES = [NormRule(offset, rounds) for offset in (0.0, 1.0) for rounds in (True, False)]


class InvariantRMSNorm(nn.Module):
    """Computes a root mean square norm by the invariant kernel; gives float32 where `exact` is set."""

    def __init__(self, weight: nn.Parameter, eps: float, rule: NormRule) -> None:
        super().__init__()
        self.weight, self.eps, self.rule, self.exact = weight, eps, rule, False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rounds = self.rule.round_first and not self.exact
        out: torch.Tensor = torch.ops.assay.invariant_rms_norm(
            hidden, self.weight, self.eps, self.rule.offset, rounds, self.exact
        )
        return out


def _norm_shape(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool, exact: bool
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32 if exact else x.dtype, device=x.device)


@operation(
    "invariant_rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first, bool exact) -> Tensor",
    _norm_shape,
)
def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool, exact: bool
) -> torch.Tensor:
    """Returns the rows of x, normalised, in float32 if `exact`; see `engine.kernels.rms_norm`."""
    from engine.kernels.rms_norm import rms_norm  # Triton is no part of a CPU's installation

    out = torch.float32 if exact else None
    return rms_norm(x, weight, eps, offset=offset, round_first=round_first, out_dtype=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvariantHead(HeadSpec):
    """Computes rows and columns of logits alike, in float32."""

    products: Products

    def columns(self, hidden_RH: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
        """Returns logits f32 [R, L], each with the bits that `rows` gives it."""
        bias = None if self.bias is None else self.bias[labels_L]
        return self.capped(multiply(hidden_RH, self.weight[labels_L], bias, self.products, exact=True))

    def rows(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Returns logits f32 [R, V]."""
        return self.capped(multiply(hidden_RH, self.weight, self.bias, self.products, exact=True))

    def write_products(self, hidden_RH: torch.Tensor, out_RV: torch.Tensor) -> bool:
        """Writes the products, which have the bits of `rows`; see `HeadSpec`."""
        from engine.kernels.invariant_gemm import invariant_gemm  # Triton is no part of a CPU's installation

        invariant_gemm(hidden_RH, self.weight, self.bias, few=self.products.few, out=out_RV)
        return True


@torch.no_grad()
def make_invariant(module: Any, head: HeadSpec | None, most_rows: int) -> InvariantHead:
    """Replaces the layers of a causal language model, in place, and returns its head.

    Args:
        module: The model, its projections fused or not.
        head: The result of the head check.
        most_rows: The most rows of a step.

    Raises:
        UnsupportedModel: A layer sums over a row in a way that has no invariant kernel.
    """
    if head is None:
        raise UnsupportedModel(type(module).__name__, _refusal("its head is code of its own"))
    own_head = module.get_output_embeddings()
    make_linears([one for one in _linears(module) if one is not own_head], most_rows)
    products = proven(head.weight[:MOST_COLUMNS], None, most_rows, exact=True)
    make_linear(own_head, products)
    _replace_norms(module)
    return InvariantHead(
        weight=head.weight,
        bias=head.bias,
        scale=head.scale,
        softcap=head.softcap,
        divisor=head.divisor,
        products=products,
    )


@torch.no_grad()
def make_pooled_invariant(body: Any, head: PoolingHead, most_rows: int) -> None:
    """Replaces the layers of a model without a head, and those of the head that reads its hidden states, in place.

    Args:
        body: The model, its projections fused or not.
        head: Its head.
        most_rows: The most rows of a step.

    Raises:
        UnsupportedModel: A layer sums over a row in a way that has no invariant kernel.
    """
    for part in (body, head):
        make_linears(_linears(part), most_rows)
    _replace_norms(body)
    _check_layers(type(body).__name__, head)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [one for one in module.modules() if type(one) is nn.Linear]


def _replace_norms(module: Any) -> None:
    """Replaces the norms of a model whose linear layers are replaced; the last one gives float32."""
    architecture = type(module).__name__
    for name, child in list(module.named_modules()):
        if _is_rms_norm(child):
            module.set_submodule(name, _invariant_norm(architecture, name, child))
    _check_layers(architecture, module)
    _make_tail_exact(architecture, module)


def _refusal(reason: str) -> str:
    return f"`engine.numerics: invariant` cannot compute it ({reason}): set it to fast"


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and not isinstance(module, InvariantRMSNorm)


def _invariant_norm(architecture: str, name: str, norm: Any) -> InvariantRMSNorm:
    """Returns a norm that gives what the model's own gives, by the rule that comes closest on tried rows."""
    weight = getattr(norm, "weight", None)
    eps = next((getattr(norm, key) for key in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, key)), None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        raise UnsupportedModel(architecture, _refusal(f"{name} is a norm without a weight or an epsilon"))
    generator = torch.Generator().manual_seed(0)
    tried = torch.randn((1, TRIED_ROWS, len(weight)), generator=generator).to(weight.device, weight.dtype)
    own = norm(tried).float()
    candidates = [InvariantRMSNorm(weight, eps, rule) for rule in RULES]
    apart = [float((one(tried).float() - own).abs().max()) for one in candidates]
    best = min(range(len(RULES)), key=apart.__getitem__)
    if not apart[best] <= TOLERANCES[weight.dtype] * float(own.abs().max()):
        raise UnsupportedModel(architecture, _refusal(f"{name} is a norm of another kind"))
    return candidates[best]


def _check_layers(architecture: str, module: nn.Module) -> None:
    """Refuses layers with parameters of their own that are neither replaced nor known to compute each row by itself."""
    for name, child in module.named_modules():
        known = isinstance(child, (InvariantLinear, InvariantRMSNorm, *ROWWISE))
        own = [key for key, _ in child.named_parameters(recurse=False)]
        if own and not known and own != ["sinks"]:
            raise UnsupportedModel(architecture, _refusal(f"{name} ({type(child).__name__}) sums by code of its own"))


def _make_tail_exact(architecture: str, module: Any) -> None:
    """Lets the norm in front of the head give float32: the last norm of the body's own."""
    norms = [child for child in module.base_model.children() if isinstance(child, InvariantRMSNorm)]
    if len(norms) > 1:
        raise UnsupportedModel(architecture, _refusal("it has several norms behind its layers"))
    for norm in norms:
        norm.exact = True
