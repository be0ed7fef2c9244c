"""Every route of the app, whatever is sent in place of its key: never 200, never 500."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.api.app import Routes
from deployments.api.endpoints import info
from deployments.api.schemas.info import Alive
from deployments.auth.api_keys import ANONYMOUS, NEEDS, ApiKey, digest_of
from deployments.auth.authenticator import PUBLIC, Authenticator, AuthSettings
from deployments.observability.ingress_metrics import IngressMetrics

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "get", "X\u00e9")
REFUSED = {400, 401, 403, 404, 405}
# Routes that need a template or a head, and answer 404 without one.
NEED_MORE = (
    *("/rerank", "/v1/rerank", "/v2/rerank"),
    *("/classify", "/v1/classify", "/pooling", "/v1/embeddings", "/embed", "/predict"),
)
MEGABYTE = 1 << 20


def wrong_keys(secret: str) -> dict[str, list[tuple[bytes, bytes]]]:
    """Headers without the right key."""
    right = secret.encode()

    def bearer(*values: bytes) -> list[tuple[bytes, bytes]]:
        return [(b"authorization", value) for value in values]

    return {
        "none": [],
        "empty": bearer(b""),
        "no token": bearer(b"Bearer "),
        "wrong": bearer(b"Bearer assay-" + b"x" * 43),
        "other case": bearer(b"Bearer " + right.swapcase()),
        "a byte short": bearer(b"Bearer " + right[:-1]),
        "a byte more": bearer(b"Bearer " + right + b"x"),
        "its beginning and NUL": bearer(b"Bearer " + right + b"\0"),
        "not ASCII": bearer(b"Bearer " + right[:-1] + b"\xff"),
        "1 MB": bearer(b"Bearer " + b"k" * MEGABYTE),
        "30 kB": bearer(b"Bearer " + b"k" * 30_000),
        "another scheme": bearer(b"Basic " + right),
        "no scheme": bearer(right),
        "twice": bearer(b"Bearer " + right, b"Bearer " + right),
        "under another name": [
            (b"x-api-key", right),
            (b"api-key", right),
            (b"cookie", b"authorization=Bearer " + right),
        ],
        "its hash": bearer(b"Bearer " + digest_of(right).hex().encode()),
    }


HOSTS = (
    b"healthz", b"api/healthz?", b"api/healthz#", b"127.0.0.1:0", b"[::1]", b"a b", b"\xff", b"", b"x" * 4096,
)  # fmt: skip


def variants(path: str) -> Iterator[str]:
    """Addresses that could be taken for `path`, or for one that needs no key."""
    yield path
    yield "/" + path
    yield path + "/"
    yield f"/v1/..{path}"
    yield f"/healthz/..{path}"
    yield f"/healthz;{path}"
    yield f"{path};/healthz"
    yield f"{path}?/healthz"
    yield path.upper() if path.upper() != path else path + "X"
    yield path + "\0"
    yield "http://api/healthz" + path


def hostile(path: str, secret: str) -> Iterator[tuple[str, str, list[tuple[bytes, bytes]]]]:
    """Method, address and headers of requests for `path` without the right key."""
    keys = wrong_keys(secret)
    for method, headers in itertools.product(METHODS, keys.values()):
        yield method, path, headers
    for method, what in itertools.product(("GET", "POST"), ("none", "wrong")):
        for host in HOSTS:
            yield method, path, [(b"host", host), *keys[what]]
        for address in variants(path):
            yield method, address, keys[what]


async def matrix(app: Any, ask: Callable[..., Any], secret: str, routes: list[tuple[str, set[str]]]) -> int:
    """Raises AssertionError for an answer other than a refusal; how many there were."""
    count = 0
    for declared, _ in routes:
        for method, path, headers in hostile(declared.replace("{model_id:path}", "toy"), secret):
            if method not in ("GET", "HEAD") or path.removesuffix("/") not in PUBLIC:
                found = await ask(app, method, path, headers=headers)
                assert found.status in REFUSED and not found.read, (method, path, headers, found.status)
                count += 1
    return count


@pytest.mark.risk(
    "S7",
    figure="over 4,000 requests on 20 of 20 routes: 0 answered with 200 or 500, 0 bodies read; timing: t within 2.4 "
    "of 0 for keys that are nearly right (planted: 35 to 870)",
)
async def test_no_route_answers_without_the_right_key(keyed: Any, ask: Any, secret: str) -> None:
    world = keyed()
    assert {path for path, _ in world.routes} == set(NEEDS)
    assert await matrix(world.app, ask, secret, world.routes) > 4000


async def test_with_the_right_key_every_route_answers(keyed: Any, ask: Any, secret: str) -> None:
    """So it is the key that the matrix lacks. In any scheme's case, under any prefix, with any `Host`."""
    world = keyed()
    for path, methods in world.routes:
        method = "POST" if "POST" in methods else "GET"
        for scheme in (b"Bearer ", b"bearer ", b"BEARER   "):
            headers = [(b"authorization", scheme + secret.encode() + b" "), (b"host", b"odd/healthz")]
            address = path.replace("{model_id:path}", "toy")
            for root in ("", "/under/a/prefix"):
                found = await ask(world.app, method, address, headers=headers, root_path=root)
                assert found.status in ({200} if method == "GET" else {404, 422}), (path, found)
                assert found.code != "not_found" or path in NEED_MORE


