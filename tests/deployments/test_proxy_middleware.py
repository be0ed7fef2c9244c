"""What Serve does with a request's headers before our application sees it, by Serve's own code."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
    parse_session_id_header,
    validate_http_proxy_callback_return,
)
from ray.serve._private.proxy import HTTPProxy
from ray.serve._private.proxy_request_response import ASGIProxyRequest

from deployments.cli.launch import ray_env
from deployments.proxy_middleware import SCOPE_ID, ProxyMiddleware, middlewares, readable
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


def test_a_timeout_reaches_serve_and_us() -> None:
    kept, _ = readable([(b"x-request-timeout-seconds", b"2.5")])
    assert kept == [(b"x-request-timeout-seconds", b"2.5")] and read_by_serve(kept) == 2.5


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


@pytest.mark.parametrize("watched", [True, False])
async def test_serve_watches_clients_only_where_the_application_does_not(watched: bool) -> None:
    """In fast mode the middleware stands in the ingress's own process, and the application watches its clients."""
    seen: list[Headers] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    given_headers = [(b"x-request-disconnect-disabled", b"?1"), (b"host", b"a")]
    await ProxyMiddleware(app, watched=watched)({"type": "http", "headers": given_headers}, None, None)  # type: ignore[arg-type]
    assert parse_disconnect_disabled_header(dict(seen[0])) is not watched


def test_outside_of_an_ingress_serve_watches() -> None:
    (middleware,) = middlewares()
    assert middleware.kwargs == {"watched": True}
