"""What Serve does with a request's headers before our application sees it, by Serve's own code."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.serve import context as serve_context
from ray.serve._private import constants
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
    parse_session_id_header,
    validate_http_proxy_callback_return,
)
from ray.serve._private.proxy import HTTPProxy
from ray.serve._private.proxy_request_response import ASGIProxyRequest
from ray.serve._private.replica import Replica

from deployments import proxy_middleware
from deployments.cli.launch import ray_env
from deployments.proxy_middleware import (
    BEGUN,
    MAX_AHEAD,
    OWN_TIMEOUT,
    ROUNDS,
    SCOPE_ID,
    SCOPE_TELL,
    TIMEOUT,
    TOLD,
    IngressMiddleware,
    ProxyMiddleware,
    middlewares,
    readable,
)
from tests.deployments.auth.conftest import ask

Headers = list[tuple[bytes, bytes]]
READ_BY_SERVE = (
    b"x-request-id",
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"serve_multiplexed_model_id",
    b"serve-multiplexed-model-id",
    b"Serve-Multiplexed_Model-Id",
    b"x-session-id",
    b"x_session_id",
    b"X-Session-ID",
    b"traceparent",
    b"tracestate",
)
ODD = (b"\xff", b"caf\xc3\xa9", b"caf\xe9", b"\x80" * 64, b"", b"a" * 30_000, b"?1")
names = st.sampled_from(READ_BY_SERVE) | st.binary(max_size=8) | st.just(b"x-client-request-id")
headers_of_strangers = st.lists(st.tuples(names, st.sampled_from(ODD) | st.binary(max_size=16)), max_size=8)


def read_by_serve(headers: Headers) -> float | None:
    """Serve's own code over the headers of a request: AssertionError where it acts upon one that is a client's,
    UnicodeDecodeError where it would answer 500. Returns the request's timeout."""

    def options(**given: str) -> Any:
        raise AssertionError(f"Serve keeps {given}.")

    request = ASGIProxyRequest(
        {"type": "http", "headers": [*headers, (b"x-request-id", b"by-serve")]}, SimpleNamespace(), SimpleNamespace()
    )
    proxy: Any = None  # the method reads nothing of it
    handle: Any = SimpleNamespace(options=options)
    HTTPProxy.setup_request_context_and_handle(proxy, "app", handle, "/", request, "internal")
    found = dict(headers)
    assert not parse_disconnect_disabled_header(found) and not parse_session_id_header(found)
    for name, value in headers:
        if name in (b"traceparent", b"tracestate"):
            value.decode()
    timeout: float | None = parse_request_timeout_header(found, None)
    return timeout


@pytest.mark.risk("S15")
@given(headers_of_strangers)
def test_serve_reads_any_header_and_keeps_none(headers: Headers) -> None:
    kept, _ = readable(headers)
    read_by_serve(kept)
    ours = [one for one in headers if one[0].replace(b"_", b"-").lower() not in READ_BY_SERVE and one[0].isascii()]
    assert [one for one in kept if one in ours] == [one for one in ours if one[0] != b"x-client-request-id"]


@pytest.mark.risk("S15", planted=True)
@pytest.mark.parametrize("name", READ_BY_SERVE[1:])
def test_without_the_middleware_serve_would_fail_or_keep_it(name: bytes) -> None:
    with pytest.raises((UnicodeDecodeError, AssertionError)):
        read_by_serve([(name, b"\xff")])


def test_a_timeout_reaches_us_and_not_serve() -> None:
    kept, _ = readable([(TIMEOUT, b"2.5")])
    assert kept == [(OWN_TIMEOUT, b"2.5")] and read_by_serve(kept) is None
    assert read_by_serve([(TIMEOUT, b"2.5")]) == 2.5  # as Serve would, and end the request itself


