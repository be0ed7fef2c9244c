"""Kernels of a captured step that start before the ones in front of them end: they read what those wrote."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from engine.kernels import (
    invariant_attention,
    invariant_gemm,
    qk_norm_rope,
    rms_norm,
    skinny_decode_attention,
    skinny_gemm,
)

KERNELS: dict[ModuleType, tuple[str, ...]] = {
    invariant_attention: ("_invariant_attention_kernel",),
    invariant_gemm: ("_invariant_gemm_kernel", "_terms_kernel"),
    qk_norm_rope: ("_qk_norm_rope_kernel",),
    rms_norm: ("_rms_norm_kernel",),
    skinny_decode_attention: ("_skinny_decode_attention_kernel",),
    skinny_gemm: ("_skinny_gemm_kernel",),
}
WIDTH, HEADS, KV_HEADS, DIM, INNER, LAYERS = 1024, 16, 8, 128, 3072, 6
PARTS = HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM
Step = Callable[[], torch.Tensor]


@triton.jit
def goes_on(PDL: tl.constexpr):
    """Stands where a kernel waits for the one in front."""


def layers_of(rows: int, context: int, x: torch.Tensor, *, invariant: bool) -> Step:
    """Returns decoder layers over x [rows, WIDTH], each row's token being the last of a context of its own."""
    device, dtype = x.device, x.dtype
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def weight(columns: int, width: int) -> torch.Tensor:
        return normal(columns, width) / math.sqrt(width)

    layers = [
        (weight(sum(PARTS), WIDTH), weight(WIDTH, PARTS[0]), weight(2 * INNER, WIDTH), weight(WIDTH, INNER))
        for _ in range(LAYERS)
    ]
    one, one_head = torch.ones(WIDTH, device=device, dtype=dtype), torch.ones(DIM, device=device, dtype=dtype)
    keys, values = normal(rows * context, 1, KV_HEADS, DIM), normal(rows * context, 1, KV_HEADS, DIM)
    indptr = torch.arange(0, rows * context + 1, context, dtype=torch.int32, device=device)
    indices = torch.randperm(rows * context, generator=generator, device=device, dtype=torch.int32)
    slots = indices[indptr[1:].long() - 1].contiguous()
    angles = torch.rand((rows, DIM), generator=generator, device=device)
    rotation = qk_norm_rope.Rotation(angles.cos(), angles.sin(), one_head, one_head, 1e-6)
    workspace = skinny_decode_attention.SplitKVWorkspace.of(rows, HEADS, KV_HEADS, DIM, device)

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(rows, -1, DIM) for part in qkv.split(PARTS, dim=1))
        q = qk_norm_rope.qk_norm_rope(q, k, v, rotation, keys, values, slots)
        if not invariant:
            out, _ = skinny_decode_attention.skinny_decode_attention(
                q, keys, values, indptr, indices, workspace, scale=DIM**-0.5
            )
        else:
            out, _ = invariant_attention.invariant_attention(
                q,
                keys,
                values,
                invariant_attention.Tiles(None, None, None, indptr, indices),
                invariant_attention.Heads(DIM**-0.5),
                parts=invariant_attention.Parts(),
                longest=context,
                programs=2,
                form=invariant_attention.single_form(rows * KV_HEADS),
            )
        return out.reshape(rows, PARTS[0])

    def step() -> torch.Tensor:
        hidden = x
        for qkv, o, gate_up, down in layers:
            normed = rms_norm.rms_norm(hidden, one, 1e-6)
            if invariant:
                multiply = invariant_gemm.invariant_gemm
                hidden = multiply(attend(multiply(normed, qkv)), o, residual=hidden)
                gate, up = multiply(rms_norm.rms_norm(hidden, one, 1e-6), gate_up).chunk(2, dim=1)
                hidden = multiply(torch.nn.functional.silu(gate) * up, down, residual=hidden)
            else:
                hidden = skinny_gemm.skinny_gemm(attend(skinny_gemm.skinny_gemm(normed, qkv)), o, residual=hidden)
                gated = skinny_gemm.skinny_gemm(rms_norm.rms_norm(hidden, one, 1e-6), gate_up, gated=True)
                hidden = skinny_gemm.skinny_gemm(gated, down, residual=hidden)
        return hidden

    return step


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def in_turn() -> dict[str, Any]:
    """Stands for `captured_pdl_options` of a GPU that cannot."""
    return {"PDL": False}


def differing(
    rows: int, context: int, invariant: bool, monkeypatch: pytest.MonkeyPatch, early: Callable[[], None] | None
) -> int:
    """Returns for how many inputs a step of early launches differs from one of launches in turn."""
    x = torch.zeros((rows, WIDTH), device="cuda", dtype=torch.bfloat16)
    step = layers_of(rows, context, x, invariant=invariant)
    if early is not None:
        early()
    graph, found = captured(step)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        for module in KERNELS:
            patch.setattr(module, "captured_pdl_options", in_turn)
        plain_graph, wanted = captured(step)
    count = 0
    for seed in range(30):
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
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the GPU cannot launch early"
)
CASES = [(1, 256), (8, 300), (16, 1024)]


@needs_early_launches
@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("rows", "context"), CASES)
def test_early_launches_change_no_bit(
    rows: int, context: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differing(rows, context, invariant, monkeypatch, None) == 0


@needs_early_launches
@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_kernels_that_do_not_wait_fail_the_same_test(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def early() -> None:
        for module, names in KERNELS.items():
            monkeypatch.setattr(module, "wait_for_previous", goes_on)
            for name in names:
                monkeypatch.setattr(module, name, triton.jit(getattr(module, name).fn))

    assert differing(8, 300, invariant, monkeypatch, early) > 0
