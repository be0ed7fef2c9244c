"""No request leaves a reference cycle behind, in the ingress or in the replica: its objects go with the last reference.

What waits for the garbage collector stops the event loop for tens of milliseconds when it comes.
"""

import gc
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.api.request_context import ClientWatch
from tests.deployments.fleets import Fleet
from tests.deployments.replicas import assert_left_empty

pytestmark = pytest.mark.parametrize("path", ["link"], indirect=True)  # the handle's frames are Serve's
OURS = ("deployments", "engine", "gpu_sampler", "scoring")
REQUESTS = 20
ROUNDS = 5
SCORES = {"query": "a chair", "items": ["red"], "label_token_ids": [65, 66]}
COMPLETION = {"prompt": "a chair", "max_tokens": 4}
LATE = {"x-request-timeout-seconds": "0.005"}
BODIES: dict[str, tuple[str, dict[str, Any], dict[str, str], int]] = {  # path, body, headers, status
    "score": ("/generative_scoring", SCORES, {}, 200),
    "many items": ("/generative_scoring", SCORES | {"items": ["red"] * 40}, {}, 200),
    "likelihoods": ("/v1/completions", COMPLETION | {"max_tokens": 0, "echo": True, "logprobs": 1}, {}, 200),
    "completions": ("/v1/completions", COMPLETION | {"prompt": ["a chair", "a lamp"], "n": 2}, {}, 200),
    "streams": ("/v1/completions", COMPLETION | {"n": 2, "stream": True}, {}, 200),
    "log-probabilities": ("/v1/completions", COMPLETION | {"logprobs": 3, "echo": True}, {}, 200),
    "refused": ("/v1/completions", COMPLETION | {"max_tokens": -4}, {}, 422),
    "late": ("/v1/completions", COMPLETION | {"max_tokens": 1_000, "ignore_eos": True}, LATE, 408),
}


@pytest.fixture
def collected() -> Iterator[Callable[[], Counter[str]]]:
    """Returns our own types that wait for the collector, with how many of each, and ends them. Until then all are kept,
    so that none goes unseen. What was there before the test is not looked at: with all modules loaded, collecting
    it takes half a second."""

    def found() -> Counter[str]:
        gc.collect()
        kinds = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.garbage)
        gc.garbage.clear()
        kept = gc.get_debug()
        gc.set_debug(0)
        gc.collect()  # else the next call finds the same cycles again
        gc.set_debug(kept)
        return Counter({name: count for name, count in kinds.items() if name.startswith(OURS)})

    gc.freeze()
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()


async def ask(fleet: Fleet, name: str) -> None:
    path, body, headers, status = BODIES[name]
    for _ in range(REQUESTS):
        answer = await fleet.client.http.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text


async def leave(fleet: Fleet, name: str) -> None:
    """Sends requests whose client leaves before their answer."""
    path, body, *_ = BODIES[name]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
    }
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1)}
    for _ in range(REQUESTS):
        message = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        messages = itertools.chain([message], itertools.repeat({"type": "http.disconnect"}))

        async def receive(messages: Any = messages) -> Any:
            return next(messages)

        async def send(message: Any) -> None: ...

        await fleet.client.app(scope | {"state": {}}, receive, send)


async def left_by(fleet: Fleet, name: str, collected: Callable[[], Counter[str]], send: Any = ask) -> Counter[str]:
    """Returns what requests left to the collector in three of five rounds. What other tests left late is in one or two,
    and what the app's own collection froze is missing from one."""
    await send(fleet, name)  # what is made once is made now
    await assert_left_empty(fleet.servers[0])
    collected()
    gc.set_debug(gc.DEBUG_SAVEALL)
    rounds = []
    for _ in range(ROUNDS):
        await send(fleet, name)
        await assert_left_empty(fleet.servers[0])
        rounds.append(collected())
    kinds = set[str]().union(*rounds)
    return Counter({kind: statistics.median_low([counts[kind] for counts in rounds]) for kind in kinds})


@pytest.mark.parametrize("name", list(BODIES))
async def test_a_request_leaves_nothing_to_the_collector(
    make_fleet: Callable[..., Any], collected: Callable[[], Counter[str]], name: str
) -> None:
    left = await left_by(await make_fleet(1), name, collected)
    assert max(left.values(), default=0) < REQUESTS / 2, left


@pytest.mark.parametrize("name", ["score", "completions", "streams"])
async def test_nor_does_one_whose_client_leaves(
    make_fleet: Callable[..., Any], collected: Callable[[], Counter[str]], name: str
) -> None:
    left = await left_by(await make_fleet(1), name, collected, leave)
    assert max(left.values(), default=0) < REQUESTS / 2, left


async def test_a_cycle_would_be_seen(
    make_fleet: Callable[..., Any], collected: Callable[[], Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ClientWatch.__enter__

    def enter(watch: Any) -> Any:
        watch.itself = watch
        return own(watch)

    monkeypatch.setattr(ClientWatch, "__enter__", enter)
    left = await left_by(await make_fleet(1), "score", collected)
    assert left["deployments.api.request_context.ClientWatch"] > REQUESTS / 2


async def test_what_waits_once_is_no_request_s(
    make_fleet: Callable[..., Any], collected: Callable[[], Counter[str]]
) -> None:
    """Another test's app may become free at any time."""
    sent = itertools.count()

    async def with_a_late_one(fleet: Fleet, name: str) -> None:
        await ask(fleet, name)
        if next(sent) == 1:  # in the first round that counts
            for watch in [object.__new__(ClientWatch) for _ in range(REQUESTS)]:
                watch.itself = watch  # type: ignore[attr-defined]

    left = await left_by(await make_fleet(1), "score", collected, with_a_late_one)
    assert max(left.values(), default=0) < REQUESTS / 2, left
