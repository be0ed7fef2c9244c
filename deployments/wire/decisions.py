"""POST /v1/decisions: the request as parsed, and the shape of its answers."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, ValidationInfo

from deployments.wire.decision_input import Input, Instructions, at, many, one_of_kinds
from deployments.wire.errors import describe
from deployments.wire.fields import Body, Name, bound, refused, text


def _check_value(value: object, info: ValidationInfo) -> str | bool:
    most = bound(info, "max_string_chars")
    if not isinstance(value, str | bool):
        raise refused("a string, true or false", describe(value))
    if isinstance(value, str) and len(value) > most:
        raise refused(f"a string of at most {most} characters", describe(value))
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
        most = bound(info, limit)
        if isinstance(value, list) and not 2 <= len(value) <= most:
            raise refused(f"a list of 2 to {most} {words}", f"{len(value)} {words}")
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
FOREIGN = ("question", "options")  # how another server's dialect of this route names its questions


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
    most = bound(info, "max_questions")
    if not isinstance(value, list):
        raise refused(f"a list of 1 to {most} questions", describe(value))
    if not 1 <= len(value) <= most:
        raise refused(f"a list of 1 to {most} questions", f"{len(value)} questions")
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
    # Known and ignored.
    prompt_cache_options: Any = None
    safety_identifier: Any = None


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
    """The model put less on the answers than `decisions.min_label_mass`."""

    type: Literal["refusal"]
    name: str | None
    label_mass: float


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(BaseModel):
    reasoning_tokens: Literal[0]


class DecisionUsage(BaseModel):
    """Every question counts its whole prompt; what was computed before is among `cached_tokens`."""

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
