"""Holds the steps that the routes of pooling heads share: inputs, rows, one request, activations, vectors."""

import base64
from typing import Any, NamedTuple

import numpy.typing as npt

from deployments.api.endpoints.scoring_common import (
    ServedRequest,
    check_items,
    check_size,
    refuse_chat_fields,
    submit_pooling,
    tokenize_rows,
    usage,
)
from deployments.api.generation.chat_request_builder import chat_ids
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext
from deployments.api.schemas.pooling import PoolingInput
from deployments.api.schemas.score import ScoreBody
from deployments.errors import ApiError, invalid
from engine.model.heads.info import EmbeddingInfo, HeadInfo, HeadKind
from engine.requests import PoolingResult, PoolingTask
from scoring.activation import Activation, activate, default_activation
from scoring.embeddings import cut_vectors
from scoring.errors import NONFINITE
from scoring.normalize import Float32s, Float64s
from scoring.pointer import pointer_scores, with_last_tokens
from scoring.process_rewards import token_positions
from scoring.row_builder import FieldNames, Int32s, Items, PromptSpec, Query, ScoringRows, Side, unshared


class PooledRows(NamedTuple):
    """Holds what the head answered for the inputs of a request."""

    rows: ScoringRows
    positions: Int32s | None  # [W] places in `rows.ids` that were answered; None: each row has one answer
    reply: PoolingResult


async def read_inputs(
    handler: RequestHandler, context: RequestContext, body: PoolingInput, prompt: str = ""
) -> tuple[str, Items]:
    """Returns the name of the field that holds the inputs, and the inputs. `prompt` is written before each text.

    Raises:
        ApiError: There is no input, or a field that does not go with it.
        ScoringError: The chat template refuses the messages.
    """
    if (body.input is None) == (body.messages is None):
        raise invalid("input", "given, or `messages`, but not both", "neither" if body.input is None else "both")
    if body.input is not None:
        refuse_chat_fields(body)
        return "input", with_prompt(body.input, prompt)
    prompting = bool(body.add_generation_prompt)  # a head judges what was said: no turn is opened unless it is wanted
    body = body.model_copy(update={"add_generation_prompt": prompting})
    limit_s = handler.settings.deadlines.scoring_s
    return "messages", [await chat_ids(handler, context, body, body.messages or [], limit_s)]


def with_prompt(items: Items, prompt: str) -> Items:
    """Returns texts with a prompt before each. Token ids stay as they are."""
    return [prompt + item for item in items if isinstance(item, str)] if prompt and isinstance(items[0], str) else items


def prompt_text(embedding: EmbeddingInfo, name: str | None, items: Items | None) -> str:
    """Returns the text of the prompt that a request names, or of the model's default one; "" for none.

    Args:
        embedding: Describes the vectors.
        name: The request's `prompt_name`.
        items: The inputs; None for messages.

    Raises:
        ApiError: The model has no prompt of this name, or the inputs are no texts, before which one is written.
    """
    if name is not None and (items is None or not isinstance(items[0], str)):
        raise invalid("prompt_name", "absent where the input is not text", "a name")
    texts = dict(embedding.prompts)
    name = embedding.default_prompt if name is None else name
    if name is not None and name not in texts:
        raise invalid("prompt_name", f"one of {', '.join(texts)}" if texts else "absent: the model has none", "another")
    return "" if name is None else texts[name]


def input_spec(body: PoolingInput, field: str) -> PromptSpec:
    """Says how an input becomes a row: by itself, as the tokenizer writes a single text.

    A head may read the last token, so that nothing is cut unless the request says so.
    """
    maximum = body.truncate_prompt_tokens
    return text_spec(
        field,
        cut=maximum is not None,
        maximum=None if maximum == -1 else maximum,
        side=body.truncation_side or "right",
        special=body.add_special_tokens is not False,
        cut_field="truncate_prompt_tokens",
    )


def text_spec(
    field: str, *, cut: bool, cut_field: str, maximum: int | None = None, side: Side = "right", special: bool = True
) -> PromptSpec:
    """Returns the spec of rows that are one text each.

    Args:
        field: Name of the request's inputs, for errors.
        cut: Texts that are too long are cut, else refused.
        cut_field: Name of the field that says so.
        maximum: Tokens of a text; None: as many as the model takes.
        side: The side that is cut off.
        special: The tokenizer's special tokens are added.
    """
    return PromptSpec(
        item_first=True,  # the tokens at the ends of a text are the item's
        add_special_tokens=special,
        truncate="item" if cut else "error",
        truncation_side=side,
        max_item_tokens=maximum,
        names=FieldNames(field, cut_field, query=""),
    )


