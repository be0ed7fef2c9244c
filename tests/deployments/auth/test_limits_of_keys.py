"""Tests what a key may have in use: requests, tokens, bodies, priorities; and its part of the prefix cache (S12)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.app import build_api
from deployments.api.request_context import RequestContext
from deployments.auth.api_keys import ApiKey, KeyLimits, digest_of, domain_of
from deployments.auth.authenticator import Authenticator, AuthSettings
from deployments.auth.usage import MeteredBackend, RateLimiter
from deployments.config.settings import ApiSettings
from deployments.errors import ApiError
from engine.requests import GenerateRequest
from engine.tokenizer.tokenizer import load_tokenizer
from gpu_sampler.sampling_params import SamplingParams

A, B = "a" * 40, "b" * 40
COMPLETION = {"prompt": "a", "max_tokens": 3}
SCORING = {"query": "q", "items": ["a"], "label_token_ids": [1, 2]}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def limited(clock: Clock, ingresses: int = 1, **limits: int) -> RateLimiter:
    quotas = RateLimiter(clock)
    quotas.use({"a": KeyLimits(**limits)}, ingresses)
    return quotas


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(ApiError) as refused:
        call()
    return refused.value.code, refused.value.headers()["retry-after"]


def enter(quotas: RateLimiter, name: str = "a") -> Any:
    held = quotas.request(name)
    held.__enter__()
    return held


def leave(held: Any) -> None:
    held.__exit__(None, None, None)


# Counting.


def test_tokens_come_back_with_time_and_debts_are_paid_first() -> None:
    clock = Clock()
    quotas = limited(clock, tokens_per_minute=60)
    quotas.charge("a", 100)
    assert refusal(lambda: quotas.charge("a", 1)) == ("quota_exceeded", "41")
    clock.now = 40.0
    assert refusal(lambda: quotas.charge("a", 1)) == ("quota_exceeded", "1")
    clock.now = 40.5
    quotas.charge("a", 1)
    clock.now = 1000.0
    quotas.charge("a", 60)
    assert refusal(lambda: quotas.charge("a", 1))[0] == "quota_exceeded"


@given(costs=st.lists(st.integers(1, 500), min_size=30, max_size=80), share=st.integers(1, 5))
def test_no_sizes_of_requests_get_more_than_the_rate(costs: list[int], share: int) -> None:
    """A client that asks as early as allowed gets the rate, and once a minute's worth and one request more."""
    clock = Clock()
    quotas = limited(clock, share, tokens_per_minute=600)
    used = 0
    for cost in costs:
        while True:
            try:
                quotas.charge("a", cost)
            except ApiError as refused:
                assert refused.retry_after_s is not None
                clock.now += refused.retry_after_s
            else:
                break
        used += cost
    assert used <= (600 + 600 * clock.now / 60) / share + max(costs)
    assert used >= 600 * clock.now / 60 / share - 1


def test_requests_in_flight_are_shared_out_over_the_ingresses_and_rounded_up() -> None:
    for ingresses, most in ((1, 5), (2, 3), (3, 2), (8, 1)):
        quotas = limited(Clock(), ingresses, max_inflight_requests=5)
        held = [enter(quotas) for _ in range(most)]
        assert refusal(lambda quotas=quotas: enter(quotas)) == ("quota_exceeded", "1")  # type: ignore[misc]
        leave(held.pop())
        enter(quotas)
        enter(quotas, "somebody else")


def test_what_is_in_use_survives_a_change_of_limits_and_is_forgotten_with_the_name() -> None:
    clock = Clock()
    quotas = limited(clock, max_inflight_requests=2, tokens_per_minute=60)
    held = enter(quotas)
    quotas.charge("a", 80)
    quotas.use({"a": KeyLimits(max_inflight_requests=1, tokens_per_minute=120)}, 1)
    assert refusal(lambda: enter(quotas))[0] == "quota_exceeded"
    leave(held)
    assert refusal(lambda: quotas.charge("a", 1)) == ("quota_exceeded", "11")
    held = enter_when_paid(quotas, clock)
    quotas.use({}, 1)
    leave(held)
    assert not quotas._usage
    quotas.use({"a": KeyLimits(tokens_per_minute=5)}, 1)
    quotas.charge("a", 1)


