"""Serves POST /rerank, /v1/rerank, /v2/rerank, /v1/reranking and /v1/rerankings in the forms of their clients.

Every form is a way to write one RerankRequest and to read one ranking. Cohere, Jina, vLLM, SGLang and
text-embeddings-inference need none of their own; Voyage is known by its fields, Pinecone by its header, and Mixedbread
and Isaacus have their paths.
"""

from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.rerank import TEXTS_ROUTE, Documents, Ranking, answer, rank
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext
from deployments.api.schemas.rerank import RerankRequest
from deployments.api.schemas.rerank_dialects import IsaacusRequest, MixedbreadRequest
from deployments.errors import describe, invalid
from deployments.protocol import ModelCard

VOYAGE_ROUTE = "/v1/rerank"
VOYAGE_FIELDS = ("top_k", "truncation")
PINECONE_HEADER = "x-pinecone-api-version"


async def rerank(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers the routes that several clients share. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, RerankRequest, handler.settings.deadlines.scoring_s)
    if context.pinecone and context.route == TEXTS_ROUTE:
        return await rank(handler, context, _of_pinecone(body), _pinecone_answer)
    if body.parameters is not None and (body.parameters.model_fields_set or body.parameters.model_extra):
        raise invalid("parameters", f"absent without the header {PINECONE_HEADER}", "an object")
    given = [name for name in VOYAGE_FIELDS if getattr(body, name) is not None]
    if not given:
        return await rank(handler, context, body, answer)
    if context.route != VOYAGE_ROUTE:
        name = given[0]
        raise invalid(name, f"absent here: it is a field of {VOYAGE_ROUTE}", describe(getattr(body, name)))
    return await rank(handler, context, _of_voyage(body), _voyage_answer)


async def rerank_mixedbread(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/reranking."""
    body = await handler.parse(context, MixedbreadRequest, handler.settings.deadlines.scoring_s)
    canonical = _request(
        model=body.model, query=body.query, documents=body.input, rank_fields=body.rank_fields, top_n=body.top_k,
        return_documents=bool(body.return_input),
    )  # fmt: skip
    return await rank(handler, context, canonical, _mixedbread_answer, "input")


async def rerank_isaacus(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/rerankings."""
    body = await handler.parse(context, IsaacusRequest, handler.settings.deadlines.scoring_s)
    canonical = _request(
        model=body.model, query=body.query, documents=[*body.texts], top_n=body.top_n, return_documents=False
    )
    return await rank(handler, context, canonical, _isaacus_answer, "texts")


def _request(**fields: Any) -> RerankRequest:
    """Makes a request of fields that have been validated."""
    return RerankRequest.model_construct(**fields)


def _of_voyage(body: RerankRequest) -> RerankRequest:
    for name in ("top_n", "texts", "truncate", "messages"):
        if getattr(body, name) is not None:
            raise invalid(name, "absent beside `top_k` or `truncation`", describe(getattr(body, name)))
    update = {"top_n": body.top_k, "truncate": body.truncation, "return_documents": bool(body.return_documents)}
    return body.model_copy(update=update)


def _of_pinecone(body: RerankRequest) -> RerankRequest:
    for name in ("texts", "truncate", "messages", *VOYAGE_FIELDS):
        if getattr(body, name) is not None:
            raise invalid(name, f"absent beside the header {PINECONE_HEADER}", describe(getattr(body, name)))
    truncate = None if body.parameters is None or body.parameters.truncate is None else body.parameters.truncate
    update = {"truncate": None if truncate is None else truncate == "END"}
    update["return_documents"] = body.return_documents is not False  # which Pinecone returns by default
    return body.model_copy(update=update)


def _voyage_answer(
    body: RerankRequest, card: ModelCard, documents: Documents, ranking: Ranking, route: str
) -> dict[str, Any]:
    data = [
        {"index": index, "relevance_score": value} | ({"document": documents.texts[index]} if documents.echoed else {})
        for index, value in ranking.order
    ]
    return {"object": "list", "data": data, "model": card.name, "usage": {"total_tokens": ranking.prompt_tokens}}


def _mixedbread_answer(
    body: RerankRequest, card: ModelCard, documents: Documents, ranking: Ranking, route: str
) -> dict[str, Any]:
    given = body.documents or []
    data = [
        {"object": "rank_result", "index": index, "score": value, "input": given[index] if documents.echoed else None}
        for index, value in ranking.order
    ]
    return {
        "object": "list",
        "model": card.name,
        "data": data,
        "usage": {"prompt_tokens": ranking.prompt_tokens, "total_tokens": ranking.prompt_tokens},
        "top_k": len(data),
        "return_input": documents.echoed,
    }


def _pinecone_answer(
    body: RerankRequest, card: ModelCard, documents: Documents, ranking: Ranking, route: str
) -> dict[str, Any]:
    given = [one if isinstance(one, dict) else {"text": one} for one in body.documents or []]
    data = [
        {"index": index, "score": value} | ({"document": given[index]} if documents.echoed else {})
        for index, value in ranking.order
    ]
    return {"model": card.name, "data": data, "usage": {"rerank_units": 1}}


def _isaacus_answer(
    body: RerankRequest, card: ModelCard, documents: Documents, ranking: Ranking, route: str
) -> dict[str, Any]:
    results = [{"index": index, "score": value} for index, value in ranking.order]
    return {"results": results, "usage": {"input_tokens": ranking.prompt_tokens}}
