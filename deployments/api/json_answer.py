"""Writes a large answer in pieces: other threads run between two of them, and a client takes them one by one.

The encoder holds the interpreter for as long as one call takes. An answer of 30 MB in one call would stop the event
loop for a tenth of a second and more, whichever thread writes it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ENTRIES = 8192  # numbers that one call of the encoder writes
TEXT_ENTRY = 8  # characters that take about as long as a number
PIECE_BYTES = 262_144  # that one message sends: a server waits between two until the client has taken the first


class AnswerTooLarge(ValueError):
    """Says that an answer has more bytes than the limit. It is raised before all of it is written."""


def encode(body: object, maximum: int) -> list[bytes]:
    """Writes a body as JSON. NaN and infinity become null.

    Args:
        body: Made of dicts with strings as keys, lists, and what the encoder takes whole.
        maximum: Bytes that the answer may have.

    Returns:
        Pieces of at least `PIECE_BYTES` and a last one; joined they are what one call of the encoder returns.

    Raises:
        AnswerTooLarge: The answer has more than `maximum` bytes.
    """
    pieces: list[bytes] = []
    waiting: list[bytes] = []
    size = total = 0
    for part in _parts(body):
        waiting.append(part)
        size += len(part)
        if total + size > maximum:
            raise AnswerTooLarge
        if size >= PIECE_BYTES:
            pieces.append(b"".join(waiting))
            total, size = total + size, 0
            waiting.clear()
    return [*pieces, b"".join(waiting)]


def _parts(value: object) -> Iterator[bytes]:
    if _entries(value) <= ENTRIES:
        yield _json(value)
    elif isinstance(value, dict):
        opening = b"{"
        for key, inner in value.items():
            yield opening + to_json(key) + b":"
            yield from _parts(inner)
            opening = b","
        yield b"}"
    elif isinstance(value, list):
        opening = b"["
        for group in _groups(value):
            yield opening
            if len(group) == 1:
                yield from _parts(group[0])
            else:
                yield _json(group)[1:-1]
            opening = b","
        yield b"]"
    else:
        yield _json(value)


def _groups(values: list[Any]) -> Iterator[list[Any]]:
    """Cuts a list into runs that one call may write. An entry that is too large is a run of its own."""
    if not isinstance(_first_of(values), dict | list | str):
        yield from (values[start : start + ENTRIES] for start in range(0, len(values), ENTRIES))
        return
    group: list[Any] = []
    entries = 0
    for value in values:
        more = _entries(value)
        if group and entries + more > ENTRIES:
            yield group
            group, entries = [], 0
        group.append(value)
        entries += more
    yield group


def _entries(value: object) -> int:
    """Estimates how many numbers take as long to write. The first entry of a list that is not null stands for all."""
    if isinstance(value, dict):
        return 1 + sum(map(_entries, value.values()))
    if isinstance(value, list):
        return 1 + len(value) * _entries(_first_of(value)) if value else 1
    return 1 + len(value) // TEXT_ENTRY if isinstance(value, str) else 1


def _first_of(values: list[Any]) -> object:
    """Returns the first entry that is not null, or null."""
    return next((one for one in values if one is not None), None)


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


class PieceResponse(Response):
    """Sends an answer piece by piece, with its length."""

    def __init__(self, pieces: Sequence[bytes], media_type: str = "application/json") -> None:
        super().__init__(None, media_type=media_type)
        self._pieces = pieces or [b""]  # an answer ends with its last piece
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = len(self._pieces) - 1
        for index, piece in enumerate(self._pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": index < last})