def enter_when_paid(quotas: RateLimiter, clock: Clock) -> Any:
    clock.now += 60
    return enter(quotas)


def test_a_limit_on_tokens_that_comes_later_begins_with_a_minutes_worth() -> None:
    quotas = limited(Clock(), max_inflight_requests=2)
    enter(quotas)
    quotas.use({"a": KeyLimits(max_inflight_requests=2, tokens_per_minute=10)}, 1)
    quotas.charge("a", 1)


# Through the app.


async def test_one_request_too_many_is_refused_before_its_body_is_read_and_others_are_not(
    keyed: Any, key_of: Any, ask: Any, backend: Any
) -> None:
    world = keyed(key_of("a", A, max_inflight_requests=1), key_of("b", B))
    backend.gate = asyncio.Event()
    first = asyncio.create_task(ask(world.app, "POST", "/v1/completions", A, body=COMPLETION))
    while not backend.tasks:
        await asyncio.sleep(0)
    second = await ask(world.app, "POST", "/v1/completions", A, body=COMPLETION)
    assert (second.status, second.code, second.headers["retry-after"], second.read) == (
        429, "quota_exceeded", "1", False,
    )  # fmt: skip
    assert (await ask(world.app, "GET", "/v1/models", A)).status == 200
    other = asyncio.create_task(ask(world.app, "POST", "/v1/completions", B, body=COMPLETION))
    backend.gate.set()
    assert ((await first).status, (await other).status) == (200, 200)
    assert (await ask(world.app, "POST", "/v1/completions", A, body=COMPLETION)).status == 200


async def test_a_body_may_be_as_long_as_the_key_says(keyed: Any, key_of: Any, ask: Any) -> None:
    world = keyed(key_of("a", A, max_body_bytes=100), key_of("b", B))
    for size, status in ((100, 200), (101, 413)):
        body = b'{"prompt": "a"}'.ljust(size)
        for headers in ([], [(b"content-length", b"%d" % size)]):
            found = await ask(world.app, "POST", "/v1/completions", A, headers=headers, body=body)
            assert found.status == status and (status == 200 or "100 bytes" in found.body.decode())
        assert (await ask(world.app, "POST", "/v1/completions", B, body=body)).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/generative_scoring", SCORING),
        ("/v1/score", SCORING),
        ("/v1/decisions", {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]}),
    ],
)
async def test_the_engine_hears_who_asks_how_urgently_and_in_which_part_of_the_cache(
    keyed: Any, key_of: Any, ask: Any, backend: Any, path: str, body: dict[str, Any]
) -> None:
    world = keyed(key_of("a", A, min_priority=3), key_of("b", B))
    for key in (A, B):
        assert (await ask(world.app, "POST", path, key, body=body)).status == 200
    found: list[Any] = [call[0] for call in backend.tasks] + backend.score_tasks
    one, other = found
    assert (one.tenant, one.priority, one.cache_salt) == ("a", 3, domain_of("a"))
    assert (other.tenant, other.priority, other.cache_salt) == ("b", 0, domain_of("b"))


async def test_a_key_goes_no_further_ahead_than_it_may(keyed: Any, key_of: Any, ask: Any, backend: Any) -> None:
    world = keyed(key_of("a", A, min_priority=-5))
    for priority, status in ((-5, 200), (-6, 422), (7, 200), (1001, 422)):
        found = await ask(world.app, "POST", "/v1/completions", A, body=COMPLETION | {"priority": priority})
        assert found.status == status
        if priority == -6:
            assert b"`priority` must be in [-5, 1000] for this API key. Given: -6." in found.body
    assert [call[0].priority for call in backend.tasks] == [-5, 7]


async def test_a_request_that_fails_several_ways_reports_the_first(keyed: Any, key_of: Any, ask: Any) -> None:
    world = keyed(key_of("a", A, "score", tokens_per_minute=1, max_body_bytes=5), key_of("b", B, "metrics"))
    world.access.rate_limiter.charge("a", 5)
    bad = [(b"content-length", b"x")]
    order = [
        ("/v1/nope", None, bad, "invalid_header"),
        ("/v1/nope", None, [], "invalid_api_key"),
        ("/v1/nope", B, [], "not_found"),
        ("/v1/score", B, [], "permission_denied"),
        ("/v1/score", A, [], "quota_exceeded"),
    ]
    for path, key, headers, code in order:
        assert (await ask(world.app, "POST", path, key, headers=headers, body=b"x" * 9)).code == code
    world.access.rate_limiter.settle("a", 100)
    assert (await ask(world.app, "POST", "/v1/score", A, body=b"x" * 9)).code == "body_too_large"


