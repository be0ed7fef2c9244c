"""What a decision is about, as it arrives: text, messages, tool calls and their outputs, and the parts of each."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, to_json

from deployments.wire.errors import describe
from deployments.wire.fields import Body, Name, bound, refused, text

MAX_JSON_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 262_144
Pick = Callable[[object, ValidationInfo], Any]


def at(error: PydanticCustomError, *loc: str | int) -> ValidationError:
    """The error at a place below the field that is being read."""
    return ValidationError.from_exception_data("body", [InitErrorDetails(type=error, loc=loc, input=None)])


def one_of_kinds(kinds: Mapping[str, type[Body]], key: str = "type", default: str | None = None) -> Pick:
    """An object read as the model that its `key` names. Errors carry the paths of its fields, without the kind."""
    allowed = "one of " + ", ".join(kinds)

    def pick(value: object, info: ValidationInfo) -> Body:
        if not isinstance(value, dict):
            raise refused("an object", describe(value))
        kind = value.get(key)
        kind = default if kind is None else kind
        if kind == "input_image":
            raise at(refused(f"{allowed}: images are not supported", kind, "unsupported_parameter"), key)
        if not isinstance(kind, str) or kind not in kinds:
            raise at(refused(allowed, "nothing" if kind is None else describe(kind)), key)
        return kinds[kind].model_validate(value, context=info.context)

    return pick


def many(pick: Pick) -> TypeAdapter[list[Any]]:
    return TypeAdapter(list[Annotated[Any, PlainValidator(pick)]])


# Parts of a text


def _check_data(value: object) -> object:
    """An object or an array of objects within the three bounds, as compact JSON text."""
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, dict) for row in rows):
        raise refused("an object or a list of objects", describe(value))
    level: list[Any] = [value]
    levels, values = 0, 1
    while level:
        levels += 1
        if levels > MAX_JSON_LEVELS:
            raise refused(f"JSON of at most {MAX_JSON_LEVELS} levels", "more")
        values += sum(map(len, level))
        if values > MAX_JSON_VALUES:
            raise refused(f"JSON of at most {MAX_JSON_VALUES} values", "more")
        children = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        if not all(math.isfinite(child) for child in children if isinstance(child, float)):
            raise refused("JSON of finite numbers", "infinity")
        level = [child for child in children if isinstance(child, dict | list)]
    data = to_json(value)
    if len(data) > MAX_JSON_BYTES:
        raise refused(f"JSON of at most {MAX_JSON_BYTES} bytes when written compactly", f"{len(data)} bytes")
    return data.decode("utf-8")


class InputText(Body):
    type: Literal["input_text"]
    text: Annotated[str, text()]
    prompt_cache_breakpoint: Any = None


class OutputText(Body):
    type: Literal["output_text"]
    text: Annotated[str, text()]


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Annotated[str, text()]


class InputJson(Body):
    type: Literal["input_json"]
    data: Annotated[str, PlainValidator(_check_data, json_schema_input_type=dict[str, Any] | list[dict[str, Any]])]
    """Read as compact JSON text."""
    prompt_cache_breakpoint: Any = None


InputPart = InputText | OutputText | RefusalPart | InputJson
QuestionPart = InputText | InputJson
INPUT_PARTS: dict[str, type[Body]] = {
    "input_text": InputText,
    "output_text": OutputText,
    "refusal": RefusalPart,
    "input_json": InputJson,
}
QUESTION_PARTS: dict[str, type[Body]] = {"input_text": InputText, "input_json": InputJson}


def _part_text(part: InputPart) -> str:
    match part:
        case InputJson():
            return part.data
        case RefusalPart():
            return part.refusal
    return part.text


def text_of(content: str | Sequence[InputPart]) -> str:
    """The texts of the parts in order, a line break between each."""
    return content if isinstance(content, str) else "\n".join(map(_part_text, content))


def _content(parts: dict[str, type[Body]], kind: Any, *, empty: bool) -> Any:
    """A string, or a list of parts."""
    adapter = many(one_of_kinds(parts))

    def check(value: object, info: ValidationInfo) -> str | list[Any]:
        if not isinstance(value, str | list):
            raise refused("a string or a list of parts", describe(value))
        content = value if isinstance(value, str) else adapter.validate_python(value, context=info.context)
        size, most = len(text_of(content)), bound(info, "max_string_chars")
        if size > most:
            raise refused(f"text of at most {most} characters", f"{size} characters")
        if not size and not empty:
            raise refused("text that is not empty", "no text")
        return content

    return PlainValidator(check, json_schema_input_type=str | list[kind])


Content = Annotated[str | list[InputPart], _content(INPUT_PARTS, InputPart, empty=True)]
Instructions = Annotated[str | list[QuestionPart], _content(QUESTION_PARTS, QuestionPart, empty=False)]


# The input


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "developer", "system", "assistant"]
    content: Content
    phase: Any = None


class _Item(Body):
    """What every tool item has; the last three are ignored."""

    call_id: Name
    id: Any = None
    status: Any = None
    namespace: Any = None


class FunctionCall(_Item):
    type: Literal["function_call"]
    name: Name
    arguments: Annotated[str, text()]


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    output: Content


class CustomToolCall(_Item):
    type: Literal["custom_tool_call"]
    name: Name
    input: Annotated[str, text()]


class CustomToolCallOutput(_Item):
    type: Literal["custom_tool_call_output"]
    output: Content


InputItem = InputMessage | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput
INPUT_ITEMS: dict[str, type[Body]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": CustomToolCallOutput,
}
_ITEMS = many(one_of_kinds(INPUT_ITEMS, default="message"))


def _check_input(value: object, info: ValidationInfo) -> str | list[InputItem]:
    if isinstance(value, str):
        most = bound(info, "max_string_chars")
        if len(value) > most:
            raise refused(f"a string of at most {most} characters", describe(value))
        return value
    if not isinstance(value, list):
        raise refused("a string or a list of items", describe(value))
    most = bound(info, "max_items")
    if not 1 <= len(value) <= most:
        raise refused(f"a list of 1 to {most} items", f"{len(value)} items")
    items: list[InputItem] = _ITEMS.validate_python(value, context=info.context)
    calls: set[tuple[bool, str]] = set()
    for index, item in enumerate(items):
        match item:
            case FunctionCall() | CustomToolCall():
                calls.add((isinstance(item, FunctionCall), item.call_id))
            case FunctionCallOutput() | CustomToolCallOutput():
                if (isinstance(item, FunctionCallOutput), item.call_id) not in calls:
                    raise at(refused("the id of an earlier call of its kind", "another id"), index, "call_id")
    return items


Input = Annotated[str | list[InputItem], PlainValidator(_check_input, json_schema_input_type=str | list[InputItem])]
