"""What a configuration alone tells to be wrong under packing, and the error that says so."""

from collections.abc import Iterator
from typing import Any

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
ORIGINAL_LENGTH = "original_max_position_embeddings"


class Refused(RuntimeError):
    """The model would be computed wrong, or not at all. `architecture` and `reason` say which and why."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(architecture, reason)
        self.architecture = architecture
        self.reason = reason

    def __str__(self) -> str:
        return f"`{self.architecture}` is not supported: {self.reason}."


def refuse_by_config(config: Any, max_model_len: int | None = None) -> None:
    """Raises Refused for what a model library config tells to be wrong under packing."""
    name = str(config.model_type)
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise Refused(name, "it is an encoder-decoder model; only decoders are served")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise Refused(name, f"its weights are quantised ({getattr(method, 'value', method)}); only plain weights are")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(SUPPORTED_LAYERS))
    if others:
        raise Refused(name, f"it has layers of type {', '.join(others)}; only {' and '.join(SUPPORTED_LAYERS)} are")
    if getattr(text, "attention_chunk_size", None):
        raise Refused(name, "its attention is chunked (attention_chunk_size), which packed steps would not apply")
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
        raise Refused(name, "its rotary embedding is dynamic: a long request would change its neighbours")
    if kind == "longrope":
        original = parameters.get(ORIGINAL_LENGTH) or getattr(config, ORIGINAL_LENGTH, None)
        length = max_model_len or config.max_position_embeddings
        if original is None or length > original:
            raise Refused(
                name,
                f"its rotary embedding is longrope, which changes beyond {original} tokens for all requests of a step; "
                f"set `model.max_model_len` to at most {original}. Given: {length}",
            )
