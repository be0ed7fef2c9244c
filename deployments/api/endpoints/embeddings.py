"""Serves POST /v1/embeddings and /embed: the vector of each text, by a pooled head.

A request builds one `engine.requests.PoolingRequest`.
"""

from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.pooling_common import (
    PooledRows,
    check_dimensions,
    check_finite,
    encoded_vector,
    input_spec,
    pool_items,
    pooled_usage,
    prompt_text,
    read_inputs,
    text_spec,
    vectors,
    wants_activation,
    with_prompt,
)
from deployments.api.endpoints.scoring_common import ServedRequest, list_answer, report_items
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.embeddings import EmbeddingsRequest, EmbedRequest
from deployments.errors import ApiError, invalid
from engine.model.heads.info import EmbeddingInfo, HeadInfo, HeadKind


async def embeddings(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/embeddings. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, EmbeddingsRequest, handler.settings.deadlines.scoring_s)
    card, head = await handler.pooling_head(body.model, context.route, (HeadKind.POOLED,))
    served = ServedRequest(handler, context, card, new_id("embd-"), body.cache_salt, body.priority)
    embedding, normalise = embedding_of(head), wants_activation(body)
    if body.normalize is not None and normalise not in (None, body.normalize):
        raise invalid("normalize", "absent beside another `use_activation`", "both")
    normalise = normalise if body.normalize is None else body.normalize
    check_dimensions(head, embedding, body.dimensions)
    field, items = await read_inputs(handler, context, body, prompt_text(embedding, body.prompt_name, body.input))
    found = await pool_items(served, head, items, input_spec(body, field))
    _check(handler, context, found, field)
    cut = vectors(embedding, found.reply.values, body.dimensions, normalise)

    def make() -> dict[str, Any]:
        data = [
            {"index": index, "object": "embedding", "embedding": encoded_vector(one, body.encoding_format)}
            for index, one in enumerate(cut)
        ]
        return list_answer(served, data, pooled_usage(found))

    return await handler.sized_json(context, 4 * cut.nbytes, make)


async def embed(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /embed, which normalises unless the request says otherwise. Raises as `embeddings` does."""
    body = await handler.parse(context, EmbedRequest, handler.settings.deadlines.scoring_s)
    card, head = await handler.pooling_head(body.model, context.route, (HeadKind.POOLED,))
    served = ServedRequest(handler, context, card, new_id("embd-"), body.cache_salt, body.priority)
    embedding = embedding_of(head)
    check_dimensions(head, embedding, body.dimensions)
    items = with_prompt(body.inputs, prompt_text(embedding, body.prompt_name, body.inputs))
    spec = text_spec("inputs", cut=bool(body.truncate), cut_field="truncate", side=body.truncation_direction or "right")
    found = await pool_items(served, head, items, spec)
    _check(handler, context, found, "inputs")
    cut = vectors(embedding, found.reply.values, body.dimensions, body.normalize is not False)
    return await handler.sized_json(context, 4 * cut.nbytes, cut.tolist)


def embedding_of(head: HeadInfo) -> EmbeddingInfo:
    """Returns what describes the vectors of a pooled head. Raises ApiError for another head."""
    if head.embedding is None:
        raise ApiError("not_found", f"This server's model has a {head.kind} head, which gives no vectors.")
    return head.embedding


def _check(handler: RequestHandler, context: RequestContext, found: PooledRows, field: str) -> None:
    check_finite(found, field)
    report_items(handler, context, found.rows.truncated)
