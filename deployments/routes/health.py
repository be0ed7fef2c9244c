"""GET /healthz, /readyz, /health, /version and /metrics."""

from starlette.requests import Request
from starlette.responses import Response

from deployments.exchange import Exchange
from deployments.routes.context import Api
from deployments.wire.errors import ApiError

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
