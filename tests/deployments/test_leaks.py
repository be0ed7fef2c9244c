"""S9: no answer tells what a request said, nor anything of the machine, whatever goes wrong. S8: no client cancels what
another has asked for."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api import handler
from deployments.config.settings import ApiSettings
from deployments.errors import ApiError, ErrorBody
from engine.requests import EngineError, ErrorCode
from tests.deployments.clients import settings_of_every_route

MARK = "Zq7secretZq7"
HERE = "/srv/models/" + MARK
MESSAGES = [{"role": "user", "content": MARK}]
BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": MARK},
    "/detokenize": {"tokens": [1]},
    "/generative_scoring": {"query": MARK, "items": [MARK], "label_token_ids": [1, 2]},
    "/v1/score": {"query": MARK, "items": [MARK], "label_token_ids": [1, 2]},
    "/rerank": {"query": MARK, "documents": [MARK]},
    "/v1/rerank": {"query": MARK, "documents": [MARK]},
    "/v2/rerank": {"query": MARK, "documents": [MARK]},
    "/v1/decisions": {"input": MARK, "questions": [{"type": "predicate", "instructions": MARK}]},
    "/v1/completions": {"prompt": MARK, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
}
INNER = re.compile(
    r"/(srv|home|root|tmp|usr|opt)\b|0x[0-9a-f]{4,}|Traceback|\.py\b|[a-z]+\.[A-Z]\w+Error|<(class|function)"
)
ODD: list[Any] = [MARK, [MARK], {MARK: MARK}, [[MARK]], 2**70, 1.5, MARK * 300, [{"text": MARK, "type": MARK}]]


@pytest.fixture
def settings() -> ApiSettings:
    return settings_of_every_route()


def check(text: str) -> None:
    """Raises AssertionError for the body of a refusal or a failure that tells more than it may."""
    assert MARK not in text, text
    assert not INNER.search(text), text
    ErrorBody.model_validate_json(text)


async def fields_of(client: Any, path: str) -> list[str]:
    document = client.app.openapi()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return sorted(document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]["properties"])


@pytest.mark.full(keep=4)
@pytest.mark.risk("S9", figure="0 leaks: every field of 10 routes with 8 odd values, 12 kinds of exception")
@pytest.mark.parametrize("path", BODIES)
async def test_no_refusal_repeats_the_request(client: Any, path: str) -> None:
    """Every field of every route, with what does not belong there."""
    refused = 0
    for field in await fields_of(client, path):
        for odd in ODD:
            found = await client.post(path, BODIES[path] | {field: odd})
            assert found.status_code < 500
            if found.status_code >= 400:
                refused += 1
                check(found.text)
    assert refused > 10


@pytest.mark.risk("S9")
@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError(f"{HERE} at 0x7f00deadbeef"),
        OSError(2, "No such file", HERE),
        KeyError(MARK),
        ValueError(MARK),
        AssertionError(MARK),
        UnicodeDecodeError("utf-8", MARK.encode(), 0, 1, MARK),
        MemoryError(MARK),
        RecursionError(MARK),
        json.JSONDecodeError(MARK, MARK, 0),
        ExceptionGroup(MARK, [ValueError(HERE)]),
        EngineError(ErrorCode.STEP_FAILED, "A step failed.", None),
        ApiError("replica_lost", "The replica was lost."),
    ],
    ids=lambda fault: type(fault).__name__,
)
async def test_no_failure_tells_what_happened_inside(client: Any, backend: Any, fault: Any) -> None:
    backend.fail = fault
    for path in BODIES.keys() - {"/tokenize", "/detokenize"}:
        found = await client.post(path, BODIES[path])
        assert found.status_code >= 500
        check(found.text)
    found = await client.post("/v1/completions", BODIES["/v1/completions"] | {"stream": True})
    check(found.text)
    backend.fail_after, backend.pieces = 1, 1
    events = (await client.post("/v1/completions", BODIES["/v1/completions"] | {"stream": True})).text
    last = events.rstrip().split("data: ")[-1]
    assert "error" in json.loads(last) and MARK not in last and not INNER.search(last)


async def test_no_read_route_tells_what_happened_inside(client: Any, backend: Any) -> None:
    async def fail() -> Any:
        raise RuntimeError(f"{HERE} 0xdeadbeef")

    backend.card = backend.metrics = fail
    backend.readiness = lambda: 1 / 0
    for path in ("/v1/models", "/v1/models/x", "/version", "/metrics", "/readyz", "/health"):
        found = await client.get(path)
        assert found.status_code == 500
        check(found.text)


@pytest.mark.risk("S9")
async def test_nothing_is_revealed_of_headers_and_paths(client: Any) -> None:
    for method, path in (("GET", f"/{MARK}"), ("POST", f"/v1/{MARK}/../x"), ("DELETE", f"/v1/models/{MARK}")):
        check((await client.http.request(method, f"http://api{path}")).text)
    check((await client.get(f"/v1/models/{MARK}")).text)
    for name in ("content_type", "content_encoding", "authorization"):
        check((await client.post("/v1/score", b"{", **{name: MARK})).text)
    assert MARK not in (await client.post("/v1/score", b"{" + MARK.encode())).text


# Planted faults.


@pytest.mark.risk("S9", planted=True)
async def test_an_exceptions_words_in_the_answer_would_be_seen(
    client: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.fail = RuntimeError(HERE)

    def told() -> ApiError:
        return ApiError("internal_error", f"It failed: {backend.fail}")

    monkeypatch.setattr(handler, "internal_error", told)
    with pytest.raises(AssertionError):
        check((await client.post("/v1/score", BODIES["/v1/score"])).text)


@pytest.mark.risk("S9", planted=True)
@pytest.mark.parametrize(
    "words", [f"`x` was {MARK}.", "in /srv/models", "at 0x7f00dead", "app.py", "builtins.ValueError"]
)
def test_each_kind_of_leak_would_be_seen(words: str) -> None:
    body = json.dumps(ApiError("invalid_value", words).body("req-1"))
    with pytest.raises(AssertionError):
        check(body)


# S8: cancelling another client's work.

ABORTS = ("/abort", "/abort_request", "/cancel", "/v1/cancel", "/v1/completions/{id}", "/v1/responses/{id}/cancel")


@pytest.mark.risk("S8")
async def test_no_client_can_name_anothers_work(
    client: Any, backend: Any, wire: Callable[..., Any], settings: ApiSettings
) -> None:
    """There is no route to cancel by an id, and no id that a client sends becomes one of ours."""
    backend.gate = asyncio.Event()
    victim = wire("/v1/completions", {"prompt": "a", "request_id": "victim", "user": "victim"},
                  headers=[(b"content-type", b"application/json"), (b"x-request-id", b"victim")])  # fmt: skip
    while not backend.tasks:
        await asyncio.sleep(0)
    [(task,)] = backend.tasks
    assert "victim" not in task.request_id
    for id in ("victim", task.request_id, task.request_id[:9], ""):
        for route in ABORTS:
            for method in ("POST", "DELETE", "GET"):
                found = await client.http.request(
                    method, f"http://api{route.format(id=id)}", json={"rid": id, "request_id": id, "abort_all": True}
                )
                # Without an id, the path is that of completions, and the body lacks a prompt.
                assert found.status_code in ((404, 405) if id else (404, 405, 422))
        thief = wire("/v1/completions", {"prompt": "a", "request_id": id},
                     headers=[(b"content-type", b"application/json"), (b"x-request-id", id.encode())])  # fmt: skip
        while len(backend.tasks) < 2:
            await asyncio.sleep(0)
        thief.leave()
        await thief.task
        del backend.tasks[1:]
    assert backend.cancelled == 4 and not victim.task.done()
    backend.gate.set()
    await victim.task
    assert victim.sent[0]["status"] == 200
