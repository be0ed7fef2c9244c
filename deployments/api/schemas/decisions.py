"""Declares the request and the answer of POST /v1/decisions.

The input is text, or messages, tool calls and their outputs, each made of parts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, to_json

from deployments.api.schemas.fields import Body, Name, bound, refused, text
from deployments.errors import describe

MAX_JSON_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 262_144
Pick = Callable[[object, ValidationInfo], Any]


def at(error: PydanticCustomError, *loc: str | int) -> ValidationError:
    """Returns the error for a place below the field that is being read."""
    return ValidationError.from_exception_data("body", [InitErrorDetails(type=error, loc=loc, input=None)])


def one_of_kinds(kinds: Mapping[str, type[Body]], default: str | None = None) -> Pick:
    """Returns a validator that reads an object as the model that its `type` names. Errors have its fields' paths."""
    allowed = "one of " + ", ".join(kinds)

    def pick(value: object, info: ValidationInfo) -> Body:
        if not isinstance(value, dict):
            raise refused("an object", describe(value))
        kind = value.get("type")
        kind = default if kind is None else kind
        if kind == "input_image":
            raise at(refused(f"{allowed}: images are not supported", kind, "unsupported_parameter"), "type")
        if not isinstance(kind, str) or kind not in kinds:
            raise at(refused(allowed, "nothing" if kind is None else describe(kind)), "type")
        return kinds[kind].model_validate(value, context=info.context)

    return pick


def many(pick: Pick) -> TypeAdapter[list[Any]]:
    """Returns a validator of a list whose entries `pick` reads."""
    return TypeAdapter(list[Annotated[Any, PlainValidator(pick)]])


def _check_data(value: object) -> object:
    """Returns an object, or an array of objects, as compact JSON text. Refuses one beyond the three limits."""
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
    """Kept as compact JSON text."""
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
    """Returns the texts of the parts in order, with line breaks between them."""
    return content if isinstance(content, str) else "\n".join(map(_part_text, content))


def _content(parts: dict[str, type[Body]], kind: Any, *, empty: bool) -> Any:
    """Returns a validator of a string or a list of parts."""
    adapter = many(one_of_kinds(parts))

    def check(value: object, info: ValidationInfo) -> str | list[Any]:
        if not isinstance(value, str | list):
            raise refused("a string or a list of parts", describe(value))
        content = value if isinstance(value, str) else adapter.validate_python(value, context=info.context)
        size, maximum = len(text_of(content)), bound(info, "max_string_chars")
        if size > maximum:
            raise refused(f"text of at most {maximum} characters", f"{size} characters")
        if not size and not empty:
            raise refused("text that is not empty", "no text")
        return content

    return PlainValidator(check, json_schema_input_type=str | list[kind])


Content = Annotated[str | list[InputPart], _content(INPUT_PARTS, InputPart, empty=True)]
Instructions = Annotated[str | list[QuestionPart], _content(QUESTION_PARTS, QuestionPart, empty=False)]


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "developer", "system", "assistant"]
    content: Content
    phase: Any = None


class _Item(Body):
    """Holds the fields that every tool item has; the last three are ignored."""

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
        maximum = bound(info, "max_string_chars")
        if len(value) > maximum:
            raise refused(f"a string of at most {maximum} characters", describe(value))
        return value
    if not isinstance(value, list):
        raise refused("a string or a list of items", describe(value))
    maximum = bound(info, "max_items")
    if not 1 <= len(value) <= maximum:
        raise refused(f"a list of 1 to {maximum} items", f"{len(value)} items")
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


def _check_value(value: object, info: ValidationInfo) -> str | bool:
    maximum = bound(info, "max_string_chars")
    if not isinstance(value, str | bool):
        raise refused("a string, true or false", describe(value))
    if isinstance(value, str) and len(value) > maximum:
        raise refused(f"a string of at most {maximum} characters", describe(value))
    return value


class ChoiceOption(Body):
    value: Annotated[str | bool, PlainValidator(_check_value, json_schema_input_type=str | bool)]
    description: Annotated[str | None, text()] = None


