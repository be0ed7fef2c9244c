"""Merged projections give the bits of separate ones."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.model.hf_model import HFModel
from engine.model.optimize.fused_projections import FusedOutput, fuse_projections

SIX = {"llama": 2, "qwen3": 2, "mistral": 2, "gemma2": 2, "gpt_oss": 1, "qwen3_moe": 1}  # merges a layer


@pytest.mark.parametrize("name", SIX)
def test_merged_equals_unmerged_bit_for_bit(tiny_models: Any, name: str) -> None:
    module = tiny_models.module(name)
    ids = torch.arange(17)[None]
    with torch.no_grad():
        before = module(input_ids=ids, use_cache=False).logits
        assert fuse_projections(module) == 3 * SIX[name]
        after = module(input_ids=ids, use_cache=False).logits
    assert torch.equal(before, after)


def test_a_model_served_merged_gives_the_bits_of_one_served_unmerged(tiny_models: Any) -> None:
    drivers = [tiny_models.driver("qwen3", merge=merge) for merge in (True, False)]
    assert any(isinstance(one, FusedOutput) for one in drivers[0].model.module.modules())
    assert not any(isinstance(one, FusedOutput) for one in drivers[1].model.module.modules())
    rows = [d.model.forward("prefill", [d.run(d.add(13), 0, 13)], d.table) for d in drivers]
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize(("told", "fused"), [(None, False), (False, False), (True, True)])
def test_on_a_cpu_projections_are_fused_only_where_the_configuration_says_so(
    tiny_models: Any, told: bool | None, fused: bool
) -> None:
    model = HFModel(tiny_models.module("qwen3"), EngineConfig(kv_slots=64, fuse_projections=told))
    assert any(isinstance(one, FusedOutput) for one in model.module.modules()) is fused


def test_no_output_outlives_the_call_and_no_weight_is_held_twice(tiny_models: Any) -> None:
    module = tiny_models.module("llama")
    numbers = sum(one.numel() for one in module.parameters())
    fuse_projections(module)
    with torch.no_grad():
        module(input_ids=torch.arange(5)[None], use_cache=False)
    wholes = {id(one.whole): one.whole for one in module.modules() if isinstance(one, FusedOutput)}
    assert len(wholes) == 6
    assert all(whole.left == () for whole in wholes.values())
    assert sum(one.numel() for one in module.parameters()) == numbers


class _Scaled(nn.Linear):
    """Does more than multiply."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


@pytest.mark.parametrize(
    "other",
    [nn.Linear(9, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, dtype=torch.float64), _Scaled(8, 8), nn.Identity()],
)
def test_unlike_projections_stay_apart(other: nn.Module) -> None:
    block = nn.Module()
    block.gate_proj, block.up_proj = nn.Linear(8, 8), other
    assert fuse_projections(block) == 0
    assert block.up_proj is other
