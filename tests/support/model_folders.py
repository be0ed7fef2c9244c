"""Folders of tiny random models, as they are published, saved or spoilt. Each is written by a function of its path."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    MPNetConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WEIGHTS = "model.safetensors"
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
Make = Callable[[Path], Path]


def llama(**changes: Any) -> Any:
    """Returns the configuration of a tiny Llama, whose head is its own."""
    return LlamaConfig(**{**GROUPED, "tie_word_embeddings": False, **changes})


def qwen3(**changes: Any) -> Any:
    """Returns the configuration of a tiny Qwen3, whose head is tied."""
    return Qwen3Config(**{**GROUPED, "head_dim": 8, "tie_word_embeddings": True, **changes})


def gemma2(**changes: Any) -> Any:
    """Returns the configuration of a tiny Gemma 2, whose head is tied."""
    return Gemma2Config(**{**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, **changes})


def mixture(**changes: Any) -> Any:
    """Returns the configuration of a tiny Qwen3 with four experts, which files hold one by one."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeConfig(**{**GROUPED, **experts, "head_dim": 8, **changes})


def save(folder: Path, config: Any, auto: Any = AutoModelForCausalLM, *, seed: int = 0, **options: Any) -> Path:
    """Saves a random model of `auto`'s class for `config`; `options` are those of `save_pretrained`."""
    torch.manual_seed(seed)
    auto.from_config(config).save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **fields: Any) -> Path:
    """Changes fields of config.json; None removes one."""
    file = folder / "config.json"
    changed = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    return folder


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Changes the tensors of the folder's only file."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    return folder


def without(folder: Path, name: str) -> Path:
    """Deletes a tensor."""
    return edit_weights(folder, lambda tensors: {key: value for key, value in tensors.items() if key != name})


def renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    """Renames tensors."""
    return edit_weights(folder, lambda tensors: {rename(key): value for key, value in tensors.items()})


def with_tensor(folder: Path, name: str, value: torch.Tensor) -> Path:
    """Adds a tensor."""
    return edit_weights(folder, lambda tensors: {**tensors, name: value})


def write_json(folder: Path, name: str, content: Any) -> Path:
    """Writes a JSON file into the folder."""
    (folder / name).write_text(json.dumps(content))
    return folder


def sentence_modules(folder: Path, *kinds: str) -> Path:
    """Writes a modules.json of sentence-transformers."""
    chain = [
        {"idx": index, "name": str(index), "path": "", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    return write_json(folder, "modules.json", chain)


def cut_off(folder: Path, size: int = -100) -> Path:
    """Cuts the weights' file off, as a broken download does."""
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:size])
    return folder


def pointer(folder: Path, name: str = WEIGHTS) -> Path:
    """Replaces a file by the pointer that git leaves without git-lfs."""
    (folder / name).write_text(LFS_POINTER)
    return folder


def sharded(folder: Path) -> Path:
    """Saves a Llama in several files with an index."""
    return save(folder, llama(), max_shard_size="20KB")


