"""Tests what is read of the files with which sentence-transformers describes a model, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from engine.model.compatibility import UnsupportedModel
from engine.model.file_digests import is_read
from engine.model.heads.embedding_files import read_embedding
from tests.support.model_folders import sentence_modules, write_json

KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sentence_modules(tmp_path, "Transformer", "Pooling")


@pytest.mark.parametrize("kind", KINDS)
def test_the_transformers_file_is_read_by_all_of_its_names(folder: Path, kind: str) -> None:
    file = f"sentence_{kind}_config.json"
    write_json(folder, file, {"max_seq_length": 64, "do_lower_case": False})
    assert read_embedding(folder, "BertModel").max_tokens == 64
    assert is_read(file)
    write_json(folder, file, {"do_lower_case": True})
    with pytest.raises(UnsupportedModel, match=f"`do_lower_case` of its {file} must be false"):
        read_embedding(folder, "BertModel")
    write_json(folder, file, {"max_seq_length": 0})
    with pytest.raises(UnsupportedModel, match=f"`max_seq_length` of its {file} must be at least 1. Given: 0"):
        read_embedding(folder, "BertModel")


def test_the_first_name_that_says_something_counts(folder: Path) -> None:
    for length, kind in enumerate(KINDS[1:], start=1):
        write_json(folder, f"sentence_{kind}_config.json", {"max_seq_length": length})
    write_json(folder, "sentence_bert_config.json", {})
    assert read_embedding(folder, "BertModel").max_tokens == 1


@pytest.mark.parametrize("default", [None, "query", "document"])
def test_a_prompt_that_is_null_is_none(folder: Path, default: str | None) -> None:
    prompts = {"query": "q: ", "document": None, "clustering": ""}
    write_json(folder, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
    found = read_embedding(folder, "BertModel")
    assert found.prompts == (("query", "q: "), ("clustering", ""))
    assert found.default_prompt == ("query" if default == "query" else None)


@pytest.mark.parametrize(
    ("wording", "reason"),
    [
        ({"prompts": {"query": 7}}, r"`prompts.query` of its .* must be a text or null. Given: 7"),
        ({"prompts": {"query": ["q: "]}}, r"`prompts.query` of its .* must be a text or null. Given: \['q: '\]"),
        ({"prompts": ["q: "]}, r"`prompts` of its .* must be an object of texts. Given: \['q: '\]"),
        (
            {"prompts": {"a": "", "b": None}, "default_prompt_name": "c"},
            r"`default_prompt_name` of its .* must be one of a, b. Given: c",
        ),
        (
            {"prompts": {"a": ""}, "default_prompt_name": ["a"]},
            r"`default_prompt_name` of its .* one of a. Given: \['a",
        ),
    ],
)
def test_a_prompt_that_is_no_text_is_refused_by_its_name(folder: Path, wording: dict[str, Any], reason: str) -> None:
    write_json(folder, "config_sentence_transformers.json", wording)
    with pytest.raises(UnsupportedModel, match=reason):
        read_embedding(folder, "BertModel")
