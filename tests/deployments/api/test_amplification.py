"""S1: a small body cannot cost much. One that would is refused from lengths alone, before anything is made of it."""

import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from deployments.api.generation.response import GenerationRun
from deployments.config.settings import ApiSettings
from deployments.limits import Limits, WireLimits
from tests.deployments.clients import settings_of_every_route

PREDICATE = {"type": "predicate", "instructions": "b"}
MOST_MS = 500
MOST_FACTOR = 24  # bytes held at a time for a byte of the body: what JSON's lists and numbers themselves take
BASE = 1 << 20  # and what any request takes


class Case(NamedTuple):
    path: str
    what: str
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def question(count: int) -> dict[str, Any]:
    return {"type": "choice", "instructions": "b", "choices": [{"value": str(n)} for n in range(count)]}


MANY = 9_000
SCORING = {"query": "q", "items": ["a"], "label_token_ids": [1]}
FOLLOWED = {"query": "q", "items": ["a"], "continuations": ["c"]}
CASES = [
    Case("/v1/completions", "prompts", {"prompt": ["a"] * MANY}),
    Case("/v1/completions", "prompts of ids", {"prompt": [[1]] * MANY}),
    Case("/v1/completions", "prompts x n", {"prompt": ["a"] * 1024, "n": 128}),
    Case("/v1/completions", "n", {"prompt": "a", "n": 10**9}),
    Case("/v1/completions", "max_tokens", {"prompt": "a", "max_tokens": 10**9}),
    Case("/v1/completions", "rows x max_tokens", {"prompt": ["a"] * 64, "n": 128, "max_tokens": 4000}),
    Case("/v1/completions", "x logprobs", {"prompt": ["a"] * 64, "n": 8, "max_tokens": 2000, "logprobs": 20}),
    Case("/v1/completions", "echo x logprobs", {"prompt": [[1] * 3000] * 30, "n": 8, "logprobs": 20, "echo": True}),
    Case("/v1/completions", "stop", {"prompt": "a", "stop": ["s"] * MANY}),
    Case("/v1/completions", "stop_token_ids", {"prompt": "a", "stop_token_ids": [1] * MANY}),
    Case("/v1/completions", "logit_bias", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(MANY)}}),
    Case("/v1/completions", "allowed_token_ids", {"prompt": "a", "allowed_token_ids": [1] * MANY}),
    Case("/v1/completions", "bad_words", {"prompt": "a", "bad_words": ["w"] * MANY}),
    Case("/v1/completions", "logprob_token_ids", {"prompt": "a", "logprob_token_ids": [1] * MANY}),
    Case("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "a"}] * MANY}),
    Case("/generative_scoring", "items", {"query": "q", "items": ["a"] * MANY, "label_token_ids": [1]}),
    Case("/generative_scoring", "x labels", SCORING | {"items": ["a"] * 4096, "label_token_ids": [*range(256)]}),
    Case("/generative_scoring", "labels", {"query": "q", "items": ["a"], "label_token_ids": [*range(MANY)]}),
    Case("/generative_scoring", "x query", SCORING | {"query": "q" * 8000, "items": ["a"] * 4096, "seam": "joint"}),
    Case("/generative_scoring", "continuations", {"query": "q", "items": ["a"], "continuations": ["c"] * MANY}),
    Case("/generative_scoring", "x continuations", FOLLOWED | {"items": ["a"] * 4096, "continuations": ["c"] * 128}),
    Case("/v1/score", "items", {"query": "q", "items": ["a"] * MANY, "label_token_ids": [1]}),
    Case("/v1/score", "items x query", {"query": "q" * 8000, "items": ["a"] * 4096, "label_token_ids": [1]}),
    Case("/v1/rerank", "documents", {"query": "q", "documents": ["a"] * MANY}),
    Case("/rerank", "texts", {"query": "q", "texts": ["a"] * MANY}),
    Case("/v1/decisions", "questions", {"input": "a", "questions": [PREDICATE] * MANY}),
    Case("/v1/decisions", "choices", {"input": "a", "questions": [question(MANY)]}),
    Case("/detokenize", "nesting", {"tokens": [], "x": json.loads("[" * 200 + "]" * 200)}),
]  # fmt: skip


