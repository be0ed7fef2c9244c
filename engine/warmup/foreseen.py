"""Foresees what a start-up compiles for a model by its config.json, without its weights and without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.model.model_folder import read_json

HALVES: Final = ("bfloat16", "float16")
LANGUAGE_MODELS: Final = ("ForCausalLM", "ForConditionalGeneration")  # ends of the names of architectures


class ForeseenHead(NamedTuple):
    """Holds what kernels of the head depend on, as a `HeadSpec` does."""

    scale: float
    softcap: float
    bias: None = None


class Foreseen(NamedTuple):
    """Holds what kernels depend on, as a `CausalLM` does."""

    vocab_size: int
    dtype: str
    head: ForeseenHead


def foresee(folder: Path, dtype: str) -> Foreseen | None:
    """Returns what the model of a folder will probably be on a GPU; None for one that is no language model.

    Args:
        folder: The model's files.
        dtype: That of the logits, or auto: that of the weights.

    Raises:
        BadCheckpoint: config.json is damaged.
        OSError: It cannot be read.
    """
    config = read_json(folder / "config.json")
    text = text_part(config)
    if not any(str(name).endswith(LANGUAGE_MODELS) for name in config.get("architectures") or ()):
        return None
    if not isinstance(text.get("vocab_size"), int):
        return None
    scale = text.get("logit_scale") or 1 / (text.get("logits_scaling") or 1)
    head = ForeseenHead(scale, text.get("final_logit_softcapping") or 0.0)
    return Foreseen(text["vocab_size"], own_half(text) if dtype == "auto" else dtype, head)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes the decoder."""
    found: Mapping[str, Any] = config.get("text_config") or config
    return found


def own_half(text: Mapping[str, Any]) -> str:
    """Returns the dtype in which a model is held on a GPU if nothing else is said."""
    own = str(text.get("dtype") or text.get("torch_dtype"))
    return own if own in HALVES else "bfloat16"