@pytest.mark.parametrize("path", sorted(PUBLIC))
async def test_probes_need_no_key_under_their_own_names_only(keyed: Any, ask: Any, path: str) -> None:
    world = keyed()
    for key in (None, "wrong", b"\xff"):
        assert (await ask(world.app, "GET", path, key)).status == 200
        assert (await ask(world.app, "GET", path, key, root_path="/prefix")).status == 200
        for address in variants(path):
            if address not in (path, path + "/"):
                assert (await ask(world.app, "GET", address, key)).status == 401
    assert (await ask(keyed(public=frozenset()).app, "GET", path)).status == 401
    opened = keyed(public=frozenset(("/metrics",))).app
    assert (await ask(opened, "GET", "/metrics")).status == 200
    assert (await ask(opened, "GET", "/version")).status == 401


@pytest.mark.risk("S7")
async def test_without_a_key_no_client_learns_which_routes_exist(keyed: Any, ask: Any) -> None:
    """Bodies, headers and codes of a route that exists, one that does not, and another method are alike."""
    world = keyed()
    found = [
        await ask(world.app, *request)
        for request in (("POST", "/v1/completions"), ("GET", "/v1/completions"), ("POST", "/nope"), ("PUT", "/x"))
    ]
    for one in found:
        assert (one.status, one.headers["www-authenticate"]) == (401, "Bearer")
        assert one.headers["content-type"] == "application/json" and "allow" not in one.headers
        assert one.body.replace(one.headers["x-assay-request-id"].encode(), b"") == (
            found[0].body.replace(found[0].headers["x-assay-request-id"].encode(), b"")
        )


async def test_no_web_socket_is_opened(keyed: Any) -> None:
    for path in ("/v1/completions", "/healthz", "/nope"):
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        await keyed().app({"type": "websocket", "path": path, "headers": []}, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]


# Scopes.

SCORING = {"/generative_scoring", "/score", "/v1/score", "/v1/decisions", *NEED_MORE}
GENERATION = {"/v1/completions", "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("scopes", "closed"),
    [
        (("inference",), {"/metrics"}),
        (("score",), {"/metrics"} | GENERATION),
        (("generate",), {"/metrics"} | SCORING),
        (("metrics",), None),
        (("score", "generate", "metrics"), set()),
    ],
)
async def test_a_key_opens_what_its_scopes_say(
    keyed: Any, key_of: Any, ask: Any, secret: str, scopes: tuple[str, ...], closed: set[str] | None
) -> None:
    world = keyed(key_of("team", secret, *scopes))
    if closed is None:
        closed = {path for path, _ in world.routes} - {"/metrics"} - PUBLIC
    refused = set()
    for path, methods in world.routes:
        found = await ask(world.app, "POST" if "POST" in methods else "GET", path, secret)
        if found.status == 403:
            assert (found.code, found.read) == ("permission_denied", False)
            refused.add(path)
    assert refused == closed


# Planted faults: what opens a route must be seen by the same matrix.


def by_beginning(access: Authenticator, route: str | None) -> bool:
    return route is None or not route.startswith(("/health", "/ready", "/v1/mod"))


def one_left_out(access: Authenticator, route: str | None) -> bool:
    return route not in (*PUBLIC, "/generative_scoring")


def open_document(access: Authenticator, route: str | None) -> bool:
    return route not in (*PUBLIC, "/openapi.json")


