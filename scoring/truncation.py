"""Cutting text at token boundaries. Cut text is tokenised again, so that its score is that of the shortened text."""

from collections.abc import Callable
from typing import Literal, NamedTuple

Side = Literal["right", "left"]


class Cut(NamedTuple):
    text: str
    ids: list[int]  # of whatever `encode` makes of the text


def cut_ids(ids: list[int], keep: int, side: Side) -> list[int]:
    """At most `keep` ids: the first ones if the right side is cut off, else the last ones."""
    if len(ids) <= keep:
        return ids
    if not keep:
        return []
    return ids[:keep] if side == "right" else ids[-keep:]


def cut_text(
    spans: list[tuple[int, int]], text: str, excess: int, side: Side, encode: Callable[[str], list[int]], most: int
) -> Cut:
    """Drops tokens of `text`, which stand at `spans`, from one side until `encode` of the rest has at most `most` ids.

    `excess` of its own tokens are dropped first. A cut may change how the rest is tokenised, and a token may be a part
    of a character, so the rest is measured and cut again; every round drops at least one token more. The rest is empty
    if nothing fits: the caller then decides by the length of `ids`.
    """
    keep = len(spans)
    while True:
        keep = max(0, keep - max(1, excess))
        rest = _kept(text, spans, keep, side)
        ids = encode(rest)
        excess = len(ids) - most
        if excess <= 0 or not keep:
            return Cut(rest, ids)


def _kept(text: str, spans: list[tuple[int, int]], keep: int, side: Side) -> str:
    if not keep:
        return ""
    return text[: spans[keep - 1][1]] if side == "right" else text[spans[len(spans) - keep][0] :]
