"""Declares the field types of request bodies: strict, finite, and checked against the server's limits before any copy.

Limits reach a validator through pydantic's context (`{"limits": {name: bound}}`), so that one server may differ from
another while the models stay declared once. The length of a list is checked before its entries.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from deployments.errors import Code, describe
from deployments.limits import PRIORITIES
from scoring.loglikelihood import Continuations

Int = int
Number = FiniteFloat


class Body(BaseModel):
    """Holds a request body or a part of one. Undeclared fields are kept apart: `RequestHandler.parse` judges them."""

    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Undeclared fields of a part that are refused, with the values that have no effect. See `known_fields`."""

    item_fields: ClassVar[frozenset[str]] = frozenset()
    """Lists whose entries can fail alone, so that a text that is no Unicode fails its entry and not the request."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), ser_json_inf_nan="null")


def refused(allowed: str, given: str, code: Code = "invalid_value") -> PydanticCustomError:
    """Returns the validation error for a value that is not allowed."""
    return PydanticCustomError("refused", "refused", {"allowed": allowed, "given": given, "code": code})


def bound(info: ValidationInfo, name: str) -> int:
    """Returns the server's limit of this name."""
    context: dict[str, Any] = info.context or {}
    limits: dict[str, int] = context["limits"]
    return limits[name]


def check_size(value: list[Any], minimum: int, maximum: int) -> None:
    """Refuses a list that is too short or too long."""
    if not minimum <= len(value) <= maximum:
        raise refused(f"a list of {minimum} to {maximum} entries", f"{len(value)} entries")


def _lower_side(value: object) -> object:
    return value.lower() if isinstance(value, str) and value.lower() in ("left", "right") else value


Direction = Annotated[Literal["left", "right"] | None, BeforeValidator(_lower_side)]
"""A side, in whatever case."""


def check_string(value: object, minimum: int, maximum: int, where: str = "") -> str:
    """Returns a string. Refuses another type, and one that is too short or too long."""
    if not isinstance(value, str):
        raise refused(f"a string{where}", describe(value))
    if not minimum <= len(value) <= maximum:
        raise refused(f"a string of {minimum} to {maximum} characters{where}", describe(value))
    return value


def text(limit: str = "max_string_chars", minimum: int = 0) -> Any:
    """Returns a validator of a string of at most `limit` characters."""

    def check(value: object, info: ValidationInfo) -> object:
        return None if value is None else check_string(value, minimum, bound(info, limit))

    return BeforeValidator(check)


Name = Annotated[str, text("max_name_chars")]
Salt = Annotated[str, text("max_name_chars", 1)]


def _all(values: list[Any], kind: type) -> bool:
    return set(map(type, values)) <= {kind}


def _check_ids(values: list[Any]) -> list[int]:
    for index, value in enumerate(values if not _all(values, int) else ()):
        if type(value) is not int:
            raise refused("a list of integers", f"{describe(value)} at [{index}]")
    return values


def ids(limit: str, minimum: int = 0, null: bool = True) -> Any:
    """Returns a validator of `[int]` with `minimum` to `limit` entries. The vocabulary is checked later."""

    def check(value: object, info: ValidationInfo) -> list[int] | None:
        if value is None and null:
            return None
        if not isinstance(value, list):
            raise refused("a list of integers", describe(value))
        check_size(value, minimum, bound(info, limit))
        return _check_ids(value)

    return PlainValidator(check, json_schema_input_type=(list[int] | None) if null else list[int])


def absent(why: str) -> Any:
    """Returns a validator that allows only `null`, for a field of another dialect. `why` names the right route."""

    def check(value: object) -> None:
        if value is not None:
            raise refused(f"absent: {why}", describe(value))

    return PlainValidator(check, json_schema_input_type=None)


def strings(limit: str, chars: str, minimum: int = 0, min_chars: int = 1, one: bool = False, null: bool = True) -> Any:
    """Returns a validator of `[str]`, or (with `one`) also of a bare string, which becomes a list of one."""

    def check(value: object, info: ValidationInfo) -> list[str] | None:
        if value is None and null:
            return None
        if one and isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise refused("a string or a list of strings" if one else "a list of strings", describe(value))
        check_size(value, minimum, bound(info, limit))
        maximum = bound(info, chars)
        return [check_string(entry, min_chars, maximum, f" at [{i}]") for i, entry in enumerate(value)]

    kinds = (str | list[str]) if one else list[str]
    return PlainValidator(check, json_schema_input_type=(kinds | None) if null else kinds)


def texts_or_ids(limit: str, minimum: int = 1, one: bool = False, null: bool = False) -> Any:
    """Returns a validator of `[str] | [[int]]`, or (with `one`) also of a bare string, which becomes a list of one, or
    (with `null`) also of null."""

    def check(value: object, info: ValidationInfo) -> list[str] | list[list[int]] | None:
        if value is None and null:
            return None
        if one and isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise refused("a list of strings or of lists of token ids", describe(value))
        check_size(value, minimum, bound(info, limit))
        if value and isinstance(value[0], list):
            return _id_lists(value)
        maximum = bound(info, "max_string_chars")
        return [check_string(entry, 0, maximum, f" at [{i}]") for i, entry in enumerate(value)]

    lists = list[str] | list[list[int]]
    kind: Any = (str | lists) if one else lists
    return PlainValidator(check, json_schema_input_type=(kind | None) if null else kind)