@pytest.mark.risk("S7", planted=True)
@pytest.mark.parametrize("fault", [by_beginning, one_left_out, open_document])
async def test_a_route_left_open_would_be_seen(
    keyed: Any, ask: Any, secret: str, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    world = keyed()
    monkeypatch.setattr(Authenticator, "closed", fault)
    with pytest.raises(AssertionError):
        await matrix(world.app, ask, secret, world.routes)


def ends_are_ignored(access: Authenticator, headers: Any, route: str | None) -> ApiKey:
    """Takes any token that the key begins with."""
    given = dict(headers).get(b"authorization", b"")
    if access.closed(route) and not given.startswith(b"Bearer assay-Sbv3"):
        Authenticator.identify(access, headers, "")
    return ANONYMOUS


def case_is_ignored(access: Authenticator, headers: Any, route: str | None) -> ApiKey:
    given = [(name, value.swapcase() if name == b"authorization" else value) for name, value in headers]
    fixed = [(name, value.replace(b"bEARER ", b"Bearer ")) for name, value in given]
    return OWN(access, fixed, route)


def host_decides(access: Authenticator, headers: Any, route: str | None) -> ApiKey:
    """Asks no key for an address that, put together from `Host`, begins as a public one does."""
    host = dict(headers).get(b"host", b"api").decode("latin-1")
    if f"http://{host}{route}".split("/", 3)[-1].startswith("healthz"):
        return ANONYMOUS
    return OWN(access, headers, route)


OWN = Authenticator.identify


@pytest.mark.risk("S7", planted=True)
@pytest.mark.parametrize("fault", [ends_are_ignored, case_is_ignored, host_decides])
async def test_a_careless_look_at_the_key_would_be_seen(
    keyed: Any, ask: Any, secret: str, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    world = keyed()
    monkeypatch.setattr(Authenticator, "identify", fault)
    with pytest.raises(AssertionError):
        await matrix(world.app, ask, secret, world.routes)


async def test_a_route_without_a_rule_is_closed_to_every_key(keyed: Any, ask: Any, secret: str) -> None:
    world = keyed()
    Routes(world.app, _api(world.app), {}).get("/debug", info.healthz, Alive)
    assert (await ask(world.app, "GET", "/debug")).status == 401
    assert (await ask(world.app, "GET", "/debug", secret)).status == 403
    assert {path for path, _ in world.routes} - set(NEEDS) == {"/debug"}


def _api(app: Any) -> Any:
    """Returns what the app's own routes were made with."""
    [route] = [route for route in app.router.routes if getattr(route, "path", "") == "/healthz"]
    return next(cell.cell_contents for cell in route.endpoint.__closure__ if hasattr(cell.cell_contents, "access"))


# Contents of refusals.


async def test_refusals_are_counted_by_reason(keyed: Any, key_of: Any, ask: Any, secret: str) -> None:
    metrics = IngressMetrics()
    old = ApiKey(name="old", digest=key_of("old", "o" * 40).digest, expires_at=0.0)
    world = keyed(key_of("team", secret, "score"), old, observer=metrics)
    for key in (None, "wrong", "o" * 40, secret):
        await ask(world.app, "POST", "/v1/completions", key)
    await ask(world.app, "POST", "/v1/score", headers=[(b"authorization", b"odd")])
    for reason in ("missing", "malformed", "unknown", "expired", "scope"):
        assert metrics.registry.get_sample_value("assay_auth_failures_total", {"reason": reason}) == 1
    found = metrics.registry.get_sample_value(
        "assay_requests_total", {"route": "other", "status": "401", "code": "invalid_api_key"}
    )
    assert found == 4


async def test_a_key_is_good_until_it_expires(key_of: Any) -> None:
    now = [100.0]
    one = ApiKey(name="a", digest=key_of("a", "s" * 40).digest, expires_at=101.0)
    access = Authenticator(AuthSettings(mode="keys", keys=(one,)), clock=lambda: now[0])
    headers = [(b"authorization", b"Bearer " + b"s" * 40)]
    assert access.identify(headers, "/v1/score") is one
    now[0] = 101.0
    with pytest.raises(Exception, match="expired"):
        access.identify(headers, "/v1/score")


async def test_disabled_authentication_asks_no_client(client: Any) -> None:
    for value in ("Bearer ", "Bearer x", "odd", "Basic eA=="):
        found = await client.http.get("/version", headers={"authorization": value})
        assert found.status_code == 200
    assert (await client.get("/readyz")).json()["auth"] == "disabled"


async def test_the_document_says_which_routes_need_a_key(keyed: Any, ask: Any, secret: str) -> None:
    document = json.loads((await ask(keyed().app, "GET", "/openapi.json", secret)).body)
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for route in methods.values():
            assert ("security" in route) == (path not in PUBLIC)
            assert {"401", "403"} <= set(route["responses"]) or path in PUBLIC
