"""RMS norms in one operation give the same bits, and others stay as they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.config import EngineConfig
from engine.model.hf_model import HFModel
from engine.model.optimize.fused_norms import fuse_norms
from tests.engine.model.conftest import SLOTS

ENGINE = EngineConfig(kv_slots=SLOTS, onednn_linear=False)
WIDTH = 48


def _drawn(norm: Any) -> Any:
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
    return nn.ModuleDict({"norm": norm})


class _Doubled(LlamaRMSNorm):  # type: ignore[misc]
    """Plants a fault: it looks like the others and gives something else."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return 2 * super().forward(hidden)


class _Gated(LlamaRMSNorm):  # type: ignore[misc]
    """Takes more than rows."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
        found = super().forward(hidden)
        return found if gate is None else found * gate


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_model_gives_the_same_bits(tiny_models: Any, name: str) -> None:
    module, ids = tiny_models.module(name), torch.arange(17)[None]
    with torch.no_grad():
        before = module(input_ids=ids, use_cache=False).logits
        norms = sum(type(one).__name__.endswith("RMSNorm") for one in module.modules())
        assert fuse_norms(module) == norms > 0
        assert torch.equal(module(input_ids=ids, use_cache=False).logits, before)
    assert sum(type(one) is nn.RMSNorm for one in module.modules()) == norms


@pytest.mark.parametrize(
    "norm",
    [Gemma2RMSNorm(WIDTH), LlamaRMSNorm(WIDTH).to(torch.bfloat16), _Doubled(WIDTH), _Gated(WIDTH)],
    ids=lambda one: str(type(one)),
)
def test_a_norm_with_other_bits_stays(norm: nn.Module) -> None:
    parent = _drawn(norm)
    assert fuse_norms(parent) == 0 and parent["norm"] is norm


def test_a_norm_with_a_hook_stays() -> None:
    norm = LlamaRMSNorm(WIDTH)
    norm.register_forward_hook(lambda module, given, out: 2 * out)
    assert fuse_norms(_drawn(norm)) == 0


def test_the_switch_turns_it_off(tiny_models: Any) -> None:
    def fused(engine: EngineConfig) -> bool:
        return any(type(one) is nn.RMSNorm for one in HFModel(tiny_models.module("llama"), engine).module.modules())

    assert fused(ENGINE) and not fused(replace(ENGINE, fused_norms=False))