# The cost of work, over a real engine.


@pytest.fixture
async def metered(replica_backend: Any) -> AsyncIterator[Any]:
    """An app over the toy engine, with the keys A and B; and a way to learn what A has used."""
    backend = await replica_backend()
    access = Authenticator(
        AuthSettings(
            mode="keys",
            keys=(
                ApiKey(name="a", digest=digest_of(A.encode()), domain=domain_of("a"),
                    limits=KeyLimits(tokens_per_minute=10**9)),
                ApiKey(name="b", digest=digest_of(B.encode()), domain=domain_of("b")),
            ),
        )
    )  # fmt: skip
    access.rate_limiter._clock = Clock()
    access.rate_limiter.use({"a": KeyLimits(tokens_per_minute=10**9)}, 1)
    app = build_api(backend, load_tokenizer("toy"), ApiSettings(), None, access)

    def used() -> int:
        return round(10**9 - access.rate_limiter._of("a").balance)

    yield app, used, backend


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generative_scoring", {"query": "a query of a length", "items": ["x", "yz", "zzz"], "label_token_ids": [1]}),
        ("/generative_scoring", {"query": "a query of a length", "items": ["x", "yz"], "continuations": ["one", "of"]}),
        ("/v1/completions", {"prompt": "some prompt", "max_tokens": 7, "ignore_eos": True, "n": 3}),
        ("/v1/completions", {"prompt": ["p", "qr"], "max_tokens": 700, "stop_token_ids": [*range(40, 160)]}),
        ("/v1/completions", {"prompt": "some prompt", "max_tokens": 7, "ignore_eos": True, "stream": True,
                             "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "some prompt", "max_tokens": 7, "ignore_eos": True, "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": "some prompt", "max_tokens": 7, "ignore_eos": True, "stream": True,
                             "stream_options": {"include_usage": True}, "echo": True, "logprobs": 0}),
    ],
)  # fmt: skip
async def test_a_key_pays_for_what_was_computed(metered: Any, ask: Any, path: str, body: Any) -> None:
    """The second time the prompt is cached, and costs nothing."""
    app, used, _ = metered
    for _ in range(2):
        before = used()
        found = await ask(app, "POST", path, A, body=body)
        assert found.status == 200, found.body
        text = found.body.decode()
        whole = json.loads(text.split("data: ")[-2] if body.get("stream") else text)
        usage = whole["usage"]
        cost = usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert used() - before == cost


async def test_a_stream_that_its_client_leaves_costs_what_it_got(keyed: Any, key_of: Any, backend: Any) -> None:
    quotas = limited(Clock(), tokens_per_minute=1000)
    params = SamplingParams(max_tokens=400)
    request = GenerateRequest(request_id="t", prompt=np.arange(9, dtype=np.int32), params=params, seed=0, tenant="a")
    replies = MeteredBackend(backend, quotas).stream((request,))
    await anext(replies)
    assert quotas._of("a").balance == 1000 - 409
    await anext(replies)
    await replies.aclose()  # type: ignore[attr-defined]
    assert backend.cancelled == 1
    assert quotas._of("a").balance == 1000 - (9 - 3 + 2)  # three of the prompt were cached


async def test_a_resumed_generation_costs_the_tokens_that_it_resumes_behind(backend: Any) -> None:
    """They are computed again, of a stream too. Three tokens of each prompt were cached."""
    quotas = limited(Clock(), tokens_per_minute=1000)
    backend.script = b"a" * 60
    params = SamplingParams(max_tokens=60)
    request = GenerateRequest(
        request_id="t",
        prompt=np.arange(9, dtype=np.int32),
        params=params,
        seed=0,
        tenant="a",
        emitted=(np.full(50, 97, np.int32),),
    )
    metered = MeteredBackend(backend, quotas)
    await metered.generate((request,))
    assert quotas._of("a").balance == 1000 - (9 - 3 + 50 + 10)
    async for _ in metered.stream((request,)):
        pass
    assert quotas._of("a").balance == 1000 - 2 * (9 - 3 + 50 + 10)