class ScoreLevel(Body):
    label: Annotated[str, text()]
    description: Annotated[str | None, text()] = None


def _distinct(choices: list[ChoiceOption]) -> list[ChoiceOption]:
    seen: dict[tuple[bool, str | bool], int] = {}
    for index, choice in enumerate(choices):
        key = (isinstance(choice.value, bool), choice.value)
        if key in seen:
            raise at(refused("unlike every other value", f"that of [{seen[key]}]"), index, "value")
        seen[key] = index
    return choices


def _sized(limit: str, words: str) -> Any:
    def check(value: object, info: ValidationInfo) -> object:
        maximum = bound(info, limit)
        if isinstance(value, list) and not 2 <= len(value) <= maximum:
            raise refused(f"a list of 2 to {maximum} {words}", f"{len(value)} {words}")
        return value

    return BeforeValidator(check)


class PredicateQuestion(Body):
    type: Literal["predicate"]
    instructions: Instructions
    name: Name | None = None


class ChoiceQuestion(Body):
    type: Literal["choice"]
    instructions: Instructions
    choices: Annotated[list[ChoiceOption], _sized("max_choices", "choices"), AfterValidator(_distinct)]
    name: Name | None = None


class ScoreQuestion(Body):
    type: Literal["score"]
    instructions: Instructions
    levels: Annotated[list[ScoreLevel], _sized("max_levels", "levels")]
    name: Name | None = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_KINDS: dict[str, type[Body]] = {"predicate": PredicateQuestion, "choice": ChoiceQuestion, "score": ScoreQuestion}
_pick_kind = one_of_kinds(_KINDS)
FOREIGN = ("question", "options")  # names of questions in another server's dialect of this route


def _pick_question(value: object, info: ValidationInfo) -> Any:
    if isinstance(value, dict) and "instructions" not in value:
        for name in FOREIGN:
            if name in value:
                raise at(
                    refused(
                        "absent: a question has `type`, `instructions` and its `choices` or `levels`",
                        describe(value[name]),
                    ),
                    name,
                )
    return _pick_kind(value, info)


_QUESTIONS = many(_pick_question)


def _check_questions(value: object, info: ValidationInfo) -> list[Question]:
    maximum = bound(info, "max_questions")
    if not isinstance(value, list):
        raise refused(f"a list of 1 to {maximum} questions", describe(value))
    if not 1 <= len(value) <= maximum:
        raise refused(f"a list of 1 to {maximum} questions", f"{len(value)} questions")
    return _QUESTIONS.validate_python(value, context=info.context)


def _absent(value: object) -> None:
    if value is not None:
        raise refused("absent: ask in `questions`, each with `type` and `instructions`", describe(value))


class DecisionRequest(Body):
    model: Name | None = None
    question: Annotated[None, BeforeValidator(_absent)] = None
    options: Annotated[None, BeforeValidator(_absent)] = None
    input: Input
    questions: Annotated[list[Question], PlainValidator(_check_questions, json_schema_input_type=list[Question])]
    prompt_cache_key: Name | None = None


class PredicateAnswer(BaseModel):
    type: Literal["predicate"]
    name: str | None
    probability: float
    label_mass: float


class ChoiceProbability(BaseModel):
    value: str | bool
    probability: float


class ChoiceAnswer(BaseModel):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    label_mass: float


class LevelProbability(BaseModel):
    value: int
    label: str
    probability: float


class ScoreAnswer(BaseModel):
    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]
    label_mass: float


class RefusalAnswer(BaseModel):
    """Says that the answers' probability is below `decisions.min_label_mass`."""

    type: Literal["refusal"]
    name: str | None
    label_mass: float


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(BaseModel):
    reasoning_tokens: Literal[0]


class DecisionUsage(BaseModel):
    """Counts tokens. Each question counts its whole prompt; tokens computed before are among `cached_tokens`."""

    input_tokens: int
    output_tokens: Literal[0]
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class DecisionResponse(BaseModel):
    model: str
    answers: list[Annotated[PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer, Field(discriminator="type")]]
    """In the order of the questions."""
    usage: DecisionUsage
    prompt_format_version: str