@pytest.fixture
def settings() -> ApiSettings:
    return settings_of_every_route()


class Cost(NamedTuple):
    status: int
    kb: float
    ms: float


async def cost(client: Any, case: Case) -> Cost:
    """Measures a refusal: the most that was held at a time beyond the body, and how long it took without that being
    counted. The first request is not looked at: it may make what all of them use."""
    data = json.dumps(case.body).encode()
    await client.post(case.path, data)
    started = time.process_time()
    found = await client.post(case.path, data)
    ms = 1000 * (time.process_time() - started)
    tracemalloc.start()
    try:
        await client.post(case.path, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= BASE + MOST_FACTOR * len(data), f"{case}: {peak >> 10} KiB for a body of {len(data) >> 10} KiB"
    assert ms <= MOST_MS, f"{case}: {ms:.0f} ms"
    return Cost(found.status_code, peak / 1024, ms)


@pytest.mark.risk("S1", figure="28 refusals: at most 2,177 KiB and 10 ms of processor time each")
async def test_what_would_cost_much_is_refused_for_little(client: Any, backend: Any) -> None:
    found = {str(case): await cost(client, case) for case in CASES}
    assert not [name for name, one in found.items() if one.status not in (400, 413, 422)]
    assert not backend.tasks and not backend.score_tasks
    worst = max(found, key=lambda name: found[name].kb)
    slowest = max(found, key=lambda name: found[name].ms)
    print(f"{len(found)} refusals: at most {found[worst].kb:.0f} KiB ({worst}), {found[slowest].ms:.0f} ms ({slowest})")


@pytest.mark.risk("S1", planted=True)
async def test_work_before_the_count_would_be_seen(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that makes rows first and counts them afterwards."""
    from deployments.api.generation import request_builder

    own: Callable[..., Any] = request_builder.check_rows

    def late(api: Any, count: int, params: Any) -> None:
        rows = [[params, bytes(200)] for _ in range(count * params.n)]
        own(api, len(rows) // params.n, params)

    monkeypatch.setattr(request_builder, "check_rows", late)
    [case] = [case for case in CASES if case.what == "prompts x n"]
    with pytest.raises(AssertionError, match="KiB for a body"):
        await cost(client, case)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
async def test_a_prompt_that_each_choice_repeats_is_counted(
    client_of: Any, backend: Any, field: str, stream: bool
) -> None:
    """At eight bytes a token and choice, before the prompt is decoded or a replica hears of it."""
    limits = Limits(wire=WireLimits(max_answer_bytes=80_000))
    client = client_of(ApiSettings(limits=limits))
    body = {"prompt": [40] * 1000, "max_tokens": 1, field: True, "stream": stream}
    assert (await client.post("/v1/completions", body | {"n": 10})).status_code == 200
    found = await client.post("/v1/completions", body | {"n": 11})
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (413, "request_too_large", field)
    assert "at most 80000 bytes (`limits.max_answer_bytes`). Given: 88000." in error["message"]
    assert len(backend.tasks) == 1


async def test_a_streamed_prompt_longer_than_counted_is_refused_before_it_is_sent(client_of: Any) -> None:
    """Its tokens count eight bytes each, and what is around them in an event has more."""
    client = client_of(ApiSettings(limits=Limits(wire=WireLimits(max_answer_bytes=2_000))))
    body = {"prompt": [0] * 240, "max_tokens": 1, "echo": True, "stream": True}
    assert (await client.post("/v1/completions", body)).status_code == 200
    found = await client.post("/v1/completions", body | {"prompt": [0] * 24, "n": 10})
    assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")
    assert "`limits.max_answer_bytes`" in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_each_choice_repeats_are_written_off_the_loop(
    client: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    push = GenerationRun.push

    def noted(run: GenerationRun, item: Any) -> Any:
        threads.add(threading.get_ident())
        return push(run, item)

    monkeypatch.setattr(GenerationRun, "push", noted)
    body = {"prompt": [40] * 1000, "n": 8, "max_tokens": 1, "return_token_ids": True, "stream": stream}
    assert (await client.post("/v1/completions", body)).status_code == 200
    assert threads and threading.get_ident() not in threads
