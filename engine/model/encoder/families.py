"""EncoderFamily: what differs between the encoders of transformers that are served."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.model.compatibility import UnsupportedModel, check_config
from engine.model.encoder.disentangled_attention import disentangled_hidden
from engine.model.encoder.packed_rows import PackedRows
from engine.model.heads.row_pooling import Pooling


class FirstToken(nn.Module):
    """Gives hidden rows [R, H] to a head of the library, which takes the first token of (R, tokens, H)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Returns [R, K]."""
        logits: torch.Tensor = self.head(hidden_RH[:, None])
        return logits


def interface_hidden(base: Any, rows: PackedRows) -> torch.Tensor:
    """Returns the last hidden states [T, hidden] of a base model whose attention goes through the library's
    interface."""
    more = {"token_type_ids": rows.token_types[None]} if segments_of(base.config) else {}
    found: torch.Tensor = base(
        input_ids=rows.ids[None], position_ids=rows.positions[None], rows=rows, **more
    ).last_hidden_state
    return found[0]


class EncoderFamily(NamedTuple):
    """Describes one family."""

    head: Callable[[Any], nn.Module]  # from `*ForSequenceClassification` to its layers, [R, hidden] to [R, labels]
    token_head: Callable[[Any], nn.Module] = lambda model: model.classifier  # the same of `*ForTokenClassification`
    padded_positions: bool = False  # positions begin behind the padding token's id (RoBERTa)
    token_types: bool = True  # it embeds the segment of each token, as far as its configuration has segments
    has_interface: bool = True  # its attention goes through the library's interface
    pooling_field: str | None = None  # of its configuration: what its head reads; None: the first token
    hidden: Callable[[Any, PackedRows], torch.Tensor] = interface_hidden


_roberta = EncoderFamily(lambda model: FirstToken(model.classifier), padded_positions=True)
FAMILIES: dict[str, EncoderFamily] = {  # by `model_type`
    "bert": EncoderFamily(lambda model: nn.Sequential(FirstToken(model.base_model.pooler), model.classifier)),
    "camembert": _roberta,
    "deberta-v2": EncoderFamily(
        lambda model: nn.Sequential(FirstToken(model.pooler), model.classifier),
        has_interface=False,
        hidden=disentangled_hidden,
    ),
    "distilbert": EncoderFamily(
        lambda model: nn.Sequential(model.pre_classifier, nn.ReLU(), model.classifier), token_types=False
    ),
    "electra": EncoderFamily(lambda model: FirstToken(model.classifier)),
    "modernbert": EncoderFamily(
        lambda model: nn.Sequential(model.head, model.classifier),
        token_head=lambda model: nn.Sequential(model.head, model.classifier),
        token_types=False,
        pooling_field="classifier_pooling",
    ),
    "roberta": _roberta,
    "xlm-roberta": _roberta,
}
HEAD_MODULES = ("classifier", "head", "pooler", "pre_classifier")  # of all families; they stay in float32


def family_of(config: Any) -> EncoderFamily:
    """Returns the family of a configuration.

    Raises:
        UnsupportedModel: It is no encoder that is served, or a variant that packed rows would compute wrong.
    """
    name = str(config.model_type)
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(name, f"of the encoders only {', '.join(FAMILIES)} are")
    if getattr(config, "is_decoder", False):
        raise UnsupportedModel(name, "`is_decoder` of its config.json is true; only encoders are")
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise UnsupportedModel(
            name, f"`position_embedding_type` of its config.json must be absolute for this family. Given: {positions}"
        )
    check_config(config)
    return family


def segments_of(config: Any) -> int:
    """Returns how many segments the model embeds; 0: it has no token types."""
    return int(config.type_vocab_size or 0) if FAMILIES[str(config.model_type)].token_types else 0


def head_pooling(config: Any) -> Pooling:
    """Returns what the sequence head of this configuration reads. The library checks the configuration's value."""
    field = FAMILIES[str(config.model_type)].pooling_field
    return Pooling.CLS if field is None else Pooling(getattr(config, field))


def longest_row(config: Any, max_model_len: int | None = None) -> int:
    """Returns how many tokens a row may have: `max_model_len`, else what the model has positions for.

    Raises:
        ValueError: `max_model_len` is more than that.
    """
    own = int(config.max_position_embeddings)
    if family_of(config).padded_positions:
        own -= int(config.pad_token_id) + 1
    length = own if max_model_len is None else max_model_len
    if not 1 <= length <= own:
        raise ValueError(f"`model.max_model_len` must be in [1, {own}] for this encoder. Given: {max_model_len}.")
    return length
