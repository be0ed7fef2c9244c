"""Tiny random encoders of every family and variant that is served, and the library's own answers row by row."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from engine.model.encoder.packed_rows import EncoderRow

VOCAB, LONGEST, LABELS, PADDING = 111, 300, 3, 1
WINDOW = 16  # of ModernBERT's local layers: 8 tokens on each side
LENGTHS = (5, 1, 40, 17, 280, 2, 63)
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "num_labels": LABELS,
    "pad_token_id": PADDING,
}
CONTROL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
SHARED = {**RELATIVE, "share_att_key": True, "position_buckets": 32, "norm_rel_ebd": "layer_norm"}
T = transformers
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: T.BertConfig(**BASE),
    "camembert": lambda: T.CamembertConfig(**BASE, type_vocab_size=1),
    "distilbert": lambda: T.DistilBertConfig(
        vocab_size=VOCAB,
        dim=64,
        hidden_dim=96,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=LONGEST,
        num_labels=LABELS,
        pad_token_id=PADDING,
    ),
    "electra": lambda: T.ElectraConfig(**BASE, embedding_size=32),
    "modernbert": lambda: T.ModernBertConfig(**BASE, **CONTROL, local_attention=WINDOW, global_attn_every_n_layers=3),
    "modernbert mean": lambda: T.ModernBertConfig(
        **BASE, **CONTROL, local_attention=WINDOW, global_attn_every_n_layers=3, classifier_pooling="mean"
    ),
    "roberta": lambda: T.RobertaConfig(**BASE, type_vocab_size=1),
    "xlm-roberta": lambda: T.XLMRobertaConfig(**BASE, type_vocab_size=1),
    "deberta-v3": lambda: T.DebertaV2Config(**BASE, **SHARED, position_biased_input=False, type_vocab_size=0),
    "deberta-v2 convolution": lambda: T.DebertaV2Config(
        **BASE, **SHARED, position_biased_input=False, type_vocab_size=2, conv_kernel_size=3, conv_act="gelu"
    ),
    "deberta-v2 unshared": lambda: T.DebertaV2Config(**BASE, **RELATIVE, share_att_key=False, type_vocab_size=2),
    "deberta-v2 c2p": lambda: T.DebertaV2Config(
        **BASE, relative_attention=True, share_att_key=False, pos_att_type=["c2p"]
    ),
    "deberta-v2 absolute": lambda: T.DebertaV2Config(**BASE),
}


class TinyEncoders:
    """Random models with weights large enough that attention and positions matter."""

    names = tuple(ENCODERS)

    def config(self, name: str, **changes: Any) -> Any:
        config = ENCODERS[name]()
        for field, value in changes.items():
            setattr(config, field, value)
        return config

    def module(self, name: str, **changes: Any) -> Any:
        torch.manual_seed(0)
        module = AutoModelForSequenceClassification.from_config(
            self.config(name, **changes), attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return module.eval()

    def segments(self, module: Any) -> int:
        silent = module.config.model_type in ("distilbert", "modernbert")
        return 0 if silent else int(module.config.type_vocab_size)

    def rows(self, module: Any, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[EncoderRow]:
        """Returns pairs with two segments where the model has them, the longer ones with the padding token inside."""
        rng = np.random.default_rng(seed)
        rows = []
        for length in lengths:
            ids = rng.integers(3, VOCAB, length).astype(np.int32)
            if length > 10:
                ids[length // 3] = PADDING
            types = np.sort(rng.integers(0, max(1, self.segments(module)), length))
            rows.append(EncoderRow(ids, types.astype(np.int32)))
        return rows

    @torch.no_grad()
    def reference(self, module: Any, rows: Sequence[EncoderRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the library's hidden states [T, H] and logits [R, K], each row by itself."""
        hidden, logits = [], []
        for row in rows:
            given = {"input_ids": torch.from_numpy(row.ids).long()[None].to(module.device)}
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            if self.segments(module) and row.token_types is not None:
                given["token_type_ids"] = torch.from_numpy(row.token_types).long()[None].to(module.device)
            hidden.append(module.base_model(**given).last_hidden_state[0])
            logits.append(module(**given).logits)
        return torch.cat(hidden), torch.cat(logits)


@pytest.fixture(scope="session")
def tiny_encoders() -> TinyEncoders:
    return TinyEncoders()
