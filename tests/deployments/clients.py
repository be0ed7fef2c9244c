"""Clients of an app in process, and the app over the scripted backend that most of them ask."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fastapi import FastAPI

from deployments.api.app import build_api
from deployments.config.sections import RerankArgs
from deployments.config.settings import ApiSettings, ChatSettings
from scoring.prompts.templates import TemplateSpec
from tests.deployments.scripted import ScriptedBackend
from tests.support.toy_model import ByteTokenizer


class Client:
    """httpx over an app in process, with a short way to post JSON."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=True), base_url="http://api"
        )

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        return await self.http.post(path, content=data, headers=named)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def complete(self, **body: object) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"prompt": "hello", **body})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def score(self, **body: object) -> dict[str, Any]:
        response = await self.post("/generative_scoring", body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def events(self, **body: object) -> list[Any]:
        response = await self.post("/v1/completions", {"prompt": "hello", "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return [parse_event(part) for part in response.text.split("\n\n") if part.startswith("data: ")]


def parse_event(part: str) -> Any:
    data = part.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def settings_of_every_route() -> ApiSettings:
    """With the templates without which chats and rerankings are refused."""
    ask = TemplateSpec(prefix="{{ query }}|", item="{{ item }}", suffix="?", labels=("y", "n"))
    return ApiSettings(
        chat=ChatSettings(template="{% for message in messages %}{{ message.content }}{% endfor %}"),
        templates={"ask": ask},
        rerank=RerankArgs(template="ask"),
    )


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings()


@pytest.fixture
def app(backend: ScriptedBackend, settings: ApiSettings) -> FastAPI:
    return build_api(backend, ByteTokenizer(), settings)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[Client]:
    client = Client(app)
    yield client
    await client.http.aclose()


@pytest.fixture
async def client_of(backend: ScriptedBackend) -> AsyncIterator[Callable[[ApiSettings], Client]]:
    """Clients of the same backend under other settings."""
    made: list[Client] = []

    def make(settings: ApiSettings) -> Client:
        made.append(Client(build_api(backend, ByteTokenizer(), settings)))
        return made[-1]

    yield make
    for client in made:
        await client.http.aclose()


@pytest.fixture
def make_client() -> type[Client]:
    """A client of any app."""
    return Client


@pytest.fixture
def sdk_of() -> Callable[[FastAPI], openai.AsyncOpenAI]:
    """The official client of an app in process; an async context manager."""

    def make(app: FastAPI) -> openai.AsyncOpenAI:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))  # what the SDK itself uses
        return openai.AsyncOpenAI(base_url="http://api/v1", api_key="any", http_client=http, max_retries=0)

    return make
