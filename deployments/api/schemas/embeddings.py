"""Declares the bodies of POST /v1/embeddings, and of text-embeddings-inference's /embed and /predict."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, PlainValidator, RootModel, ValidationInfo

from deployments.api.schemas.fields import (
    AtLeastOne,
    Body,
    Direction,
    Name,
    Priority,
    Salt,
    bound,
    check_size,
    check_string,
    prompts,
    refused,
)
from deployments.api.schemas.pooling import EncodingFormat, PoolingInput, PoolingUsage
from deployments.errors import describe


class PredictInputs(NamedTuple):
    """Holds lists of one or two texts, and whether the request was a batch of them."""

    texts: list[list[str]]
    batch: bool


def texts_and_pairs(limit: str) -> Any:
    """Returns a validator of what /predict classifies: a text, a list of one or two texts, or a list of such lists."""

    def pair(value: list[Any], maximum: int, where: str) -> list[str]:
        if not 1 <= len(value) <= 2:
            raise refused(f"one or two texts{where}", f"{len(value)} entries")
        return [check_string(entry, 0, maximum, where) for entry in value]

    def check(value: object, info: ValidationInfo) -> PredictInputs:
        maximum = bound(info, "max_string_chars")
        if isinstance(value, str):
            return PredictInputs([[check_string(value, 0, maximum)]], batch=False)
        if not isinstance(value, list):
            raise refused("a text, or a list of texts or of lists of them", describe(value))
        check_size(value, 1, bound(info, limit))
        if not isinstance(value[0], list):
            return PredictInputs([pair(value, maximum, "")], batch=False)
        for index, entry in enumerate(value):
            if not isinstance(entry, list):
                raise refused("lists of one or two texts", f"{describe(entry)} at [{index}]")
        return PredictInputs([pair(entry, maximum, f" at [{index}]") for index, entry in enumerate(value)], batch=True)

    return PlainValidator(check, json_schema_input_type=str | list[str] | list[list[str]])


class EmbeddingsRequest(PoolingInput):
    """Holds inputs whose vectors are wanted. `null` means absent."""

    dimensions: AtLeastOne | None = None
    encoding_format: EncodingFormat | None = None
    normalize: bool | None = None
    prompt_name: Name | None = None


class Embedding(BaseModel):
    """Holds the vector of one input: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class EmbedRequest(Body):
    """Holds the inputs of text-embeddings-inference's /embed. `null` means absent."""

    model: Name | None = None
    inputs: Annotated[list[str] | list[list[int]], prompts("max_items")]
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction = None
    prompt_name: Name | None = None
    dimensions: AtLeastOne | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class EmbedResponse(RootModel[list[list[float]]]):
    """Lists the vector of each input."""


class PredictRequest(Body):
    """Holds the inputs of text-embeddings-inference's /predict. `null` means absent."""

    model: Name | None = None
    inputs: Annotated[PredictInputs, texts_and_pairs("max_items")]
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class Prediction(BaseModel):
    score: float
    label: str


class PredictResponse(RootModel[list[Prediction] | list[list[Prediction]]]):
    """Lists the labels with their scores, best first: of the input, or of each input of a batch."""
