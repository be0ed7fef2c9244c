"""Declares the request of the rerank routes, one for the dialects of several clients, and the answers of two."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, PlainValidator, ValidationInfo

from deployments.api.schemas.chat import Conversations, TemplateValues, content_text
from deployments.api.schemas.fields import (
    Body,
    Count,
    Direction,
    Name,
    Salt,
    bound,
    check_size,
    check_string,
    one_of,
    refused,
    strings,
    text,
)
from deployments.api.schemas.generative_scoring import ItemFailure
from deployments.errors import ErrorBody, describe

Document = str | dict[str, Any]
IMAGES = ("image", "image_url", "images")


def texts_or_objects(limit: str, null: bool = True) -> Any:
    """Returns a validator of `[str | object]`. The ranked field of an object is chosen later, by `rank_fields`.

    An object whose `content` is a list of text parts is the text of its parts; in place of the whole list it is one
    document a part, as vLLM reads it.
    """

    def check(value: object, info: ValidationInfo) -> list[Document] | None:
        if value is None and null:
            return None
        if isinstance(value, dict) and isinstance(value.get("content"), list):
            value = value["content"]
        if not isinstance(value, list):
            raise refused("a list of strings or objects", describe(value))
        check_size(value, 1, bound(info, limit))
        maximum = bound(info, "max_string_chars")
        return [_document(entry, maximum, index) for index, entry in enumerate(value)]

    kinds = list[str | dict[str, Any]]
    return PlainValidator(check, json_schema_input_type=(kinds | None) if null else kinds)


def text_or_parts() -> Any:
    """Returns a validator of a string, of a text part, or of an object whose `content` is a list of text parts."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        if isinstance(value, dict):
            content = value.get("content")
            return content_text(content if isinstance(content, list) else [value], bound(info, "max_string_chars"))
        return check_string(value, 0, bound(info, "max_string_chars"))

    return PlainValidator(check, json_schema_input_type=str | dict[str, Any] | None)


def _document(entry: object, maximum: int, index: int) -> Document:
    if not isinstance(entry, dict):
        return check_string(entry, 0, maximum, f" or an object at [{index}]")
    if isinstance(parts := entry.get("content"), list):
        entry = {"text": content_text(parts, maximum)}
    if any(entry.get(name) is not None for name in IMAGES):
        raise refused("documents of text alone", f"images at [{index}]", "unsupported_parameter")
    for value in entry.values():
        if isinstance(value, str):
            check_string(value, 0, maximum, f" in the object at [{index}]")
    return entry


class PineconeParameters(Body):
    """Holds the options of Pinecone's reranker."""

    truncate: Literal["NONE", "END"] | None = None


class RerankRequest(Body):
    """Holds `documents` (Cohere, Jina, vLLM, SGLang, Voyage, Pinecone) or `texts` (text-embeddings-inference).

    `null` means absent. `top_k` and `truncation` are Voyage's, `parameters` Pinecone's. For a reward model `messages`
    holds conversations in place of both, or the conversation that each of `documents` answers.
    """

    item_fields: ClassVar[frozenset[str]] = frozenset(("documents", "texts"))

    model: Name | None = None
    query: Annotated[str | None, text_or_parts()] = None
    messages: Conversations = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues = None
    documents: Annotated[list[Document] | None, texts_or_objects("max_items")] = None
    texts: Annotated[list[str] | None, strings("max_items", "max_string_chars", 1, 0)] = None
    rank_fields: Annotated[list[str] | None, strings("max_items", "max_name_chars", 1)] = None
    top_n: Count | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    instruction: Annotated[str | None, text("max_instruction_chars")] = None
    instruct: Annotated[str | None, text("max_instruction_chars")] = None
    max_tokens_per_doc: Count | None = None
    max_tokens_per_query: Count | None = None
    truncate_prompt_tokens: Annotated[int, one_of(lambda x: x == -1 or 1 <= x < 2**31, "-1 or >= 1")] | None = None
    truncation_side: Literal["left", "right"] | None = None
    truncate: bool | None = None
    truncation_direction: Direction = None
    raw_scores: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    priority: Annotated[int, one_of(lambda x: 0 <= x <= 999, "in [0, 999]")] | None = None
    cache_salt: Salt | None = None
    max_chunks_per_doc: int | None = None
    top_k: Count | None = None
    truncation: bool | None = None
    parameters: PineconeParameters | None = None


class RankedDocument(BaseModel):
    text: str


class RankResult(BaseModel):
    """Ranks one document. `truncated` is present only if part of it was cut off."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None
    truncated: Literal[True] | None = None


class RerankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    version: Literal["1", "2"]


class BilledUnits(BaseModel):
    search_units: Literal[1]


class RerankTokens(BaseModel):
    input_tokens: int
    output_tokens: Literal[0]


class RerankMeta(BaseModel):
    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: RerankTokens
    cached_tokens: int
    warnings: list[str] | None = None


class DocumentFailure(ItemFailure):
    """Says why the model cannot read a document, which `results` then lacks."""

    index: int


class Failures(BaseModel):
    """Lists the documents without a score; absent where each has one."""

    errors: list[DocumentFailure] | None = None


class RerankResponse(Failures):
    """Lists the documents, best first, equal raw scores in the request's order."""

    id: str
    object: Literal["rerank"]
    model: str
    results: list[RankResult]
    usage: RerankUsage
    meta: RerankMeta


class TextRank(BaseModel):
    """Ranks one text. `truncated` is present only if part of it was cut off."""

    index: int
    score: float
    text: str | None = None
    truncated: Literal[True] | None = None


class RerankErrorBody(ErrorBody):
    """Repeats the message in the fields that rerank clients read."""

    detail: str
    message: str
