"""The gate: what is decided before a body is parsed, and in which order."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import build_api
from deployments.config.sections import StreamArgs
from deployments.config.settings import ApiSettings
from deployments.errors import ApiError
from deployments.limits import Limits, WireLimits
from deployments.observability.ingress_metrics import IngressMetrics, Phase, StageTimer
from deployments.proxy_middleware import BEGUN, SCOPE_TELL
from tests.support.toy_model import ByteTokenizer

JSON = (b"content-type", b"application/json")
LIMIT = 1000


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(limits=Limits(wire=WireLimits(max_body_bytes=LIMIT)))


def padded(size: int) -> bytes:
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


async def answer(request: Any) -> tuple[int, str | None, dict[str, str]]:
    await request.task
    start = request.sent[0]
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    body = json.loads(request.body)
    return start["status"], body.get("error", {}).get("code"), headers


@pytest.mark.risk("S15", figure="at the limit passes, one more does not")
async def test_a_body_at_the_limit_passes_and_one_byte_more_is_refused(client: Any) -> None:
    assert (await client.post("/v1/completions", padded(LIMIT))).status_code == 200
    found = await client.post("/v1/completions", padded(LIMIT + 1))
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.risk("S15")
async def test_a_chunked_body_is_counted_while_it_is_read(client: Any, wire: Callable[..., Any]) -> None:
    async def parts(size: int) -> AsyncIterator[bytes]:
        body = padded(size)
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        found = await client.http.post(
            "/v1/completions", content=parts(size), headers={"content-type": "application/json"}
        )
        assert found.status_code == status


@pytest.mark.risk("S15")
@pytest.mark.parametrize("declared", [b"-1", b"abc", b"", b"+5", b"1 000", b"5"])
async def test_a_lying_or_malformed_length_is_refused(wire: Callable[..., Any], declared: bytes) -> None:
    request = wire("/v1/completions", {"prompt": "a"}, headers=[JSON, (b"content-length", declared)])
    assert (await answer(request))[:2] == (400, "invalid_header")


async def test_a_length_given_twice_is_refused(wire: Callable[..., Any]) -> None:
    length = (b"content-length", b"15")
    assert (await answer(wire("/v1/completions", {"prompt": "a"}, headers=[JSON, length, length])))[0] == 400


async def test_a_length_over_the_limit_is_refused_before_reading(wire: Callable[..., Any]) -> None:
    request = wire("/v1/completions", {"prompt": "a"}, headers=[JSON, (b"content-length", b"1001")])
    assert (await answer(request))[:2] == (413, "body_too_large")
    assert not request._inbox.empty(), "the body was not read"


@pytest.mark.risk("S15")
async def test_headers_are_counted_and_measured(wire: Callable[..., Any]) -> None:
    many = [JSON, *[(b"x-%d" % i, b"") for i in range(127)]]
    assert (await answer(wire("/v1/completions", {"prompt": "a"}, headers=many)))[0] == 200
    assert (await answer(wire("/v1/completions", {"prompt": "a"}, headers=[*many, (b"y", b"")])))[1] == "invalid_header"
    size = 32_768 - sum(map(len, JSON)) - 1
    big = [JSON, (b"x", b"y" * size)]
    assert (await answer(wire("/v1/completions", {"prompt": "a"}, headers=big)))[0] == 200
    big = [JSON, (b"x", b"y" * (size + 1))]
    assert (await answer(wire("/v1/completions", {"prompt": "a"}, headers=big)))[1] == "invalid_header"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/jsonx")],
        [JSON, JSON],
        [JSON, (b"content-encoding", b"gzip")],
    ],
)
async def test_only_plain_json_is_taken(wire: Callable[..., Any], headers: list[tuple[bytes, bytes]]) -> None:
    request = wire("/v1/completions", {"prompt": "a"}, headers=headers)
    assert (await answer(request))[:2] == (415, "unsupported_media_type")


async def test_parameters_of_the_media_type_are_allowed(wire: Callable[..., Any]) -> None:
    headers = [(b"content-type", b"Application/JSON ; charset=utf-8")]
    assert (await answer(wire("/v1/completions", {"prompt": "a"}, headers=headers)))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "//v1/completions", 404, "not_found"),
        ("POST", "/v1/completions//", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("HEAD", "/v1/completions", 405, None),
        ("OPTIONS", "/nothing", 404, "not_found"),
        ("DELETE", "/v1/models/toy", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods_have_our_errors(
    client: Any, method: str, path: str, status: int, code: str | None
) -> None:
    found = await client.http.request(method, f"http://api{path}")
    assert found.status_code == status
    assert ("allow" in found.headers) == (status == 405)
    if code:
        assert found.json()["error"]["code"] == code


async def test_every_answer_has_our_id_and_never_rays(client: Any) -> None:
    for found in (await client.get("/healthz"), await client.get("/nope"), await client.post("/v1/completions", b"{")):
        assert len(found.headers.get_list("x-assay-request-id")) == 1
        assert "x-request-id" not in found.headers
        if "error" in found.json():
            assert found.json()["request_id"] == found.headers["x-assay-request-id"]


async def test_a_proxy_that_asks_is_told_when_a_request_begins(wire: Callable[..., Any]) -> None:
    request = wire("/v1/completions", {"prompt": "a", "max_tokens": 1}, **{SCOPE_TELL: True})
    await request.task
    assert [message["type"] for message in request.sent[:2]] == [BEGUN, "http.response.start"]
    for in_scope in ({}, {SCOPE_TELL: False}):
        request = wire("/v1/completions", {"prompt": "a", "max_tokens": 1}, **in_scope)
        await request.task
        assert request.sent[0]["type"] == "http.response.start"


async def test_a_request_that_fails_several_ways_reports_the_first(wire: Callable[..., Any]) -> None:
    big = {"prompt": "a" * 2000, "top_p": 5, "model": "other"}
    bad_header = (b"content-length", b"-1")
    text = (b"content-type", b"text/plain")
    order = [
        (("/nope", big, [bad_header, text]), "invalid_header"),
        (("/nope", big, [text]), "not_found"),
        (("/v1/completions", big, [text]), "body_too_large"),
        (("/v1/completions", b"{", [text]), "unsupported_media_type"),
        (("/v1/completions", b'{"top_p": NaN', [JSON]), "invalid_json"),
        (
            ("/v1/completions", {"prompt": [[999]] * 2, "top_p": "x", "model": "y"}, [JSON]),
            "invalid_value",
        ),
        (("/v1/completions", {"prompt": [[999]] * 99, "model": "y", "n": 128}, [JSON]), "model_not_found"),
        (("/v1/completions", {"prompt": [[999]] * 99, "n": 128}, [JSON]), "request_too_large"),
        (("/v1/completions", {"prompt": [[999]]}, [JSON]), "invalid_token_id"),
    ]
    for (path, body, headers), code in order:
        assert (await answer(wire(path, body, headers=headers)))[1] == code


async def test_unknown_fields_are_named_or_refused(client: Any) -> None:
    body = {"prompt": "a", "zeta": 1, "b\u00e9 \n": 2, "stream_options": None, **{f"f{i:040d}": 0 for i in range(9)}}
    found = await client.post("/v1/completions", body)
    names = found.headers["x-assay-ignored-fields"].split(", ")
    assert names[:2] == ["zeta", "b???"] and len(names) == 8 and max(map(len, names)) == 32
    found = await client.post("/v1/completions", body, x_assay_strict="1")
    assert (found.status_code, found.json()["error"]["param"]) == (422, "zeta")
    found = await client.post("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"odd": 1}})
    assert found.headers["x-assay-ignored-fields"] == "stream_options.odd"


async def test_a_server_may_be_strict_by_itself(backend: Any, settings: ApiSettings, wire_to: Any) -> None:
    app = build_api(backend, ByteTokenizer(), replace(settings, strict=True))
    assert (await answer(wire_to(app, "/v1/completions", {"prompt": "a", "odd": 1})))[:2] == (422, "invalid_value")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"1", b"null", b'{"prompt": NaN}', b'{"a": Infinity, "prompt": "a"}', b"\xff\xfe{}",
        b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
    ],
)  # fmt: skip
async def test_what_is_not_a_json_object_is_refused(client: Any, body: bytes) -> None:
    found = await client.post("/v1/completions", body)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.risk("S15")
async def test_nesting_at_the_limit_passes(client: Any) -> None:
    body = b'{"prompt": "a", "metadata":' + b"[" * 63 + b"]" * 63 + b"}"
    assert (await client.post("/v1/completions", body)).status_code == 200


@pytest.mark.risk("R5")
@pytest.mark.parametrize("wish", ["0", "-1", "nan", "inf", "x", "", "1e999"])
async def test_a_wish_that_is_no_time_is_ignored(client: Any, backend: Any, wish: str) -> None:
    found = await client.post("/v1/completions", {"prompt": "a"}, x_request_timeout_seconds=wish)
    assert found.status_code == 200 and 590 < backend.tasks[0][0].timeout_s <= 600


async def test_a_client_can_only_shorten_its_deadline(client: Any, backend: Any) -> None:
    await client.post("/v1/completions", {"prompt": "a"}, x_request_timeout_seconds="9999")
    await client.post("/v1/completions", {"prompt": "a"}, x_request_timeout_seconds="5")
    assert backend.tasks[0][0].timeout_s <= 600 and backend.tasks[1][0].timeout_s <= 5
    backend.gate = asyncio.Event()
    found = await client.post("/v1/completions", {"prompt": "a"}, x_request_timeout_seconds="0.02")
    assert (found.status_code, found.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert backend.cancelled == 1


async def test_room_is_limited_and_freed(backend: Any, settings: ApiSettings, wire_to: Any) -> None:
    app = build_api(backend, ByteTokenizer(), replace(settings, max_inflight_requests=1))
    backend.gate = asyncio.Event()
    first = wire_to(app, "/v1/completions", {"prompt": "a"})
    while not backend.tasks:
        await asyncio.sleep(0)
    status, code, headers = await answer(wire_to(app, "/v1/completions", {"prompt": "a"}))
    assert (status, code, headers["retry-after"]) == (429, "overloaded", "1")
    backend.gate.set()
    assert (await answer(first))[0] == 200
    assert (await answer(wire_to(app, "/v1/completions", {"prompt": "a"})))[0] == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_room_is_taken_by_bodies_that_are_still_on_their_way(
    backend: Any, settings: ApiSettings, wire_to: Any, declared: bool
) -> None:
    app = build_api(backend, ByteTokenizer(), replace(settings, max_inflight_body_bytes=1500))
    headers = [JSON, (b"content-length", b"800")] if declared else [JSON]
    slow, slower = [wire_to(app, "/v1/completions", padded(800)[:700], headers=headers, more=True) for _ in range(2)]
    for _ in range(50):
        await asyncio.sleep(0)
    status, code, found = await answer(wire_to(app, "/v1/completions", padded(800), headers=headers))
    assert (status, code, found["retry-after"]) == (429, "overloaded", "1")
    slow.feed(padded(800)[700:])
    assert (await answer(slow))[0] == 200
    slower.leave()
    await slower.task
    both = [wire_to(app, "/v1/completions", padded(700)) for _ in range(2)]
    assert [(await answer(one))[0] for one in both] == [200, 200]


@pytest.mark.risk("R14")
@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        ("/v1/completions", "POST", {"prompt": "a"}),
        ("/v1/completions", "POST", {"prompt": "a", "max_tokens": 500, "logprobs": 5}),
        ("/v1/completions", "POST", {"prompt": "a", "top_p": 2}),
        ("/v1/completions", "POST", {"prompt": "fails", "stream": True}),
        ("/v1/completions", "OPTIONS", {}),
        ("/nowhere", "POST", {}),
        ("/v1/models/toy", "GET", {}),
    ],
)
async def test_a_client_that_does_not_read_its_answer_is_given_up(
    backend: Any, wire_to: Any, path: str, method: str, body: dict[str, Any]
) -> None:
    """It would hold its place among the requests in flight."""
    phases: list[Phase] = []

    class Recorder(IngressMetrics):
        def disconnected(self, phase: Phase) -> None:
            phases.append(phase)

    backend.script = b"x" * 500
    backend.fail = ApiError("overloaded", "Planted.") if body.get("prompt") == "fails" else None
    app: Any = build_api(backend, ByteTokenizer(), ApiSettings(stream=StreamArgs(read_timeout_s=0.02)), Recorder())
    request = wire_to(app, path, body, method=method)
    request.reading.clear()
    await asyncio.wait_for(request.task, 10)
    assert request.blocked.is_set() and not request.sent
    assert len(phases) == 1 and app.requests._places.held == 0


@pytest.mark.risk("R14", planted=True)
async def test_without_that_limit_it_would_hold_its_place(backend: Any, wire_to: Any) -> None:
    app: Any = build_api(backend, ByteTokenizer(), ApiSettings(stream=StreamArgs(read_timeout_s=3600.0)))
    request = wire_to(app, "/v1/completions", {"prompt": "a"})
    request.reading.clear()
    await request.blocked.wait()
    done, _ = await asyncio.wait({request.task}, timeout=0.1)
    assert not done and app.requests._places.held == 1
    request.reading.set()
    await asyncio.wait_for(request.task, 10)
    assert json.loads(request.body)["object"] == "text_completion" and app.requests._places.held == 0


@pytest.mark.risk("S9")
async def test_a_bug_answers_500_and_tells_nothing(client: Any, backend: Any, caplog: Any) -> None:
    backend.fail = RuntimeError("/secret/path 0xdeadbeef")
    found = await client.post("/v1/completions", {"prompt": "a"})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in found.text and "0x" not in found.text and "secret" in caplog.text


async def test_the_observer_hears_of_every_request(backend: Any, wire_to: Any) -> None:
    heard: list[tuple[Any, ...]] = []

    class Recorder(IngressMetrics):
        def __init__(self) -> None: ...

        def __getattribute__(self, name: str) -> Callable[..., Any]:
            if name == "timed":
                return lambda stage: StageTimer(lambda seconds, stage: heard.append(("stage", stage, seconds)), stage)
            return lambda *args: heard.append((name, *args))

    app = build_api(backend, ByteTokenizer(), ApiSettings(), Recorder())
    await wire_to(app, "/v1/completions", {"prompt": "a"}).task
    await wire_to(app, "/v1/completions", {"prompt": "a", "stream": True}).task
    await wire_to(app, "/nope" * 5, {"prompt": "a"}).task
    gone = wire_to(app, "/v1/completions", {"prompt": "a"})
    backend.gate = asyncio.Event()
    gone.leave()
    await gone.task
    ended = [event[1:4] for event in heard if event[0] == "request_ended"]
    assert ended == [("/v1/completions", 200, "")] * 2 + [("other", 404, "not_found"), ("/v1/completions", 499, "")]
    stages = {event[1] for event in heard if event[0] == "stage"}
    assert {"parse", "tokenize", "queue", "prefill", "decode", "encode"} <= stages
    assert ("disconnected", "queued") in heard
    assert [event[0] for event in heard].count("first_token") == 1  # the stream's: no request sees another's
    assert sum(event[1] for event in heard if event[0] == "body") == 0


@pytest.mark.parametrize(("replies", "phase"), [(0, "prefill"), (1, "stream"), (3, "last")])
async def test_a_client_that_leaves_a_stream_is_counted_by_how_far_it_was(
    backend: Any, wire_to: Any, monkeypatch: pytest.MonkeyPatch, replies: int, phase: str
) -> None:
    """The client leaves after so many of three replies, and reads none of the last ones."""
    heard: list[str] = []
    stopped = asyncio.Event()
    whole = backend.stream

    class Recorder(IngressMetrics):
        def disconnected(self, phase: Phase) -> None:
            heard.append(phase)

    async def some(task: Any) -> AsyncIterator[Any]:
        left = replies
        async for reply in whole(task):
            if not left:
                stopped.set()
                await asyncio.Event().wait()
            left -= 1
            yield reply

    backend.script = b"abc"
    monkeypatch.setattr(backend, "stream", some)
    app = build_api(backend, ByteTokenizer(), ApiSettings(), Recorder())
    wire = wire_to(app, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 3})
    if phase == "last":
        wire.reading.clear()
        await asyncio.wait_for(wire.blocked.wait(), 10)
        for _ in range(100):  # all is made in this event loop, and nothing of it is read
            await asyncio.sleep(0)
    else:
        await asyncio.wait_for(stopped.wait(), 10)
    wire.leave()
    await wire.task
    assert heard == [phase]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_client_that_leaves_before_its_body_is_whole_is_counted(
    backend: Any, wire_to: Any, cancelled: bool
) -> None:
    """By its message, or by Serve, which cancels the request."""
    heard: list[str] = []

    class Recorder(IngressMetrics):
        def disconnected(self, phase: Phase) -> None:
            heard.append(phase)

    app = build_api(backend, ByteTokenizer(), ApiSettings(), Recorder())
    wire = wire_to(app, "/v1/completions", b'{"prompt":', more=True)
    for _ in range(50):
        await asyncio.sleep(0)
    if cancelled:
        wire.task.cancel()
    else:
        wire.leave()
    await asyncio.wait([wire.task])
    assert heard == ["queued"]


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/openapi.json"])
async def test_head_is_get_without_its_body(client: Any, path: str) -> None:
    head, get = [await client.http.request(method, f"http://api{path}") for method in ("HEAD", "GET")]
    assert (head.status_code, head.content) == (200, b"") and get.content
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))


async def test_a_slash_at_the_end_of_a_path_changes_nothing(client: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1, "seed": 1}
    one, other = [await client.post(f"/v1/completions{end}", body) for end in ("", "/")]
    assert one.status_code == other.status_code == 200
    assert one.json()["choices"] == other.json()["choices"]


async def test_a_byte_order_mark_is_no_part_of_the_body(client: Any) -> None:
    headers = {"content-type": "application/json"}
    for mark, status in ((b"\xef\xbb\xbf", 200), (b"\xef\xbb\xbf" * 2, 400)):
        body = mark + b'{"prompt": "a", "max_tokens": 1}'
        found = await client.http.post("http://api/v1/completions", content=body, headers=headers)
        assert found.status_code == status


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "a",}', "trailing comma at line 1 column 16."),
        (b'{"prompt":\n "s3cr3t" "b"}', "at line 2 column 11."),
        (
            b'{"prompt": "s3cr3t \\ud800"}',
            "at line 1 column 26. `prompt` has half of a surrogate pair, which is no character.",
        ),
        (b'{"prompt": "\xff"}', "at line 1 column 13."),
        (b"", "at line 1 column 0."),
    ],
)
async def test_json_that_is_broken_is_told_its_place_and_not_its_text(client: Any, body: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    found = await client.http.post("http://api/v1/completions", content=body, headers=headers)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")
    assert words in found.json()["error"]["message"] and "s3cr3t" not in found.text


async def test_errors_say_what_the_route_takes(client: Any) -> None:
    for method, path, words in (
        ("GET", "/v1/completions", "The method must be POST."),
        ("POST", "/healthz", "The method must be GET or HEAD."),
        ("GET", "/v1/models/x", "The model of this server is 'toy'. Given: another name."),
    ):
        found = await client.http.request(method, f"http://api{path}", headers={"content-type": "application/json"})
        assert words in found.json()["error"]["message"], found.text


async def test_options_names_the_methods_of_a_route(client: Any) -> None:
    for path, methods in (("/v1/completions", "POST, OPTIONS"), ("/v1/models", "GET, HEAD, OPTIONS")):
        found = await client.http.request("OPTIONS", f"http://api{path}")
        assert (found.status_code, found.headers["allow"], found.content) == (204, methods, b"")


@pytest.mark.parametrize(("coding", "status"), [(b"chunked", 200), (b"Chunked", 200), (b"gzip, chunked", 400)])
async def test_a_body_in_another_coding_than_chunks_is_refused(
    wire: Callable[..., Any], coding: bytes, status: int
) -> None:
    """Nothing undoes the other codings, so the body would be read as if there were none."""
    found = await answer(wire("/v1/completions", {"prompt": "a"}, headers=[JSON, (b"transfer-encoding", coding)]))
    assert found[:2] == (status, "invalid_header" if status == 400 else None)


PAGE = {"origin": "https://app.example.com"}
PREFLIGHT = {**PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize("settings", [ApiSettings(cors_origins=("https://app.example.com",))])
async def test_pages_of_a_configured_origin_may_ask_and_read(client: Any) -> None:
    found = await client.http.request("OPTIONS", "http://api/v1/completions", headers=PREFLIGHT)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "POST" in found.headers["access-control-allow-methods"]
    assert "authorization" in found.headers["access-control-allow-headers"].lower()
    found = await client.http.get("http://api/v1/models", headers=PAGE)
    assert found.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "x-request-id" in found.headers["access-control-expose-headers"]
    found = await client.http.get("http://api/nothing", headers=PAGE)
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (404, PAGE["origin"])


@pytest.mark.parametrize("settings", [ApiSettings(cors_origins=("https://app.example.com",)), ApiSettings()])
async def test_pages_of_other_origins_may_not(client: Any) -> None:
    other = {"origin": "https://other.example.com"}
    for found in (
        await client.http.request("OPTIONS", "http://api/v1/completions", headers=PREFLIGHT | other),
        await client.http.get("http://api/v1/models", headers=other),
    ):
        assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/completions", rb'{"prompt":["a","b\ud83d"]}', "prompt[1]"),
        ("/v1/chat/completions", rb'{"messages":[{"role":"user","content":"\udc00 a"}]}', "messages[0].content"),
        ("/tokenize", rb'{"prompt":"\ud83d"}', "prompt"),
        ("/v1/score", rb'{"query":"a","items":["b","\ud83d"],"label_token_ids":[5]}', "items[1]"),
        ("/score", rb'{"text_1":"a","text_2":["b","\ud83d"]}', "text_2[1]"),
        ("/v1/decisions", rb'{"input":"\ud83d","questions":[]}', "input"),
        ("/v1/embeddings", rb'{"input":["a","\ud83d"]}', "input[1]"),
        ("/generative_scoring", rb'{"query":"\ud83d","items":["\ud83d"],"label_token_ids":[5]}', "query"),
        ("/generative_scoring", rb'{"query":"a","items":["b"],"labels":["\ud83d"]}', "labels[0]"),
        ("/v1/rerank", rb'{"query":"\udc00","documents":["b"]}', "query"),
        ("/v1/rerank", rb'{"query":"a","documents":["b"],"rank_fields":["\ud83d"]}', "rank_fields[0]"),
        ("/v1/rerank", rb'{"query":"a","documents":["b"],"x":{"\ud83d":1}}', "x"),
        ("/v1/rerank", rb'{"query":"a","\ud83d":1}', "body"),
        ("/v1/rerank", rb'["\ud83d"]', "[0]"),
    ],
)
async def test_half_a_surrogate_pair_is_refused_with_its_place(client: Any, path: str, body: bytes, place: str) -> None:
    found = await client.post(path, body)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (400, "invalid_json", place)
    assert f"`{place}` has half of a surrogate pair" in error["message"] and "line 1 column" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        rb'{"query":"a","documents":["\ud83d","b"],"top_n":NaN}',
        rb'{"query":"a","documents":["\ud83d","b"]',
        rb'{"query":"a","documents":["\uZZ","b"]}',
    ],
)
async def test_half_a_surrogate_pair_excuses_no_other_fault_of_the_json(client: Any, body: bytes) -> None:
    error = (await client.post("/v1/rerank", body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_json", None)


async def test_whole_surrogate_pairs_are_their_character(client: Any) -> None:
    escaped, plain = rb'{"prompt":"a \ud83d\ude00"}', {"prompt": "a \U0001f600"}
    found = await client.post("/tokenize", escaped)
    assert found.status_code == 200
    assert found.json()["tokens"] == (await client.post("/tokenize", plain)).json()["tokens"]
