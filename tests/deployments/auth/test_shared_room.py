"""One key's unfinished requests and bodies leave room for another's."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.app import build_api
from deployments.auth.authenticator import Authenticator, AuthSettings
from deployments.auth.usage import SharedRoom
from deployments.config.settings import ApiSettings
from tests.deployments.auth.conftest import JSON, ask, key_of
from tests.support.toy_model import ByteTokenizer

A, B = "a" * 40, "b" * 40
COMPLETION = {"prompt": "a", "max_tokens": 3}
BEARER = [JSON, (b"authorization", b"Bearer " + A.encode())]


def filled(room: SharedRoom, tenant: str, *, shared: bool = True) -> int:
    """How many places a tenant gets."""
    count = 0
    while room.has(tenant, 1, shared=shared):
        room.take(tenant, 1)
        count += 1
    return count


def test_tenants_fill_parts_and_leave_room() -> None:
    room = SharedRoom(1024)
    assert filled(room, "a") == 768
    assert filled(room, "b") == 192
    assert filled(room, "c") == 48
    assert filled(SharedRoom(1024), "a", shared=False) == 1024


@given(size=st.integers(1, 50), asked=st.lists(st.sampled_from("abc"), max_size=200))
def test_the_room_is_never_exceeded_and_all_of_it_comes_back(size: int, asked: list[str]) -> None:
    room, held = SharedRoom(size), list[str]()
    for tenant in asked:
        if room.has(tenant, 1, shared=True):
            room.take(tenant, 1)
            held.append(tenant)
    assert room.held == len(held) <= size
    for tenant in held:
        room.give_back(tenant, 1)
    assert room.held == 0 and not room._held


def test_a_request_that_has_begun_may_fill_what_is_free() -> None:
    room = SharedRoom(1000)
    for part in range(10):
        assert room.has("a", 100, own=100 * part, shared=True)
        room.take("a", 100)
    assert not room.has("a", 1, own=1000, shared=True)


def service(backend: Any, *names: str, **limits: int) -> Any:
    secrets = {"a": A, "b": B}
    access = Authenticator(AuthSettings(mode="keys", keys=tuple(key_of(name, secrets[name]) for name in names)))
    return build_api(backend, ByteTokenizer(), ApiSettings(**limits), None, access)  # type: ignore[arg-type]


async def rounds() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def leave(wires: list[Any]) -> None:
    for wire in wires:
        wire.leave()
    await asyncio.gather(*(wire.task for wire in wires))


@pytest.mark.risk(
    "R17", figure="beside a key that holds all places it gets, by bodies that it does not send: 0 refused"
)
@pytest.mark.parametrize(("names", "status"), [(("a", "b"), 200), (("a",), 429)])
async def test_bodies_that_one_key_does_not_send_leave_places_for_another(
    backend: Any, wire_to: Any, names: tuple[str, ...], status: int
) -> None:
    """Where there is one key, it may have them all."""
    app = service(backend, *names, max_inflight_requests=16)
    wires = [wire_to(app, "/v1/completions", b"{", headers=BEARER, more=True) for _ in range(16)]
    await rounds()
    refused = [wire for wire in wires if wire.task.done()]
    assert len(refused) == (4 if len(names) > 1 else 0)
    assert all(wire.sent[0]["status"] == 429 for wire in refused)
    found = await ask(app, "POST", "/v1/completions", names[-1] * 40, body=COMPLETION)
    assert found.status == status
    await leave([wire for wire in wires if wire not in refused])
    assert (await ask(app, "POST", "/v1/completions", A, body=COMPLETION)).status == 200


async def test_bytes_of_one_keys_bodies_leave_room_for_anothers(backend: Any, wire_to: Any) -> None:
    app = service(backend, "a", "b", max_inflight_body_bytes=16_000)
    wires = [wire_to(app, "/v1/completions", b"{" * 1000, headers=BEARER, more=True) for _ in range(16)]
    await rounds()
    assert sum(wire.task.done() for wire in wires) == 4
    found = await ask(app, "POST", "/v1/completions", B, body=json.dumps(COMPLETION).encode().ljust(3000))
    assert found.status == 200
    await leave([wire for wire in wires if not wire.task.done()])
    assert app.requests._bytes.held == app.requests._places.held == 0


async def test_a_body_is_counted_until_it_is_parsed(backend: Any, wire_to: Any) -> None:
    """A stream may last for minutes, and holds nothing of its body."""
    app: Any = build_api(backend, ByteTokenizer(), ApiSettings(max_inflight_body_bytes=1024))
    backend.gate = asyncio.Event()
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 3}).encode().ljust(800)
    wires = []
    for number in range(3):
        wires.append(wire_to(app, "/v1/completions", body))
        while len(backend.tasks) <= number:
            await asyncio.sleep(0)
    assert app.requests._bytes.held == 0 and app.requests._places.held == 3
    backend.gate.set()
    await asyncio.gather(*(wire.task for wire in wires))
    assert [wire.sent[0]["status"] for wire in wires] == [200] * 3
