"""build_api: the HTTP layer wired together. The Serve deployment around it is in `deployments.app`."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from deployments.messages import Backend
from deployments.middleware import Gate
from deployments.observer import Observer, SilentObserver
from deployments.openapi import Schemas
from deployments.routes import health, models, tokenize
from deployments.routes.chat import chat_completions
from deployments.routes.completions import completions
from deployments.routes.context import Api, Handler, endpoint
from deployments.routes.decisions import decisions
from deployments.routes.generative_scoring import generative_scoring
from deployments.routes.rerank import rerank
from deployments.routes.score import scoring
from deployments.settings import ApiSettings
from deployments.wire.chat import ChatRequest, ChatResponse
from deployments.wire.completions import CompletionRequest, CompletionResponse
from deployments.wire.decisions import DecisionRequest, DecisionResponse
from deployments.wire.errors import ErrorBody
from deployments.wire.fields import Body
from deployments.wire.generative_scoring import ScoringRequest, ScoringResponse
from deployments.wire.health import Alive, Readiness, Versions
from deployments.wire.models import ModelList, ModelObject
from deployments.wire.rerank import RerankAnswer, RerankErrorBody, RerankRequest, RerankResponse
from deployments.wire.score import ScoreRequest, ScoreResponse
from deployments.wire.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from engine.tokenizer import Tokenizer


def build_api(
    backend: Backend, tokenizer: Tokenizer, settings: ApiSettings, observer: Observer | None = None
) -> FastAPI:
    """The whole application over a backend. Call it inside the process that serves: it makes a thread pool."""
    observer = observer or SilentObserver()
    api = Api(backend, tokenizer, settings, observer)
    app = FastAPI(title="Assay", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Gate, settings=settings, observer=observer, routes=lambda: app.router.routes)
    schemas = Schemas(app)

    def get(path: str, handler: Handler, answer: type[BaseModel] | None) -> None:
        _add(app, path, "GET", endpoint(api, handler), answer, {})

    def post(
        path: str, handler: Handler, body: type[Body], answer: type[BaseModel], error: type[ErrorBody] = ErrorBody
    ) -> None:
        _add(app, path, "POST", endpoint(api, handler), answer, schemas.body(body), error)

    get("/healthz", health.healthz, Alive)
    get("/readyz", health.readyz, Readiness)
    get("/health", health.readyz, Readiness)
    get("/version", health.version, Versions)
    get("/metrics", health.metrics, None)
    get("/v1/models", models.models, ModelList)
    get("/v1/models/{model_id:path}", models.model, ModelObject)
    get("/tokenizer_info", tokenize.tokenizer_info, TokenizerInfoResponse)
    post("/tokenize", tokenize.tokenize, TokenizeRequest, TokenizeResponse)
    post("/detokenize", tokenize.detokenize, DetokenizeRequest, DetokenizeResponse)
    post("/generative_scoring", generative_scoring, ScoringRequest, ScoringResponse)
    post("/rerank", rerank, RerankRequest, RerankAnswer, RerankErrorBody)
    post("/v1/rerank", rerank, RerankRequest, RerankResponse, RerankErrorBody)
    post("/v2/rerank", rerank, RerankRequest, RerankResponse, RerankErrorBody)
    post("/v1/score", scoring, ScoreRequest, ScoreResponse)
    post("/v1/decisions", decisions, DecisionRequest, DecisionResponse)
    post("/v1/completions", completions, CompletionRequest, CompletionResponse)
    post("/v1/chat/completions", chat_completions, ChatRequest, ChatResponse)
    return app


def _add(
    app: FastAPI,
    path: str,
    method: str,
    call: Any,
    answer: type[BaseModel] | None,
    extra: dict[str, Any],
    error: type[ErrorBody] = ErrorBody,
) -> None:
    app.add_api_route(
        path,
        call,
        methods=[method],
        response_model=answer,
        responses={"default": {"model": error, "description": "A refusal or a failure."}},
        openapi_extra=extra,
    )
