"""R17: requests that come together begin one after another, tenants in turn."""

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from deployments import proxy_middleware
from deployments.api.middleware import TOGETHER, RequestMiddleware
from deployments.api.request_context import RequestContext
from deployments.app import SWITCH_S
from deployments.auth.api_keys import ApiKey
from deployments.auth.authenticator import Authenticator
from deployments.config.settings import ApiSettings
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.proxy_middleware import LONG_S, ROUNDS, UNKNOWN, FairTurns, KnownKeys, ProxyMiddleware

MANY = 300
BEGINNING_S = 0.001  # of the loop, for each request


async def begun(tenants: list[str]) -> list[str]:
    """The tenants in the order in which their requests begin, each of which keeps the loop."""
    turns, found = FairTurns(), list[str]()

    async def request(tenant: str) -> None:
        await turns.take(tenant)
        found.append(tenant)
        time.sleep(BEGINNING_S)

    async with asyncio.TaskGroup() as group:
        for tenant in tenants:
            group.create_task(request(tenant))
    return found


@pytest.mark.risk(
    "R17", figure="beside 300 requests of another key that came before it, a request begins as the second"
)
async def test_a_request_begins_beside_hundreds_of_another_tenant() -> None:
    found = await begun(["heavy"] * MANY + ["light", "light"])
    assert len(found) == MANY + 2
    assert [place for place, tenant in enumerate(found) if tenant == "light"] == [2, 4]


@pytest.mark.risk("R17", planted=True)
async def test_one_queue_for_all_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FairTurns.take
    monkeypatch.setattr(FairTurns, "take", lambda turns, tenant: own(turns, ""))
    found = await begun(["heavy"] * MANY + ["light"])
    assert found.index("light") == MANY


async def begun_a_round(tenants: list[str]) -> list[int]:
    """How many requests begin in each round of the event loop in which any does."""
    turns, found, passed = FairTurns(together=TOGETHER), Counter[int](), 0

    async def request(tenant: str) -> None:
        await turns.take(tenant)
        found[passed] += 1

    tasks = [asyncio.create_task(request(tenant)) for tenant in tenants]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        passed += 1
    return list(found.values())


async def test_requests_of_one_tenant_alone_begin_a_few_in_a_round() -> None:
    assert await begun_a_round(["one"] * (2 * TOGETHER + 4)) == [1, TOGETHER, TOGETHER, 3]


@pytest.mark.risk("R17")
async def test_while_there_is_another_tenant_each_begins_in_a_round_of_its_own() -> None:
    assert set(await begun_a_round(["one"] * 2 * TOGETHER + ["another"])) == {1}


async def answered_by_the_proxy(keys: list[bytes]) -> list[bytes]:
    """Keys in the order in which the proxy hands their requests on, after one request of `REAL`, the only valid key."""
    found = list[bytes]()

    async def ingress(scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"])[b"authorization"]
        found.append(key)
        await send({"type": "http.response.start", "status": 200 if key == REAL else 401})
        await send({"type": "http.response.body"})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None: ...

    proxy = ProxyMiddleware(ingress)

    async def request(key: bytes) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"authorization", key)]}
        await proxy(scope, receive, send)

    await request(REAL)
    found.clear()
    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(request(key))
    return found


REAL = b"Bearer real"
INVENTED = [b"Bearer %d" % number for number in range(MANY)]


@pytest.mark.risk("R17", figure="beside 300 requests with a key invented for each, a key's request begins second")
async def test_keys_that_a_client_invents_share_one_turn_in_the_proxy() -> None:
    assert (await answered_by_the_proxy([*INVENTED, REAL])).index(REAL) <= 1


@pytest.mark.risk("R17", planted=True)
async def test_a_turn_for_each_invented_key_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownKeys, "turn_of", lambda keys, value: hash(value))
    assert (await answered_by_the_proxy([*INVENTED, REAL])).index(REAL) > MANY // 2


