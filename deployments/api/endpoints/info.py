"""GET /healthz, /readyz, /health, /version and /metrics.

GET /v1/models and /v1/models/{id}: what is served, and every limit.
"""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.handler import Api, model_not_found
from deployments.api.request_context import Exchange
from deployments.errors import ApiError
from deployments.protocol import ModelCard


async def models(api: Api, exchange: Exchange, request: Request) -> Response:
    return api.json(exchange, {"object": "list", "data": [_model(api, await api.card())]})


async def model(api: Api, exchange: Exchange, request: Request) -> Response:
    card = await api.card()
    if request.path_params["model_id"] != card.name:
        raise model_not_found(card.name)
    return api.json(exchange, _model(api, card))


def _model(api: Api, card: ModelCard) -> dict[str, Any]:
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
            "templates": sorted(api.templates),
            "max_choices": api.limits["max_choices"],
            "logprobs_mode": card.logprobs_mode,
            "sampling_defaults": asdict(api.settings.sampling),
            "limits": api.limits,
        },
    }


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def healthz(api: Api, exchange: Exchange, request: Request) -> Response:
    """The event loop turns; touches no replica."""
    return api.json(exchange, {"status": "ok"})


async def readyz(api: Api, exchange: Exchange, request: Request) -> Response:
    found = api.backend.readiness() | {"auth": api.access.mode}
    return api.json(exchange, found, 200 if found.get("status") == "ready" else 503)


async def version(api: Api, exchange: Exchange, request: Request) -> Response:
    versions = dict(api.settings.versions)
    templates = {name: template.version for name, template in sorted(api.templates.items())}
    found: dict[str, object] = {"versions": versions, "model": None, "revision": None, "templates": templates}
    try:
        card = await api.card()
    except ApiError:  # what this process is can be told before a replica is there
        return api.json(exchange, found)
    found |= {"versions": versions | card.versions, "model": card.name, "revision": card.revision}
    return api.json(exchange, found)


async def metrics(api: Api, exchange: Exchange, request: Request) -> Response:
    return Response(await api.backend.metrics(), headers={"content-type": METRICS_TYPE})
