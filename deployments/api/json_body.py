"""Reads a request's body as JSON. Its errors name the place, and nothing of the text."""

import json
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from pydantic_core import from_json

from deployments.api import json_pieces
from deployments.api.json_pieces import JsonLimits, TooDeep, TooManyValues
from deployments.errors import ApiError, path_of
from scoring.row_builder import is_unicode

HALF = "\ud800"
"""Stands for an item with half of a surrogate pair, which is no Unicode text: it fails where items are tokenised."""

Place = tuple[int | str, ...]


class Parser:
    """Parses JSON. `half` is the error of the first text with half of a surrogate pair, which passes."""

    half: ValueError | None = None

    def __call__(self, text: bytes) -> Any:
        """Returns the value. Raises ValueError with the place, and nothing of the text."""
        try:
            return from_json(text, allow_inf_nan=False)
        except ValueError as error:
            if "hex escape" not in str(error):
                raise
            try:
                value = json.loads(text, parse_constant=_refuse)
            except (ValueError, RecursionError):
                raise error from None
            self.half = self.half or error
            return value


def read_object(data: bytes, items: Collection[str], limits: JsonLimits) -> dict[str, Any]:
    """Parses a JSON object in UTF-8, with finite numbers; a large one in pieces.

    JavaScript makes half of a surrogate pair of a text that it cuts inside a character. No string of a request may hold
    one, but where the route's items can fail alone, only its item does.

    Args:
        data: The body, with or without a byte order mark.
        items: Names of the lists whose entries can fail alone: an entry with half of a surrogate pair becomes HALF.
        limits: Bounds of its depth and of its values.

    Raises:
        ApiError: The body is anything else (400), or has too many values (413).
    """
    data, parse = data.removeprefix(BOM_UTF8), Parser()
    large = len(data) > limits.whole_bytes
    try:
        value = json_pieces.read(data, limits, parse) if large else parse(data)
    except TooDeep:
        raise _too_deep(limits.depth) from None
    except TooManyValues as error:
        raise ApiError("body_too_large", f"The body must have at most {error}. Send less in one request.") from None
    except ValueError as error:
        raise _invalid(error) from None
    place = _mark_halves(value, items) if parse.half else None
    if place is not None:
        raise _invalid(parse.half, place)
    if not isinstance(value, dict):
        raise ApiError("invalid_json", "The body must be a JSON object.")
    if not large and data.count(b"[") + data.count(b"{") > limits.depth:
        _check_depth(value, limits.depth)
    return value


def _invalid(error: ValueError | None, place: str | None = None) -> ApiError:
    hint = f" `{place}` has half of a surrogate pair, which is no character." if place else ""
    return ApiError("invalid_json", f"The body must be JSON in UTF-8, with finite numbers: {error}.{hint}", place)


def _too_deep(maximum: int) -> ApiError:
    return ApiError("invalid_json", f"The body must be nested at most {maximum} levels deep.")


def _mark_halves(value: Any, items: Collection[str]) -> str | None:
    """Puts HALF in place of each item with half of a surrogate pair. Returns the first other place of one."""
    for place in [*_halves(value)]:
        match place:
            case (str(field), int(index), *_) if field in items:
                value[field][index] = HALF
            case _:
                return path_of(place) or "body"
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError("A number must be finite.")


def _halves(value: object) -> Iterator[Place]:
    """Yields the places of strings with half of a surrogate pair, in order. The place of a name is its object's."""
    nodes: list[tuple[Place, object]] = [((), value)]
    while nodes:
        place, node = nodes.pop()
        names = [*node] if isinstance(node, dict) else [node] if isinstance(node, str) else []
        if not all(map(is_unicode, names)):
            yield place
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        nodes += reversed([((*place, key), child) for key, child in children])


def _check_depth(value: object, maximum: int) -> None:
    """Raises ApiError if parsed JSON is nested more than `maximum` levels deep."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > maximum:
            raise _too_deep(maximum)
        inner: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            if not {dict, list}.isdisjoint(map(type, children)):
                inner.extend(child for child in children if isinstance(child, dict | list))
        level = inner
