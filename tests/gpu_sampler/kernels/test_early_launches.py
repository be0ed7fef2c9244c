"""Kernels of a captured step that start before the ones in front of them end: they read what those wrote."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels.bench_early_launches import MODULES, DecodeLayers, LayerShape, in_turn

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
    """Returns for how many inputs a step of early launches differs from one of launches in turn. The first is captured
    with what `monkeypatch` has changed, the second without."""
    x = torch.zeros((rows, SHAPE.width), device="cuda", dtype=torch.bfloat16)
    layers = DecodeLayers(SHAPE, rows, context, x)
    step = layers.invariant if invariant else layers.fast
    graph, found = captured(step)
    monkeypatch.undo()
    with in_turn():
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


needs_early_launches = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the GPU launches in turn"
)


@needs_early_launches
@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("rows", "context"), [(1, 256), (8, 300), (16, 1024)])
def test_early_launches_change_no_bit(
    rows: int, context: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differing(rows, context, invariant, monkeypatch) == 0


@needs_early_launches
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
    """The step that the tests above compare is that of a decoder's layers."""
    shape = LayerShape("small", 2, 64, 4, 2, 32, 96)
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    layers = DecodeLayers(shape, 3, 40, x)
    found = (layers.invariant if invariant else layers.fast)().float()
    wanted = x.float()
    for layer in layers.layers:
        wanted = wanted + _attended(layers, _normed(wanted) @ layer.qkv.float().T) @ layer.out.float().T
        gate, up = (_normed(wanted) @ layer.gate_up.float().T).chunk(2, dim=1)
        wanted = wanted + (torch.nn.functional.silu(gate) * up) @ layer.down.float().T
    assert torch.allclose(found, wanted, atol=0.15)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def _attended(layers: DecodeLayers, qkv: torch.Tensor) -> torch.Tensor:
    """Attends with each row over its context, whose last token's keys and values are the row's own."""
    rows, dim, group = layers.rows, layers.shape.dim, layers.shape.heads // layers.shape.kv_heads
    q, k, v = (part.view(rows, -1, dim) for part in torch.split(qkv, layers.parts, dim=1))
    cos, sin = layers.rotation.cos_TD[:, None], layers.rotation.sin_TD[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        low, high = _normed(heads).chunk(2, dim=2)
        return torch.cat((low, high), dim=2) * cos + torch.cat((-high, low), dim=2) * sin

    at = layers.indices.view(rows, -1).long()
    keys, values = layers.keys[at, 0].float(), layers.values[at, 0].float()
    keys[:, -1], values[:, -1] = turned(k), v
    keys, values = (pool.repeat_interleave(group, dim=2).transpose(1, 2) for pool in (keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(turned(q)[:, :, None], keys, values)
    return out.reshape(rows, -1)
