"""Tests what is read of an encoder's folder, in which dtype, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.config import EngineConfig, ModelConfig
from engine.model.encoder.encoder_model import EncoderModel
from engine.model.encoder.loading import read_encoder
from engine.model.heads.row_pooling import Pooling
from engine.model.loader import load_model
from engine.model.model_folder import BadCheckpoint, ModelNotFound

CPU = torch.device("cpu")
FAMILIES = ("bert", "distilbert", "electra", "modernbert", "roberta", "deberta-v3")


def read(folder: Path, **options: Any) -> Any:
    return read_encoder(folder, AutoConfig.from_pretrained(folder), ModelConfig(path=folder, **options), CPU)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_scores_as_before(tiny_encoders: Any, tmp_path: Path, name: str) -> None:
    module = tiny_encoders.module(name)
    module.save_pretrained(tmp_path)
    rows = tiny_encoders.rows(module)
    wanted = tiny_encoders.reference(module, rows)[1]
    torch.testing.assert_close(EncoderModel(read(tmp_path)).classify(rows), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_stays_in_float32_beside_a_body_in_half_precision(tiny_encoders: Any, tmp_path: Path, name: str) -> None:
    module = tiny_encoders.module(name)
    module.save_pretrained(tmp_path)
    rows = tiny_encoders.rows(module)
    model = EncoderModel(read(tmp_path, dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    pooled = model.embed(rows, Pooling.CLS)
    head = EncoderModel(module)._head
    assert head is not None
    assert torch.equal(model.classify(rows), head(pooled))  # rounded weights would differ


@pytest.mark.parametrize(
    "key", ["classifier.weight", "bert.pooler.dense.bias", "bert.encoder.layer.1.output.dense.weight"]
)
def test_a_missing_tensor_is_refused_by_name(tiny_encoders: Any, tmp_path: Path, key: str) -> None:
    tiny_encoders.module("bert").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=f"`BertForSequenceClassification` in .*: the files lack {key}"):
        read(tmp_path)


def test_a_base_model_needs_no_pooler(tiny_encoders: Any, tmp_path: Path) -> None:
    module = tiny_encoders.module("bert").base_model
    module.pooler = None
    module.save_pretrained(tmp_path)
    assert not EncoderModel(read(tmp_path, head="pooled", pooling="mean")).has_head


def test_random_weights_need_no_files(tiny_encoders: Any, tmp_path: Path) -> None:
    config = tiny_encoders.config("deberta-v3", architectures=["DebertaV2ForSequenceClassification"])
    config.save_pretrained(tmp_path)
    assert EncoderModel(read(tmp_path, random_weights=True)).has_head
    with pytest.raises(ModelNotFound):
        read(tmp_path)


def test_invariant_numerics_are_refused(tiny_encoders: Any, tmp_path: Path) -> None:
    tiny_encoders.module("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`engine\.numerics` must be fast for an encoder\. Given: invariant\."):
        load_model(ModelConfig(path=tmp_path, device="cpu"), EngineConfig(numerics="invariant"))