def _adapter_beside(folder: Path) -> Path:
    return write_json(
        save(folder, llama()), "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    )


def _adapter_alone(folder: Path) -> Path:
    folder.mkdir()
    return write_json(folder, "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})


def _gguf(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return folder


def _shard_missing(folder: Path) -> Path:
    next(iter(sorted(sharded(folder).glob("*.safetensors")))).unlink()
    return folder


def _index_of_others(folder: Path) -> Path:
    file = sharded(folder) / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    file.write_text(json.dumps(index))
    return folder


def _two_heads(folder: Path) -> Path:
    return with_tensor(save(folder, qwen3()), "lm_head.weight", torch.randn(VOCAB, 32))


def _encoder(folder: Path, auto: Any) -> Path:
    return save(folder, BertConfig(**SIZES), auto)


def _pooled_by(folder: Path, mode: str) -> Path:
    sentence_modules(folder, "Transformer", "Pooling")
    (folder / "1").mkdir()
    chain = json.loads((folder / "modules.json").read_text())
    chain[1]["path"] = "1"
    write_json(folder, "modules.json", chain)
    write_json(folder / "1", "config.json", {f"pooling_mode_{mode}": True})
    return folder


def process_reward(folder: Path, *, labels: int = 2, **changes: Any) -> Path:
    """Saves a tiny Qwen2 body beside a head of two layers, as Qwen's process-reward models are published."""
    save(folder, Qwen2Config(**{**GROUPED, "num_labels": labels, **changes}), AutoModel)
    shapes = {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (labels, 32), "2.bias": (labels,)}
    head = {f"score.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    edit_weights(folder, lambda tensors: {f"model.{key}": value for key, value in tensors.items()} | head)
    return edit_config(
        folder,
        architectures=["Qwen2ForProcessRewardModel"],
        auto_map={"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"},
    )


SEQUENCE, TOKEN = AutoModelForSequenceClassification, AutoModelForTokenClassification

# Models that are served with another head than a language model's.
OTHER_SERVED: dict[str, Make] = {
    "qwen2_token": lambda at: save(at, Qwen2Config(**GROUPED, num_labels=2), TOKEN),
    "process_reward": process_reward,
    "qwen3_embedding": lambda at: _pooled_by(save(at, qwen3()), "lasttoken"),
    "bert_cross_encoder": lambda at: _encoder(at, SEQUENCE),
    "bert_tokens": lambda at: _encoder(at, TOKEN),
    "masked_bert_as_an_embedding": lambda at: _pooled_by(_encoder(at, AutoModelForMaskedLM), "cls_token"),
}

# Models whose own head this build does not serve: (how to make it, a part of the message, the architecture it names).
OTHER_HEADS: dict[str, tuple[Make, str, str]] = {
    "process_reward_of_another_type": (
        lambda at: edit_config(
            save(at, qwen3(), AutoModel),
            architectures=["Qwen2ForProcessRewardModel"],
            auto_map={"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"},
        ),
        "auto_map",
        "Qwen2ForProcessRewardModel",
    ),
    "jina_reranker_v3": (
        lambda at: edit_config(
            save(at, qwen3(), AutoModel),
            architectures=["JinaForRanking"],
            auto_map={"AutoModel": "modeling.JinaForRanking"},
        ),
        "auto_map",
        "JinaForRanking",
    ),
    "bare_qwen3": (lambda at: save(at, qwen3(), AutoModel), "embedding model", "Qwen3Model"),
    "sparse_embedding": (
        lambda at: sentence_modules(save(at, qwen3()), "MLMTransformer", "SpladePooling"),
        "SpladePooling",
        "Qwen3ForCausalLM",
    ),
    "unknown_module_of_an_embedding": (
        lambda at: sentence_modules(save(at, qwen3(), AutoModel), "Transformer", "Pooling", "LSTM"),
        "Given: Transformer, Pooling, LSTM",
        "Qwen3Model",
    ),
    "unknown_pooling": (
        lambda at: _pooled_by(save(at, qwen3(), AutoModel), "max_tokens"),
        "Given: max",
        "Qwen3Model",
    ),
    "bert_masked": (lambda at: _encoder(at, AutoModelForMaskedLM), "encoder", "BertForMaskedLM"),
    "other_encoder": (
        lambda at: save(at, MPNetConfig(**{**SIZES, "intermediate_size": 48}), SEQUENCE),
        "of the encoders only bert",
        "MPNetForSequenceClassification",
    ),
    "adapter_beside": (_adapter_beside, "adapter_config.json", "LlamaForCausalLM"),
    "class_of_another_type": (
        lambda at: edit_config(save(at, llama()), architectures=["Qwen3ForCausalLM"]),
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
    ),
    "one_of_two": (
        lambda at: edit_config(save(at, llama()), architectures=["LlamaForCausalLM", "LlamaForSequenceClassification"]),
        "`model.head`",
        "LlamaForSequenceClassification",
    ),
}

# Files that are damaged, incomplete or another model's: (how to make it, parts of the message).
DAMAGED: dict[str, tuple[Make, tuple[str, ...]]] = {
    "layer_missing": (
        lambda at: without(save(at, llama()), "model.layers.1.mlp.up_proj.weight"),
        ("LlamaForCausalLM", "lack model.layers.1.mlp.up_proj.weight", "download or export"),
    ),
    "untied_head_missing": (lambda at: without(save(at, llama()), "lm_head.weight"), ("lack lm_head.weight",)),
    "other_prefix": (
        lambda at: renamed(save(at, llama()), lambda key: f"policy.{key}"),
        ("more", "they hold policy.lm_head.weight"),
    ),
    "head_of_a_classifier": (
        lambda at: with_tensor(save(at, qwen3()), "score.weight", torch.zeros(1, 32)),
        ("they hold score.weight",),
    ),
    "bias_without_a_place": (
        lambda at: with_tensor(save(at, llama()), "model.layers.0.self_attn.q_proj.bias", torch.zeros(32)),
        ("q_proj.bias",),
    ),
    "fewer_layers_by_config": (
        lambda at: edit_config(save(at, llama()), num_hidden_layers=1),
        ("they hold model.layers.1.",),
    ),
    "more_layers_by_config": (
        lambda at: edit_config(save(at, llama()), num_hidden_layers=3),
        ("lack model.layers.2.",),
    ),
    "other_vocabulary_by_config": (
        lambda at: edit_config(save(at, llama()), vocab_size=65),
        ("[64, 32] in the files and [65, 32] by config.json",),
    ),
    "two_heads": (_two_heads, ("lm_head.weight", "tie_word_embeddings")),
    "stored_twice": (
        lambda at: with_tensor(save(at, llama()), "norm.weight", torch.ones(32)),
        ("model.norm.weight and norm.weight are both model.norm.weight",),
    ),
    "experts_with_a_gap": (
        lambda at: renamed(save(at, mixture()), lambda key: key.replace("experts.3.", "experts.5.")),
        ("experts.5", "are a list with gaps"),
    ),
    "packed_weights": (
        lambda at: edit_weights(
            save(at, llama()),
            lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.int8)},
        ),
        ("model.norm.weight", "is I8"),
    ),
    "lfs_pointer": (lambda at: pointer(save(at, llama())), (WEIGHTS, "git lfs pull")),
    "lfs_pointer_of_the_config": (lambda at: pointer(save(at, llama()), "config.json"), ("config.json", "git lfs")),
    "cut_off": (lambda at: cut_off(save(at, llama())), (WEIGHTS, "damaged or cut off")),
    "empty": (lambda at: cut_off(save(at, llama()), 0), (WEIGHTS, "damaged or cut off", "0 bytes")),
    "shard_missing": (_shard_missing, ("model-00001-of-", "lacks")),
    "index_of_others": (_index_of_others, ("model.extra.weight",)),
    "broken_config": (lambda at: cut_off_config(save(at, llama())), ("config.json", "line", "column")),
    "wrong_config": (lambda at: edit_config(save(at, llama()), num_hidden_layers="two"), ("config.json", "llama")),
    "adapter_alone": (_adapter_alone, ("config.json", "an adapter of org/base")),
    "gguf": (_gguf, ("GGUF", "safetensors")),
}


def cut_off_config(folder: Path) -> Path:
    """Cuts config.json off."""
    file = folder / "config.json"
    file.write_text(file.read_text()[:-10])
    return folder


# What is published in other ways, and is a language model: loaded as it is.
GOOD: dict[str, Make] = {
    "llama": lambda at: save(at, llama()),
    "tied": lambda at: save(at, qwen3()),
    "shards": sharded,
    "experts": lambda at: save(at, mixture()),
    "no_architectures": lambda at: edit_config(save(at, llama()), architectures=None),
    "own_code_of_a_known_class": lambda at: edit_config(
        save(at, llama()), auto_map={"AutoModelForCausalLM": "modeling.Llama"}
    ),
    "body_without_prefix": lambda at: renamed(save(at, qwen3()), lambda key: key.removeprefix("model.")),
    "tied_head_stored": lambda at: edit_weights(
        save(at, qwen3()), lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    ),
    "rotary_frequencies": lambda at: with_tensor(
        save(at, llama()), "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)
    ),
    "draft_layers": lambda at: with_tensor(save(at, llama()), "mtp.fc.weight", torch.ones(4)),
    "reranker_of_sentence_transformers": lambda at: sentence_modules(save(at, qwen3()), "Transformer", "LogitScore"),
    "pickles_beside": lambda at: _touched(save(at, llama()), "training_args.bin"),
}


def _touched(folder: Path, name: str) -> Path:
    (folder / name).touch()
    return folder
