"""What scoring needs of a tokenizer; `engine.tokenizer.tokenizer` provides it."""

from collections.abc import Sequence
from typing import Protocol


class Encoding(Protocol):
    """Ids of one text and the characters [start, end) that each came from."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def spans(self) -> list[tuple[int, int]]: ...


class Tokens(Protocol):
    """Text to ids. Thread-safe."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, plain: bool = False
    ) -> list[list[int]]: ...

    def encode_spans(self, text: str, *, plain: bool = False) -> Encoding: ...

    def mark(self, text: str) -> str: ...

    def has_token(self, text: str) -> bool: ...

    def mark_spans(self, text: str) -> list[tuple[int, int]]: ...
