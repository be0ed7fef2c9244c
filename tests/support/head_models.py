"""Tiny random models with heads, saved as their publishers save them, with a byte-level tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BOS, EOS = "<s>", "</s>"
VOCAB = 260
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def perturbed(module: Any) -> Any:
    """Makes weights large enough that attention, routing and the head matter."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def sequence_classifier(config: Any, seed: int = 0) -> Any:
    """The library's own model for the configuration, with random weights."""
    torch.manual_seed(seed)
    return perturbed(AutoModelForSequenceClassification.from_config(config, attn_implementation="eager"))


def save(module: Any, folder: Path) -> Path:
    """Saves model and tokenizer to a new folder."""
    folder.mkdir(parents=True)
    module.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer that has an id for each byte, and writes BOS in front of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS), AddedToken(EOS)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"bos_token": "{BOS}", "eos_token": "{EOS}"}}')


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
# By model type: what its configuration needs besides `BASE`. All have sequence and token classifiers whose body packs.
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "biogpt": {},
    "exaone4": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_neox": {},
    "helium": {"head_dim": 16},
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "nemotron": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


def config_of(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of the family."""
    return CONFIG_MAPPING[family](**{**BASE, **FAMILIES[family], **changes})
