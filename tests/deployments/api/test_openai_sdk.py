"""The official OpenAI client against the app in process."""

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx2
import openai
import pytest
from fastapi import FastAPI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from deployments.config.settings import ApiSettings, ChatSettings
from deployments.protocol import Failure
from engine.requests import ErrorCode


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(chat=ChatSettings(template="{% for m in messages %}{{ m.content }}{% endfor %}"))


@pytest.fixture
async def sdk(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))  # what the SDK itself uses
    async with openai.AsyncOpenAI(base_url="http://api/v1", api_key="any", http_client=http, max_retries=0) as client:
        yield client


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["toy"]
    assert (await sdk.models.retrieve("toy")).owned_by == "assay"


async def test_a_completion(sdk: openai.AsyncOpenAI) -> None:
    found = await sdk.completions.create(model="toy", prompt=["a", "b"], logprobs=2, max_tokens=4, n=2, seed=3)
    assert [choice.text for choice in found.choices] == [" wor"] * 4
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == [" ", "w", "o", "r"]
    assert found.usage is not None and found.usage.total_tokens == 20


async def test_a_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.completions.create(
        model="toy", prompt="a", stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " world"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


HELLO: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]


async def test_a_chat(sdk: openai.AsyncOpenAI) -> None:
    found = await sdk.chat.completions.create(
        model="toy", messages=HELLO, logprobs=True, top_logprobs=2, max_completion_tokens=4, n=2, seed=3
    )
    assert [choice.message.content for choice in found.choices] == [" wor"] * 2
    assert {choice.message.role for choice in found.choices} == {"assistant"}
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in logprobs.content[:2]] == [
        (" ", [32], 2), ("w", [119], 2)
    ]  # fmt: skip
    assert found.usage is not None and found.usage.completion_tokens == 8
    ChatCompletion.model_validate(found.model_dump(), strict=True)


async def test_an_answer_goes_back_as_a_message(sdk: openai.AsyncOpenAI, backend: Any) -> None:
    found = await sdk.chat.completions.create(model="toy", messages=HELLO)
    said = cast(ChatCompletionMessageParam, found.choices[0].message.model_dump())
    await sdk.chat.completions.create(model="toy", messages=[*HELLO, said, *HELLO[1:]])
    assert bytes(t for t in backend.tasks[1][0].prompt.tolist() if t < 256) == b"Be brief.hello worldhello"


async def test_a_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="toy", messages=HELLO, stream=True, n=2, stream_options={"include_usage": True}, extra_body={"top_k": 5}
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    for index in range(2):
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == " world"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


async def test_the_streaming_helper_puts_the_chat_together(sdk: openai.AsyncOpenAI, backend: Any) -> None:
    backend.script = [*b" world", 257]
    async with sdk.chat.completions.stream(model="toy", messages=HELLO, logprobs=True, top_logprobs=1) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == " world" and final.choices[0].finish_reason == "stop"
    logprobs = final.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 7


async def test_a_chat_that_asks_for_tools_is_an_error_of_the_client(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(
            model="toy", messages=HELLO, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")


async def test_errors_are_the_clients_own(sdk: openai.AsyncOpenAI, backend: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as invalid:
        await sdk.completions.create(model="toy", prompt="a", temperature=9)
    assert (invalid.value.code, invalid.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="gpt", prompt="a")
    backend.chunk_failure = Failure(ErrorCode.OVERLOADED, "Busy.", None)
    with pytest.raises(openai.RateLimitError):
        await sdk.completions.create(model="toy", prompt="a")


async def test_a_stream_that_breaks_raises(sdk: openai.AsyncOpenAI, backend: Any) -> None:
    from deployments.errors import ApiError

    backend.fail, backend.fail_after = ApiError("replica_lost", "Lost."), 2
    stream = await sdk.completions.create(model="toy", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="Lost"):
        async for _ in stream:
            pass
