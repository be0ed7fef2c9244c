"""Builds the HTTP application: every route with its endpoint and schema. `deployments.app` deploys it on Ray Serve."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.endpoints import info, tokenize
from deployments.api.endpoints.chat import chat_completions
from deployments.api.endpoints.classify import classify
from deployments.api.endpoints.completions import completions
from deployments.api.endpoints.decisions import decisions
from deployments.api.endpoints.embeddings import embed, embeddings
from deployments.api.endpoints.generative_scoring import generative_scoring
from deployments.api.endpoints.pooling import pooling
from deployments.api.endpoints.predict import predict
from deployments.api.endpoints.rerank_dialects import rerank, rerank_isaacus, rerank_mixedbread
from deployments.api.endpoints.score import scoring
from deployments.api.handler import Endpoint, RequestHandler, answer_of, route_of
from deployments.api.middleware import Answer, RequestMiddleware
from deployments.api.openapi import (
    MODEL_READ,
    POSTED,
    PROBED,
    READ,
    TEXT,
    Responses,
    Schemas,
    answered,
    not_ready,
    path_parameter,
)
from deployments.api.schemas.chat import ChatEvent, ChatRequest, ChatResponse
from deployments.api.schemas.classify import ClassifyRequest, ClassifyResponse
from deployments.api.schemas.decisions import DecisionRequest, DecisionResponse
from deployments.api.schemas.embeddings import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    PredictRequest,
    PredictResponse,
)
from deployments.api.schemas.fields import Body
from deployments.api.schemas.generation import CompletionRequest, CompletionResponse
from deployments.api.schemas.generative_scoring import ScoringRequest, ScoringResponse
from deployments.api.schemas.info import (
    Alive,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelList,
    ModelObject,
    Readiness,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
    Versions,
)
from deployments.api.schemas.pooling import PoolingBody, PoolingResponse
from deployments.api.schemas.rerank import RerankErrorBody, RerankRequest, RerankResponse
from deployments.api.schemas.rerank_dialects import (
    IsaacusRequest,
    IsaacusResponse,
    MixedbreadRequest,
    MixedbreadResponse,
    RerankAnswer,
    V1RerankAnswer,
)
from deployments.api.schemas.score import ScoreBody, ScoreResponse
from deployments.auth.authenticator import Authenticator
from deployments.auth.usage import MeteredBackend
from deployments.config.settings import ApiSettings
from deployments.errors import OPENAI_STATUSES, ErrorBody
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Backend
from engine.tokenizer.tokenizer import Tokenizer

EXPOSED_HEADERS = (  # that a page of another origin may read
    "retry-after", "x-request-id", "x-client-request-id", "x-assay-request-id", "x-assay-ignored-fields",
    "x-assay-failed-items", "x-assay-queue-ms", "x-assay-compute-ms",
)  # fmt: skip


def build_api(
    backend: Backend,
    tokenizer: Tokenizer,
    settings: ApiSettings,
    observer: IngressMetrics | None = None,
    access: Authenticator | None = None,
) -> FastAPI:
    """Builds the whole application over a backend. Call it in the process that serves: it starts a thread pool.

    Args:
        backend: The replicas.
        tokenizer: The model's tokenizer.
        settings: The operator's choices.
        observer: Receives counts and times; None for none.
        access: Keys, scopes and quotas; None allows everything to everyone.

    Raises:
        ValueError: A template or a layout of the settings does not suit the tokenizer.
    """
    observer, access = observer or IngressMetrics(), access or Authenticator()
    handler = RequestHandler(MeteredBackend(backend, access.rate_limiter), tokenizer, settings, observer, access)
    app = Application(title="Assay", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.handler = handler
    routes = Routes(app, handler, OPENAI_STATUSES if settings.openai_errors else {})
    app.requests = RequestMiddleware(
        app.by_route,
        settings=settings,
        observer=observer,
        router=app.router,
        answers=routes.answers,
        access=access,
        check_open=backend.check_open,
    )
    if settings.cors_origins:  # outermost: a preflight has no key
        app.requests = CORSMiddleware(
            app.requests,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    # Serve looks for a request's route in this order: first come those of most requests.
    routes.post("/generative_scoring", generative_scoring, ScoringRequest, ScoringResponse)
    routes.post("/v1/completions", completions, CompletionRequest, CompletionResponse, event=CompletionResponse)
    routes.post("/v1/chat/completions", chat_completions, ChatRequest, ChatResponse, event=ChatEvent)
    routes.post("/classify", classify, ClassifyRequest, ClassifyResponse)
    routes.post("/v1/classify", classify, ClassifyRequest, ClassifyResponse)
    routes.post("/pooling", pooling, PoolingBody, PoolingResponse)
    routes.post("/v1/embeddings", embeddings, EmbeddingsRequest, EmbeddingsResponse)
    routes.post("/embed", embed, EmbedRequest, EmbedResponse)
    routes.post("/predict", predict, PredictRequest, PredictResponse)
    routes.post("/rerank", rerank, RerankRequest, RerankAnswer, RerankErrorBody)
    routes.post("/v1/rerank", rerank, RerankRequest, V1RerankAnswer, RerankErrorBody)
    routes.post("/v1/reranking", rerank_mixedbread, MixedbreadRequest, MixedbreadResponse, RerankErrorBody)
    routes.post("/v1/rerankings", rerank_isaacus, IsaacusRequest, IsaacusResponse, RerankErrorBody)
    routes.post("/v2/rerank", rerank, RerankRequest, RerankResponse, RerankErrorBody)
    routes.post("/score", scoring, ScoreBody, ScoreResponse)
    routes.post("/v1/score", scoring, ScoreBody, ScoreResponse)
    routes.post("/v1/decisions", decisions, DecisionRequest, DecisionResponse)
    routes.get("/healthz", info.healthz, Alive, PROBED)
    routes.get("/readyz", info.readyz, Readiness, PROBED, also=not_ready(Readiness))
    routes.get("/health", info.readyz, Readiness, PROBED, also=not_ready(Readiness))
    routes.get("/version", info.version, Versions)
    routes.get("/metrics", info.metrics, None, also=answered(TEXT), response_class=PlainTextResponse)
    routes.get("/v1/models", info.models, ModelList, MODEL_READ)
    model_id = path_parameter("model_id")
    routes.get("/v1/models/{model_id:path}", info.model, ModelObject, (*MODEL_READ, 404), **model_id)
    routes.get("/tokenizer_info", tokenize.tokenizer_info, TokenizerInfoResponse)
    routes.post("/tokenize", tokenize.tokenize, TokenizeRequest, TokenizeResponse)
    routes.post("/detokenize", tokenize.detokenize, DetokenizeRequest, DetokenizeResponse)
    return app


class Application(FastAPI):
    """Answers requests by `requests`, which calls the endpoints itself. FastAPI describes them, and routes the rest.

    Its layers around an endpoint parse, check and catch what the endpoints and the middleware do, at a third of the
    cost of a small request.
    """

    requests: ASGIApp
    handler: RequestHandler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            await self.requests(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def by_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request as FastAPI does."""
        await super().__call__(scope, receive, send)


