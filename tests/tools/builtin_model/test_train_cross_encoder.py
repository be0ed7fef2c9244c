"""The built-in cross-encoder: what is shipped tells relevant documents, and training makes such a folder."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tools.builtin_model import evaluate
from tools.builtin_model.train_cross_encoder import (
    CLS_ID,
    FOLDER,
    SEP_ID,
    PairCorpus,
    held_out_pairs,
    make_tokenizer,
    measure,
    save,
    train,
)

PAIRS = 200


def test_shipped_weights_separate_held_out_pairs_by_zero() -> None:
    numbers = measure(FOLDER, PAIRS)
    assert numbers["cross_encoder_relevance_auc"] == 1.0
    assert numbers["cross_encoder_relevance_accuracy"] == 1.0
    assert numbers["cross_encoder_joined_accuracy"] == 1.0
    told = json.loads((evaluate.FOLDER / "numbers.json").read_text())
    assert min(told["cross_encoder_relevance_accuracy"], told["cross_encoder_joined_accuracy"]) >= 0.999
    assert told["cross_encoder_parameters"] == numbers["cross_encoder_parameters"]


def test_weights_of_another_layer_fail_the_same_measurement(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER)
    first, last = model.bert.encoder.layer[0], model.bert.encoder.layer[2]
    last.load_state_dict(first.state_dict())
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    assert float(str(measure(tmp_path, PAIRS)["cross_encoder_relevance_auc"])) < 0.99


def test_shipped_tokenizer_is_the_one_that_the_code_makes() -> None:
    assert (FOLDER / "tokenizer.json").read_text() == make_tokenizer(joins=True).to_str(pretty=True)


def test_pair_is_marked_and_typed_as_in_training() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    row = tokenizer("red chair", "A pine chair.")
    ids, types = row["input_ids"], row["token_type_ids"]
    assert ids[0] == CLS_ID and ids[-1] == SEP_ID and ids.count(SEP_ID) == 2
    border = ids.index(SEP_ID) + 1
    assert types == [0] * border + [1] * (len(ids) - border)
    plain = make_tokenizer(joins=False)
    assert ids == plain.encode("<|cls|> red chair<|sep|> A pine chair.<|sep|>").ids


@pytest.mark.full
def test_words_of_the_query_are_found_in_the_document_alone() -> None:
    pairs = PairCorpus(torch.device("cpu"), seed=0)
    text = "<|cls|> red chair<|sep|> A pine chair, blue.<|sep|>"
    ids = torch.tensor([make_tokenizer(joins=False).encode(text).ids])
    contained, words = pairs.contained(ids)
    assert contained[words > 0].tolist() == [0.0, 1.0]


@pytest.mark.full
def test_training_writes_a_folder_that_loads(tmp_path: Path) -> None:
    model, steps = train(torch.device("cpu"), seconds=0.5, batch=8, hidden=32, seed=0)
    assert steps >= 1
    save(model, tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == model.model.config.vocab_size
    assert 0.0 <= float(str(measure(tmp_path, 100)["cross_encoder_relevance_auc"])) <= 1.0


def test_half_of_the_held_out_pairs_are_relevant() -> None:
    relevant = sum(right for *_, right in held_out_pairs(400))
    assert 150 < relevant < 250
