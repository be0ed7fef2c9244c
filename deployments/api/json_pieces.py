"""Reads a large JSON body in pieces: other threads run between two of them.

The parser holds the interpreter for as long as one call takes: 0.1 to 2 s for a body of 16 MB, whichever thread calls
it. Here numpy first finds the commas outside of strings and counts what would be made; then runs of entries are parsed
one after another and put into the list or the object that holds them. A long text is cut between two characters.

Each piece is parsed by the parser itself. Thus a wrong body has a wrong piece, and right pieces make what one call of
the parser would make, wherever the cuts are.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WHOLE_BYTES = 131_072  # a body that one call of the parser reads: in pieces it takes 30 times as long
PIECE_BYTES = 32_768  # of a larger body, that one call reads if entries are no larger: 10,000 empty lists
BLANK = b" \t\n\r"
OPENING = b'[{"'
CLOSED = (b"[]", b"{}", b'""')
QUOTE, COMMA, COLON = b'",:'
DEEPER = np.zeros(256, np.int8)  # by byte: how much deeper its successor is
DEEPER[list(b"[{")] = 1
DEEPER[list(b"]}")] = -1
IS_MARK = DEEPER != 0
IS_MARK[[QUOTE, COMMA, COLON]] = True
MAX_NAME_BYTES = 4096  # of the name of a field whose value is larger than a piece; an escape counts as one
NAME = re.compile(rb'[ \t\n\r]*("(?:[^"\\]|\\.){0,%d}")[ \t\n\r]*:' % MAX_NAME_BYTES, re.DOTALL)
LONG_NAME = re.compile(rb'[ \t\n\r]*"(?:[^"\\]|\\.){%d}' % (MAX_NAME_BYTES + 1), re.DOTALL)
CHAR_BYTES = 12  # that one character takes at most: two escapes of six, for the halves of a surrogate pair
PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]")


class TooDeep(ValueError):
    """Says that lists and objects are nested more deeply than allowed."""


class TooManyValues(ValueError):
    """Says how many values of a kind are allowed, and the name of the limit."""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits what a body holds.

    Args:
        depth: Levels of lists and objects.
        values: Entries of lists and objects, counted by their commas.
        containers: Lists, objects and names of fields, which take several times as long and as much as a number.
    """

    depth: int
    values: int
    containers: int
    whole_bytes: int = field(init=False)
    """Bytes of a body that one call of the parser may read: it cannot hold more than is allowed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole_bytes", min(WHOLE_BYTES, self.values, self.containers))


def read(data: bytes, limits: JsonLimits, parse: Callable[[bytes], Any]) -> Any:
    """Parses a body as one call of the parser would, in pieces of about `PIECE_BYTES`.

    Args:
        data: JSON in UTF-8.
        limits: Bounds of its depth and of its values.
        parse: The parser.

    Raises:
        TooDeep: It is nested too deeply.
        TooManyValues: It has too many values or containers.
        ValueError: It is not JSON, or has a number that is not finite.
    """
    return _Reader(data, limits, parse).value(0, len(data), 1)


class _Reader:
    """Holds a body, and the commas outside of its strings: their places [n] and how deep they are [n]."""

    def __init__(self, data: bytes, limits: JsonLimits, parse: Callable[[bytes], Any]) -> None:
        self._data = data
        self._parser = parse
        places, depths = [np.zeros(0, np.intp)], [np.zeros(0, np.int16)]
        start = depth = values = containers = 0
        quoted = False
        while start < len(data):
            piece = data[start : start + PIECE_BYTES]
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the next byte is escaped
                piece = data[start : start + PIECE_BYTES + 1]
            chars = np.frombuffer(piece.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
            marks = np.flatnonzero(IS_MARK[chars])
            quotes = chars[marks] == QUOTE
            inside = np.logical_xor.accumulate(quotes) ^ quoted
            quoted ^= bool(quotes.sum() % 2)
            marks = marks[~(quotes | inside)]
            kinds = chars[marks]
            change = DEEPER[kinds]
            levels = depth + np.cumsum(change, dtype=np.int64)
            depth = int(levels[-1]) if len(levels) else depth
            commas = kinds == COMMA
            values += int(commas.sum())
            containers += int((change > 0).sum() + (kinds == COLON).sum())
            if levels.max(initial=0) > limits.depth:
                raise TooDeep
            if values > limits.values:
                raise TooManyValues(f"{limits.values} values (`limits.max_json_values`)")
            if containers > limits.containers:
                named = "lists, objects and names of fields"
                raise TooManyValues(f"{limits.containers} {named} (`limits.max_json_containers`)")
            places.append(marks[commas] + start)
            depths.append(levels[commas].clip(-1, 32767).astype(np.int16))
            start += len(piece)
        self._places, self._depths = np.concatenate(places), np.concatenate(depths)

    def value(self, start: int, end: int, depth: int) -> Any:
        """Parses the value at `start:end`, whose own entries are `depth` deep."""
        text = self._data[start:end].strip(BLANK)
        kind = text[:1] + text[-1:]
        if len(text) > PIECE_BYTES and kind not in CLOSED and text[:1] in OPENING:
            raise ValueError(f"a list, an object or a text must end, in bytes {start} to {end}")
        if len(text) <= PIECE_BYTES or kind not in CLOSED or not text[1:-1].strip(BLANK):
            return self._parse(text, start, end)
        first = self._data.index(text[:1], start) + 1
        if kind == b'""':
            return self._text(first, first + len(text) - 2)
        runs = self._runs(first, first + len(text) - 2, depth)
        return self._list(runs, depth) if kind == b"[]" else self._object(runs, depth)

    def _list(self, runs: Iterator[tuple[int, int]], depth: int) -> list[Any]:
        found: list[Any] = []
        for start, end in runs:
            if end - start > PIECE_BYTES:
                found.append(self.value(start, end, depth + 1))
            else:
                found += self._parse_run(b"[%b]", start, end)
        return found

    def _object(self, runs: Iterator[tuple[int, int]], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for start, end in runs:
            name = NAME.match(self._data, start, end) if end - start > PIECE_BYTES else None
            if name is None:
                if end - start > PIECE_BYTES and LONG_NAME.match(self._data, start, end):
                    words = f"the name of a field with a large value must have at most {MAX_NAME_BYTES} bytes"
                    raise ValueError(f"{words}, in bytes {start} to {end}")
                found |= self._parse_run(b"{%b}", start, end)
            else:
                found[self._parse(name[1], start, end)] = self.value(name.end(), end, depth + 1)
        return found

    def _text(self, start: int, end: int) -> str:
        """Parses what stands between two quotes, in pieces that end between two characters.

        Each piece begins there, so the parser refuses one that ends elsewhere. It need not refuse half of a surrogate
        pair.
        """
        found: list[str] = []
        while end - start > PIECE_BYTES:
            for cut in range(start + PIECE_BYTES, min(start + PIECE_BYTES + CHAR_BYTES, end)):
                if not PAIR.match(self._data, cut - CHAR_BYTES // 2):
                    with contextlib.suppress(ValueError):
                        found.append(self._parser(b'"%b"' % self._data[start:cut]))
                        start = cut
                        break
            else:  # it is wrong here, or ends here: one call tells
                break
        found.append(self._parse(b'"%b"' % self._data[start:end], start, end))
        return "".join(found)

    def _runs(self, start: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
        """Yields runs of entries of at most `PIECE_BYTES`, and larger entries alone."""
        first, last = np.searchsorted(self._places, (start, end))
        cuts = self._places[first:last][self._depths[first:last] == depth]
        while end - start > PIECE_BYTES and len(cuts):
            at = max(int(np.searchsorted(cuts, start + PIECE_BYTES, side="right")) - 1, 0)
            yield start, int(cuts[at])
            start, cuts = int(cuts[at]) + 1, cuts[at + 1 :]
        yield start, end

    def _parse_run(self, form: bytes, start: int, end: int) -> Any:
        text = self._data[start:end]
        if not text.strip(BLANK):  # a comma without an entry before or behind it
            raise ValueError(f"expected value before byte {end}")
        return self._parse(form % text, start, end)

    def _parse(self, text: bytes, start: int, end: int) -> Any:
        """Parses one piece. Raises ValueError with its place in the body."""
        try:
            return self._parser(text)
        except ValueError as error:
            reason = str(error).partition(" at line ")[0]
            raise ValueError(f"{reason}, in bytes {start} to {end}") from None
