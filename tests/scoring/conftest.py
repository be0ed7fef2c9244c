"""A word tokenizer in a few lines: its tokens merge over seams, as real vocabularies do."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest


class Spans(NamedTuple):
    ids: list[int]
    spans: list[tuple[int, int]]


class WordTokens:
    """A token is a run of letters with its leading space, or any other single character. Ids are made when needed.
    `<|word|>` is a control token, but not as plain text; there it goes by another name."""

    def __init__(self, bos: int | None = 0) -> None:
        self.bos_token_id = bos
        self._ids: dict[str, int] = {}

    def encode_spans(self, text: str, *, plain: bool = False) -> Spans:
        control = "\ue000[a-z]+\ue001" if plain else r"<\|[a-z]+\|>"
        found = list(re.finditer(control + r"| ?[a-z]+|.", text, re.DOTALL))
        names = [re.sub("^\ue000([a-z]+)\ue001$", r"<|\1|>", match.group()) for match in found]
        return Spans([self.id(name) for name in names], [match.span() for match in found])

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool, plain: bool = False) -> list[list[int]]:
        head = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return [head + self.encode_spans(text, plain=plain).ids for text in texts]

    seam = ""  # each word is a token anyway

    def mark(self, text: str) -> str:
        return re.sub(r"<\|([a-z]+)\|>", "\ue000\\1\ue001", text)

    def has_token(self, text: str) -> bool:
        return re.fullmatch(r"<\|[a-z]+\|>", text) is not None

    def mark_spans(self, text: str) -> list[tuple[int, int]]:
        return [found.span() for found in re.finditer("\ue000[a-z]+\ue001", text)]

    def id(self, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids) + 1)


@pytest.fixture
def tokens() -> WordTokens:
    return WordTokens()


@pytest.fixture(scope="session")
def word_tokens() -> type[WordTokens]:
    """The class, for tests that make more than one."""
    return WordTokens
