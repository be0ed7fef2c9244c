"""Decides how this build serves a model: one table from the architecture that config.json names to the head it has.

A class name is looked up in transformers' own mappings for the configuration's type, so that a name belongs to one row
only, and a name that transformers lacks belongs to none.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from engine.model.compatibility import UnsupportedModel
from engine.model.encoder.families import FAMILIES
from engine.model.heads.head_declaration import HeadDeclaration
from engine.model.heads.info import HeadKind

NO_TENSOR = "(?!)"  # a pattern that no name matches
PROCESS_REWARD = "Qwen2ForProcessRewardModel"
TWO_LAYERS = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")
OTHER_HEADS = r"^(lm_head|cls|head|decoder|(vocab|generator|discriminator)_\w+)(\.|$)"  # of a body that is pooled


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureKind:
    """Describes the classes of one kind, and how they are served."""

    what: str  # in words, behind "it is"
    listed_in: tuple[Any, ...]  # the mappings of transformers that list the classes by configuration
    loaded_by: Any = None  # the auto class that reads the model; None: this build does not serve the kind
    head: HeadKind = HeadKind.LM
    head_tensors: str = NO_TENSOR  # a pattern of tensors that a head reads and the library's class has no place for
    optional_tensors: str = NO_TENSOR  # a pattern of tensors of the library's class that no head reads
    named: tuple[str, str] | None = None  # an architecture that transformers lacks, and its model type
    required: tuple[str, ...] = ()  # tensors of the head that the library's class has no place for

    def contains(self, architecture: str, config: Any) -> bool:
        """Returns whether `architecture` names a class of this kind for this type of configuration."""
        listed = any(architecture in _class_names(auto, config) for auto in self.listed_in)
        return listed or self.named == (architecture, config.model_type)


LANGUAGE_MODEL = ArchitectureKind(
    what="a causal language model", listed_in=(AutoModelForCausalLM,), loaded_by=AutoModelForCausalLM
)
KINDS = (  # the first that contains an architecture counts
    LANGUAGE_MODEL,
    ArchitectureKind(  # its text part alone is loaded
        what="a multimodal language model",
        listed_in=(AutoModelForImageTextToText, AutoModelForMultimodalLM),
        loaded_by=AutoModelForCausalLM,
    ),
    ArchitectureKind(
        what="a classifier or reward model of whole sequences",
        listed_in=(AutoModelForSequenceClassification,),
        loaded_by=AutoModelForSequenceClassification,
        head=HeadKind.SEQUENCE,
        head_tensors=r"^(score|classifier)\.bias$",
    ),
    ArchitectureKind(
        what="a classifier or process-reward model of single tokens",
        listed_in=(AutoModelForTokenClassification,),
        loaded_by=AutoModelForTokenClassification,
        head=HeadKind.TOKEN,
        head_tensors=r"^(score|classifier)\.bias$",
    ),
    ArchitectureKind(
        what="a process-reward model with a head of two layers",
        listed_in=(),
        named=(PROCESS_REWARD, "qwen2"),
        loaded_by=AutoModel,
        head=HeadKind.TOKEN,
        head_tensors=r"^(score\.[02]\.(weight|bias)|lm_head\.weight)$",
        required=TWO_LAYERS,
    ),
    ArchitectureKind(
        what="a reward model with a head of two layers",
        listed_in=(),
        named=("Qwen2ForRewardModel", "qwen2"),
        loaded_by=AutoModel,
        head=HeadKind.SEQUENCE,
        head_tensors=r"^(score\.[02]\.(weight|bias)|lm_head\.weight)$",
        required=TWO_LAYERS,
    ),
    ArchitectureKind(what="a masked language model (an encoder)", listed_in=(AutoModelForMaskedLM,)),
    ArchitectureKind(what="an encoder-decoder model", listed_in=(AutoModelForSeq2SeqLM,)),
    ArchitectureKind(what="a model for question answering", listed_in=(AutoModelForQuestionAnswering,)),
    ArchitectureKind(
        what="a model without a head (an embedding model, or the body of another)",
        listed_in=(AutoModel,),
        loaded_by=AutoModel,
        head=HeadKind.POOLED,
        head_tensors=OTHER_HEADS,
        optional_tensors=r"(^|\.)pooler\.",
    ),
)


def find_kind(config: Any) -> ArchitectureKind:
    """Returns how the model of a configuration is served. One that names no architecture is a language model.

    Args:
        config: The configuration of transformers.

    Raises:
        UnsupportedModel: An architecture that it names is not served, or transformers has no such class.
    """
    names = architectures_of(config)
    found = [_kind_of(name, config) for name in names] or [LANGUAGE_MODEL]
    if len({kind.head for kind in found}) > 1:
        raise UnsupportedModel(", ".join(names), "its config.json names several heads; say which in `model.head`")
    if not _class_names(found[0].loaded_by, config):
        raise UnsupportedModel(str(config.model_type), "it is no causal language model")
    if found[0].head is HeadKind.LM and is_encoder(config):
        raise UnsupportedModel(", ".join(names) or str(config.model_type), "it is an encoder, and no language model")
    if found[0].head is not HeadKind.LM and _class_names(AutoModelForMaskedLM, config) and not is_encoder(config):
        raise UnsupportedModel(", ".join(names), f"of the encoders only {', '.join(FAMILIES)} are")
    declaration = declaration_of(config)
    return found[0] if declaration is None else _with_declared_head(found[0], declaration)


def is_encoder(config: Any) -> bool:
    """Tells whether a configuration is that of a bidirectional model that this build knows, and not as a decoder."""
    return config.model_type in FAMILIES and not getattr(config, "is_decoder", False)


def choose_head(config: Any, head: str) -> None:
    """Makes the configuration name the class of transformers with the head that `model.head` names.

    Args:
        config: The configuration of transformers.
        head: `auto` leaves it as it is.

    Raises:
        UnsupportedModel: transformers has no such class for the model's type.
    """
    if head == "auto":
        return
    names = architectures_of(config)
    for name in names:
        if not any(kind.contains(name, config) for kind in KINDS):
            raise UnsupportedModel(name, _why_unknown(config))
    if any(kind.contains(name, config) and kind.required and kind.head == head for name in names for kind in KINDS):
        return  # a head that transformers has no class for
    kind = next(kind for kind in KINDS if kind.loaded_by is not None and kind.head == head)
    names = _class_names(kind.loaded_by, config)
    if not names:
        raise UnsupportedModel(str(config.model_type), f"`model.head` is {head}, and transformers has no such class")
    config.architectures = [names[0]]


def declare_head(config: Any, declaration: HeadDeclaration) -> None:
    """Makes the configuration name the class of the model's body, and carry what a file declares of its head.

    Raises:
        UnsupportedModel: transformers has no such class for the model's type.
    """
    choose_head(config, HeadKind.POOLED)
    config.declared_head = declaration


def declaration_of(config: Any) -> HeadDeclaration | None:
    """Returns what `declare_head` has put into the configuration."""
    return getattr(config, "declared_head", None)


def _with_declared_head(body: ArchitectureKind, declaration: HeadDeclaration) -> ArchitectureKind:
    own = [] if declaration.weights is not None else [f"^{re.escape(name)}$" for _, name in declaration.tensors]
    return replace(body, head=declaration.kind, head_tensors="|".join((body.head_tensors, *own)))


def architectures_of(config: Any) -> tuple[str, ...]:
    """Returns the architectures that config.json names."""
    return tuple(map(str, getattr(config, "architectures", None) or ()))


def _kind_of(architecture: str, config: Any) -> ArchitectureKind:
    kind = next((kind for kind in KINDS if kind.contains(architecture, config)), None)
    if kind is None:
        raise UnsupportedModel(architecture, _why_unknown(config))
    if kind.loaded_by is None:
        served = " or ".join(kind.what for kind in KINDS if kind.loaded_by is not None)
        raise UnsupportedModel(architecture, f"it is {kind.what}, and this build serves {served}")
    return kind


def _why_unknown(config: Any) -> str:
    known = sorted({name for kind in KINDS for auto in kind.listed_in for name in _class_names(auto, config)})
    why = f"transformers has no such class for model type `{config.model_type}`"
    if getattr(config, "auto_map", None):
        why += ", and the code that comes with the weights (auto_map) is not run"
    return f"{why}; its classes are {', '.join(known)}" if known else why


def _class_names(auto: Any, config: Any) -> tuple[str, ...]:
    """Returns the names of the classes that an auto class of transformers has for a configuration."""
    found = auto._model_mapping.get(type(config), ())
    return tuple(one.__name__ for one in (found if isinstance(found, list | tuple) else (found,)))
