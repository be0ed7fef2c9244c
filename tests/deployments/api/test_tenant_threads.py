"""Threads take the calls of tenants in turn, and keep nothing of those that are cancelled."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from deployments.api.app import build_api
from deployments.api.tenant_threads import TenantThreads
from deployments.auth.authenticator import Authenticator, AuthSettings
from deployments.config.sections import DeadlineArgs
from deployments.config.settings import ApiSettings
from tests.deployments.auth.conftest import ask, key_of
from tests.support.toy_model import ByteTokenizer

LARGE = "x" * 20_000
A, B = "a" * 40, "b" * 40


class Gate:
    """Holds the only thread of a pool until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._held = threading.Event()

    def hold(self, threads: TenantThreads) -> Future[bool]:
        def wait() -> bool:
            self._held.set()
            return self._open.wait(10)

        held = threads.submit("heavy", wait)
        assert self._held.wait(10)
        return held

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open()


@pytest.mark.risk("R17", figure="behind 20 calls of another key a call begins second")
def test_tenants_take_turns(gate: Gate) -> None:
    threads, order = TenantThreads(1), list[str]()
    gate.hold(threads)
    calls = [threads.submit(tenant, order.append, tenant) for tenant in [*["heavy"] * 20, *["light"] * 2]]
    gate.open()
    for call in calls:
        call.result(10)
    assert order[:5] == ["heavy", "light", "heavy", "light", "heavy"] and len(order) == 22


def test_calls_of_one_tenant_keep_their_order(gate: Gate) -> None:
    threads, order = TenantThreads(1), list[int]()
    gate.hold(threads)
    calls = [threads.submit("a", order.append, number) for number in range(5)]
    gate.open()
    for call in calls:
        call.result(10)
    assert order == [*range(5)]


def test_results_and_errors_come_back() -> None:
    threads = TenantThreads(2)
    assert threads.submit("a", int, "12", base=8).result(10) == 10
    with pytest.raises(ValueError, match="invalid literal"):
        threads.submit("a", int, "x").result(10)


def test_nothing_is_kept_of_a_cancelled_call(gate: Gate) -> None:
    """A client may send a large body and leave, many times, while the threads are busy."""

    class Body:
        def read(self) -> None:
            read.append(self)

    threads, read = TenantThreads(1), list[Body]()
    gate.hold(threads)
    body = Body()
    call, last = threads.submit("a", body.read), threads.submit("a", int)
    kept = weakref.ref(body)
    del body
    assert call.cancel()
    gc.collect()
    assert kept() is None
    gate.open()
    assert last.result(10) == 0 and not read


async def test_a_keys_text_does_not_wait_for_all_texts_of_another(
    backend: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = Authenticator(AuthSettings(mode="keys", keys=(key_of("a", A), key_of("b", B))))
    app: Any = build_api(backend, ByteTokenizer(), ApiSettings(tokenizer_threads=1), None, access)
    order: list[str] = []
    parse = app.handler._parse

    def noted(data: bytes, model: Any) -> Any:
        order.append(data.decode()[-4])
        return parse(data, model)

    monkeypatch.setattr(app.handler, "_parse", noted)
    gate.hold(app.handler._threads)

    def bodies(key: str) -> Any:
        return ask(app, "POST", "/tokenize", key, body={"prompt": LARGE, "user": key[0] * 2})

    requests = [asyncio.create_task(bodies(A)) for _ in range(5)]
    for _ in range(100):
        await asyncio.sleep(0)
    requests.append(asyncio.create_task(bodies(B)))
    for _ in range(100):
        await asyncio.sleep(0)
    gate.open()
    assert {found.status for found in await asyncio.gather(*requests)} == {200}
    assert order.index("b") <= 1


@pytest.mark.risk("R6")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score", "/tokenize"])
async def test_a_body_waits_for_a_thread_no_longer_than_its_routes_deadline(
    backend: Any, gate: Gate, path: str
) -> None:
    deadlines = DeadlineArgs(scoring_s=0.05, generation_s=0.05)
    app: Any = build_api(backend, ByteTokenizer(), ApiSettings(tokenizer_threads=1, deadlines=deadlines))
    gate.hold(app.handler._threads)
    async with asyncio.timeout(5):
        found = await ask(app, "POST", path, body={"prompt": LARGE})
    assert (found.status, found.code) == (408, "deadline_exceeded") and b"0.05 s" in found.body