def test_the_proxy_learns_keys_from_answers_that_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "MAX_KNOWN", 2)
    keys = KnownKeys()
    for method, status in (("GET", 200), ("POST", 400), ("POST", 401), ("POST", 0)):
        keys.answered(REAL, method, status)
        assert keys.turn_of(REAL) == UNKNOWN
    keys.answered(b"", "POST", 200)
    assert keys.turn_of(b"") == UNKNOWN
    for key in (REAL, b"b"):
        keys.answered(key, "POST", 200)
    assert keys.turn_of(REAL) not in (UNKNOWN, keys.turn_of(b"b"))
    keys.turn_of(REAL)
    keys.answered(b"c", "POST", 200)
    assert keys.turn_of(b"b") == UNKNOWN != keys.turn_of(REAL)
    keys.answered(REAL, "GET", 401)
    assert keys.turn_of(REAL) == UNKNOWN


async def begun_ahead(turns: FairTurns) -> tuple[list[str], int]:
    """The first ten that begin among 20 of one tenant and, behind them, 3 of another, and how many had to pass."""
    found, passes = list[str](), 0

    async def request(tenant: str) -> None:
        await turns.take(tenant)
        found.append(tenant)

    tasks = [asyncio.create_task(request(tenant)) for tenant in ["heavy"] * 20 + ["light"] * 3]
    while len(found) < 10:
        before = len(found)
        for _ in range(4 * ROUNDS):
            await asyncio.sleep(0)
        if len(found) == before:
            turns.passed()
            passes += 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found[:10], passes


@pytest.mark.risk("R17")
async def test_no_more_begin_than_may_be_ahead_of_the_next_process() -> None:
    turns = FairTurns(2)
    found, passes = await begun_ahead(turns)
    assert passes == 8
    assert found == ["heavy", "heavy", "light", "heavy", "light", "heavy", "light", "heavy", "heavy", "heavy"]
    turns.passed()
    turns.passed()
    await asyncio.wait_for(turns.take("another"), 1)  # those that were cancelled hold no place


@pytest.mark.risk("R17", planted=True)
async def test_without_a_bound_all_would_be_seen_to_begin() -> None:
    _, passes = await begun_ahead(FairTurns())
    assert passes == 0


async def test_one_that_is_cancelled_as_its_turn_comes_holds_no_place() -> None:
    turns = FairTurns(1)
    await turns.take("a")
    waiting = asyncio.create_task(turns.take("a"))
    for _ in range(2 * ROUNDS):
        await asyncio.sleep(0)
    turns.passed()  # it is its turn, and it has not run yet
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(turns.take("b"), 1)


@pytest.fixture
def busy_thread() -> Iterator[None]:
    """A thread that computes in Python, as those do that read large requests and write large answers."""
    usual, stop = sys.getswitchinterval(), threading.Event()

    def compute() -> None:
        while not stop.is_set():
            [str(number) for number in range(100)]

    thread = threading.Thread(target=compute)
    thread.start()
    yield
    stop.set()
    thread.join()
    sys.setswitchinterval(usual)


async def seconds_of_wakes(switch_s: float) -> list[float]:
    """Returns the seconds of ten wakes of the event loop, 1 ms apart, of several tries, ascending. Other processes may
    take a core from either thread."""
    sys.setswitchinterval(switch_s)
    found = list[float]()
    for _ in range(8):
        since = time.perf_counter()
        for _ in range(10):
            await asyncio.sleep(0.001)
        found.append(time.perf_counter() - since)
    return sorted(found)


@pytest.mark.risk("R17", figure="ten wakes of an ingress beside a thread that computes: 11 ms, as Python comes 75")
async def test_a_small_request_does_not_wait_for_a_large_ones_thread_at_every_wake(busy_thread: None) -> None:
    taken = (await seconds_of_wakes(SWITCH_S))[0]
    print(f"R17 ten wakes beside a thread that computes: {1e3 * taken:.0f} ms")
    assert taken < 0.04


@pytest.mark.risk("R17", planted=True)
async def test_turns_of_threads_as_python_comes_would_be_seen(busy_thread: None) -> None:
    taken = (await seconds_of_wakes(0.005))[4]
    print(f"R17 the same with Python's own interval: {1e3 * taken:.0f} ms")
    assert taken > 0.04


async def test_a_request_alone_does_not_wait() -> None:
    turns = FairTurns()
    for _ in range(3):
        taken = turns.take("a")
        with pytest.raises(StopIteration):  # it ends without giving the loop away
            taken.send(None)
        for _ in range(ROUNDS):
            await asyncio.sleep(0)


