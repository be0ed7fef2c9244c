"""Layers of a captured step whose kernels start before the ones in front of them end: they read what those wrote."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels.bench_pdl import EPS, DecodeLayers, LayerShape, without_pdl
from engine.kernels import (
    invariant_attention,
    invariant_gemm,
    qk_norm_rope,
    rms_norm,
    skinny_decode_attention,
    skinny_gemm,
)
from tests.support import layer_kernels as reference

MODULES: Final = invariant_attention, invariant_gemm, qk_norm_rope, rms_norm, skinny_decode_attention, skinny_gemm
SHAPE: Final = LayerShape("0.6B", 6, 1024, 16, 8, 128, 3072)
INPUTS: Final = 30


@triton.jit
def goes_on(PDL: tl.constexpr):
    """Stands where a kernel waits for the one in front."""


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def differing(rows: int, context: int, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns for how many inputs a step with PDL differs from one without. The first is captured with what
    `monkeypatch` has changed, the second without."""
    x = torch.zeros((rows, SHAPE.width), device="cuda", dtype=torch.bfloat16)
    layers = DecodeLayers(SHAPE, rows, context, x)
    step = layers.invariant if invariant else layers.fast
    graph, found = captured(step)
    monkeypatch.undo()
    with without_pdl():
        plain_graph, wanted = captured(step)
    count = 0
    for seed in range(INPUTS):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        plain_graph.replay()
        kept = wanted.clone()
        x.neg_()
        graph.replay()  # leaves other numbers where those of the input are to stand
        x.neg_()
        graph.replay()
        count += not torch.equal(found, kept)
    return count


needs_pdl = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="layers have no PDL on this GPU",
)


@needs_pdl
@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("rows", "context"), [(1, 256), (8, 300), (16, 1024)])
def test_pdl_changes_no_bit(rows: int, context: int, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(rows, context, invariant, monkeypatch) == 0


@needs_pdl
@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_kernels_that_do_not_wait_fail_the_same_test(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "wait_for_previous", goes_on)
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                monkeypatch.setattr(module, name, triton.jit(kernel.fn))
    assert differing(8, 300, invariant, monkeypatch) > 0


@pytest.mark.parametrize("invariant", [False, True])
def test_layers_of_either_numerics_agree(invariant: bool, device: str) -> None:
    """The step that is compared above is one of a decoder's layers."""
    shape = LayerShape("small", 2, 64, 4, 2, 32, 96)
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    layers = DecodeLayers(shape, 3, 40, x)
    found = (layers.invariant if invariant else layers.fast)()
    np.testing.assert_allclose(as_floats(found), referred(layers), atol=0.15)


def as_floats(tensor: torch.Tensor) -> Any:
    return tensor.float().cpu().numpy()


def referred(layers: DecodeLayers) -> Any:
    """Returns the hidden states behind the layers, f32 between two kernels."""
    dim, heads, kv_heads = layers.shape.dim, layers.shape.heads, layers.shape.kv_heads
    keys, values, norm_D = as_floats(layers.keys), as_floats(layers.values), np.ones(dim, np.float32)
    angles = as_floats(layers.rotation.cos_TD), as_floats(layers.rotation.sin_TD)
    indptr, indices, slots = (one.cpu().numpy() for one in (layers.indptr, layers.indices, layers.slots))
    hidden = as_floats(layers.x)

    def linear(x: Any, weight: Any, *, gated: bool = False) -> Any:
        return reference.skinny_gemm(x, weight, gated=gated).astype(np.float32)

    def normed() -> Any:
        return reference.rms_norm(hidden, np.ones(layers.shape.width, np.float32), EPS).astype(np.float32)

    for layer in layers.layers:
        qkv, out, gate_up, down = map(as_floats, layer)
        qkv_RHD = linear(normed(), qkv).reshape(layers.rows, -1, dim)
        q, k, values[slots, 0] = np.split(qkv_RHD, [heads, heads + kv_heads], axis=1)
        q, keys[slots, 0] = (reference.qk_norm_rope(one, *angles, norm_D, EPS).astype(np.float32) for one in (q, k))
        attended, _ = reference.skinny_decode_attention(q, keys, values, indptr, indices, scale=layers.scale)
        hidden = hidden + linear(attended.reshape(layers.rows, -1).astype(np.float32), out)
        hidden = hidden + linear(linear(normed(), gate_up, gated=True), down)
    return hidden