@pytest.mark.parametrize("middleware", [ProxyMiddleware, IngressMiddleware])
@pytest.mark.parametrize("name", [TIMEOUT, OWN_TIMEOUT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeout_is_an_error_of_ours_in_either_mode(
    app: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, middleware: Any, name: bytes, stream: bool
) -> None:
    """Serve's proxy would answer 408 in plain text, without a code, and cut a stream."""
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(servable_object=None))
    backend.gate = asyncio.Event()

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        assert read_by_serve(scope["headers"][:-1]) is None  # without the id, which `read_by_serve` adds itself
        await app(scope, receive, send)

    body = {"prompt": "a", "stream": stream}
    found = await ask(middleware(serve), "POST", "/v1/completions", headers=[(name, b"0.02")], body=body)
    assert (found.status, found.code) == (408, "deadline_exceeded")
    assert b"The deadline of 0.02 s passed." in found.body


def test_serve_takes_what_the_variable_names() -> None:
    from ray.serve._private.utils import call_function_from_import_path

    [path] = ray_env.PROXY_CALLBACK.values()
    found = validate_http_proxy_callback_return(call_function_from_import_path(path))
    assert [one.cls is ProxyMiddleware for one in (*found, *middlewares())] == [True, True]
    assert ray_env.LOCAL.items() >= ray_env.PROXY_CALLBACK.items()


def behind_serve(app: Any) -> Any:
    """The app as Serve's servers wrap it: its own middleware first, ours around it."""
    return ProxyMiddleware(RequestIdMiddleware(app))


@pytest.mark.parametrize(
    ("headers", "client_id"),
    [
        ([], None),
        ([(b"x-request-id", b"mine-7")], "mine-7"),
        ([(b"x-client-request-id", b"my-own")], "my-own"),
        ([(b"x-request-id", b"a"), (b"x-client-request-id", b"b")], "b"),
        ([(b"x-request-id", b"a"), (b"x-request-id", b"b")], "a"),
        ([(b"x-request-id", b"x" * 512)], "x" * 512),
        ([(b"x-request-id", b"x" * 513)], None),
        ([(b"x-request-id", b"two words")], None),
        ([(b"x-request-id", b"caf\xc3\xa9")], None),
        ([(b"x-request-id", b"")], None),
    ],
)
async def test_an_answer_has_one_id_and_the_clients_beside_it(
    app: Any, headers: Headers, client_id: str | None
) -> None:
    found = await ask(behind_serve(app), "POST", "/v1/completions", headers=headers, body=b"{")
    assert found.status == 400
    assert found.headers["x-request-id"] == found.headers["x-assay-request-id"]
    assert found.headers["x-request-id"].startswith("req-") and found.headers["x-request-id"].encode() in found.body
    assert found.headers.get("x-client-request-id") == client_id


READ_BY_US = (
    b"content-type", b"content-length", b"content-encoding", b"authorization", b"x-request-timeout-seconds", b"expect",
    b"x-assay-strict", b"transfer-encoding", b"host", b"cookie", b"accept", b"connection", b"origin", b"range",
)  # fmt: skip
read_by_us = st.sampled_from(READ_BY_US)
any_headers = st.lists(
    st.tuples(
        names | read_by_us, st.sampled_from((*ODD, b"0", b"-1", b"nan", b"1e9", b"gzip")) | st.binary(max_size=40)
    ),
    max_size=12,
)


def answered(app: Any, headers: Headers) -> Any:
    return asyncio.run(ask(behind_serve(app), "POST", "/v1/completions", headers=headers, body=b'{"prompt": "a"}'))


@pytest.mark.risk("F1")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])  # the app keeps nothing
@given(headers=any_headers)
def test_any_headers_are_answered_with_one_id(app: Any, headers: Headers) -> None:
    found = answered(app, headers)
    assert found.status in (200, 400, 401, 408, 413, 415), (headers, found.body)
    assert found.headers["x-request-id"] == found.headers["x-assay-request-id"]


