"""Serves the routes of operators and probes: /healthz, /readyz, /health, /version, /metrics and /v1/models.

`/v1/models` shows the served model and every limit. No route here builds a request of the engine.
"""

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.pair_scores import pair_source
from deployments.api.handler import RequestHandler, model_not_found
from deployments.api.json_answer import PieceResponse
from deployments.api.request_context import RequestContext
from deployments.errors import ApiError
from deployments.protocol import ModelCard
from engine.model.heads.info import HeadKind


async def models(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /v1/models."""
    return handler.json(context, {"object": "list", "data": [_model(handler, await handler.card())]})


async def model(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /v1/models/{id}. Raises ApiError for a name that is not served."""
    card = await handler.card()
    if context.path_params["model_id"] != card.name:
        raise model_not_found(card.name, in_path=True)
    return handler.json(context, _model(handler, card))


def _model(handler: RequestHandler, card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": 0,
        "owned_by": "assay",
        "root": card.root,
        "max_model_len": card.max_model_len,
        "assay": {
            "vocab_size": card.vocab_size,
            "revision": card.revision,
            "weights_digest": card.weights_digest,
            "head": _head(card),
            "templates": sorted(handler.templates),
            "prompt_source": pair_source(card, handler.rerank),
            "max_choices": handler.limits["max_choices"],
            "logprobs_mode": card.logprobs_mode,
            "sampling_defaults": asdict(handler.settings.sampling),
            "limits": handler.limits,
        },
    }


def _head(card: ModelCard) -> dict[str, Any]:
    """Says which head answers, and what its numbers are called."""
    if card.head is None:
        return {"kind": HeadKind.LM, "labels": None, "problem_type": None}
    return {"kind": card.head.kind, "labels": card.head.labels, "problem_type": card.head.problem_type}


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def healthz(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /healthz without touching a replica: the event loop runs."""
    return handler.json(context, {"status": "ok"})


async def readyz(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /readyz and /health: 200 if a replica takes requests, else 503."""
    found = handler.backend.readiness() | {"auth": handler.access.mode}
    return handler.json(context, found, 200 if found.get("status") == "ready" else 503)


async def version(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /version."""
    versions = dict(handler.settings.versions)
    templates = {name: template.version for name, template in sorted(handler.templates.items())}
    found: dict[str, object] = {"versions": versions, "model": None, "revision": None, "templates": templates}
    try:
        card = await handler.card()
    except ApiError:  # this process knows its own versions before a replica exists
        return handler.json(context, found)
    found |= {"versions": versions | card.versions, "model": card.name, "revision": card.revision}
    return handler.json(context, found)


async def metrics(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /metrics."""
    return PieceResponse(await handler.backend.metrics(), METRICS_TYPE)
