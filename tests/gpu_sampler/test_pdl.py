"""Kernels that come before their turn: which launches of a step do, and on which GPUs. By dry runs, without one."""

import json

import pytest
import torch

from gpu_sampler.spec_decode import VerifyRules
from tests.gpu_sampler.compiler import CAPABILITY, needs_compiler, warns_of_fusion
from tests.gpu_sampler.test_precompile import SIZE, on_kernels, proposal, rows_of_one_kind

pytestmark = [needs_compiler, warns_of_fusion]
BEHIND = {
    "_sample_kernel",
    "_report_kernel",
    "_nucleus_rejection_kernel",
    "_nucleus_fallback_kernel",
    "_token_rank_kernel",
    "_rejection_sample_kernel",
}


def launched(capability: int) -> dict[str, set[bool]]:
    """By kernel, whether its launches come early: both where some do."""
    from gpu_sampler.kernel_cache import dry_run

    with dry_run(capability) as variants:
        sampler = on_kernels(processed=False)
        for slots in rows_of_one_kind(sampler):
            sampler.sample(torch.zeros((len(slots), SIZE), dtype=torch.bfloat16), slots)
            run = torch.zeros((3 * len(slots), SIZE), dtype=torch.bfloat16)
            sampler.verify(run, slots, proposal(len(slots), 2), VerifyRules())
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


def test_a_gpu_that_cannot_waits_as_usual() -> None:
    assert not any(True in pdl_options for pdl_options in launched(80).values())


@pytest.mark.parametrize(("capability", "may"), [(80, False), (89, False), (90, True), (100, True)])
def test_the_code_that_waits_and_its_launch_go_together(capability: int, may: bool) -> None:
    from gpu_sampler.kernel_cache import dry_run
    from gpu_sampler.kernels.common import pdl_options

    with dry_run(capability):
        assert pdl_options() == ({"PDL": True, "launch_pdl": True} if may else {"PDL": False})
