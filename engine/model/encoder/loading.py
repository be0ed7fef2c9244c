"""Reads an encoder's files: safetensors alone. The head stays in float32 beside a body of any dtype."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from engine.config import ModelConfig
from engine.model.architectures import find_kind
from engine.model.checkpoint import audit_files, same_random_weights, weights_dtype
from engine.model.compatibility import UnsupportedModel
from engine.model.encoder.families import HEAD_MODULES, family_of
from engine.model.file_digests import verify_files
from engine.model.packing_check import REFERENCE


def read_encoder(folder: Path, config: Any, model: ModelConfig, device: torch.device) -> Any:
    """Reads a base model, or a `*ForSequenceClassification` or `*ForTokenClassification` where the architecture is one.

    Raises:
        ModelNotFound: The folder has no weights.
        BadCheckpoint: The weights are not those of the model that config.json describes.
        UnsupportedModel: It is no encoder that is served, its weights are pickled, or some are missing.
    """
    family_of(config)
    dtype = weights_dtype(config, model, device)
    auto = find_kind(config).loaded_by
    headed = auto is not AutoModel
    if model.random_weights:
        with same_random_weights(device), device:
            return auto.from_config(config, dtype=dtype, attn_implementation=REFERENCE).eval()
    audit_files(folder, config, model)
    verify_files(folder, weights=True)
    own = auto._model_mapping[type(config)]
    kind: Any = type(own.__name__, (own,), {"_keep_in_fp32_modules_strict": HEAD_MODULES})
    module, info = kind.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=REFERENCE,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    unread = () if headed else ("pooler.",)  # a base model's pooler is read by no head
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith(unread)):
        raise UnsupportedModel(
            config.model_type,
            f"its checkpoint lacks {len(missing)} tensors of {kind.__name__}, among them `{missing[0]}`",
        )
    return module.to(device).eval()
