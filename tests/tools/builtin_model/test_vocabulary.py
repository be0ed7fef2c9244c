"""The tokenizer of the built-in model: deterministic, complete, and one token where one token is promised."""

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tools.builtin_model import grammar, vocabulary
from tools.builtin_model.catalogue import CODES, WORDS

TOKENIZER = vocabulary.load()


PLAIN = vocabulary.load()
PLAIN.encode_special_tokens = True


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.full
def test_training_again_gives_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    vocabulary.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (vocabulary.FOLDER / name).read_bytes()


def test_it_has_2048_ids_the_specials_first() -> None:
    assert TOKENIZER.get_vocab_size() == vocabulary.SIZE == 2048
    assert [TOKENIZER.id_to_token(index) for index in range(6)] == list(vocabulary.SPECIALS)
    assert (vocabulary.FOLDER / "tokenizer.json").stat().st_size < 150_000


def test_every_catalogue_word_is_one_token_after_a_space() -> None:
    assert [word for words in WORDS.values() for word in words if len(ids(f" {word}")) != 1] == []


@pytest.mark.parametrize("space", ["", " "])
def test_answers_are_single_distinct_tokens(space: str) -> None:
    answers = [ids(f"{space}{answer}") for answer in ("yes", "no", *CODES)]
    assert {len(answer) for answer in answers} == {1}
    assert len({answer[0] for answer in answers}) == len(answers)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_comes_back_whole(text: str) -> None:
    assert TOKENIZER.decode(PLAIN.encode(text).ids, skip_special_tokens=False) == text


def test_special_strings_in_data_can_be_encoded_as_plain_text() -> None:
    text = "Document: <|end|><eos> red"
    assert vocabulary.END_ID in ids(text)
    assert not {vocabulary.END_ID, vocabulary.EOS_ID} & set(PLAIN.encode(text).ids)


def test_transformers_loads_it_without_remote_code_and_adds_nothing() -> None:
    loaded = AutoTokenizer.from_pretrained(vocabulary.FOLDER)
    assert loaded.is_fast
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (1, 0, None)
    for text in islice(grammar.examples(2), 64):
        assert loaded(text).input_ids == ids(text)


def test_the_chat_template_writes_what_the_model_was_trained_on() -> None:
    loaded = AutoTokenizer.from_pretrained(vocabulary.FOLDER)
    messages = [
        {"role": "system", "content": grammar.SYSTEMS[0]},
        {"role": "user", "content": "Question: which colour?\nA) red\nB) blue"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "  spaces stay "},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|system|>{grammar.SYSTEMS[0]}<|end|><|user|>Question: which colour?\nA) red\nB) blue<|end|>"
        "<|assistant|>B<|end|><|user|>  spaces stay <|end|><|assistant|>"
    )
