"""Reads a request's body as JSON. Its errors name the place, and nothing of the text."""

import json
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from pydantic_core import from_json

from deployments.errors import ApiError, path_of

HALF = "\ud800"
"""Stands for an item with half of a surrogate pair, which is no Unicode text: it fails where items are tokenised."""

Place = tuple[int | str, ...]


def read_object(data: bytes, items: Collection[str], max_depth: int) -> dict[str, Any]:
    """Parses a JSON object in UTF-8, with finite numbers.

    JavaScript makes half of a surrogate pair of a text that it cuts inside a character. No string of a request may hold
    one, but where the route's items can fail alone, only its item does.

    Args:
        data: The body, with or without a byte order mark.
        items: Names of the lists whose entries can fail alone: an entry with half of a surrogate pair becomes HALF.
        max_depth: Levels of nesting that are allowed.

    Raises:
        ApiError: The body is anything else (400).
    """
    data = data.removeprefix(BOM_UTF8)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:  # it tells the place, and nothing of the text
        value, place = _with_halves(data, items) if "hex escape" in str(error) else (None, None)
        if value is None or place is not None:
            hint = f" `{place}` has half of a surrogate pair, which is no character." if place else ""
            message = f"The body must be JSON in UTF-8, with finite numbers: {error}.{hint}"
            raise ApiError("invalid_json", message, place) from None
    if not isinstance(value, dict):
        raise ApiError("invalid_json", "The body must be a JSON object.")
    _check_depth(value, max_depth)
    return value


def _with_halves(data: bytes, items: Collection[str]) -> tuple[Any, str | None]:
    """Returns the value with HALF for each item that has half of a surrogate pair, and the first other place of one.

    The value is None if the body is no JSON even so.
    """
    try:
        value = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None, None
    for place in [*_halves(value)]:
        match place:
            case (str(field), int(index), *_) if field in items:
                value[field][index] = HALF
            case _:
                return value, path_of(place) or "body"
    return value, None


def _refuse(constant: str) -> NoReturn:
    raise ValueError("A number must be finite.")


def _halves(value: object) -> Iterator[Place]:
    """Yields the places of strings with half of a surrogate pair, in order. The place of a name is its object's."""
    nodes: list[tuple[Place, object]] = [((), value)]
    while nodes:
        place, node = nodes.pop()
        names = [*node] if isinstance(node, dict) else [node] if isinstance(node, str) else []
        if any("\ud800" <= char <= "\udfff" for name in names for char in name):
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
            raise ApiError("invalid_json", f"The body must be nested at most {maximum} levels deep.")
        inner: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            if not {dict, list}.isdisjoint(map(type, children)):
                inner.extend(child for child in children if isinstance(child, dict | list))
        level = inner
