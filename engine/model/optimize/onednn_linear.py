"""Computes float32 linear layers on a CPU by oneDNN, where torch takes them to its BLAS library.

Gain: on two cores of an AMD EPYC the layers of a 0.1B model take 37 ms for 1,024 rows, by MKL 83; for 16 rows 1.5 ms,
by MKL 2.9. A row has the same bits in any number of rows, which it has not by MKL. Half precision needs nothing: torch
itself takes it to oneDNN. Switch: `engine.onednn_linear`.

oneDNN generates code for each shape, which takes half a millisecond the first time and half a megabyte from then on.
Rows are padded to one of eight sizes between powers of two, so that there are few: steps of all sizes make a process
170 MB larger. A call costs 10 us more than one of MKL, which is much for the built-in model: layers of fewer than
`MIN_WEIGHTS` multiply up to `FEW_ROWS` rows by MKL.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.utils.torch_ops import operation

MIN_WEIGHTS = 1 << 17
FEW_ROWS = 128  # no fewer than a traced step has (`traced_base`): its code does not depend on the number of rows
MIN_ROWS = 2  # a single row would be multiplied in another order
SIZE_BITS = 4  # a padded number of rows has this many leading binary digits, and zeros


class OneDnnLinear(nn.Linear):
    """Computes a linear layer by oneDNN."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # A traced step must not depend on the number of rows.
        called: Any = linear
        if torch.compiler.is_compiling():
            called = F.linear if self.weight.numel() < MIN_WEIGHTS else torch.ops.assay.onednn_linear
        out: torch.Tensor = called(hidden, self.weight, self.bias)
        return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x weight^T + bias, f32 [..., N], of x f32 [..., K] and weight f32 [N, K] on a CPU."""
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    if rows <= FEW_ROWS and weight.numel() < MIN_WEIGHTS:
        return F.linear(x, weight, bias)
    if (padded := padded_rows(rows)) == rows:
        return _product(x, weight, bias)
    whole = F.pad(x.reshape(rows, inputs), (0, 0, 0, padded - rows))
    return _product(whole, weight, bias)[:rows].view(*x.shape[:-1], outputs)


def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


operation("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _shape)(linear)


def padded_rows(rows: int) -> int:
    """Returns the number of rows that so many are padded to: `MIN_ROWS`, or at most an eighth more."""
    if rows < MIN_ROWS:
        return MIN_ROWS
    step = 1 << max(0, (rows - 1).bit_length() - SIZE_BITS)
    return -(-rows // step) * step


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def available() -> bool:
    """Tells whether this build of torch has oneDNN's linear layers."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(module: nn.Module) -> int:
    """Makes the plain float32 linear layers of a module use oneDNN, in place, where torch has it.

    Returns:
        The number of layers that it has changed.
    """
    linears = [one for one in module.modules() if type(one) is nn.Linear and _fits(one)] if available() else []
    for layer in linears:
        layer.__class__ = OneDnnLinear  # the same module, with its weight, its hooks and its places in the model
    return len(linears)


def _fits(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = weight.dtype == torch.float32 and weight.is_contiguous()
    return weight.device.type == "cpu" and plain
