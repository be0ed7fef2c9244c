"""A word tokenizer in a few lines: its tokens merge over seams, as real vocabularies do."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest


class Spans(NamedTuple):
    ids: list[int]
    spans: list[tuple[int, int]]


class WordTokens:
    """A token is a run of letters with its leading space, or any other single character. Ids are made when needed."""

    def __init__(self, bos: int | None = 0) -> None:
        self.bos_token_id = bos
        self._ids: dict[str, int] = {}

    def encode_spans(self, text: str, *, plain: bool = False) -> Spans:
        found = list(re.finditer(r" ?[a-z]+|.", text, re.DOTALL))
        return Spans([self.id(match.group()) for match in found], [match.span() for match in found])

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool, plain: bool = False) -> list[list[int]]:
        head = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return [head + self.encode_spans(text).ids for text in texts]

    def id(self, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids) + 1)


@pytest.fixture
def tokens() -> WordTokens:
    return WordTokens()
