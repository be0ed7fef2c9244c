"""Finds a model's decoder layers by the attention modules that they hold."""

from collections.abc import Sequence

from torch import nn


def decoder_layers(module: nn.Module, attentions: Sequence[nn.Module]) -> nn.ModuleList:
    """Returns the decoder layers: the list of modules whose n-th holds the n-th attention module.

    Raises:
        ValueError: The model has no such list.
    """
    for found in module.modules():
        if isinstance(found, nn.ModuleList) and len(found) == len(attentions):
            holds = (attention in set(layer.modules()) for layer, attention in zip(found, attentions, strict=True))
            if all(holds):
                return found
    raise ValueError("The model keeps its decoder layers in no module list; set `engine.compile` to false.")
