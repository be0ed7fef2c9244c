"""Compiles a model's layers while FlashInfer's modules, which its checks wait for, are on their way.

Gain: what the compilers of torch make is kept on disk and in the process, where the model's own compilation finds it
after the checks. Switch: `engine.compile`, where modules are missing that a start waits for.

It compiles a copy that has one decoder layer of each kind, shares the model's weights, and is changed as the model will
be. Its attention computes nothing: compiled code calls attention as one operation. Nothing depends on the copy.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from engine.attention.interface import AttentionCall, attach
from engine.batch.input_batch import MIN_TOKENS, StepKind, StepSequences, pack
from engine.kv_cache.storage import KVStorage
from engine.model.compatibility import LayerCall, ProbedModel
from engine.model.lm_head import output_rows
from engine.model.optimize.decoder_layers import decoder_layers

SLOTS = 1031  # of the copy's KV storage: no width of a model, which the compiler would take for the same symbol


def small_copy(model: ProbedModel) -> ProbedModel:
    """Returns a copy with the first decoder layer of each kind and the last one, which has the model's own weights.

    Raises:
        ValueError: The layers are in no module list.
    """
    names = {module: name for name, module in model.module.named_modules()}
    weights = (*model.module.parameters(), *model.module.buffers())
    copy = deepcopy(model.module, {id(weight): weight for weight in weights})
    calls = [replace(call, module=copy.get_submodule(names[call.module])) for call in model.calls]
    layers = decoder_layers(copy, [call.module for call in calls])
    kinds = [_kind(layer, call) for layer, call in zip(layers, calls, strict=True)]
    places = sorted({len(calls) - 1, *map(kinds.index, kinds)})
    for place in reversed(range(len(calls))):
        if place not in places:
            del layers[place]
    small = ProbedModel(
        copy, model.backend, [calls[place] for place in places], [model.shapes[place] for place in places]
    )
    storage = KVStorage(small.shapes, SLOTS, copy.dtype, copy.device)
    attach(small.attentions, storage.keys, storage.values)
    return small


def _kind(layer: nn.Module, call: LayerCall) -> tuple[object, ...]:
    """Returns what the code of a layer depends on."""
    parts = tuple(map(type, layer.modules()))
    return parts, call.heads, call.kv_heads, call.key_dim, call.value_dim, call.scale, call.window, call.softcap


class NoAttention:
    """Implements `AttentionStep`: every token attends to nothing."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns zeros [T, H, E]."""
        return call.q_THD.new_zeros((*call.q_THD.shape[:2], call.v_TGE.shape[2]))


def runner_without_attention(model: ProbedModel) -> Callable[[StepSequences], object]:
    """Returns a function that runs a step of these sequences, whose attention computes nothing."""
    device = model.module.device
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)

    @torch.no_grad()
    def run(sequences: StepSequences) -> object:
        batch = pack(StepKind.PREFILL, sequences, table, device, MIN_TOKENS)
        return output_rows(model.module, NoAttention(), batch)

    return run
