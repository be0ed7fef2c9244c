"""Plain encoding: no text becomes a control token, marked text does, and everything else is tokenised as ever."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.tokenizer.control_tokens import ControlTokens, renamed
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.support.toy_model import ByteTokenizer

LETTERS = [chr(c) for c in range(33, 127)]
CONTROLS = ["<s>", "</s>", "<think>", "</think>"]


def metaspace(scheme: str) -> Backend:
    """The kind that puts a mark before the first word, of the text or of every run between special tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "▁a", "ab"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    made = Backend(models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    return made


def prepending() -> Backend:
    made = metaspace("never")
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def merging() -> Backend:
    """Pieces of plain text merge into a control string, and into a tag that is no control token."""
    words = ["<unk>", *LETTERS, " ", "s>", "<s>", "</", "</s>", "p>", "<p>"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("s", ">"), ("<", "s>"), ("<", "/"), ("</", "s>"), ("p", ">"), ("<", "p>")]
    return Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))


def unigram() -> Backend:
    """The model's own vocabulary holds the control strings and would find them in text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -5.0) for letter in LETTERS)]
    made = Backend(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Backend:
    words = ["[UNK]", "<s>", "</s>", *LETTERS, *(f"##{letter}" for letter in LETTERS if letter.islower())]
    made = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


KINDS: dict[str, Callable[[], Backend]] = {
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "prepending": prepending,
    "merging": merging,
    "unigram": unigram,
    "word piece": word_piece,
}


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "builtin": load_tokenizer("builtin")}
    for name, make in KINDS.items():
        backend = make()
        backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>", rstrip=True, lstrip=name == "unigram")])
        backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
        backend.add_tokens(
            [AddedToken(text, normalized=False) for text in ("   ", "word", "<p>" * (name == "merging"))]
        )
        folder: Path = tmp_path_factory.mktemp("kind")
        backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found[name] = Tokenizer(folder)
    return found


def controls_of(tokenizer: Tokenizer) -> list[str]:
    known = ["<bos>", "<eos>", "<|user|>", "<|end|>", *CONTROLS]
    return [text for text in known if tokenizer.has_token(text)]


def one(tokenizer: Tokenizer, text: str, plain: bool) -> list[int]:
    return tokenizer.encode_batch([text], add_special_tokens=False, plain=plain)[0]


pieces = st.lists(
    st.sampled_from(["<", "</", "s>", "think", "|", "end", "e", "os>", ">", " ", "   ", "a", "b", "\n", "é"])
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(pieces.map("".join), min_size=1, max_size=4), pick=st.randoms(use_true_random=False))
def test_marked_text_is_encoded_as_ever_and_text_between_never_becomes_a_control_token(
    kinds: dict[str, Tokenizer], parts: list[str], pick: Any
) -> None:
    for tokenizer in kinds.values():
        names = controls_of(tokenizer)
        between = [pick.choice(names) for _ in parts]
        text = "".join(name + part for name, part in zip(between, parts, strict=True))
        marked = "".join(tokenizer.mark(name) + part for name, part in zip(between, parts, strict=True))
        known = {one(tokenizer, name, False)[0] for name in names}
        found = one(tokenizer, marked, True)
        assert [token for token in found if token in known] == [one(tokenizer, name, False)[0] for name in between]
        raw = one(tokenizer, text, False)
        if sum(token in known for token in raw) == len(between):
            assert found == raw


@pytest.mark.parametrize("kind", ["bytes", "builtin", *KINDS])
def test_a_row_of_a_template_is_encoded_as_the_same_text_in_one(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    first, last = controls_of(tokenizer)[:2]
    text = f"{first} a b\nc {last} d   e {first}{last} f"
    assert one(tokenizer, tokenizer.mark(text), True) == one(tokenizer, text, False)


@pytest.mark.parametrize("kind", ["bytes", "builtin", *KINDS])
def test_control_strings_in_text_are_characters(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    for name in controls_of(tokenizer):
        [token] = one(tokenizer, name, False)
        assert one(tokenizer, tokenizer.mark(name), True) == [token]
        plain = one(tokenizer, f"a{name}b", True)
        assert token not in plain and len(plain) > 3
        assert token not in tokenizer.encode_spans(f"a{name}b", plain=True).ids
        assert tokenizer.encode_spans(f"a{name}b", plain=True).ids == plain


def test_the_check_above_would_notice_a_leak(kinds: dict[str, Tokenizer]) -> None:
    """The switch of the tokenizers library does not reach what the model's own vocabulary holds, nor `<think>`."""
    backend = unigram()
    backend.add_special_tokens(["</s>"])
    backend.encode_special_tokens = True
    assert backend.token_to_id("</s>") in backend.encode("a</s>b", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("kind", "text"), [("metaspace first", "   "), ("metaspace first", "word"), ("merging", "<p>")]
)
def test_ordinary_added_tokens_stay_tokens(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kinds[kind]
    assert not tokenizer.has_token(text)
    assert one(tokenizer, f"a{text}b", True) == one(tokenizer, f"a{text}b", False)


def test_secret_names_differ_between_processes_and_are_not_prefixes_of_each_other() -> None:
    first, second = ControlTokens({"<a>": 1, "<b>": 11}), ControlTokens({"<a>": 1, "<b>": 11})
    assert first.mark("<a><b>x") != second.mark("<a><b>x")
    assert not first.names["<b>"].startswith(first.names["<a>"])
    assert ControlTokens({}).mark("<a>") == "<a>"


def test_the_longest_control_string_is_marked() -> None:
    marks = ControlTokens({"<|end": 1, "<|end|>": 2})
    assert marks.mark("<|end|><|end") == marks.names["<|end|>"] + marks.names["<|end"]


def test_renaming_keeps_every_id() -> None:
    backend = metaspace("first")
    backend.add_special_tokens(["<s>", "</s>"])
    marks = ControlTokens({"<s>": 1, "</s>": 2})
    other = Backend.from_str(renamed(backend.to_str(), marks))
    assert other.get_vocab() == {marks.names.get(piece, piece): token for piece, token in backend.get_vocab().items()}