@pytest.mark.full
@pytest.mark.risk("F1", planted=True)
def test_a_header_that_is_read_carelessly_would_be_seen(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.api.middleware.parse_timeout", lambda value: float(value.decode("ascii")))
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        test_any_headers_are_answered_with_one_id(app=app)


async def test_no_header_names_the_servers_id(app: Any) -> None:
    """The id travels in the scope, where only a server can put it."""
    chosen = [(SCOPE_ID.encode(), b"req-mine"), (b"x-request-id", b"req-mine"), (b"x-assay-request-id", b"req-mine")]
    found = await ask(behind_serve(app), "GET", "/nope", headers=chosen)
    assert "mine" not in found.headers["x-request-id"] + found.headers["x-assay-request-id"]
    assert b"mine" not in found.body


async def test_what_is_no_request_passes() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope: Any = {"type": "lifespan"}
    unused: Any = None
    await ProxyMiddleware(app)(scope, unused, unused)
    assert seen == [{"type": "lifespan"}]


STREAM: list[dict[str, Any]] = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]},
    {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
    {"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True},
    {"type": "http.response.body", "body": b"", "more_body": False},
]


async def sent_by(messages: list[dict[str, Any]], version: str) -> list[dict[str, Any]]:
    """What reaches the server of an application that sends `messages`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    found: list[dict[str, Any]] = []

    async def keep(message: Any) -> None:
        found.append(message)

    scope = {"type": "http", "path": "/", "headers": [], "http_version": version}
    await ProxyMiddleware(app)(scope, None, keep)  # type: ignore[arg-type]
    return found


async def test_http_1_0_gets_a_stream_in_one_piece_with_its_length() -> None:
    start, body = await sent_by(STREAM, "1.0")
    assert dict(start["headers"])[b"content-length"] == b"18"
    assert body["body"] == b"data: 1\n\ndata: 2\n\n" and not body.get("more_body")
    assert await sent_by(STREAM, "1.1") == STREAM
    whole: list[dict[str, Any]] = [
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]},
        {"type": "http.response.body", "body": b"ok"},
    ]
    assert await sent_by(whole, "1.0") == whole


@pytest.mark.parametrize(
    ("middleware", "servable", "watched"),
    [
        (ProxyMiddleware, None, True),
        (IngressMiddleware, SimpleNamespace(direct_application=object()), False),
        (IngressMiddleware, SimpleNamespace(), True),
    ],
)
async def test_serve_watches_clients_only_where_the_application_does_not(
    monkeypatch: pytest.MonkeyPatch, middleware: Any, servable: Any, watched: bool
) -> None:
    """In fast mode the middleware stands in the ingress's own process, where our application watches its clients. One
    of another origin does not."""
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(servable_object=servable))
    seen: list[Headers] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    given_headers = [(b"x-request-disconnect-disabled", b"?1"), (b"host", b"a")]
    scope = {"type": "http", "path": "/", "headers": given_headers}
    await middleware(app)(scope, None, None)
    assert parse_disconnect_disabled_header(dict(seen[0])) is not watched


async def test_what_an_ingress_has_not_begun_holds_others_and_no_path_of_serves_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where half of what may be ahead is, an ingress is asked to say when it begins every fourth one, for the three
    before it too, and what it says stays here."""
    monkeypatch.setattr(proxy_middleware, "MAX_AHEAD_S", 60.0)
    asked: list[bool] = []
    sent: list[Any] = []
    over, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/":
            asked.append(scope[SCOPE_TELL])
            await told.wait()
            if scope[SCOPE_TELL]:
                await send({"type": BEGUN})
            await over.wait()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def keep(message: Any) -> None:
        sent.append(message["type"])

    proxy: Any = ProxyMiddleware(app)
    async with asyncio.TaskGroup() as group:
        for _ in range(2 * MAX_AHEAD):
            group.create_task(proxy({"type": "http", "path": "/", "headers": []}, None, keep))
        while len(asked) < MAX_AHEAD:
            await asyncio.sleep(0)
        for _ in range(4 * ROUNDS):
            await asyncio.sleep(0)
        told_each = [*[False] * (TOLD - 1), True]
        assert asked == [False] * (MAX_AHEAD // 2) + told_each * (MAX_AHEAD // 2 // TOLD)
        await proxy({"type": "http", "path": "/-/healthz", "headers": []}, None, keep)
        assert sent == ["http.response.start", "http.response.body"]
        told.set()
        while len(asked) < 2 * MAX_AHEAD:
            await asyncio.sleep(0)
        assert len(sent) == 2 and asked[MAX_AHEAD:].count(True) == MAX_AHEAD // TOLD
        over.set()
    assert sent.count("http.response.body") == 2 * MAX_AHEAD + 1 and BEGUN not in sent


async def test_what_no_application_begins_holds_others_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "MAX_AHEAD_S", 0.01)
    begun = asyncio.Semaphore(0)

    async def frozen(scope: Any, receive: Any, send: Any) -> None:
        begun.release()
        await asyncio.Event().wait()

    proxy: Any = ProxyMiddleware(frozen)
    tasks = [
        asyncio.create_task(proxy({"type": "http", "path": "/", "headers": []}, None, None))
        for _ in range(2 * MAX_AHEAD)
    ]
    async with asyncio.timeout(20):
        for _ in tasks:
            await begun.acquire()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_outside_of_an_ingress_the_middleware_is_the_proxys() -> None:
    middleware: Any
    (middleware,) = middlewares()
    assert middleware.cls is ProxyMiddleware


class Ingress:
    """Serve's code in an ingress and the application behind our middleware: which of them each request came to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str = "/", **options: bool) -> None:
        self.prefix = prefix
        self.came: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.replica = SimpleNamespace(servable_object=SimpleNamespace(direct_application=self._application))
        self.replica.app_name = "assay"
        monkeypatch.setattr("ray.serve.get_replica_context", lambda: self.replica)
        self._middleware: Any = IngressMiddleware(RequestIdMiddleware(self._serve), **options)

    async def ask(self, path: str, kind: str = "http", root: str = "") -> dict[bytes, bytes]:
        """The headers of the answer."""
        sent: list[Any] = []

        async def keep(message: Any) -> None:
            sent.append(message)

        scope = {"type": kind, "path": root + path, "method": "POST", "root_path": root, "headers": []}
        await asyncio.create_task(self._middleware(scope, None, keep))
        assert [name.lower() for name, _ in sent[0]["headers"]].count(b"x-request-id") == 1
        return {name.lower(): value for name, value in sent[0]["headers"]}

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """What Serve's own code does first, which ends here for a path that is its own."""
        health_check = {**scope, "path": scope["root_path"] + "/-/healthz"}
        await Replica._direct_ingress_asgi(serve_replica(self.prefix), health_check, receive, ignore)
        scope["root_path"] = health_check["root_path"]
        await self._answer("serve", scope, send)

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        self.ids.append(serve_context._get_serve_request_context().request_id)
        assert scope[SCOPE_ID] == self.ids[-1]
        await self._answer("application", scope, send)

    async def _answer(self, who: str, scope: Any, send: Any) -> None:
        self.came.append((who, scope["root_path"], scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})


async def ignore(message: Any) -> None: ...


def serve_replica(prefix: str) -> Any:
    """As much of Serve's replica as answers its health checks."""

    async def healthy() -> tuple[bool, str]:
        return True, "success"

    return SimpleNamespace(
        _user_callable_initialized=True,
        _route_prefix=prefix,
        _dataplane_health_check=healthy,
        _metrics_manager=SimpleNamespace(record_ingress_request_metrics=lambda **_: None),
        _deployment_id=SimpleNamespace(app_name="assay", name="Ingress"),
    )


async def test_after_the_first_request_the_application_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve has put the prefix into the first one. Every answer has the one id that the logs show."""
    ingress = Ingress(monkeypatch)
    for _ in range(2):
        headers = await ingress.ask("/score")
    assert ingress.came == [("serve", "", "/score"), ("application", "", "/score")]
    assert ingress.ids == [headers[b"x-request-id"].decode()]


@pytest.mark.parametrize("root", ["", "/proxied"])
async def test_an_application_under_a_prefix_is_mounted_as_serve_mounts_it(
    monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    ingress = Ingress(monkeypatch, prefix="/llm")
    for path in ("/llm/score", "/llm/score", "/score", "/-/healthz"):
        await ingress.ask(path, root=root)
    mounted = root + "/llm"
    assert ingress.came == [
        ("serve", mounted, f"{mounted}/score"),
        ("application", mounted, f"{mounted}/score"),
        ("serve", mounted, f"{root}/score"),
        ("serve", mounted, f"{root}/-/healthz"),
    ]


async def test_a_prefix_that_changes_is_followed_from_the_next_health_check_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = Ingress(monkeypatch)
    await ingress.ask("/score")
    ingress.prefix = "/v1"
    for path in ("/-/healthz", "/v1/score", "/score"):
        await ingress.ask(path)
    assert [(who, root) for who, root, _ in ingress.came[1:]] == [
        ("serve", "/v1"), ("application", "/v1"), ("serve", "/v1"),
    ]  # fmt: skip


async def test_serve_answers_what_is_not_the_applications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets; all requests of an application that is not ours, or runs in another thread; and all, while Serve records
    spans."""
    ingress = Ingress(monkeypatch)
    await ingress.ask("/score")
    await ingress.ask("/score", kind="websocket")
    for other in (SimpleNamespace(), SimpleNamespace(direct_application=None)):
        ingress.replica.servable_object = other
        await ingress.ask("/score")
    traced = Ingress(monkeypatch, direct=False)
    for _ in range(2):
        await traced.ask("/score")
    assert {who for who, *_ in (*ingress.came, *traced.came)} == {"serve"}


@pytest.mark.parametrize("tracing", ["", "exporters:spans"])
def test_in_an_ingress_the_middleware_goes_past_serve_unless_it_records_spans(
    monkeypatch: pytest.MonkeyPatch, tracing: str
) -> None:
    monkeypatch.setattr("ray.serve.get_replica_context", SimpleNamespace)
    monkeypatch.setenv(proxy_middleware.TRACING, tracing)
    middleware: Any
    (middleware,) = middlewares()
    assert middleware.cls is IngressMiddleware and middleware.kwargs == {"direct": not tracing}
    assert proxy_middleware.TRACING in vars(constants)