async def test_requests_of_clients_that_left_take_no_turn() -> None:
    turns = FairTurns()
    await turns.take("a")
    gone = [asyncio.create_task(turns.take("a")) for _ in range(50)]
    last = asyncio.create_task(turns.take("a"))
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    rounds = 0
    while not last.done():
        await asyncio.sleep(0)
        rounds += 1
    assert rounds <= 2 * ROUNDS


def test_another_loop_begins_anew() -> None:
    turns = FairTurns()

    async def left_behind() -> None:
        await turns.take("a")
        asyncio.get_running_loop().create_task(turns.take("a"))

    asyncio.run(left_behind())
    asyncio.run(asyncio.wait_for(turns.take("b"), 1))


async def test_where_a_round_takes_long_the_next_request_begins_with_it() -> None:
    turns, rounds = FairTurns(), 0
    await turns.take("a")
    waiting = asyncio.create_task(turns.take("b"))
    while not waiting.done():
        await asyncio.sleep(0)
        time.sleep(LONG_S)
        rounds += 1
    assert rounds <= 3 < ROUNDS


async def most_ahead(turns: FairTurns, tenants: list[str]) -> int:
    """How many of these begin before one passes."""
    tasks = [asyncio.create_task(turns.take(tenant)) for tenant in tenants]
    for _ in range(len(tasks) * 2 * ROUNDS):
        await asyncio.sleep(0)
    began = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return began


@pytest.mark.risk("R17")
async def test_fewer_may_be_ahead_while_requests_of_several_tenants_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "SHARED_S", 60.0)
    assert await most_ahead(FairTurns(20, 4), ["a"] * 30) == 20
    both = FairTurns(20, 4)
    assert await most_ahead(both, ["a", "b"] * 15) == 4
    assert both.shared and both.many_ahead


@pytest.mark.risk("R17", planted=True)
async def test_tenants_that_no_bound_notices_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "SHARED_S", -1.0)
    turns = FairTurns(20, 4)
    assert await most_ahead(turns, ["a", "b"] * 15) == 20
    assert not turns.shared


async def answered(monkeypatch: pytest.MonkeyPatch, tenants: list[str]) -> list[str]:
    """The tenants in the order of their answers, which are ready together; each keeps the loop as it is sent."""
    ready, found = asyncio.Event(), list[str]()

    async def answer(context: RequestContext, receive: Receive) -> Response:
        await ready.wait()
        return Sent(context.tenant, found)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None: ...

    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    access = Authenticator()
    monkeypatch.setattr(access, "identify", lambda headers, route: ApiKey(name=headers[0][1].decode(), digest=b""))
    service = RequestMiddleware(
        app,
        settings=ApiSettings(),
        observer=IngressMetrics(),
        router=Router([Route("/v1/completions", lambda request: None, methods=["POST"])]),
        answers={("POST", "/v1/completions"): answer},
        access=access,
        check_open=lambda timeout_s, tenant: None,
    )
    async with asyncio.TaskGroup() as group:
        for tenant in tenants:
            headers = [(b"authorization", tenant.encode()), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
            group.create_task(service(scope, receive, send))
            for _ in range(4 * ROUNDS):  # until it has begun
                await asyncio.sleep(0)
        ready.set()
    return found


class Sent(Response):
    """Notes a tenant as its answer begins."""

    def __init__(self, tenant: str, found: list[str]) -> None:
        super().__init__()
        self._tenant, self._found = tenant, found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._found.append(self._tenant)
        time.sleep(BEGINNING_S)


@pytest.mark.risk("R17", figure="beside 300 answers of another key that were ready before it, an answer is sent third")
async def test_an_answer_leaves_beside_hundreds_of_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "SHARED_S", 60.0)
    found = await answered(monkeypatch, ["light", *["heavy"] * MANY, "light"])
    assert len(found) == MANY + 2
    assert [place for place, tenant in enumerate(found) if tenant == "light"] == [0, 2]


@pytest.mark.risk("R17", planted=True)
async def test_answers_in_the_order_of_their_requests_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "SHARED_S", -1.0)
    found = await answered(monkeypatch, ["light", *["heavy"] * MANY, "light"])
    assert found.index("light", 1) == MANY + 1
