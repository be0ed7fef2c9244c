"""The attack finds what is planted, keeps to this machine, and ends in time."""

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tools import attack

DOCUMENT = {
    "paths": {
        "/tokenize": {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/a/Body"}}}}}}
    },
    "components": {"schemas": {"Body": {"properties": {"prompt": {}, "return_token_strs": {}}}}},
}
REFUSAL = {"error": {"code": "invalid_value"}, "request_id": "req-1"}


class Service:
    """An application that answers everything with one status and body."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        document = scope["path"] == "/openapi.json"
        body = json.dumps(DOCUMENT).encode() if document else self.body
        await send({"type": "http.response.start", "status": 200 if document else self.status, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def findings(status: int, body: bytes) -> list[str]:
    """What bad inputs find at such a service."""
    transport = httpx.ASGITransport(app=Service(status, body))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        run = attack.Attack("http://127.0.0.1", http, None, random.Random(1))
        run._routes = await run._fields()
        await asyncio.gather(*(run._bad_input() for _ in range(20)))
        assert run.report.requests == 20 and run.report.costs["/tokenize"].largest_answer == len(body)
        assert json.loads(run.report.json())["statuses"] == {"/tokenize": {str(status): 20}}
        return run.report.findings


async def test_refusals_are_no_findings() -> None:
    assert not await findings(422, json.dumps(REFUSAL).encode())
    assert not await findings(429, json.dumps(REFUSAL).encode())


@pytest.mark.risk("S1", planted=True)
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, b"{}", "status 500"),
        (422, b"<p>", "no error of the service"),
        (400, b'{"error": {"code": ""}}', "without code"),
    ],
)
async def test_planted_faults_are_found(status: int, body: bytes, words: str) -> None:
    found = await findings(status, body)
    assert len(found) == attack.MAX_FINDINGS and all(words in one for one in found)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ([([0.25, 0.75], [-1.386, -0.288])], [([0.2501, 0.7499], [-1.385, -0.2881])], True),
        ([([0.25, 0.75], [-1.386, -0.288])], [([0.35, 0.65], [-1.05, -0.431])], False),
        ([([0.25], [-1.386])], [([0.25], [-1.386]), ([0.25], [-1.386])], False),
        ([([0.25], [-1.386])], 503, False),
        ([([0.25], [None])], [([0.25], [None])], True),
        (404, 404, True),
    ],
)
def test_an_answer_that_is_only_rounded_otherwise_is_the_same(before: Any, after: Any, same: bool) -> None:
    assert attack.alike(before, after) is attack.alike(after, before) is same


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.1:8000", "http://[2001:db8::1]", "nothing"])
def test_other_machines_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="this tool attacks"):
        attack.on_this_machine(url)
    assert attack.on_this_machine("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"


async def test_a_phase_ends_with_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with httpx.AsyncClient() as http:
        run = attack.Attack("http://127.0.0.1", http, None, random.Random(1))

        async def phase() -> None:
            run.report.answered("/", 200)
            await asyncio.sleep(0)

        began = time.monotonic()
        await run._lanes(phase, 0.05)
        assert run.report.requests and time.monotonic() - began < 5
        monkeypatch.setattr(attack, "MAX_REQUESTS", 0)
        before = run.report.requests
        await run._lanes(phase, 60.0)
        assert run.report.requests == before


def test_every_costly_request_is_of_a_route_that_is_known() -> None:
    found: list[tuple[str, dict[str, Any]]] = list(attack.costly(sorted(attack.GOOD)))
    assert found and {path for path, _ in found} <= attack.GOOD.keys()
