"""GET /v1/models and /v1/models/{id}: what is served, and every limit."""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.exchange import Exchange
from deployments.messages import ModelCard
from deployments.routes.context import Api, model_not_found


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
