"""Makes the head that a model is served with, from the model as transformers loads it and the files beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from engine.config import ModelConfig
from engine.model.architectures import PROCESS_REWARD, architectures_of, declaration_of, find_kind, is_encoder
from engine.model.checkpoint_audit import DOWNLOAD, TensorHeader
from engine.model.encoder.families import family_of, head_pooling
from engine.model.heads.declared_head import make_declared_head
from engine.model.heads.embedding_files import dense_layers, read_embedding
from engine.model.heads.info import EmbeddingInfo, HeadInfo, HeadKind
from engine.model.heads.pooling_head import PoolingHead, PoolingModel
from engine.model.heads.row_pooling import Pooling
from engine.model.heads.sequence import label_names, problem_type, stored_head
from engine.model.model_folder import BadCheckpoint

STEP_TAG = "<extra_0>"  # ends a step in the layout of Qwen2ForProcessRewardModel


def make_head(
    module: Any, folder: Path, config: Any, model: ModelConfig, headers: Mapping[str, TensorHeader] | None
) -> PoolingModel:
    """Takes a model of transformers apart into its body and its head.

    Args:
        module: The model, as it was loaded.
        folder: The model's files.
        config: The configuration of transformers.
        model: The operator's choices.
        headers: The tensors of the files; None for random weights.

    Raises:
        UnsupportedModel: The head has another form than this build computes, or its labels have no names.
        BadCheckpoint: The head's tensors are of another shape, or hold values that are not finite.
        BadDeclaration: A file declares the head, and does not fit the model.
    """
    kind, declaration = find_kind(config).head, declaration_of(config)
    if declaration is not None:
        head = make_declared_head(declaration, folder, config, headers)
    elif kind is HeadKind.POOLED:
        head = _vectors(folder, config, model)
    elif is_encoder(config):
        head = _encoder_head(module, config, kind)
    else:
        tag = STEP_TAG if PROCESS_REWARD in architectures_of(config) else None
        layers, width = stored_head(module, find_kind(config).required, headers)
        info = HeadInfo(kind, width, label_names(config, width), problem_type(config), mark=tag)
        head = PoolingHead(info, layers, Pooling.LAST if kind is HeadKind.SEQUENCE else None)
    for name, weight in head.layers.named_parameters():
        if not bool(weight.isfinite().all()):
            raise BadCheckpoint(f"The head's `{name}` in {folder} has values that are not finite. {DOWNLOAD}")
    return PoolingModel(module.base_model, head.to(module.device))


def _encoder_head(module: Any, config: Any, kind: HeadKind) -> PoolingHead:
    family, width = family_of(config), int(config.num_labels)
    info = HeadInfo(kind, width, label_names(config, width), problem_type(config), encoder=True, whole_rows=True)
    if kind is HeadKind.TOKEN:
        return PoolingHead(info, family.token_head(module), None)
    return PoolingHead(info, family.head(module), head_pooling(config))


def _vectors(folder: Path, config: Any, model: ModelConfig) -> PoolingHead:
    name = ", ".join(architectures_of(config)) or str(config.model_type)
    files = read_embedding(folder, name, model.pooling)
    hidden = int(config.get_text_config(decoder=True).hidden_size)
    layers = dense_layers(files, name, hidden)
    width = next((layer.out_features for layer in reversed(layers) if isinstance(layer, nn.Linear)), hidden)
    embedding = EmbeddingInfo(files.normalised, _dimensions(config, model, width), files.prompts, files.default_prompt)
    encoder = is_encoder(config)
    whole = encoder or files.pooling is not Pooling.LAST  # a mean needs every token, cached or not
    info = HeadInfo(HeadKind.POOLED, width, (), encoder=encoder, whole_rows=whole, embedding=embedding)
    return PoolingHead(info, nn.Sequential(*layers), files.pooling)


def _dimensions(config: Any, model: ModelConfig, width: int) -> tuple[int, ...]:
    """Returns the lengths to which vectors may be cut, ascending; () where the model was not trained so."""
    given = model.embedding_dimensions or getattr(config, "matryoshka_dimensions", None) or ()
    wrong = [one for one in given if not isinstance(one, int) or not 1 <= one <= width]
    if wrong:
        raise ValueError(f"`model.embedding_dimensions` must be in [1, {width}]. Given: {wrong[0]}.")
    return tuple(sorted(given)) if given else tuple(range(1, width + 1)) * bool(getattr(config, "is_matryoshka", False))
