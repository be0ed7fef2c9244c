"""Stop strings: the same text and the same stop however the text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer.detokenizer import BranchText, StopMatcher
from tests.support.toy_model import ByteTokenizer

texts = st.text("ab", max_size=14)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def matched(text: str, stops: list[str], cuts: list[int], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found = matcher.push(text[start:end])
        out += found.text
        if found.stop is not None:
            return out, found.stop
    return out + matcher.finish(), None


@given(texts, stops, st.lists(st.integers(0, 14), max_size=5), st.booleans())
def test_cutting_the_text_changes_nothing(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    if ends:
        end, size, stop = min(ends)
        expected: tuple[str, str | None] = (text[: end if include else end + size], stop)
    else:
        expected = (text, None)
    assert matched(text, stops, cuts, include) == expected


def test_only_text_that_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\n\nQ:"], include=False)
    assert [matcher.push(part).text for part in ("a\n", "\n", "b\n\nQ")] == ["a", "", "\n\nb"]
    assert matcher.finish() == "\n\nQ"


def branch(stops: list[str], **options: object) -> BranchText:
    return BranchText(ByteTokenizer().decoder(skip_special_tokens=True), stops, **options)  # type: ignore[arg-type]


def test_tokens_after_a_stop_string_are_not_used() -> None:
    piece = branch(["or"]).push(list(b"a world"))
    assert (piece.text, piece.used, piece.stop) == ("a w", 5, "or")


def test_text_of_the_first_min_tokens_is_never_a_stop() -> None:
    piece = branch(["aa"], min_tokens=2).push(list(b"aaaaa"))
    assert (piece.text, piece.used, piece.stop) == ("aa", 4, "aa")


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_offsets_count_the_characters_before_each_token(stops: list[str]) -> None:
    piece = branch(stops, offsets=True).push([*b"a\xc3\xa9b", 257, *b"c"])
    assert piece.offsets == [0, 1, 1, 2, 3, 3]


def test_a_matcher_that_holds_nothing_back_is_noticed() -> None:
    class Hasty(StopMatcher):
        def _unsure(self, text: str) -> int:
            return 0

    hasty = Hasty(["ab"], include=False)
    assert [hasty.push(part) for part in "xab"] != [StopMatcher(["ab"], include=False).push(part) for part in "xab"]
    assert matched("xab", ["ab"], [1, 2]) == ("x", "ab")
