"""Finds and reads a model's files: safetensors alone, from a folder or a pinned revision. It runs no code of theirs."""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config import ModelConfig
from engine.model.architectures import (
    architectures_of,
    choose_head,
    declaration_of,
    declare_head,
    find_kind,
    is_encoder,
)
from engine.model.checkpoint_audit import (
    CheckpointAudit,
    audit_folder,
    audit_weights,
    check_loading_info,
    explain_other_weights,
    read_headers,
)
from engine.model.compatibility import UnsupportedModel, check_config
from engine.model.encoder.families import longest_row
from engine.model.file_digests import verify_files
from engine.model.heads.declared_head import check_declared_head
from engine.model.heads.embedding_files import dense_layers, has_pooling, read_embedding
from engine.model.heads.head_declaration import read_declaration
from engine.model.heads.info import HeadKind
from engine.model.model_folder import BadCheckpoint, ModelNotFound, one_line, read_json
from engine.model.packing_check import REFERENCE

log = logging.getLogger(__name__)
RANDOM_SEED = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Returns the device that `model.device` names.

    Raises:
        ValueError: It is cuda on a machine without CUDA.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"`model.device` must be cpu on a machine without CUDA. Given: {name}.")
    return torch.device("cuda", torch.cuda.current_device())


def read_config(folder: Path, max_model_len: int | None, head: str | Path = "auto") -> Any:
    """Reads and checks the model's configuration and the kind of its folder, before any weight.

    Args:
        folder: The model's files.
        max_model_len: Tokens of a sequence; None: as many as the model was made for.
        head: `model.head`.

    Raises:
        ModelNotFound: The folder has no config.json.
        BadCheckpoint: config.json or a file beside it is damaged.
        UnsupportedModel: The model would be computed wrong, or not at all.
        BadDeclaration: `head` is a file that declares no head.
    """
    file = folder / "config.json"
    if not file.is_file():
        why = explain_other_weights(folder) or ""
        raise ModelNotFound(f"`model.path` must hold a config.json. Given: {folder}. {why}".rstrip())
    raw = read_json(file)
    kind = raw.get("model_type")
    name = str(kind or (raw.get("architectures") or ["unknown"])[0])
    if kind not in CONFIG_MAPPING:
        why = "its code comes with its weights (auto_map), and no such code is run" if "auto_map" in raw else "unknown"
        raise UnsupportedModel(
            name, why if why != "unknown" else f"this version of transformers has no model type `{kind}`"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise BadCheckpoint(f"{file} must be a configuration of `{kind}`: {one_line(error)}.") from error
    check_config(config, max_model_len)
    if isinstance(head, Path):
        declare_head(config, read_declaration(folder / head))
    else:
        choose_head(config, "pooled" if head == "auto" and has_pooling(folder) else head)
    audit_folder(folder, config)
    if not architectures_of(config):
        log.warning("%s names no `architectures`: it is served as a language model.", file)
    return config


def audit_files(folder: Path, config: Any, model: ModelConfig) -> CheckpointAudit | None:
    """Checks the weights' files without reading them; returns None where weights are drawn at random.

    Raises:
        ModelNotFound: The folder has no weights.
        BadCheckpoint: The weights are not those of the model that config.json describes.
        UnsupportedModel: The weights are pickled, or nothing says how an embedding model pools.
        BadDeclaration: A file declares the head, and does not fit the model.
    """
    if find_kind(config).head is HeadKind.POOLED:
        files = read_embedding(folder, ", ".join(architectures_of(config)), model.pooling)
        dense_layers(files, ", ".join(architectures_of(config)), int(config.get_text_config(decoder=True).hidden_size))
    if model.random_weights:
        return None
    require_safetensors(folder, config.model_type)
    audit = audit_weights(folder, config)
    if (declaration := declaration_of(config)) is not None:
        check_declared_head(declaration, folder, config, read_headers(folder, config))
    return audit


def read_model(folder: Path, config: Any, model: ModelConfig, device: torch.device) -> nn.Module:
    """Reads the model to `device`, in evaluation mode, without gradients.

    Raises:
        ModelNotFound: The folder has no weights.
        BadCheckpoint: The weights are not those of the model that config.json describes.
        UnsupportedModel: This build does not serve its architecture, or its weights are pickled.
    """
    dtype, kind = weights_dtype(config, model, device), find_kind(config)
    if model.random_weights:
        with same_random_weights(device), device:
            module = kind.loaded_by.from_config(config, dtype=dtype, attn_implementation=REFERENCE)
    else:
        audit_files(folder, config, model)
        verify_files(folder, weights=True)
        module, info = kind.loaded_by.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=REFERENCE,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
        check_loading_info(info, module, kind.head_tensors)
        module = module.to(device)
    ready: nn.Module = module.eval().requires_grad_(False)
    return ready


@contextmanager
def same_random_weights(device: torch.device) -> Iterator[None]:
    """Draws the same numbers inside in every process, so that all replicas have the same random weights."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(RANDOM_SEED)
        yield


def weights_dtype(config: Any, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype in which the model is held: `model.dtype`, or with `auto` what suits the device."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16  # the paged kernels take halves alone


def require_safetensors(folder: Path, name: str) -> None:
    """Raises UnsupportedModel for a folder whose weights are pickled, and ModelNotFound for one without weights."""
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")):
        raise UnsupportedModel(name, "its weights are pickled (.bin), which can run code; convert them to safetensors")
    why = explain_other_weights(folder) or ""
    raise ModelNotFound(f"`model.path` must hold *.safetensors. Given: {folder}. {why}".rstrip())


def end_of_text_ids(config: Any, folder: Path | None, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids below `vocab_size` that end a text: the generation config's, else the config's."""
    text = config.get_text_config(decoder=True)
    own = _generation_eos(folder)
    found: int | list[int] | None = getattr(text, "eos_token_id", None) if own is None else own
    if found is None:
        return ()
    named = (found,) if isinstance(found, int) else tuple(found)
    known = tuple(token for token in named if 0 <= token < vocab_size)
    if known != named:
        log.warning("`eos_token_id` %s names ids that the model, with %d logits, never draws.", found, vocab_size)
    return known


def _generation_eos(folder: Path | None) -> Any:
    if folder is None or not (folder / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id


def longest_sequence(config: Any, max_model_len: int | None) -> int:
    """Returns how many tokens a sequence may have: `max_model_len`, else what the model was made for.

    Raises:
        ValueError: `max_model_len` is more than that, or both are missing.
    """
    if is_encoder(config):
        return longest_row(config, max_model_len)
    text = config.get_text_config(decoder=True)
    own: int | None = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    length = own if max_model_len is None else max_model_len
    if length is None:
        raise ValueError("`model.max_model_len` must be given: the model's configuration names no length.")
    if not 1 <= length <= (own or length):
        raise ValueError(f"`model.max_model_len` must be in [1, {own}]. Given: {max_model_len}.")
    return length


def model_length(folder: Path, config: Any, model: ModelConfig) -> int:
    """Returns how many tokens a sequence of this model may have: an embedding model was trained for those that its
    files name, which may be fewer than it has positions for.

    Raises:
        ValueError: `model.max_model_len` is more than the model was made for.
    """
    own = longest_sequence(config, model.max_model_len)
    if model.max_model_len is None and find_kind(config).head is HeadKind.POOLED:
        trained = read_embedding(folder, str(config.model_type), model.pooling).max_tokens
        return min(own, trained) if trained else own
    return own


def faults_allowed() -> bool:
    """Returns whether this process may run the fault-test model."""
    return os.environ.get("ASSAY_TEST_FAULTS") == "1"


def toy_module() -> Any:
    """Returns the tests' module with the fault-test model and its tokenizer, which ship with the tests alone.

    Raises:
        ValueError: This process may not run it.
    """
    if not faults_allowed():
        raise ValueError("`model.path` toy is a fault-test model and needs ASSAY_TEST_FAULTS=1.")
    return importlib.import_module("tests.support.toy_model")