async def test_a_stream_that_is_refused_when_it_has_got_just_what_was_charged_is_paid(backend: Any) -> None:
    """512 tokens are expected of it, and three of its prompt were cached."""
    quotas = limited(Clock(), tokens_per_minute=1000)
    backend.script, backend.fail, backend.fail_after = b"a" * 600, ApiError("draining", "Planted."), 515
    params = SamplingParams(max_tokens=600)
    request = GenerateRequest(request_id="t", prompt=np.arange(9, dtype=np.int32), params=params, seed=0, tenant="a")
    with pytest.raises(ApiError, match="Planted"):
        async for _ in MeteredBackend(backend, quotas).stream((request,)):
            pass
    assert quotas._of("a").balance == 1000 - (9 - 3 + 515)


@pytest.mark.parametrize(("code", "paid"), [("overloaded", False), ("draining", False), ("internal_error", True)])
@pytest.mark.parametrize(
    ("path", "body", "cost"), [("/generative_scoring", SCORING, 3), ("/v1/completions", COMPLETION, 5)]
)
async def test_what_was_refused_costs_nothing_and_what_failed_on_its_way_is_paid(
    keyed: Any, key_of: Any, ask: Any, backend: Any, code: Any, paid: bool, path: str, body: Any, cost: int
) -> None:
    world = keyed(key_of("a", A, tokens_per_minute=1000))
    world.access.rate_limiter._clock = Clock()
    backend.fail = ApiError(code, "Planted.")
    assert (await ask(world.app, "POST", path, A, body=body)).code == code
    assert world.access.rate_limiter._of("a").balance == 1000 - cost * paid


# S12: the cache tells one key nothing about another's.


@pytest.mark.risk("S12")
@given(
    names=st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=2, unique=True),
    salts=st.lists(st.none() | st.text(min_size=1, max_size=256), min_size=2, max_size=2),
)
def test_no_salt_leads_into_another_names_domain(names: list[str], salts: list[str | None]) -> None:
    keys = (ApiKey(name=name, digest=b"", domain=domain_of(name)) for name in names)
    one, other = (RequestContext(request_id="r", key=key) for key in keys)
    assert one.salt(salts[0]) != other.salt(salts[1])
    assert (one.salt(salts[0]) == one.salt(salts[1])) == ((salts[0] or "") == (salts[1] or ""))


async def probe(app: Any, ask: Any, server: Any, spy: str, **salt: str) -> tuple[int, int]:
    """Tokens that the engine computed under the spy's key, for a prompt of A's and for one that was never sent."""

    async def computed(key: str, letter: str, **more: str) -> int:
        before = server.engine.stats().computed_tokens
        body = {"query": letter * 40, "items": ["a"], "label_token_ids": [1]} | more
        assert (await ask(app, "POST", "/generative_scoring", key, body=body)).status == 200
        found: int = server.engine.stats().computed_tokens - before
        return found

    await computed(spy, "v", **salt)  # what begins every prompt is cached
    await computed(A, "x")
    return await computed(spy, "x", **salt), await computed(spy, "y", **salt)


@pytest.mark.risk("S12", figure="0 tokens of another's prompt cached")
@pytest.mark.parametrize("salt", [{}, {"cache_salt": domain_of("a")}])
async def test_probing_anothers_prompt_finds_nothing_cached(metered: Any, ask: Any, salt: dict[str, str]) -> None:
    """Time depends on what is computed, and that is the cost of a prompt that was never sent."""
    app, _, backend = metered
    theirs, new = await probe(app, ask, backend.server, B, **salt)
    assert theirs == new > 40


async def test_its_own_prompt_is_cached(metered: Any, ask: Any) -> None:
    app, _, backend = metered
    theirs, new = await probe(app, ask, backend.server, A)
    assert theirs < new / 2


@pytest.mark.risk("S12", planted=True)
async def test_a_cache_that_all_share_would_be_seen(metered: Any, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app, _, backend = metered
    monkeypatch.setattr(RequestContext, "salt", lambda context, given=None: given or "")
    theirs, new = await probe(app, ask, backend.server, B)
    assert theirs < new / 2
