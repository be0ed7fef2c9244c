"""Declares the request, the answer and the stream events of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, PlainValidator, TypeAdapter, ValidationInfo

from deployments.api.schemas.fields import Body, Count, Int, Name, bound, check_size, refused
from deployments.api.schemas.generation import GenerationRequest, PromptLogprob, Usage
from deployments.api.schemas.known_fields import MESSAGE_REFUSED
from deployments.errors import describe

Role = Literal["system", "developer", "user", "assistant", "tool", "context"]  # the last one is Granite Guardian's
MAX_VALUE_DEPTH = 8  # of chat_template_kwargs
OTHER_PARTS = {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file", "refusal"}


def _content(value: object, info: ValidationInfo) -> str:
    if isinstance(value, list) and len(value) > bound(info, "max_messages"):
        raise refused(f"at most {bound(info, 'max_messages')} parts", f"{len(value)} parts")
    return content_text(value, bound(info, "max_string_chars"))


def content_text(value: object, maximum: int) -> str:
    """Returns the text of a string or of a list of text parts, of at most `maximum` characters."""
    if isinstance(value, list):
        value = "".join(_part(part, index) for index, part in enumerate(value))
    if not isinstance(value, str):
        raise refused("a string or a list of text parts", describe(value))
    if len(value) > maximum:
        raise refused(f"at most {maximum} characters", describe(value))
    return value


def _part(part: object, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in OTHER_PARTS:
        raise refused(
            "a string or a list of text parts", f"a part of another kind at [{index}]", "unsupported_parameter"
        )
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise refused('a list of parts {"type": "text", "text": string}', f"another part at [{index}]")
    return text


def _messages(value: object, info: ValidationInfo) -> object:
    if isinstance(value, list) and not 1 <= len(value) <= bound(info, "max_messages"):
        raise refused(f"a list of 1 to {bound(info, 'max_messages')} entries", f"{len(value)} entries")
    return value


def _template_values(value: object, info: ValidationInfo) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refused("an object of names and values", describe(value))
    _check_values(value, bound(info, "max_instruction_chars"), 0)
    return value


def _check_values(value: object, chars: int, depth: int) -> int:
    """Returns the characters left of `chars` after a JSON value. Refuses one that is too large or nested too deeply."""
    if depth > MAX_VALUE_DEPTH:
        raise refused(f"nested at most {MAX_VALUE_DEPTH} levels deep", "more")
    parts: list[object] = []
    match value:
        case dict():
            parts = [*value, *value.values()]
        case list():
            parts = value
    chars -= len(value) if isinstance(value, str) else 1
    for part in parts:
        chars = _check_values(part, chars, depth + 1)
    if chars < 0:
        raise refused("of fewer characters, with names and numbers", "more than `limits.max_instruction_chars`")
    return chars


class TextPart(BaseModel):
    """Describes a part of a message's content in the schema."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Holds one message. Text parts are joined as they are; `null` means absent except in `role` and `content`."""

    refused_fields = MESSAGE_REFUSED

    role: Role
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[TextPart])]
    name: Name | None = None
    tool_call_id: Name | None = None

    def data(self) -> dict[str, object]:
        """Returns the message for a chat template."""
        data: dict[str, object] = {"role": self.role, "content": self.content}
        if self.name is not None:
            data["name"] = self.name
        if self.tool_call_id is not None:
            data["tool_call_id"] = self.tool_call_id
        return data


Messages = Annotated[list[Message], BeforeValidator(_messages)]
TemplateValues = Annotated[
    dict[str, Any] | None, PlainValidator(_template_values, json_schema_input_type=dict[str, Any] | None)
]
_ONE: TypeAdapter[list[Message]] = TypeAdapter(Messages)
_MANY: TypeAdapter[list[list[Message]]] = TypeAdapter(list[Messages])


def _conversations(value: object, info: ValidationInfo) -> list[Message] | list[list[Message]] | None:
    """Reads one conversation, or a list of them. Errors have the paths of what was sent."""
    if value is None:
        return None
    if isinstance(value, list) and value and isinstance(value[0], list):
        check_size(value, 1, bound(info, "max_items"))
        return _MANY.validate_python(value, context=info.context)
    return _ONE.validate_python(value, context=info.context)


Conversations = Annotated[
    list[Message] | list[list[Message]] | None,
    PlainValidator(_conversations, json_schema_input_type=list[Message] | list[list[Message]] | None),
]


class ChatRequest(GenerationRequest):
    """Holds the body of a chat request. `null` means absent except in `messages`."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None

    @property
    def length_field(self) -> str:
        """The name of the field that says how long the answer may be."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class Alternative(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    content: list[TokenEntry]
    requested_logprobs: list[list[float]] | None = None


class Answer(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class AnswerDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class _Choice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None
    stop_reason: str | int | None
    seed: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ChatChoice(_Choice):
    message: Answer
    finish_reason: Literal["stop", "length"]


class ChatEventChoice(_Choice):
    delta: AnswerDelta
    finish_reason: Literal["stop", "length"] | None


class _ChatEnvelope(BaseModel):
    id: str
    created: int
    model: str


class ChatResponse(_ChatEnvelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatEvent(_ChatEnvelope):
    """Holds one event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: Usage | None = None
