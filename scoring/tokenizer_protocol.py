"""Declares what scoring needs of a tokenizer. `engine.tokenizer.tokenizer` implements it."""

from collections.abc import Sequence
from typing import Protocol


class Encoding(Protocol):
    """Holds the ids of one text and the characters [start, end) that each stands for."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def spans(self) -> list[tuple[int, int]]: ...


class PairFrame(Protocol):
    """Holds the control tokens around two texts in one row: `before`, first text, `between`, second text, `after`."""

    @property
    def before(self) -> list[int]: ...

    @property
    def between(self) -> list[int]: ...

    @property
    def after(self) -> list[int]: ...

    @property
    def first_of_between(self) -> int | None:
        """Returns how many tokens of `between` belong to the first segment; None: rows have no second segment."""
        ...

    @property
    def size(self) -> int: ...


class TokenizerProtocol(Protocol):
    """Turns text into ids. Thread-safe.

    In plain text the strings of control tokens are ordinary characters; `mark` writes a control token into such text,
    and `mark_spans` finds the places [start, end) where one was written. `seam` is text that becomes no token: what
    stands on its two sides is tokenised separately.
    """

    @property
    def seam(self) -> str: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def pair_frame(self) -> PairFrame | None: ...

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, plain: bool = False, max_tokens: int | None = None
    ) -> list[list[int]]: ...

    def encode_spans(self, text: str, *, plain: bool = False) -> Encoding: ...

    def mark(self, text: str) -> str: ...

    def has_token(self, text: str) -> bool: ...

    def mark_spans(self, text: str) -> list[tuple[int, int]]: ...
