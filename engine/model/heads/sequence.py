"""Reads the heads of causal classifiers and reward models: one linear layer, or two with a ReLU between them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from engine.model.checkpoint_audit import TensorHeader
from engine.model.compatibility import UnsupportedModel
from engine.model.heads.info import ProblemType
from engine.model.model_folder import BadCheckpoint

PROBLEM_TYPES: tuple[ProblemType, ...] = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)


def stored_head(
    module: Any, two_layers: Sequence[str], headers: Mapping[str, TensorHeader] | None
) -> tuple[nn.Module, int]:
    """Returns the layers of a model's head, and K.

    Args:
        module: The model, as it was loaded.
        two_layers: The tensors of a head that the library has no place for; () where the library has the head.
        headers: The tensors of the model's files; None for random weights.

    Raises:
        UnsupportedModel: The head is not one linear layer.
        BadCheckpoint: The head's tensors are of another shape.
    """
    if two_layers:
        return _two_layers(module.config, two_layers, headers)
    name, layer = _find_linear(module)
    return (layer if headers is None else _stored_linear(name, layer, headers)), layer.out_features


def _two_layers(config: Any, names: Sequence[str], headers: Mapping[str, TensorHeader] | None) -> tuple[nn.Module, int]:
    """Returns Linear, ReLU, Linear (Zhang et al., The Lessons of Developing Process Reward Models, 2025)."""
    hidden = int(config.hidden_size)
    width = int(config.num_labels) if headers is None else headers[names[2]].shape[0]
    layers = [nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, width)]
    if headers is not None:
        for at, layer in ((0, layers[0]), (2, layers[2])):
            layers[at] = _stored_linear(names[at].removesuffix(".weight"), layer, headers)
    return nn.Sequential(*layers), width


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


def _stored_linear(name: str, layer: Any, headers: Mapping[str, TensorHeader]) -> nn.Linear:
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


def label_names(config: Any, width: int) -> tuple[str, ...]:
    """Returns the names of the K labels, in the order of the head's rows. `width`: K.

    Raises:
        UnsupportedModel: `id2label` does not name the ids 0 to K - 1.
    """
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if sorted(names) != list(range(width)):
        raise UnsupportedModel(
            config.model_type,
            f"`id2label` of its config.json must name the labels 0 to {width - 1}. "
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