def _id_lists(value: list[Any]) -> list[list[int]]:
    for index, entry in enumerate(value):
        if not isinstance(entry, list):
            raise refused("a list of lists of token ids", f"{describe(entry)} at [{index}]")
        _check_ids(entry)
    return value


def continuation_lists() -> Any:
    """Returns a validator of `[str] | [[int]]`, or of one such list for each item, as `Continuations`."""

    def group(value: object, info: ValidationInfo, where: str) -> list[str] | list[list[int]]:
        if not isinstance(value, list):
            raise refused("a list of strings or of lists of token ids", describe(value) + where)
        check_size(value, 1, bound(info, "max_continuations"))
        if not isinstance(value[0], list):
            maximum = bound(info, "max_string_chars")
            return [check_string(entry, 1, maximum, f" at [{i}]{where}") for i, entry in enumerate(value)]
        for entry in _id_lists(value):
            check_size(entry, 1, bound(info, "max_continuation_tokens"))
        return value

    def check(value: object, info: ValidationInfo) -> Continuations | None:
        if value is None:
            return None
        nested = isinstance(value, list) and value and isinstance(value[0], list) and value[0]
        if not isinstance(value, list) or not nested or isinstance(value[0][0], int):
            return Continuations(lists=[group(value, info, "")], per_item=False)
        check_size(value, 1, bound(info, "max_items"))
        lists = [group(one, info, f" for item {item}") for item, one in enumerate(value)]
        if len({type(one[0]) for one in lists}) > 1:
            raise refused("of one kind: all text or all token ids", "both")
        return Continuations(lists=lists, per_item=True)

    kinds = list[str] | list[list[int]] | list[list[str]] | list[list[list[int]]] | None
    return PlainValidator(check, json_schema_input_type=kinds)


def text_or_ids(null: bool = False) -> Any:
    """Returns a validator of `str | [int]`, or (with `null`) also of null."""

    def check(value: object, info: ValidationInfo) -> str | list[int] | None:
        if value is None and null:
            return None
        if isinstance(value, list):
            return _check_ids(value)
        if not isinstance(value, str):
            raise refused("a string or a list of token ids", describe(value))
        return check_string(value, 0, bound(info, "max_string_chars"))

    return PlainValidator(check, json_schema_input_type=(str | list[int] | None) if null else (str | list[int]))


def prompts(limit: str = "max_prompts", null: bool = False) -> Any:
    """Returns a validator of `str | [str] | [int] | [[int]]` that makes a list of prompts. No list of ids is empty."""

    def check(value: object, info: ValidationInfo) -> list[str] | list[list[int]] | None:
        if value is None and null:
            return None
        if isinstance(value, str):
            return [check_string(value, 0, bound(info, "max_string_chars"))]
        if not isinstance(value, list):
            raise refused("a string, a list of strings, token ids or a list of token id lists", describe(value))
        if not value:
            raise refused("not empty", "an empty list")
        if not isinstance(value[0], str | list):
            return [_check_ids(value)]
        check_size(value, 1, bound(info, limit))
        if isinstance(value[0], list):
            found = _id_lists(value)
            if not all(found):
                raise refused("lists of at least one token id", f"an empty list at [{found.index([])}]")
            return found
        maximum = bound(info, "max_string_chars")
        return [check_string(entry, 0, maximum, f" at [{i}]") for i, entry in enumerate(value)]

    kinds = str | list[str] | list[int] | list[list[int]]
    return PlainValidator(check, json_schema_input_type=(kinds | None) if null else kinds)


def biases() -> Any:
    """Returns a validator of `{id: number}` with decimal keys that makes a tuple of pairs."""

    def check(value: object, info: ValidationInfo) -> tuple[tuple[int, float], ...] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise refused("an object of token ids and numbers", describe(value))
        maximum = bound(info, "max_logit_bias")
        if len(value) > maximum:
            raise refused(f"an object of at most {maximum} entries", f"{len(value)} entries")
        return tuple((_bias_key(key), _bias_value(entry)) for key, entry in value.items())

    return PlainValidator(check, json_schema_input_type=dict[str, float] | None)


def _bias_key(key: str) -> int:
    digits = key.removeprefix("-")
    if not (0 < len(digits) <= 18 and digits.isascii() and digits.isdigit()):
        raise refused("an object whose keys are token ids in decimal digits", "another key")
    return int(key)


def _bias_value(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused("an object whose values are numbers in [-100, 100]", describe(value))
    if not -100 <= value <= 100:  # also NaN and integers too large for a float
        raise refused("an object whose values are in [-100, 100]", describe(value))
    return float(value)


def one_of(allowed: Callable[[int], bool], words: str) -> Any:
    """Returns a validator of an integer for which `allowed` holds. `words` name the range."""

    def check(value: object) -> object:
        if type(value) is int and not allowed(value):
            raise refused(f"an integer {words}", describe(value))
        return value

    return BeforeValidator(check)


Count = Annotated[int, one_of(lambda x: 0 <= x < 2**31, ">= 0")]
AtLeastOne = Annotated[int, one_of(lambda x: 1 <= x < 2**31, ">= 1")]
Priority = Annotated[
    int, one_of(lambda x: PRIORITIES[0] <= x <= PRIORITIES[1], f"in [{PRIORITIES[0]}, {PRIORITIES[1]}]")
]