async def pool_items(
    served: ServedRequest, head: HeadInfo, items: Items, spec: PromptSpec, *, mark: int | None = None
) -> PooledRows:
    """Computes what the head answers for each input.

    Raises:
        ApiError: An input is wrong, too long, or gave a number that is not finite.
        ScoringError: The request as a whole is wrong.
    """
    handler, field = served.handler, spec.names.items
    check_size(handler, len(items), head.width, field)
    query: Query = "" if isinstance(items[0], str) else []
    rows = await tokenize_rows(served, query, items, spec)
    check_items(rows.errors, field)
    positions = None
    rows = unshared(rows) if head.whole_rows else rows
    if head.task is PoolingTask.TOKEN_CLASSIFY:
        rows, positions = token_positions(rows, mark, field)
        positions = with_last_tokens(rows, positions) if head.kind is HeadKind.POINTER else positions
        check_size(handler, len(positions), head.width, field)
    reply = await submit_pooling(served, rows, head, positions)
    return PooledRows(rows, positions, reply)


def mark_id(handler: RequestHandler, head: HeadInfo) -> int | None:
    """Returns the id of the token whose places the head answers; None where it names none.

    Raises:
        ApiError: The model's tokenizer has no such token.
    """
    if head.mark is None:
        return None
    ids = handler.tokenizer.encode_batch([head.mark], add_special_tokens=False)[0]
    if len(ids) != 1:
        message = f"The model's head reads the token {head.mark}, which is none of its tokenizer."
        raise ApiError("invalid_value", f"`step_tag_id` must be given. {message}", "step_tag_id")
    return ids[0]


def pointer_answers(found: PooledRows, mark: int, activation: Activation) -> list[Float64s]:
    """Returns the numbers of each input's marked tokens, activated as those of one distribution.

    Args:
        found: The answers of a pointer head.
        mark: Id of the marked tokens.
        activation: `softmax`, or `none` for the products of query and keys.
    """
    if found.positions is None:
        raise RuntimeError("A pointer answers marked tokens.")
    scores = pointer_scores(found.rows, found.positions, found.reply.values, mark)
    return [activate(one, activation) for one in scores]


def activation_of(body: PoolingInput, head: HeadInfo) -> Activation:
    """Returns the head's own activation, or none where the request wants raw numbers (either name of the field)."""
    return "none" if wants_activation(body) is False else default_activation(head.width, head.problem_type)


def wants_activation(body: PoolingInput | ScoreBody) -> bool | None:
    """Returns `use_activation` by either of its names; None where the request leaves it to the model.

    Raises:
        ApiError: Both names have values, and these differ.
    """
    first, second = body.use_activation, body.activation
    if first is not None and second is not None and first != second:
        raise invalid("activation", "absent beside another `use_activation`", "both")
    return second if first is None else first


def check_dimensions(head: HeadInfo, embedding: EmbeddingInfo, dimensions: int | None) -> None:
    """Raises ApiError if the model was not trained for vectors of this length."""
    if dimensions not in (None, head.width, *embedding.dimensions):
        given = ", ".join(map(str, embedding.dimensions[:8])) + ", ..." * (len(embedding.dimensions) > 8)
        whole = f"{head.width} or one of {given}" if embedding.dimensions else f"{head.width}, the model's own length"
        raise invalid("dimensions", whole, str(dimensions))


def vectors(embedding: EmbeddingInfo, values: Float32s, dimensions: int | None, normalise: bool | None) -> Float32s:
    """Returns the vectors of an answer, f32 [N, D].

    Args:
        embedding: Describes the vectors.
        values: The head's numbers, [N, H].
        dimensions: The request's `dimensions`, which passed `check_dimensions`.
        normalise: Whether they have length 1; None: as the model's own vectors are.
    """
    return cut_vectors(values, dimensions, normalise=embedding.normalised if normalise is None else normalise)


def encoded_vector(vector: npt.NDArray[Any], encoding: str | None) -> list[float] | str:
    """Writes a vector as numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers


def check_finite(found: PooledRows, field: str) -> None:
    """Raises ApiError if an input gave a number that is not finite. `field`: the name of the inputs."""
    check_items({found.rows.items[row]: NONFINITE for row in found.reply.status.nonzero()[0].tolist()}, field)


def pooled_usage(found: PooledRows) -> dict[str, Any]:
    """Returns the usage block of pooled rows."""
    return usage(sum(found.rows.lengths()), int(found.reply.cached.sum()))