class Routes:
    """Adds routes to an app, each with every status that it can answer in the app's schema."""

    def __init__(self, app: FastAPI, handler: RequestHandler, statuses: Mapping[int, int]) -> None:
        self._app = app
        self._api = handler
        self._schemas = Schemas(app, statuses)
        self.answers: dict[tuple[str, str], Answer] = {}
        """By method and path: the endpoints whose path has no parameters."""

    def get(
        self,
        path: str,
        function: Endpoint,
        answer: type[BaseModel] | None,
        statuses: tuple[int, ...] = READ,
        also: Responses | None = None,
        **more: Any,
    ) -> None:
        """Adds a GET route that answers `answer` or one of the statuses."""
        responses = answered() | self._schemas.refusals(statuses) | (also or {})
        self._add("GET", path, function, answer, responses, more)

    def post(
        self,
        path: str,
        function: Endpoint,
        body: type[Body],
        answer: type[BaseModel],
        error: type[ErrorBody] = ErrorBody,
        event: type[BaseModel] | None = None,
    ) -> None:
        """Adds a POST route. `event`: the model of a stream's events, where the route streams."""
        content = self._schemas.events(event) if event else {}
        responses = answered(content) | self._schemas.refusals(POSTED, error)
        self._add("POST", path, function, answer, responses, self._schemas.body(body))

    def _add(
        self,
        method: str,
        path: str,
        function: Endpoint,
        answer: type[BaseModel] | None,
        responses: Responses,
        more: dict[str, Any],
    ) -> None:
        answer_request = answer_of(self._api, function)
        if "{" not in path:
            self.answers[method, path] = answer_request
        call = route_of(answer_request, function.__name__)
        if self._api.access.closed(path):
            more["openapi_extra"] = more.get("openapi_extra", {}) | self._schemas.keyed()
        self._app.add_api_route(path, call, methods=[method], response_model=answer, responses=responses, **more)
