"""Asking a model, layer by layer, what it wants of attention. Nothing trusts a config where the model can be asked."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention import ATTENTION, NO_SOFTCAP, NO_WINDOW, AttentionBody
from engine.kv_pool import LayerShape
from engine.rules import Refused

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
        raise Refused(architecture, f"a call with packed tokens failed ({type(error).__name__}: {error})") from error
    finally:
        _recorder.calls = None
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    if not calls:
        raise Refused(architecture, "its attention does not go through the library's attention interface")
    if [getattr(call.module, "layer_idx", None) for call in calls] != list(range(layers)):
        raise Refused(architecture, f"attention is not one call of each of its {layers} layers ({len(calls)} calls)")
    if any(call.masked for call in calls):
        raise Refused(architecture, "it builds an attention mask of its own, which packed steps would not apply")
    return calls


def stored_shapes(calls: Sequence[LayerCall], body: AttentionBody, architecture: str) -> list[LayerShape]:
    """What the pool keeps a layer. Raises Refused where the device's attention has no such heads."""
    try:
        return [LayerShape(call.kv_heads, *body.stored_dims(call.key_dim, call.value_dim)) for call in calls]
    except ValueError as error:
        raise Refused(architecture, str(error).rstrip(".")) from error
