"""Linear layers that sum each row alike: by the invariant kernel, or by a faster product that has been seen to have its
bits.

The library's product of many rows takes three quarters of the kernel's time (`benchmarks/results/invariant-gemm.json`).
It sums K from the first to the last, too, where it does not cut K, which torch can forbid with cuBLASLt. Neither this
order nor that of the kernel's tiles of few rows is promised. So both are tried at start-up, for every form of weight
and many numbers of rows, beside the kernel's tiles of many rows, and what differs in a bit is not used for that form.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.model.optimize.skinny_linear import HALVES
from engine.utils.torch_ops import operation

log = logging.getLogger(__name__)

LIBRARY_ROWS: Final = 97  # from which the library's product is used: uncut, it is slow for some numbers below
EVERY: Final = 64  # numbers of rows up to this one are all tried
RATIO: Final = 1.07  # of the numbers that are tried above it
MOST_COLUMNS: Final = 8192  # of a head that are tried


class Products(NamedTuple):
    """Says which products have the bits of the kernel's tiles of many rows."""

    few: bool = False  # its tiles of few rows
    library: bool = False  # the library's, which are used from LIBRARY_ROWS rows on


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products, *, exact: bool
) -> torch.Tensor:
    """Computes a linear layer; float32 rows stay float32 beside weights of any type. `exact`: it gives float32."""
    out: torch.Tensor = torch.ops.assay.invariant_linear(x, weight, bias, *products, exact)
    return out


def _shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, few: bool, library: bool, exact: bool, *_: object
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if exact else x.dtype)


@operation(
    "invariant_linear(Tensor x, Tensor weight, Tensor? bias, bool few, bool library, bool exact, "
    "Tensor? residual=None) -> Tensor",
    _shape,
)
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    few: bool,
    library: bool,
    exact: bool,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [..., N] of x [..., K], in float32 if `exact`; see `engine.kernels.invariant_gemm`."""
    if library and not exact and x.numel() >= LIBRARY_ROWS * x.shape[-1]:
        out = F.linear(x, weight, bias)
        return out if residual is None else out.add_(residual)
    from engine.kernels.invariant_gemm import invariant_gemm  # Triton is no part of a CPU's installation

    return invariant_gemm(x, weight, bias, residual, out_dtype=torch.float32 if exact else None, few=few)


class InvariantLinear(nn.Linear):
    """Computes a linear layer by products of equal bits."""

    products: Products

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return multiply(hidden, self.weight, self.bias, self.products, exact=hidden.dtype == torch.float32)


def make_linears(linears: Sequence[nn.Linear], most_rows: int) -> None:
    """Turns linear layers into invariant ones, in place.

    Args:
        linears: All of one device.
        most_rows: The most rows of a step.
    """
    library = bool(linears) and linears[0].weight.is_cuda and stop_cutting()
    found: dict[tuple[Any, ...], Products] = {}
    for linear in linears:
        form = (linear.weight.shape, linear.weight.dtype, linear.bias is not None)
        if form not in found:
            found[form] = proven(linear.weight, linear.bias, most_rows, library=library)
        make_linear(linear, found[form])


def make_linear(linear: nn.Linear, products: Products) -> None:
    """Turns a linear layer into an invariant one: the same module, with its weight and its places in the model."""
    linear.__class__ = InvariantLinear
    linear.products = products  # type: ignore[assignment]


def stop_cutting() -> bool:
    """Stops the library from cutting K, in this process; returns whether it can."""
    matmul: Any = torch.backends.cuda.matmul
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the choice of a library experimental
            torch.backends.cuda.preferred_blas_library("cublaslt")
            matmul.allow_bf16_reduced_precision_reduction = (False, False)  # the second is split K
            matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        log.warning("torch cannot stop its products from cutting K, so they are not used: %s", error)
        return False
    return True


def proven(
    weight: torch.Tensor, bias: torch.Tensor | None, most_rows: int, *, library: bool = False, exact: bool = False
) -> Products:
    """Tries the products with a weight.

    Args:
        weight: [N, K].
        bias: [N].
        most_rows: The most rows of a step.
        library: Whether the library's is tried.
        exact: Whether rows and results are float32.
    """
    from engine.kernels.invariant_gemm import MANY, invariant_gemm, tile_of
    from gpu_sampler.kernels.lm_head_logprob import INTERPRETED

    if weight.dtype not in HALVES or INTERPRETED:  # which has one tile
        return Products()
    counts = tried_rows(most_rows)
    dtype = torch.float32 if exact else weight.dtype
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn((most_rows, weight.shape[1]), generator=generator, device=weight.device, dtype=dtype)
    wanted = invariant_gemm(x, weight, bias, tile=tile_of(MANY, len(weight), dtype, weight.dtype))
    return Products(
        alike(x, weight, bias, Products(few=True), wanted, counts),
        library and alike(x, weight, bias, Products(library=True), wanted, counts),
    )


def alike(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    products: Products,
    wanted: torch.Tensor,
    counts: Sequence[int],
) -> bool:
    """Returns whether the first rows of x, as many as each of `counts`, have the bits of `wanted`."""
    exact = x.dtype == torch.float32
    return all(
        torch.equal(multiply(x[:count], weight, bias, products, exact=exact), wanted[:count]) for count in counts
    )


def tried_rows(most: int) -> list[int]:
    """Returns the numbers of rows that are tried, ascending."""
    found = list(range(1, min(EVERY, most) + 1))
    while found[-1] < most:
        found.append(min(max(found[-1] + 1, int(found[-1] * RATIO)), most))
    return found
