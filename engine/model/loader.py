"""Loads a target model and, where speculation needs one, its draft model: one vocabulary, one set of storage slots."""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from engine.config import EngineConfig, ModelConfig
from engine.model.architectures import find_kind, is_encoder
from engine.model.checkpoint import (
    audit_files,
    choose_device,
    longest_sequence,
    model_length,
    read_config,
    read_model,
    toy_module,
)
from engine.model.checkpoint_audit import read_headers
from engine.model.encoder.loading import read_encoder
from engine.model.encoder.pooled_encoder import PooledEncoder
from engine.model.heads.info import HeadKind
from engine.model.heads.make_head import make_head
from engine.model.hf_model import HFModel, allocate_kv_storage
from engine.model.interface import CausalLM
from engine.model.model_folder import find_draft_folder, find_folder
from gpu_sampler.startup_progress import StartupProgress, silent, timed


class UnsupportedDraft(ValueError):
    """`speculation.draft` cannot draft for this model."""


class LoadedModels(NamedTuple):
    """Holds the models that a replica runs."""

    target: CausalLM
    draft: CausalLM | None


def load_model(model: ModelConfig, engine: EngineConfig, progress: StartupProgress = silent) -> CausalLM:
    """Loads a model, checks it and gives it KV storage.

    Raises:
        ModelNotFound: `model` names nothing that can be read.
        UnsupportedModel: The model would be computed wrong, or not at all.
        KVStorageTooSmall: The memory left holds too few slots.
        ValueError: An option does not fit the model or the machine.
    """
    if str(model.path) == "toy":
        toy: CausalLM = toy_module().load(model, engine)
        return toy
    device = choose_device(model.device)
    with timed("load", progress):
        folder = find_folder(model)
        config = read_config(folder, model.max_model_len, model.head)
        if engine.numerics == "invariant" and is_encoder(config):
            raise ValueError("`engine.numerics` must be fast for an encoder. Given: invariant.")
        module: Any = (read_encoder if is_encoder(config) else read_model)(folder, config, model, device)
        if find_kind(config).head is not HeadKind.LM:
            headers = None if model.random_weights else read_headers(folder, config)
            module = make_head(module, folder, config, model, headers)
    length = model_length(folder, config, model)
    if is_encoder(config):
        return PooledEncoder(module, engine, max_model_len=length, progress=progress)
    return HFModel(module, engine, max_model_len=length, folder=folder, progress=progress)


def load_models(model: ModelConfig, engine: EngineConfig, progress: StartupProgress = silent) -> LoadedModels:
    """Loads a model, and the draft model that `engine.speculation` names.

    Raises:
        UnsupportedDraft: The draft model cannot draft for this model. Others as `load_model`.
    """
    if engine.speculation.draft is None:
        return LoadedModels(load_model(model, engine, progress), None)
    if str(model.path) == "toy":
        toys: LoadedModels = toy_module().load_models(model, engine)
        return toys
    device = choose_device(model.device)
    draft_model = _draft_model_config(model, engine)
    folder, draft_folder, config, draft_config, length = _checked_pair(model, draft_model)
    with timed("load", progress):
        module = read_model(folder, config, model, device)
        draft_module = read_model(draft_folder, draft_config, draft_model, device)
    options: dict[str, Any] = {"max_model_len": length, "allocate": False}
    draft = HFModel(draft_module, engine, **options, progress=draft_progress(progress))
    target = HFModel(module, engine, **options, folder=folder, progress=progress)
    allocate_kv_storage([target, draft], engine, progress)
    check_widths(target.vocab_size, draft.vocab_size, str(draft_model.path))
    return LoadedModels(target, draft)


def check_pair(model: ModelConfig, engine: EngineConfig) -> None:
    """Raises what `load_models` raises for a draft, as far as files tell without their weights."""
    draft = _draft_model_config(model, engine)
    _, folder, _, config, _ = _checked_pair(model, draft)
    audit_files(folder, config, draft)


def draft_progress(progress: StartupProgress) -> StartupProgress:
    """Returns a progress that reports stages under the draft model's names."""
    return lambda stage, seconds: progress(f"draft {stage}", seconds)


def _checked_pair(model: ModelConfig, draft: ModelConfig) -> tuple[Path, Path, Any, Any, int]:
    """Finds and checks both models' configurations and tokenizers: (folder, draft's folder, configuration, draft's
    configuration, longest sequence)."""
    folder, draft_folder = find_folder(model), find_draft_folder(draft)
    config = read_config(folder, model.max_model_len, model.head)
    if (kind := find_kind(config).head) is not HeadKind.LM:
        raise UnsupportedDraft(
            f"`speculation.draft` must be absent for a model with a {kind} head. Given: {draft.path}."
        )
    length = longest_sequence(config, model.max_model_len)
    draft_config = read_config(draft_folder, length)
    if (kind := find_kind(draft_config).head) is not HeadKind.LM:
        raise UnsupportedDraft(
            f"`speculation.draft` must be a language model. Given: {draft.path}, with a {kind} head."
        )
    _check_configs(config, draft_config, length, draft)
    _check_tokenizers(folder, draft_folder, draft)
    return folder, draft_folder, config, draft_config, length


def check_widths(target: int, draft: int, name: str) -> None:
    """Checks that both models give logits for the same ids.

    Raises:
        UnsupportedDraft: They do not.
    """
    if target != draft:
        raise UnsupportedDraft(
            f"`speculation.draft` must have the target's vocabulary of {target} ids. Given: {name}, with {draft}."
        )


def _draft_model_config(model: ModelConfig, engine: EngineConfig) -> ModelConfig:
    return ModelConfig(
        path=engine.speculation.draft or "",
        revision=engine.speculation.draft_revision,
        dtype=model.dtype,
        device=model.device,
        random_weights=model.random_weights,
    )


def _check_configs(target: Any, draft: Any, length: int, model: ModelConfig) -> None:
    """Raises UnsupportedDraft where the configurations differ in vocabulary, or the draft is too short."""
    target_width, draft_width = (config.get_text_config(decoder=True).vocab_size for config in (target, draft))
    check_widths(target_width, draft_width, str(model.path))
    try:
        longest_sequence(draft, length)
    except ValueError as error:
        raise UnsupportedDraft(
            f"`speculation.draft` must take sequences of {length} tokens, as the target does; "
            f"set `model.max_model_len` to what both can. Given: {model.path}."
        ) from error


def _check_tokenizers(target: Path, draft: Path, model: ModelConfig) -> None:
    """Raises UnsupportedDraft where the tokenizers differ. A draft without one of its own is trusted."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if not all(file.is_file() for file in files):
        return
    first, second = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    if first != second:
        differ = sum(second.get(token) != index for token, index in first.items())
        raise UnsupportedDraft(
            f"`speculation.draft` must have the target's tokenizer. Given: {model.path}, in which {differ} of "
            f"{len(first)} tokens have another id or none."
        )
