"""Asking a model, layer by layer, what it wants of attention. Nothing trusts a config where the model can be asked.

What a configuration alone tells to be wrong under packing, and the error that says so.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.interface import ATTENTION, NO_SOFTCAP, NO_WINDOW, AttentionBackend
from engine.kv_cache.storage import LayerShape

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
ORIGINAL_LENGTH = "original_max_position_embeddings"


class UnsupportedModel(RuntimeError):
    """The model would be computed wrong, or not at all. `architecture` and `reason` say which and why."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(architecture, reason)
        self.architecture = architecture
        self.reason = reason

    def __str__(self) -> str:
        return f"`{self.architecture}` is not supported: {self.reason}."


def check_config(config: Any, max_model_len: int | None = None) -> None:
    """Raises Refused for what a model library config tells to be wrong under packing."""
    name = str(config.model_type)
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, "it is an encoder-decoder model; only decoders are served")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise UnsupportedModel(
            name, f"its weights are quantised ({getattr(method, 'value', method)}); only plain weights are"
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(SUPPORTED_LAYERS))
    if others:
        raise UnsupportedModel(
            name, f"it has layers of type {', '.join(others)}; only {' and '.join(SUPPORTED_LAYERS)} are"
        )
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModel(
            name, "its attention is chunked (attention_chunk_size), which packed steps would not apply"
        )
    for parameters in _rope_parameters(text):
        _refuse_rope(name, text, parameters, max_model_len)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    for field in ("rope_parameters", "rope_scaling"):
        found = getattr(config, field, None)
        if isinstance(found, dict):
            nested = [value for value in found.values() if isinstance(value, dict)]
            yield from nested or [found]  # some models have one set a layer type


def _refuse_rope(name: str, config: Any, parameters: dict[str, Any], max_model_len: int | None) -> None:
    """Both kinds look at the largest position of the whole call: one long neighbour would change another request."""
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "dynamic":
        raise UnsupportedModel(name, "its rotary embedding is dynamic: a long request would change its neighbours")
    if kind == "longrope":
        original = parameters.get(ORIGINAL_LENGTH) or getattr(config, ORIGINAL_LENGTH, None)
        length = max_model_len or config.max_position_embeddings
        if original is None or length > original:
            raise UnsupportedModel(
                name,
                f"its rotary embedding is longrope, which changes beyond {original} tokens for all requests of a step; "
                f"set `model.max_model_len` to at most {original}. Given: {length}",
            )


PROBE = "assay_probe"
PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one layer asked of attention."""

    module: nn.Module
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool
    masked: bool


class _Recorder(threading.local):
    calls: list[LayerCall] | None = None


_recorder = _Recorder()


def record_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Stands for the attention function during the probe: notes what was asked and answers zeros (1, T, H, E)."""
    if _recorder.calls is not None:
        call = LayerCall(
            module=module,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=NO_WINDOW if sliding_window is None else int(sliding_window),
            softcap=NO_SOFTCAP if softcap is None else float(softcap),
            sinks=s_aux is not None,
            masked=attention_mask is not None,
        )
        _recorder.calls.append(call)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def attention_of(module: nn.Module, name: str) -> Iterator[None]:
    """The model's attention is `name` inside, and this engine's afterwards."""
    set_attention(module, name)
    try:
        yield
    finally:
        set_attention(module, ATTENTION)


def set_attention(module: Any, name: str) -> None:
    module.set_attn_implementation(name)


def probe(module: Any, architecture: str) -> list[LayerCall]:
    """One call a layer, in layer order. Raises Refused where attention is not one call of each layer."""
    calls: list[LayerCall] = []
    _recorder.calls = calls
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=module.device)
    try:
        with attention_of(module, PROBE), torch.no_grad():
            module(input_ids=ids, position_ids=torch.arange(PROBE_TOKENS, device=ids.device)[None], use_cache=False)
    except Exception as error:
        raise UnsupportedModel(
            architecture, f"a call with packed tokens failed ({type(error).__name__}: {error})"
        ) from error
    finally:
        _recorder.calls = None
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    if not calls:
        raise UnsupportedModel(architecture, "its attention does not go through the library's attention interface")
    if [getattr(call.module, "layer_idx", None) for call in calls] != list(range(layers)):
        raise UnsupportedModel(
            architecture, f"attention is not one call of each of its {layers} layers ({len(calls)} calls)"
        )
    if any(call.masked for call in calls):
        raise UnsupportedModel(
            architecture, "it builds an attention mask of its own, which packed steps would not apply"
        )
    return calls


def stored_shapes(calls: Sequence[LayerCall], backend: AttentionBackend, architecture: str) -> list[LayerShape]:
    """What the pool keeps a layer. Raises Refused where the device's attention has no such heads."""
    try:
        return [LayerShape(call.kv_heads, *backend.stored_dims(call.key_dim, call.value_dim)) for call in calls]
    except ValueError as error:
        raise UnsupportedModel(architecture, str(error).rstrip(".")) from error
