"""Kernels that come before their turn: which launches of a step do, and on which GPUs. By dry runs, without one."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from gpu_sampler.spec_decode import VerifyRules
from tests.gpu_sampler.compiler import CAPABILITY, needs_compiler, warns_of_fusion
from tests.gpu_sampler.test_precompile import SIZE, on_kernels, proposal, rows_of_one_kind

if TYPE_CHECKING:
    from gpu_sampler.kernel_cache import Variant

pytestmark = [needs_compiler, warns_of_fusion]
BEHIND = {
    "_sample_kernel",
    "_report_kernel",
    "_nucleus_rejection_kernel",
    "_nucleus_fallback_kernel",
    "_token_rank_kernel",
    "_rejection_sample_kernel",
}
LAYERS = {
    "_skinny_gemm_kernel",
    "_invariant_gemm_kernel",
    "_terms_kernel",
    "_rms_norm_kernel",
    "_qk_norm_rope_kernel",
    "_skinny_decode_attention_kernel",
    "_invariant_attention_kernel",
}


def launched(capability: int) -> dict[str, set[bool]]:
    """Returns what `early` does, of a sampler's step and of a verify step."""
    from gpu_sampler.kernel_cache import dry_run

    with dry_run(capability) as variants:
        sampler = on_kernels(processed=False)
        for slots in rows_of_one_kind(sampler):
            sampler.sample(torch.zeros((len(slots), SIZE), dtype=torch.bfloat16), slots)
            run = torch.zeros((3 * len(slots), SIZE), dtype=torch.bfloat16)
            sampler.verify(run, slots, proposal(len(slots), 2), VerifyRules())
    return early(variants)


def launched_by_layers(capability: int) -> dict[str, set[bool]]:
    """Returns the same of the layers' kernels in a decode step, with and without invariant numerics."""
    from engine.kernels.invariant_attention import Heads, Parts, Tiles, invariant_attention
    from engine.kernels.invariant_gemm import invariant_gemm
    from engine.kernels.qk_norm_rope import Rotation, qk_norm_rope
    from engine.kernels.rms_norm import rms_norm
    from engine.kernels.skinny_decode_attention import SplitKVWorkspace, skinny_decode_attention
    from engine.kernels.skinny_gemm import skinny_gemm
    from gpu_sampler.kernel_cache import dry_run

    x, weight = torch.zeros((2, 64), dtype=torch.bfloat16), torch.zeros((32, 64), dtype=torch.bfloat16)
    q, k = torch.zeros((2, 2, 64), dtype=torch.bfloat16), torch.zeros((2, 1, 64), dtype=torch.bfloat16)
    pool, indptr = torch.zeros((4, 1, 1, 64), dtype=torch.bfloat16), torch.tensor([0, 2, 4], dtype=torch.int32)
    indices, turned = torch.arange(4, dtype=torch.int32), torch.zeros((2, 64))
    with dry_run(capability) as variants:
        skinny_gemm(x, weight)
        for rows in (x, x.float()):
            invariant_gemm(rows, weight)
        rms_norm(x, weight[0], 1e-6)
        qk_norm_rope(q, k, k, Rotation(turned, turned), pool, pool, indices[:2])
        workspace = SplitKVWorkspace.of(2, 2, 1, 64, torch.device("cpu"))
        skinny_decode_attention(q, pool, pool, indptr, indices, workspace, scale=1.0)
        tiles = Tiles(None, None, None, indptr, indices)
        invariant_attention(q, pool, pool, tiles, Heads(1.0), parts=Parts(), longest=2)
    return early(variants)


def early(variants: Sequence["Variant"]) -> dict[str, set[bool]]:
    """Returns by kernel whether its launches come early: both where some do."""
    found: dict[str, set[bool]] = {}
    for variant in variants:
        specialization = json.loads(variant.specialization)
        found.setdefault(variant.kernel, set()).add(bool(specialization["options"]["launch_pdl"]))
    return found


def test_what_stands_behind_the_read_of_the_logits_comes_early() -> None:
    found = launched(CAPABILITY)
    assert set(found) > BEHIND
    assert {kernel for kernel, pdl_options in found.items() if True in pdl_options} == BEHIND
    assert all(len(pdl_options) == 1 for pdl_options in found.values())


def test_every_kernel_of_a_decode_step_s_layers_comes_early() -> None:
    assert launched_by_layers(CAPABILITY) == {kernel: {True} for kernel in LAYERS}


def test_a_gpu_that_cannot_waits_as_usual() -> None:
    assert not any(True in pdl_options for pdl_options in launched(80).values())
    assert launched_by_layers(80) == {kernel: {False} for kernel in LAYERS}


def test_layers_wait_as_usual_where_they_are_not_measured_or_the_driver_captures_no_early_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpu_sampler.kernels import common

    in_turn = {kernel: {False} for kernel in LAYERS}
    assert launched_by_layers(100) == in_turn
    monkeypatch.setattr(common, "_driver_version", lambda: 12_020)
    assert launched_by_layers(CAPABILITY) == in_turn
    monkeypatch.setattr(common, "_driver_version", lambda: 12_030)
    assert launched_by_layers(CAPABILITY) == {kernel: {True} for kernel in LAYERS}


@pytest.mark.parametrize(("capability", "may"), [(80, False), (89, False), (90, True), (100, True)])
def test_the_code_that_waits_and_its_launch_go_together(capability: int, may: bool) -> None:
    from gpu_sampler.kernel_cache import dry_run
    from gpu_sampler.kernels.common import pdl_options

    with dry_run(capability):
        assert pdl_options() == ({"PDL": True, "launch_pdl": True} if may else {"PDL": False})
