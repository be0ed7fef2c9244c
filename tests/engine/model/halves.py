"""Tiny models on a GPU, in bfloat16, and the engines that tests there compare: eager, and with all that is captured."""

from dataclasses import replace
from typing import Any

import torch

from engine.config import EngineConfig

WIDE = {"head_dim": 64, "num_hidden_layers": 2}
EVERY_EXPERT = {"gpt_oss": {"num_experts_per_tok": 4}, "qwen3_moe": {"num_experts_per_tok": 4}}  # no routing to flip
BF16 = 3e-2  # of the largest |logit|
PLAIN = EngineConfig(kv_slots=331, compile=False, graphs=False, token_budget=64, max_running=8, prefill_graph_tokens=0)
FULL = EngineConfig(kv_slots=331, token_budget=64, max_running=8, max_graph_batch_size=8, prefill_graph_tokens=0)
EAGER = replace(PLAIN, token_budget=96)
SMALL = replace(FULL, token_budget=96, prefill_graph_tokens=EngineConfig().prefill_graph_tokens)


def on_gpu(tiny_models: Any, name: str, **changes: Any) -> Any:
    """The model, with heads that the paged kernels take as they are."""
    return tiny_models.module(name, **{**WIDE, **EVERY_EXPERT.get(name, {}), **changes}).to("cuda", torch.bfloat16)


def largest_difference(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Returns the largest error of any row of any step, over its step's largest |logit|."""
    errors = [(one - other).abs().max() / other.abs().max() for one, other in zip(got, wanted, strict=True)]
    return max(map(float, errors))
