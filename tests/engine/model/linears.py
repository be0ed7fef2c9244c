"""Takes the place of the kernel of few rows, on a CPU: the same products by torch, and a note of each call."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F


class Asked(NamedTuple):
    """Holds what a call of the kernel was to do."""

    gated: bool
    added: bool


def linear_of_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    z = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = z.chunk(2, dim=-1)
        z = F.silu(gate) * up
    y = z.to(x.dtype)
    return y if residual is None else y + residual


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """One entry a call of the kernel, from now on."""
    pytest.importorskip("triton")
    from engine.kernels import skinny_gemm as kernels

    calls: list[Asked] = []

    def note(*given: Any, gated: bool = False, residual: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(Asked(gated, residual is not None))
        return linear_of_torch(*given, gated=gated, residual=residual)

    monkeypatch.setattr(kernels, "skinny_gemm", note)
    return calls
