"""Declares the rerank requests and answers of Voyage, Mixedbread, Pinecone and Isaacus."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, RootModel

from deployments.api.schemas.fields import Body, Count, Name, strings, text
from deployments.api.schemas.rerank import Document, Failures, RerankResponse, TextRank, texts_or_objects


class MixedbreadRequest(Body):
    """Holds a request of POST /v1/reranking."""

    item_fields: ClassVar[frozenset[str]] = frozenset(("input",))

    model: Name | None = None
    query: Annotated[str, text()]
    input: Annotated[list[Document], texts_or_objects("max_items", null=False)]
    rank_fields: Annotated[list[str] | None, strings("max_items", "max_name_chars", 1)] = None
    top_k: Count | None = None
    return_input: bool | None = None


class IsaacusRequest(Body):
    """Holds a request of POST /v1/rerankings."""

    item_fields: ClassVar[frozenset[str]] = frozenset(("texts",))

    model: Name | None = None
    query: Annotated[str, text()]
    texts: Annotated[list[str], strings("max_items", "max_string_chars", 1, 0, null=False)]
    top_n: Count | None = None


class TotalTokens(BaseModel):
    total_tokens: int


class VoyageResult(BaseModel):
    index: int
    relevance_score: float
    document: str | None = None


class VoyageResponse(Failures):
    """Answers a request with `top_k` or `truncation` at /v1/rerank."""

    object: Literal["list"]
    data: list[VoyageResult]
    model: str
    usage: TotalTokens


class MixedbreadResult(BaseModel):
    object: Literal["rank_result"]
    index: int
    score: float
    input: Any = None


class MixedbreadUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class MixedbreadResponse(Failures):
    object: Literal["list"]
    model: str
    data: list[MixedbreadResult]
    usage: MixedbreadUsage
    top_k: int
    return_input: bool


class PineconeResult(BaseModel):
    index: int
    score: float
    document: dict[str, Any] | None = None


class RerankUnits(BaseModel):
    rerank_units: Literal[1]


class PineconeResponse(Failures):
    """Answers a request with the header `x-pinecone-api-version` at /rerank."""

    model: str
    data: list[PineconeResult]
    usage: RerankUnits


class IsaacusResult(BaseModel):
    index: int
    score: float


class InputTokens(BaseModel):
    input_tokens: int


class IsaacusResponse(Failures):
    results: list[IsaacusResult]
    usage: InputTokens


class V1RerankAnswer(RootModel[RerankResponse | VoyageResponse]):
    """Answers in Voyage's form where the request is in it, else in Cohere's."""


class RerankAnswer(RootModel[RerankResponse | list[TextRank] | PineconeResponse]):
    """Answers `documents` with an object, `texts` with a list, and a client of Pinecone in its form."""
