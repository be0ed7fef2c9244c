"""Frames: the text that a template puts around an item, and how rows of it are tokenised.

Control tokens stand in it under their secret names, so it is for plain encoding only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scoring.tokens import Tokens


class Frame(NamedTuple):
    """Text around an item."""

    head: str
    tail: str
    empty: str  # the whole row of an empty item

    def row(self, item: str) -> str:
        return self.head + item + self.tail if item else self.empty


class Runs(NamedTuple):
    """A frame cut at the control tokens on both sides of the item: what lies beyond is encoded once a request.

    Text is tokenised apart on the two sides of a control token, so a row is `before`, then the ids of
    `head + item + tail`, then `after`. `head` begins and `tail` ends with the control token itself, because a tokenizer
    may treat the beginning of a text in its own way and may let a control token swallow the spaces beside it.
    """

    before: list[int]
    head: str
    tail: str
    after: list[int]

    @classmethod
    def of(cls, frame: Frame, tokens: Tokens) -> "Runs":
        opened, closed = tokens.mark_spans(frame.head), tokens.mark_spans(frame.tail)
        start, head_end = opened[-1] if opened else (0, 0)
        tail_start, end = closed[0] if closed else (len(frame.tail), len(frame.tail))
        texts = [frame.head[:head_end], frame.tail[tail_start:]]
        before, after = tokens.encode_batch(texts, add_special_tokens=False, plain=True)
        return cls(before[:-1], frame.head[start:], frame.tail[:end], after[1:])

    def rows(self, items: Sequence[str], tokens: Tokens) -> list[list[int]]:
        texts = [self.head + item + self.tail for item in items]
        found = tokens.encode_batch(texts, add_special_tokens=False, plain=True)
        return [self.before + ids + self.after for ids in found]
