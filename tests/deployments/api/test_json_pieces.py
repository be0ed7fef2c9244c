"""A body that is read in pieces is what the parser makes of it at once; limits are counted before anything is made."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from deployments.api import json_pieces
from deployments.api.json_body import Parser
from deployments.api.json_pieces import JsonLimits, TooDeep, TooManyValues, read

LIMITS = JsonLimits(depth=64, values=100_000, containers=100_000)
TEXTS = st.text(st.sampled_from('ab"\\,:[]{}\u0301\U0001f600 \n'), max_size=12)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=40,
)
SPACES = st.sampled_from([None, 0, 1, 5])
PIECES = st.integers(1, 40)
BROKEN = st.text(st.sampled_from('{}[],:"\\ a1e.-'), max_size=24)


def outcome(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """What is made, in words that tell 1 from 1.0 and true; None where the body is refused."""
    try:
        return repr(parse(data))
    except ValueError:
        return None


def at_once(data: bytes) -> Any:
    return from_json(data, allow_inf_nan=False)


def in_pieces(size: int, data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "PIECE_BYTES", size)
        return read(data, LIMITS, at_once)


@given(value=VALUES, spaces=SPACES, ascii_only=st.booleans(), size=PIECES)
def test_pieces_make_what_one_call_makes(value: Any, spaces: int | None, ascii_only: bool, size: int) -> None:
    data = json.dumps(value, indent=spaces, ensure_ascii=ascii_only).encode()
    assert repr(in_pieces(size, data)) == repr(at_once(data))


@given(value=VALUES, size=PIECES, place=st.floats(0, 1), cut=st.integers(0, 3), more=BROKEN)
def test_what_one_call_refuses_is_refused_in_pieces(value: Any, size: int, place: float, cut: int, more: str) -> None:
    whole = json.dumps(value).encode()
    at = int(place * len(whole))
    data = whole[:at] + more.encode() + whole[at + cut :]
    assert outcome(lambda body: in_pieces(size, body), data) == outcome(at_once, data)


CHARS = st.sampled_from(["a", "é", "\u0301", "\U0001f600", "\\ud83d\\ude00", "\\u00e9", '\\"', "\\\\", "\\n", "ud83d"])
HALVES = st.sampled_from(["\\ud83d", "\\ude00", "a", "\\ud83d\\ude00"])


@given(chars=st.lists(CHARS | HALVES, max_size=40), broken=st.booleans(), size=PIECES)
def test_a_long_text_is_cut_between_characters(chars: list[str], broken: bool, size: int) -> None:
    data = ('"' + "".join(chars) + '\\u00"' * broken + '"').encode()
    for make in (from_json, Parser()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_pieces, "PIECE_BYTES", size)
            assert outcome(partial(read, limits=LIMITS, parse=make), data) == outcome(make, data)


def test_each_piece_of_a_long_text_is_short() -> None:
    longest = 0

    def noted(text: bytes) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return from_json(text)

    for char in ('\\"', "\\ud83d\\ude00", "\u0301"):
        data = ('["a", "' + char * 1_000_000 + '"]').encode()
        assert read(data, LIMITS, noted) == from_json(data)
    assert longest <= json_pieces.PIECE_BYTES + json_pieces.CHAR_BYTES + 2


LISTED = b"[" + b"1234567," * 99_000 + b"1]"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"' + b"x" * 4096 + b'":' + LISTED + b"}", None),
        (b'{"' + b"x" * 4097 + b'":' + LISTED + b"}", "a large value must have at most 4096 bytes, in bytes 1 to "),
        (b'{"a":{"' + b"\\n" * 4097 + b'":' + LISTED + b"}}", "a large value must have at most 4096 bytes, in bytes 6"),
        (b'{"a":' + LISTED + b" 1}", "a list, an object or a text must end, in bytes 5 to "),
        (LISTED + b"}", "a list, an object or a text must end, in bytes 0 to "),
        (b'["' + b"a" * 100_000 + b'"1]', "a list, an object or a text must end, in bytes 1 to "),
    ],
)
def test_no_body_is_read_in_one_call(data: bytes, words: str | None) -> None:
    longest = 0

    def noted(text: bytes) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return from_json(text)

    if words is None:
        assert read(data, LIMITS, noted) == from_json(data)
    else:
        with pytest.raises(ValueError, match=words):
            read(data, LIMITS, noted)
    assert longest <= json_pieces.PIECE_BYTES + 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "", " ", "[", "]", "[,]", "[1,]", "[,1]", "[1,,2]", "[1 2]", "[1],[2]", "{},{}", "{\"a\":1,}", "{,\"a\":1}",
        "{\"a\":1,,\"b\":2}", "{\"a\"}", "{\"a\":}", "{1:2}", "[1}", "{\"a\":1]", "[[1,2},3]", "[1,2],3", "[\"\\\"]",
        "[\"\\\\\",1]", "{\"a\":1,\"a\":2}", "{\"a\":[1,2],\"b\":3,\"a\":[4,5]}", "[NaN]", "[1e999]", "[\"\\ud800\"]",
        "[ ]", "[          ]", "{          }", "[[          ],[ ]]", "\"[1,2,3],[4,5]\"", "[1,2]x", "x[1,2]",
    ],
)  # fmt: skip
def test_grammar_is_the_parsers(text: str, size: int) -> None:
    assert outcome(lambda body: in_pieces(size, body), text.encode()) == outcome(at_once, text.encode())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", TooDeep),
        (b"[" + b"0," * 100_001 + b"0]", TooManyValues),
        (b"[" + b"[]," * 99_999 + b"[]]", TooManyValues),
        (b"{" + b",".join(b'"%d":0' % n for n in range(100_000)) + b"}", TooManyValues),
    ],
)
def test_limits_are_counted_before_anything_is_made(data: bytes, error: type[Exception]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error):
            read(data, LIMITS, at_once)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000
    deeper = JsonLimits(depth=65, values=100_001, containers=100_001)
    assert read(data, deeper, at_once) == from_json(data)


@pytest.mark.parametrize("depth", [126, 127, 128, 129, 190])
def test_deep_lists_are_cut_at_their_own_commas(depth: int) -> None:
    """A server may allow more levels than a byte counts."""
    data = b"[0," * depth + b"0,1" + b"]" * depth
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "PIECE_BYTES", 4)
        assert read(data, JsonLimits(depth=200, values=1000, containers=1000), at_once) == from_json(data)


def test_an_error_tells_its_place_and_no_text() -> None:
    data = b'{"items": [' + b'"secret", ' * 20_000 + b'"a" "b"' + b', "secret"' * 20_000 + b"]}"
    with pytest.raises(ValueError, match=r"expected `,` or `]`.*, in bytes \d+ to \d+") as caught:
        read(data, LIMITS, at_once)
    assert "secret" not in str(caught.value)
    start, end = (int(word) for word in str(caught.value).replace("to", "").split()[-2:])
    assert start <= data.index(b'"a" "b"') <= end


def test_a_search_that_forgets_strings_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: commas in texts are cuts."""
    monkeypatch.setattr(json_pieces, "QUOTE", 0)
    data = b'["a,b","c"]'
    assert outcome(at_once, data) is not None
    assert outcome(lambda body: in_pieces(2, body), data) is None
