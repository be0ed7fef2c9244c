"""POST /v1/completions, streamed: events, statuses, cancelling, and clients that do not read."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api.app import build_api
from deployments.api.generation.response import GenerationRun
from deployments.api.schemas.generation import CompletionResponse
from deployments.config.sections import StreamArgs
from deployments.config.settings import ApiSettings
from deployments.errors import ApiError
from tests.deployments.clients import settings_of_every_route
from tests.support.toy_model import ByteTokenizer

Wires = Callable[..., Any]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def parsed(body: bytes) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(stream=StreamArgs(header_after_s=60.0, keep_alive_s=60.0, max_buffer_bytes=4096))


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "or", "zz"])
async def test_a_stream_says_what_the_plain_answer_says(client: Any, backend: Any, pieces: int, stop: Any) -> None:
    backend.pieces, backend.script = pieces, "née 😀 world".encode()
    plain = await client.complete(stop=stop, logprobs=2, max_tokens=20, seed=1)
    events = await client.events(stop=stop, logprobs=2, max_tokens=20, seed=1, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        CompletionResponse.model_validate_json(json.dumps(event), strict=True)
    assert len({(event["id"], event["created"], event["model"]) for event in events[:-1]}) == 1
    choice = plain["choices"][0]
    parts = [event["choices"][0] for event in events[:-2]]
    assert text_of(events) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    assert parts[-1]["stop_reason"] == choice["stop_reason"]
    assert events[-2]["choices"] == [] and events[-2]["usage"] == plain["usage"]
    assert all(event["usage"] is None for event in events[:-2])


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_events_of_text_alone_have_the_bytes_of_all_others(
    client_of: Any, backend: Any, path: str, usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes around the text are written once, and must be those that are written anew for other events."""
    backend.script = 'a "née" \\ 😀\n\x00\x7f text </s>'.encode()
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    client = client_of(settings_of_every_route())
    body = {**prompt, **options, "stream": True, "seed": 1, "max_tokens": 60}

    async def streamed() -> list[str]:
        text = (await client.post(path, body)).text
        return re.sub(r'"(id|created)":("[^"]*"|[0-9]+)', r'"\1":0', text).split("\n\n")

    taken: list[str] = []
    text_event = GenerationRun.text_event

    def counted(run: GenerationRun, choice: Any, text: str, more: Any) -> bytes:
        taken.append(text)
        return text_event(run, choice, text, more)

    with monkeypatch.context() as patch:
        patch.setattr(GenerationRun, "text_event", counted)
        quick = await streamed()
    monkeypatch.setattr(GenerationRun, "push_text", lambda run, item: None)
    assert quick == await streamed()
    assert len(taken) > 10


async def test_choices_interleave_and_each_ends_once(client: Any) -> None:
    events = await client.events(prompt=["a", "b"], n=2, seed=1, return_token_ids=True)
    parts = [event["choices"][0] for event in events[:-1]]
    assert [text_of(events, index) for index in range(4)] == [" world"] * 4
    assert sorted(part["index"] for part in parts if part["finish_reason"]) == [0, 1, 2, 3]
    assert [part["index"] for part in parts[:8]] == [0, 1, 2, 3] * 2
    firsts = {part["index"]: part for part in reversed(parts)}
    assert all(part["seed"] == 1 and "prompt_token_ids" in part for part in firsts.values())
    assert sum("seed" in part for part in parts) == 4
    assert "usage" not in events[0]


async def test_text_waits_for_whole_characters_and_ids_do_not(client: Any, backend: Any) -> None:
    backend.script = "é".encode()
    events = await client.events(return_token_ids=True)
    parts = [event["choices"][0] for event in events[:-1]]
    assert [part["text"] for part in parts] == ["", "é"]
    assert [part["token_ids"] for part in parts] == [[0xC3], [0xA9]]


async def test_continuous_usage_counts_what_was_sent(client: Any) -> None:
    events = await client.events(stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 4, 5, 6]


