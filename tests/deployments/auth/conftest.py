"""Keys, apps that ask for them, and raw requests: a client library would tidy up what a hostile one sends."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute

from deployments.api.app import build_api
from deployments.auth.api_keys import ApiKey, KeyLimits, Scope, digest_of, domain_of
from deployments.auth.authenticator import Authenticator, AuthSettings
from deployments.config.settings import ApiSettings
from deployments.observability.ingress_metrics import IngressMetrics
from tests.support.toy_model import ByteTokenizer

Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
SECRET = "assay-Sbv3ZpLk8QyR2mXw7TfN4dHc9GjA6eUo1iVrB5tYqEs"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    read: bool  # whether the app asked for the body

    @property
    def code(self) -> str:
        found: str = json.loads(self.body)["error"]["code"] if self.status >= 400 and self.body else ""
        return found


async def ask(
    app: Any,
    method: str,
    path: str,
    key: str | bytes | None = None,
    *,
    headers: Headers = [],  # noqa: B006
    body: object = b"{}",
    root_path: str = "",
) -> Answer:
    """One request as bytes on the wire would make it; `key` becomes a bearer token."""
    own: Headers = [JSON, *headers]
    if key is not None:
        own.append((b"authorization", b"Bearer " + (key.encode() if isinstance(key, str) else key)))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": root_path + path,
        "raw_path": path.encode(), "root_path": root_path, "scheme": "http", "query_string": b"", "headers": own,
        "client": ("127.0.0.1", 1), "server": ("api", 80),
    }  # fmt: skip
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": data, "more_body": False})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, inbox.get, send)
    start = sent[0]
    named = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return Answer(start["status"], named, b"".join(part.get("body", b"") for part in sent), inbox.empty())


def key_of(name: str = "team", secret: str = SECRET, *scopes: Scope, **limits: int) -> ApiKey:
    return ApiKey(
        name=name,
        digest=digest_of(secret.encode()),
        scopes=frozenset(scopes or ("inference", "metrics")),
        domain=domain_of(name),
        limits=KeyLimits(**limits),
    )


@dataclass
class Keyed:
    """An app that asks for keys."""

    app: FastAPI
    access: Authenticator

    @property
    def routes(self) -> list[tuple[str, set[str]]]:
        """Every declared path and its methods, from the app itself."""
        return routes_of(self.app.router.routes)


def routes_of(routes: list[BaseRoute]) -> list[tuple[str, set[str]]]:
    return [(getattr(route, "path", "?"), set(getattr(route, "methods", None) or ())) for route in routes]


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., Any]:
    """`await ask(app, method, path, key, headers=, body=)`: an Answer."""
    return ask


@pytest.fixture(name="key_of")
def key_of_fixture() -> Callable[..., ApiKey]:
    """`key_of(name, secret, *scopes, **limits)`."""
    return key_of


@pytest.fixture
def secret() -> str:
    """Returns the key that `keyed()` knows where no other is given."""
    return SECRET


@pytest.fixture
def keyed(backend: Any) -> Callable[..., Keyed]:
    """`keyed(*keys, observer=, settings=, over=, **AuthSettings)`: an app that asks for them."""

    def make(
        *keys: ApiKey,
        observer: IngressMetrics | None = None,
        settings: ApiSettings | None = None,
        over: Any = None,
        **more: Any,
    ) -> Keyed:
        access = Authenticator(AuthSettings(mode="keys", keys=keys or (key_of(),), **more))
        app = build_api(over or backend, ByteTokenizer(), settings or ApiSettings(), observer, access)
        return Keyed(app, access)

    return make


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits for what a task of this loop will bring about."""

    async def wait(done: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not done():
                await asyncio.sleep(0.001)

    return wait
