"""Makes the head of a `*ForSequenceClassification` model: one linear layer over a row's last token."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from engine.model.checkpoint_audit import BadCheckpoint, TensorHeader
from engine.model.compatibility import UnsupportedModel
from engine.model.heads.info import HeadInfo, HeadKind, ProblemType
from engine.model.heads.pooling_head import PoolingHead, PoolingModel

PROBLEM_TYPES: tuple[ProblemType, ...] = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)


def split_head(module: Any, headers: Mapping[str, TensorHeader] | None) -> PoolingModel:
    """Takes a model of transformers apart into its body and its head.

    Args:
        module: The model, as it was loaded.
        headers: The tensors of its files; None for random weights.

    Raises:
        UnsupportedModel: The head is not one linear layer, or its labels have no names.
        BadCheckpoint: The head's tensors are of another shape.
    """
    config = module.config
    name, layer = _find_linear(module)
    info = HeadInfo(HeadKind.SEQUENCE, layer.out_features, label_names(config), problem_type(config))
    if headers is not None:
        layer = _stored_linear(name, layer, headers)
    return PoolingModel(module.base_model, PoolingHead(info, layer).to(module.device))


def _find_linear(module: Any) -> tuple[str, nn.Linear]:
    """Returns the only layer that the model has behind its body, and its name."""
    found = {
        name: child
        for name, child in module.named_children()
        if child is not module.base_model and not isinstance(child, nn.Dropout)
    }
    for name, layer in found.items():
        if len(found) == 1 and isinstance(layer, nn.Linear):
            return name, layer
    given = ", ".join(found) or "nothing"
    raise UnsupportedModel(type(module).__name__, f"its head must be one linear layer. Given: {given}")


def _stored_linear(name: str, layer: nn.Linear, headers: Mapping[str, TensorHeader]) -> nn.Linear:
    """Returns the layer with the values that the files hold, in float32, and with a bias if they hold one.

    The library rounds a head to the dtype of the body: a float32 head beside a bfloat16 body would lose bits.
    """
    bias = f"{name}.bias" in headers
    stored = nn.Linear(layer.in_features, layer.out_features, bias=bias, device="meta")
    stored.weight = _read(f"{name}.weight", headers, (layer.out_features, layer.in_features))
    if bias:
        stored.bias = _read(f"{name}.bias", headers, (layer.out_features,))
    return stored


def _read(name: str, headers: Mapping[str, TensorHeader], shape: tuple[int, ...]) -> nn.Parameter:
    header = headers.get(name)
    if header is None or header.shape != shape:
        given = "none" if header is None else list(header.shape)
        raise BadCheckpoint(f"The files must hold the head's `{name}` of shape {list(shape)}. Given: {given}.")
    with safe_open(header.file, "pt") as opened:
        values: torch.Tensor = opened.get_tensor(name)
    return nn.Parameter(values.float(), requires_grad=False)


def label_names(config: Any) -> tuple[str, ...]:
    """Returns the names of the K labels, in the order of the head's rows.

    Raises:
        UnsupportedModel: `id2label` does not name the ids 0 to K - 1.
    """
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if sorted(names) != list(range(int(config.num_labels))):
        raise UnsupportedModel(
            config.model_type,
            f"`id2label` of its config.json must name the labels 0 to {int(config.num_labels) - 1}. "
            f"Given: {', '.join(map(str, sorted(names)))}",
        )
    return tuple(names[index] for index in range(len(names)))


def problem_type(config: Any) -> ProblemType | None:
    """Returns what the head was trained for, None where the configuration does not say it.

    Raises:
        UnsupportedModel: The configuration names something else.
    """
    given = getattr(config, "problem_type", None)
    for known in PROBLEM_TYPES:
        if given == known:
            return known
    if given is None:
        return None
    raise UnsupportedModel(
        config.model_type,
        f"`problem_type` of its config.json must be one of {', '.join(PROBLEM_TYPES)}. Given: {given}",
    )
