"""Loading a target and, where speculation asks for one, its draft model: one vocabulary, one set of pool slots."""

import importlib
import time
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from engine.config import EngineConfig, ModelConfig
from engine.model.checkpoint import BUILTIN, choose_device, find_folder, longest_sequence, read_config, read_model
from engine.model.hf_model import HFModel, load_model, silent
from engine.model.interface import CausalLM, StartupProgress

BUILTIN_DRAFT = BUILTIN.parent / "draft"
TOY_BLUR = 0.3  # a toy draft foresees the toy most of the time


class UnsupportedDraft(ValueError):
    """`speculation.draft` cannot draft for this model."""


class LoadedModels(NamedTuple):
    target: CausalLM
    draft: CausalLM | None


def load_models(model: ModelConfig, engine: EngineConfig, progress: StartupProgress = silent) -> LoadedModels:
    """As `load_model`, with the draft model that `engine.speculation` names. Raises UnsupportedDraft besides."""
    if engine.speculation.draft is None:
        return LoadedModels(load_model(model, engine, progress), None)
    if str(model.path) == "toy":
        return _load_toys(model, engine)
    device = choose_device(model.device)
    asked = _asked(model, engine)
    folder, draft_folder = find_folder(model), _draft_folder(asked)
    config, draft_config = read_config(folder, model.max_model_len), read_config(draft_folder, None)
    length = longest_sequence(config, model.max_model_len)
    _check_configs(config, draft_config, length, asked)
    _check_tokenizers(folder, draft_folder, asked)
    started = time.perf_counter()
    modules = read_model(folder, config, model, device), read_model(draft_folder, draft_config, asked, device)
    progress("load", time.perf_counter() - started)
    draft = HFModel(modules[1], engine, max_model_len=length, pooled=False, progress=of_draft(progress))
    made = HFModel(modules[0], engine, max_model_len=length, folder=folder, draft=draft, progress=progress)
    check_widths(made, draft, str(asked.path))
    return LoadedModels(made, draft)


def check_pair(model: ModelConfig, engine: EngineConfig) -> None:
    """As `load_models` refuses a draft, as far as configurations and tokenizers tell. Reads no weight."""
    asked = _asked(model, engine)
    folder, draft_folder = find_folder(model), _draft_folder(asked)
    config, draft_config = read_config(folder, model.max_model_len), read_config(draft_folder, None)
    _check_configs(config, draft_config, longest_sequence(config, model.max_model_len), asked)
    _check_tokenizers(folder, draft_folder, asked)


def of_draft(progress: StartupProgress) -> StartupProgress:
    """Tells the draft model's stages under names of their own."""
    return lambda stage, seconds: progress(f"draft {stage}", seconds)


def check_widths(target: CausalLM, draft: CausalLM, name: str) -> None:
    """Raises UnsupportedDraft unless both give logits for the same ids."""
    if target.vocab_size != draft.vocab_size:
        raise UnsupportedDraft(
            f"`speculation.draft` must have the target's vocabulary of {target.vocab_size} ids. "
            f"Given: {name}, with {draft.vocab_size}."
        )


def _asked(model: ModelConfig, engine: EngineConfig) -> ModelConfig:
    return ModelConfig(
        path=engine.speculation.draft or "",
        revision=engine.speculation.draft_revision,
        dtype=model.dtype,
        device=model.device,
        random_weights=model.random_weights,
    )


def _draft_folder(asked: ModelConfig) -> Path:
    return BUILTIN_DRAFT if str(asked.path) == "builtin" else find_folder(asked)


def _check_configs(target: Any, draft: Any, length: int, asked: ModelConfig) -> None:
    """What can be told before any weight is read."""
    sizes = [config.get_text_config(decoder=True).vocab_size for config in (target, draft)]
    if sizes[0] != sizes[1]:
        raise UnsupportedDraft(
            f"`speculation.draft` must have the target's vocabulary of {sizes[0]} ids. "
            f"Given: {asked.path}, with {sizes[1]}."
        )
    try:
        longest_sequence(draft, length)
    except ValueError as error:
        raise UnsupportedDraft(
            f"`speculation.draft` must take sequences of {length} tokens, as the target does; "
            f"set `model.max_model_len` to what both can. Given: {asked.path}."
        ) from error


def _check_tokenizers(target: Path, draft: Path, asked: ModelConfig) -> None:
    """A draft without a tokenizer of its own is taken at its word."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if not all(file.is_file() for file in files):
        return
    first, second = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    if first != second:
        differ = sum(second.get(token) != index for token, index in first.items())
        raise UnsupportedDraft(
            f"`speculation.draft` must have the target's tokenizer. Given: {asked.path}, in which {differ} of "
            f"{len(first)} tokens have another id or none."
        )


def _load_toys(model: ModelConfig, engine: EngineConfig) -> LoadedModels:
    target = load_model(model, engine)
    if engine.speculation.draft != "toy":
        raise UnsupportedDraft(f"`speculation.draft` must be toy for the toy model. Given: {engine.speculation.draft}.")
    toy: Any = importlib.import_module("engine.testing.toy_model")
    draft: CausalLM = toy.ToyModel(
        num_slots=target.num_slots, max_model_len=target.max_model_len, vocab_size=target.vocab_size, blur=TOY_BLUR
    )
    return LoadedModels(target, draft)
