"""Finds out what a model needs of attention, and refuses models that packed steps would compute wrong.

`check_config` reads the configuration; `probe` runs the model with an attention function that records what each layer
passes to it, which a configuration may not say.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.attention.interface import ATTENTION, NO_SOFTCAP, NO_WINDOW, AttentionBackend
from engine.kv_cache.storage import LayerShape

SLIDING = "sliding_attention"  # in `layer_types`
SUPPORTED_LAYERS = ("full_attention", SLIDING)
DEFAULT_ROPE = "default"  # the plain rotary embedding, for which the library needs no function
ORIGINAL_LENGTH = "original_max_position_embeddings"


class UnsupportedModel(RuntimeError):
    """Reports a model that would be computed wrong, or not at all, by `architecture` and `reason`."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(architecture, reason)
        self.architecture = architecture
        self.reason = reason

    def __str__(self) -> str:
        return f"`{self.architecture}` is not supported: {self.reason}."


def check_config(config: Any, max_model_len: int | None = None) -> None:
    """Checks a model's configuration for what packed steps would compute wrong.

    Args:
        config: The configuration of transformers.
        max_model_len: Tokens of a sequence; None: as many as the model was made for.

    Raises:
        UnsupportedModel: Says what is not supported.
    """
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
    for field, parameters in _rope_parameters(text):
        _check_rope(name, text, field, parameters, max_model_len)


def _rope_parameters(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the parameters of each kind of rotary embedding, with the name of their field."""
    for field in ("rope_parameters", "rope_scaling"):
        found = getattr(config, field, None)
        if isinstance(found, dict):
            nested = [(f"{field}.{kind}", value) for kind, value in found.items() if isinstance(value, dict)]
            yield from nested or [(field, found)]  # some models have parameters for each layer type


def _check_rope(name: str, config: Any, field: str, parameters: dict[str, Any], max_model_len: int | None) -> None:
    """Refuses rotary embeddings that the library does not know, and those that depend on the largest position of a
    step: a long request would change others."""
    own = getattr(config, "default_rope_type", DEFAULT_ROPE)
    kind = parameters.get("rope_type", parameters.get("type", own))
    if kind == "dynamic":
        raise UnsupportedModel(name, "its rotary embedding is dynamic: a long request would change its neighbours")
    known = sorted({DEFAULT_ROPE, own, *ROPE_INIT_FUNCTIONS} - {"dynamic"})
    if kind not in known:
        raise UnsupportedModel(name, f"`{field}.rope_type` must be one of {', '.join(known)}. Given: {kind}")
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
WINDOW_DTYPE = torch.int64  # of a mask that tells its window during the probe; no model makes such a mask itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """Records what one layer passed to attention."""

    module: nn.Module
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool
    masked: bool  # by a mask that the model makes itself
    mask_window: int  # of the library's mask


class ProbedModel(NamedTuple):
    """Holds a model, what each layer needs of attention, and the backend that computes it."""

    module: Any
    backend: AttentionBackend
    calls: list[LayerCall]  # one a layer, in layer order
    shapes: list[LayerShape]  # of the KV storage, one a layer

    @property
    def architecture(self) -> str:
        """The model's type, which errors name."""
        return str(self.module.config.model_type)

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention modules, in layer order."""
        return [call.module for call in self.calls]


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
    """Replaces the attention function during the probe: records the call and returns zeros (1, T, H, E)."""
    if _recorder.calls is not None:
        recorded = attention_mask is not None and attention_mask.dtype == WINDOW_DTYPE
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
            masked=attention_mask is not None and not recorded,
            mask_window=int(attention_mask.flatten()[0]) if attention_mask is not None and recorded else NO_WINDOW,
        )
        _recorder.calls.append(call)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def record_mask(
    *, q_length: int, kv_length: int, device: torch.device, local_size: int | None = None, **_: object
) -> torch.Tensor:
    """Replaces the mask function during the probe: returns (1, 1, T, T) full of the window that the mask would have."""
    window = NO_WINDOW if local_size is None else int(local_size)
    return torch.full((1, 1, q_length, kv_length), window, dtype=WINDOW_DTYPE, device=device)


@contextmanager
def attention_of(module: nn.Module, name: str) -> Iterator[None]:
    """Makes the model's attention `name` inside, and this engine's afterwards."""
    set_attention(module, name)
    try:
        yield
    finally:
        set_attention(module, ATTENTION)


def set_attention(module: Any, name: str) -> None:
    """Makes the model call the attention function that is registered under `name`."""
    module.set_attn_implementation(name)


def probe(module: Any, backend: AttentionBackend, max_model_len: int) -> ProbedModel:
    """Runs the model once, and records what each layer passes to attention.

    Args:
        module: A model of transformers.
        backend: Computes attention.
        max_model_len: Tokens of a sequence.

    Raises:
        UnsupportedModel: Attention is not one call of each layer, has a mask of its own or a window that only the
            library's mask knows, or has heads that the backend does not take.
    """
    architecture = str(module.config.model_type)
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
    _check_windows(architecture, module.config.get_text_config(decoder=True), calls, max_model_len)
    try:
        shapes = [LayerShape(call.kv_heads, *backend.stored_dims(call.key_dim, call.value_dim)) for call in calls]
    except ValueError as error:
        raise UnsupportedModel(architecture, str(error).rstrip(".")) from error
    return ProbedModel(module, backend, calls, shapes)


def _check_windows(name: str, config: Any, calls: list[LayerCall], max_model_len: int) -> None:
    """Refuses a layer whose window is another one than its attention call passes, which is the one that packed steps
    apply. Its window is that of the library's mask, or the one that `layer_types` asks for."""
    types = [*(getattr(config, "layer_types", None) or ()), *[None] * len(calls)]
    named = getattr(config, "sliding_window", None)
    for index, (call, kind) in enumerate(zip(calls, types, strict=False)):
        window = call.mask_window
        if kind == SLIDING and window == call.window == NO_WINDOW:
            window = int(named or 0)
        limit = min(one for one in (window, call.window, max_model_len) if one != NO_WINDOW)
        if window == call.window or max_model_len <= limit:
            continue
        advice = f"; set `model.max_model_len` to at most {limit}. Given: {max_model_len}" if limit > 0 else ""
        passed, wanted = ("none" if one == NO_WINDOW else one for one in (call.window, window))
        raise UnsupportedModel(
            name,
            f"the attention call of layer {index} must pass the layer's window, {wanted} (`sliding_window`: {named}, "
            f"`layer_types`: {kind}), since packed steps apply no other. It passes: {passed}{advice}",
        )
