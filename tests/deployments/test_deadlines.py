"""Deadlines: fixed at the first byte, shortened by a wish, never lengthened or switched off; checked everywhere."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deployments.config.sections import DeadlineArgs
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.errors import ApiError
from engine.model.heads.info import HeadInfo, HeadKind
from engine.requests import ScoreRequest
from scoring.prompts.chat_template import ChatTemplate
from tests.deployments.replicas import settled

MakeFleet = Callable[..., Any]
JSON = (b"content-type", b"application/json")
OFF = {
    "none": [],
    "zero": [(b"x-request-timeout-seconds", b"0")],
    "negative": [(b"x-request-timeout-seconds", b"-1")],
    "no number": [(b"x-request-timeout-seconds", b"nan")],
    "endless": [(b"x-request-timeout-seconds", b"inf")],
    "longer": [(b"x-request-timeout-seconds", b"86400")],
    "no watch": [(b"x-request-timeout-seconds", b"0"), (b"x-request-disconnect-disabled", b"?1")],
    "other spellings": [(b"x-request-timeout", b"0"), (b"timeout", b"0"), (b"keep-alive", b"timeout=86400")],
}
COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 1_000, "ignore_eos": True}
SCORING = {"query": [1, 2], "items": [[n % 250, 5] for n in range(2_000)], "label_token_ids": [65, 66]}


@pytest.mark.risk(
    "R5", figure="7 sets of headers and none: fires each time; unwatched clients freed within 0.1 s over Ray"
)
async def test_no_header_switches_the_deadline_off(make_fleet: MakeFleet, wire_to: Callable[..., Any]) -> None:
    fleet = await make_fleet(
        1,
        engine={"kv_slots": 4096, "token_budget": 64},
        deadlines={"scoring_s": 0.2, "generation_s": 0.2},
        stream={"header_after_s": 5.0},
    )
    fleet.models[0].step_seconds = 0.02
    for name, headers in OFF.items():
        path, body = ("/v1/completions", COMPLETION) if len(name) % 2 else ("/generative_scoring", SCORING)
        before = fleet.models[0].steps
        wire = wire_to(fleet.client.app, path, body, headers=[JSON, *headers])
        await wire.task
        assert wire.sent[0]["status"] == 408, name
        assert b"deadline_exceeded" in wire.body
        await settled(fleet.servers[0])
        assert fleet.models[0].steps - before < 100, name


@pytest.mark.risk("R5")
async def test_a_replica_ends_late_work_even_if_no_one_cancels_it(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that switched off Ray's watch, and an ingress that is gone: the deadline travels with the task."""
    fleet = await make_fleet(1, deadlines={"generation_s": 0.2})
    fleet.models[0].step_seconds = 0.02
    monkeypatch.setattr(fleet.servers[0].engine, "_cancel", lambda state: None)
    answer = await fleet.client.post("/v1/completions", COMPLETION)
    assert answer.status_code == 408
    await settled(fleet.servers[0])
    assert fleet.models[0].steps < 100


async def test_a_wish_shortens(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(1)
    fleet.models[0].step_seconds = 0.02
    answer = await fleet.client.post("/v1/completions", COMPLETION, **{"x-request-timeout-seconds": "0.1"})
    assert answer.status_code == 408
    assert "0.1 s" in answer.json()["error"]["message"]


@pytest.mark.full(keep=1)
@pytest.mark.risk("R6")
@pytest.mark.parametrize("route", ["completions", "scoring"])
async def test_what_waits_for_a_tokenizer_thread_past_its_deadline_is_not_tokenised(
    client_of: Callable[..., Any], backend: Any, route: str
) -> None:
    """The threads' queue is the only one that an ingress has."""
    client = client_of(ApiSettings(tokenizer_threads=1, deadlines=DeadlineArgs(scoring_s=0.2, generation_s=0.2)))
    free, calls = threading.Event(), list[int]()
    tokenizer = client.app.handler.tokenizer
    encode = type(tokenizer).encode_batch

    def slow(self: Any, texts: Any, **options: Any) -> Any:
        calls.append(len(texts))
        free.wait(10)
        return encode(self, texts, **options)

    body: dict[str, Any] = {"prompt": "x" * 10_000}
    path = "/v1/completions"
    if route == "scoring":
        path, body = "/generative_scoring", {"query": "x" * 10_000, "items": ["a"], "label_token_ids": [65, 66]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "encode_batch", slow)
        answers = await asyncio.gather(*(client.post(path, body) for _ in range(4)))
        free.set()
        assert [answer.status_code for answer in answers] == [408] * 4
        started = len(calls)
        await asyncio.to_thread(client.app.handler._threads.submit("", lambda: None).result, 10)
    assert started == 1
    assert len(calls) - started <= 1, "the one that had a thread may end; the others never start"
    assert not backend.tasks and not backend.score_tasks


@pytest.mark.risk("R6")
async def test_a_task_that_comes_too_late_is_not_sent(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(1)
    ids = np.array([1, 2], np.int32)
    task = ScoreRequest(
        request_id="s", prefix=ids, ids=ids, starts=np.array([0, 2], np.int32), labels=ids, timeout_s=0.0
    )
    with pytest.raises(ApiError) as late:
        await fleet.dispatch.score(task)
    assert (late.value.code, fleet.handle.calls) == ("deadline_exceeded", 0)


@pytest.mark.parametrize("path", ["/score", "/generative_scoring"])
async def test_conversations_are_written_within_the_time_of_scoring(
    client_of: Callable[..., Any], backend: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    parts, written = ChatTemplate.parts, []

    def slow(template: ChatTemplate, messages: Any, **options: Any) -> Any:
        written.append(messages)
        time.sleep(0.05)
        return parts(template, messages, **options)

    chat = ChatSettings(template="{{ messages[0].content }}")
    client = client_of(ApiSettings(chat=chat, deadlines=DeadlineArgs(scoring_s=0.2, generation_s=60)))
    monkeypatch.setattr(ChatTemplate, "parts", slow)
    body: dict[str, Any] = {"messages": [[{"role": "user", "content": "a"}]] * 20}
    if path == "/score":
        backend.head = HeadInfo(HeadKind.SEQUENCE, 1, ("reward",))
    else:
        body["label_token_ids"] = [65, 66]
    found = await client.post(path, body)
    assert (found.status_code, found.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert len(written) < 10