async def test_continuous_usage_is_counted_once_a_reply(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many choices the reply brings a token for."""
    counted: list[int] = []
    usage = GenerationRun.usage

    def noted(run: GenerationRun) -> dict[str, Any]:
        found = usage(run)
        counted.append(found["completion_tokens"])
        return found

    monkeypatch.setattr(GenerationRun, "usage", noted)
    events = await client.events(prompt=["a", "b"], n=4, stream_options={"continuous_usage_stats": True})
    assert counted == [8 * step for step in range(1, 7)]
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [8 * (at // 8 + 1) for at in range(48)]


async def test_a_failure_before_the_first_token_has_its_status(client: Any, backend: Any) -> None:
    backend.fail = ApiError("overloaded", "Busy.", retry_after_s=7.2)
    found = await client.post("/v1/completions", {"prompt": "a", "stream": True})
    assert (found.status_code, found.headers["retry-after"]) == (429, "8")
    assert found.json()["error"]["code"] == "overloaded"


async def test_a_failure_after_the_start_is_a_last_event_without_done(client: Any, backend: Any) -> None:
    backend.fail, backend.fail_after = ApiError("replica_lost", "Lost."), 2
    found = await client.post("/v1/completions", {"prompt": "a", "stream": True})
    events = parsed(found.content)
    assert found.status_code == 200 and len(events) == 3
    assert events[-1]["error"] == {"message": "Lost.", "type": "server_error", "param": None, "code": "replica_lost"}
    assert events[-1]["request_id"] == found.headers["x-assay-request-id"]


async def test_a_bug_after_the_start_tells_nothing(client: Any, backend: Any, caplog: Any) -> None:
    backend.fail, backend.fail_after = RuntimeError("/secret/path 0xdeadbeef"), 1
    found = await client.post("/v1/completions", {"prompt": "a", "stream": True})
    assert parsed(found.content)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in found.text and "secret" in caplog.text


def test_errors_of_bodies_come_before_the_stream(client: Any) -> None:
    async def run() -> None:
        found = await client.post("/v1/completions", {"prompt": "a", "stream": True, "top_p": 2})
        assert (found.status_code, found.json()["error"]["param"]) == (422, "top_p")

    asyncio.run(run())


async def test_headers_go_out_before_a_slow_first_token(backend: Any, wire_to: Wires) -> None:
    backend.gate = asyncio.Event()
    app = build_api(backend, ByteTokenizer(), ApiSettings(stream=StreamArgs(header_after_s=0.01, keep_alive_s=0.01)))
    wire = wire_to(app, "/v1/completions", {"prompt": "a", "stream": True})
    await wire.until(lambda w: w.body.count(b": keep-alive\n\n") >= 3)
    backend.gate.set()
    await wire.task
    assert text_of(parsed(wire.body)) == " world" and wire.body.endswith(b"data: [DONE]\n\n")


async def test_the_first_token_is_not_held_for_the_others(wire: Wires, backend: Any) -> None:
    stream = wire("/v1/completions", {"prompt": "a", "stream": True})
    await stream.until(lambda w: b"data: " in w.body)
    assert backend.sent <= 2
    await stream.task


async def test_a_client_that_leaves_cancels_its_stream(wire: Wires, backend: Any) -> None:
    backend.script = b"x" * 4000
    stream = wire("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 4000})
    await stream.until(lambda w: b"data: " in w.body)
    stream.leave()
    await stream.task
    assert backend.cancelled == 1 and backend.sent < 4000
    assert b"[DONE]" not in stream.body


async def test_a_cancelled_request_task_cancels_its_stream(wire: Wires, backend: Any) -> None:
    backend.script = b"x" * 4000
    stream = wire("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 4000})
    await stream.until(lambda w: b"data: " in w.body)
    stream.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
    assert backend.cancelled == 1


@pytest.mark.parametrize("stop", [None, "x"])
@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_a_client_that_leaves_cancels_a_plain_request(wire: Wires, backend: Any, how: str, stop: Any) -> None:
    backend.gate = asyncio.Event()
    request = wire("/v1/completions", {"prompt": "a", "stop": stop})
    while not backend.tasks:
        await asyncio.sleep(0)
    if how == "disconnect":
        request.leave()
        await request.task
    else:
        request.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request.task
    assert backend.cancelled >= 1 and not request.sent


async def test_a_client_that_does_not_read_loses_its_stream_and_memory_stays_bounded(wire: Wires, backend: Any) -> None:
    backend.script = b"x" * 4000
    stream = wire("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 4000})
    stream.reading.clear()
    await asyncio.wait_for(stream.task, 10)
    assert backend.cancelled == 1
    assert backend.sent * 100 < 8192, "the buffer is bounded, not the stream's length"


@pytest.mark.risk("R14")
async def test_a_client_that_stops_reading_a_short_stream_is_given_up(backend: Any, wire_to: Wires) -> None:
    """The rest fits the buffer and the generation has ended: only the connection is held."""
    settings = ApiSettings(stream=StreamArgs(keep_alive_s=60.0, read_timeout_s=0.05))
    stream = wire_to(build_api(backend, ByteTokenizer(), settings), "/v1/completions", {"prompt": "a", "stream": True})
    stream.reading.clear()
    await asyncio.wait_for(stream.task, 10)
    assert stream.blocked.is_set() and not stream.sent and backend.sent == len(b" world")


@pytest.mark.risk("R14", planted=True)
async def test_without_that_limit_it_would_hold_its_connection(backend: Any, wire_to: Wires) -> None:
    settings = ApiSettings(stream=StreamArgs(keep_alive_s=60.0, read_timeout_s=3600.0))
    stream = wire_to(build_api(backend, ByteTokenizer(), settings), "/v1/completions", {"prompt": "a", "stream": True})
    stream.reading.clear()
    await stream.blocked.wait()
    done, _ = await asyncio.wait({stream.task}, timeout=0.5)
    assert not done
    stream.reading.set()
    await asyncio.wait_for(stream.task, 10)
    assert stream.body.endswith(b"data: [DONE]\n\n")


async def test_a_deadline_ends_a_stream_with_its_error(client: Any, backend: Any) -> None:
    backend.gate = asyncio.Event()
    found = await client.post("/v1/completions", {"prompt": "a", "stream": True}, x_request_timeout_seconds="0.02")
    assert (found.status_code, found.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert found.headers["x-should-retry"] == "false" and backend.cancelled >= 1
